"""What the package depends on: registries and licences. Known vulnerabilities: `.github/workflows/audit.yml`."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import tomllib
from importlib.metadata import Distribution, distribution
from pathlib import Path
from typing import Any

import pytest

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
