"""The jobs that the page "On a cluster" shows run as they are, with processes of this host in place of a cluster."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import yaml
from tests.helpers.command_line import PROGRAM

import reshard

pytestmark = pytest.mark.slow

PAGE = (Path(__file__).parents[2] / "docs" / "guides" / "cluster.md").read_text()
LAYOUT = {"mesh": {"tp": 4}, "rules": [{"match": "*", "cut": ["tp"]}]}
# In the place of that of Slurm: as many tasks as hosts.
SRUN = """#!/bin/bash
trap 'kill $(jobs -p) 2>/dev/null' EXIT
for task in $(seq 0 $((TASKS - 1))); do SLURM_PROCID=$task SLURM_NTASKS=$TASKS "$@" & done
status=0
for job in $(jobs -p); do wait $job || status=$?; done
exit $status
"""
LAUNCHED = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT", "SLURM_PROCID", "SLURM_NTASKS")


def block(start: str, language: str = "text") -> str:
    """The code on the page that begins so."""
    blocks = re.findall(rf"^```{language}\n(.*?)^```", PAGE, re.DOTALL | re.MULTILINE)
    (found,) = [one for one in blocks if one.startswith(start)]
    return str(found)


@pytest.fixture
def shared(tmp_path: Path) -> Path:
    """What the page calls `/shared`, with the run."""
    tensors = {f"layers.{i}.w": np.arange(64.0).reshape(8, 8) + i for i in range(6)}
    reshard.save_file(tensors, tmp_path / "all.safetensors")
    root = tmp_path / "shared" / "run" / "checkpoint"
    reshard.convert(tmp_path / "all.safetensors", root, layout=LAYOUT, iteration=1)
    return tmp_path / "shared"


def run(shared: Path, script: str, **variables: str) -> str:
    """What a script prints, of which the shared folder and the programs are those of this test."""
    bash = shutil.which("bash")
    if bash is None:
        pytest.skip("there is no bash")
    programs = shared.parent / "bin"
    programs.mkdir(exist_ok=True)
    for name, text in {"srun": SRUN, "reshard": f"#!{sys.executable}\n" + PROGRAM[2].replace("; ", "\n")}.items():
        (programs / name).write_text(text)
        (programs / name).chmod(0o755)
    environment = {name: text for name, text in os.environ.items() if name not in LAUNCHED} | variables
    environment["PATH"] = f"{programs}:{Path(sys.executable).parent}:{environment['PATH']}"
    file = shared.parent / "script.sh"
    file.write_text(script.replace("/shared", str(shared)))
    subprocess.run([bash, "-n", file], check=True)
    done = subprocess.run(
        [bash, "-e", file], cwd=shared.parent, env=environment, capture_output=True, text=True, check=False, timeout=300
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def check_export(shared: Path) -> None:
    assert reshard.diff(shared / "run" / "checkpoint", shared / "hf", part="model").equal
    assert [path.name for path in shared.iterdir() if path.name.startswith(".")] == []


def test_the_script_of_slurm(shared: Path) -> None:
    script = block("#!/bin/bash")
    nodes, tasks = (int(re.search(rf"^#SBATCH --{name}=(\d+)$", script, re.MULTILINE)[1])  # type: ignore[index]
                    for name in ("nodes", "ntasks-per-node"))  # fmt: skip
    assert (nodes, tasks) == (4, 1)
    printed = run(shared, script, TASKS="2")
    check_export(shared)
    assert "equal" in printed


def test_the_commands_of_torchrun(shared: Path) -> None:
    commands = block("torchrun")
    assert commands.count("torchrun --nproc-per-node 2 --no-python ") == 2
    printed = run(shared, commands)
    check_export(shared)
    assert "equal" in printed


def test_the_job_of_kubernetes(shared: Path) -> None:
    """Its fields are those of an indexed Job, and its pods write the destination, in any order."""
    job = yaml.safe_load(block("apiVersion", "yaml"))
    assert (job["apiVersion"], job["kind"], set(job)) == ("batch/v1", "Job", {"apiVersion", "kind", "metadata", "spec"})
    spec, pod = job["spec"], job["spec"]["template"]["spec"]
    assert set(spec) == {"completionMode", "completions", "parallelism", "backoffLimitPerIndex", "template"}
    # What Kubernetes asks of a limit for each index.
    assert (spec["completionMode"], pod["restartPolicy"]) == ("Indexed", "Never")
    assert type(spec["completions"]) is type(spec["parallelism"]) is type(spec["backoffLimitPerIndex"]) is int
    (container,) = pod["containers"]
    (mount,), (volume,) = container["volumeMounts"], pod["volumes"]
    assert mount["name"] == volume["name"]
    assert set(volume) == {"name", "persistentVolumeClaim"}
    assert mount["mountPath"] == "/shared"
    for index in reversed(range(spec["completions"])):
        run(shared, shlex.join(container["command"]), JOB_COMPLETION_INDEX=str(index))
    check_export(shared)


def test_the_job_of_ray_is_a_command_of_reshard(shared: Path) -> None:
    """The cluster is missing here, and the error says so; `tests/ray` converts on one."""
    submit, _, command = block("ray job").strip().partition(" -- ")
    assert submit == "ray job submit --address http://head:8265"
    assert command == "reshard convert /shared/run/checkpoint /shared/hf --on ray"
    with pytest.raises(AssertionError, match=r"there is no Ray cluster|Ray cannot be imported"):
        run(shared, command, RAY_ADDRESS="127.0.0.1:1")
