"""What a release publishes: one version, workflows that run the scripts of the project, and complete artifacts.

The tests of artifacts run where `RESHARD_DIST` names the folder that holds them, as `.ci/wheels check` does.
"""

from __future__ import annotations

import os
import re
import subprocess
import tarfile
import tomllib
import zipfile
from email.parser import BytesParser
from email.policy import compat32
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).parents[2]
VERSION: str = tomllib.loads((ROOT / "Cargo.toml").read_text())["workspace"]["package"]["version"]
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
DIST = sorted(Path(os.environ.get("RESHARD_DIST", "none")).glob("*"))
WHEELS = [path for path in DIST if path.suffix == ".whl"]
MACHINES = {"x86_64": 62, "aarch64": 183}  # e_machine of ELF
PYTHONS = ["3.11", "3.12", "3.13", "3.14"]


def workflow(path: Path) -> dict[str, Any]:
    content: dict[str, Any] = yaml.load(path.read_text(), Loader=yaml.BaseLoader)  # `on` stays a text
    return content


def steps(path: Path) -> list[dict[str, Any]]:
    return [step for job in workflow(path)["jobs"].values() for step in job["steps"]]


def wheels_script(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = ["bash", str(ROOT / ".ci" / "wheels"), *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_the_version_is_told_once_and_the_changelog_has_it() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert project["dynamic"] == ["version"]
    packages = tomllib.loads((ROOT / "Cargo.lock").read_text())["package"]
    ours = {package["version"] for package in packages if package["name"].startswith("reshard-")}
    assert ours == {VERSION}, "run `cargo check`, which brings Cargo.lock up to date"
    first = re.search(r"^## (.*)$", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert first is not None
    assert re.fullmatch(rf"{re.escape(VERSION)}, (not yet released|\d{{4}}-\d\d-\d\d)", first[1])


def test_the_changelog_tells_what_breaks_first() -> None:
    newest = (ROOT / "CHANGELOG.md").read_text().split("\n## ")[1]
    sections = re.findall(r"^### (.*)$", newest, re.MULTILINE)
    order = ["Breaking changes", "Added", "Changed", "Fixed", "Removed"]
    assert sections == [name for name in order if name in sections]


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.name)
def test_a_workflow_has_few_rights_and_pins_the_content_of_all_actions(path: Path) -> None:
    content = workflow(path)
    assert content["permissions"] == {"contents": "read"}
    for name, job in content["jobs"].items():
        assert "timeout-minutes" in job, name
        extra = {key for key, value in job.get("permissions", {}).items() if value == "write"}
        assert extra <= ({"id-token"} if (path.stem, name) == ("release", "publish") else set()), name
    for step in steps(path):
        assert ("uses" in step) != ("run" in step), step
        if "uses" in step:
            assert re.search(rf"{step['uses']}  # v\d+\.\d+\.\d+$", path.read_text(), re.MULTILINE), step["uses"]
            assert re.fullmatch(r"[\w-]+/[\w-]+@[0-9a-f]{40}", step["uses"])
            if step["uses"].startswith("actions/checkout@"):
                assert step["with"] == {"persist-credentials": "false"}
        else:  # text of an event in a command could be a command itself
            assert "${{" not in step["run"], step["run"]


def test_workflows_run_the_scripts() -> None:
    runs = {path.stem: [step["run"] for step in steps(path) if "run" in step] for path in WORKFLOWS}
    assert [run.split()[-1] for run in runs["ci"]] == [".ci/run"]
    verbs = re.findall(r"\.ci/wheels (\w+)", "\n".join(runs["release"]))
    assert set(verbs) == {"build", "check", "smoke", "types"}
    assert set(re.findall(r"\.ci/wheels (\w+)", (ROOT / ".ci" / "wheels").read_text())) == set(verbs)
    smoke = workflow(ROOT / ".github/workflows/release.yml")["jobs"]["smoke"]["strategy"]["matrix"]
    assert (smoke["python"], smoke["machine"]) == (PYTHONS, list(MACHINES))


def test_nothing_is_published_that_was_not_tested() -> None:
    jobs = workflow(ROOT / ".github/workflows/release.yml")["jobs"]
    assert set(jobs["publish"]["needs"]) == {"check", "smoke"}
    assert jobs["check"]["needs"] == jobs["smoke"]["needs"] == "build"
    assert "if" in jobs["publish"]


def test_the_pythons_of_the_package_are_those_that_are_tested() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    prefix = "Programming Language :: Python :: "
    named = [entry.removeprefix(prefix) for entry in project["classifiers"] if entry.startswith(f"{prefix}3.")]
    assert named == PYTHONS
    assert project["requires-python"] == f">={PYTHONS[0]}"


def test_the_script_explains_itself_and_refuses_what_it_does_not_know() -> None:
    for arguments in (
        [],
        ["publish"],
        ["build"],
        ["smoke", "reshard.whl"],
        ["types", "reshard.whl"],
        ["check", "dist"],
    ):
        done = wheels_script(*arguments)
        assert done.returncode == 2, arguments
        assert ".ci/wheels build TARGET..." in done.stderr


@pytest.mark.skipif(not DIST, reason="RESHARD_DIST names no folder of artifacts")
def test_all_artifacts_are_there() -> None:
    tags = {name: f"manylinux2014_{name}.manylinux_2_17_{name}" for name in MACHINES}
    expected = {f"reshard-{VERSION}-cp311-abi3-{tag}.whl" for tag in tags.values()} | {f"reshard-{VERSION}.tar.gz"}
    assert {path.name for path in DIST} == expected


@pytest.mark.parametrize("path", WHEELS, ids=lambda path: path.name)
def test_a_wheel_is_complete(path: Path) -> None:
    machine = next(name for name in MACHINES if path.stem.endswith(name))
    with zipfile.ZipFile(path) as wheel:
        names = set(wheel.namelist())
        source = ROOT / "python" / "reshard"
        modules = {f"reshard/{file.relative_to(source).as_posix()}" for file in source.rglob("*.py")}
        assert {"reshard/py.typed", "reshard/_core.pyi", *modules} <= names
        assert [name for name in names if name.endswith(".so")] == ["reshard/_core.abi3.so"]
        assert {name.split("/")[0] for name in names} == {"reshard", f"reshard-{VERSION}.dist-info"}
        core = wheel.read("reshard/_core.abi3.so")
        metadata = BytesParser(policy=compat32).parsebytes(wheel.read(f"reshard-{VERSION}.dist-info/METADATA"))
    assert int.from_bytes(core[18:20], "little") == MACHINES[machine]
    assert not re.search(rb"/(root|home|tmp|work|Users)/", core), "a path of the machine that built it"
    assert (metadata["Version"], metadata["License-Expression"]) == (VERSION, "Apache-2.0")
    assert metadata["Requires-Python"] == ">=3.11"


@pytest.mark.skipif(not DIST, reason="RESHARD_DIST names no folder of artifacts")
def test_the_source_archive_holds_what_a_build_needs() -> None:
    with tarfile.open(next(path for path in DIST if path.name.endswith(".tar.gz"))) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    assert {"Cargo.lock", "Cargo.toml", "LICENSE", "README.md", "pyproject.toml", "rust/core/lib.rs"} <= names
    assert {"rust/python/src/lib.rs", "rust/formats/Cargo.toml", "python/reshard/py.typed"} <= names
    assert not any(name.endswith(".so") for name in names)
