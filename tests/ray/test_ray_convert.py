"""Conversions and comparisons by the workers of a real cluster of Ray. They are skipped where Ray is not installed."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

import reshard
from reshard import __version__ as VERSION  # noqa: N812

pytest.importorskip("ray", reason="pip install 'reshard[ray]'")

import ray
from tests.helpers.ray_cluster import RayCluster, running
from tests.servers import doubles

from reshard.ray.cluster import end_tasks

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def cluster() -> Iterator[RayCluster]:
    with running(3) as cluster:
        yield cluster


@pytest.fixture
def source(tmp_path: Path) -> Path:
    arrays = {f"w{i}": np.random.default_rng(i).standard_normal((8192, 1024)).astype(np.float32) for i in range(8)}
    reshard.save_file(arrays | {"b": np.arange(3)}, tmp_path / "src.safetensors")
    return tmp_path / "src.safetensors"


def start(cluster: RayCluster, *arguments: object, verb: str = "convert") -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "reshard", verb, *map(str, arguments), "--on", "ray", "--json"]
    return subprocess.Popen(command, env=cluster.environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def ended(process: subprocess.Popen[str], code: int = 0) -> Any:
    output, errors = process.communicate(timeout=240)
    assert process.returncode == code, output + errors
    return json.loads(output) if code == 0 else output + errors


def wait_for_worker(cluster: RayCluster, node: subprocess.Popen[bytes] | None = None) -> int:
    end = time.monotonic() + 120
    while not (found := cluster.workers(node)):
        assert time.monotonic() < end, "no worker does a share"
        time.sleep(0.002)
    return found[0]


def pause_worker(cluster: RayCluster) -> None:
    """Stop a worker while it does a share."""
    while True:
        pid = wait_for_worker(cluster)
        os.kill(pid, signal.SIGSTOP)
        if pid in cluster.workers():
            return
        os.kill(pid, signal.SIGCONT)


LAYOUT: dict[str, Any] = {"mesh": {"tp": 2}, "rules": [{"match": "w*", "cut": [None, "tp"]}, {"match": "*"}]}


def content(path: Path) -> dict[str, bytes]:
    files = [path] if path.is_file() else sorted(file for file in path.rglob("*") if file.is_file())
    kept = (file for file in files if file.suffix in {".safetensors", ".bin"} or file.name.endswith(".index.json"))
    return {str(file.relative_to(path)): file.read_bytes() for file in kept}


@pytest.mark.parametrize("kind", ["file", "folder", "root"])
def test_a_cluster_publishes_what_one_process_does(
    cluster: RayCluster, source: Path, tmp_path: Path, kind: str
) -> None:
    name = {"file": "{}.safetensors", "folder": "{}", "root": "{}"}[kind]
    layout = tmp_path / "tp2.json"
    layout.write_text(json.dumps(LAYOUT))
    options = ["--layout", layout, "--iteration", 4] if kind == "root" else []
    alone, dst = tmp_path / name.format("alone"), tmp_path / name.format("dst")
    given: dict[str, Any] = {"layout": LAYOUT, "iteration": 4} if kind == "root" else {}
    reshard.convert(source, alone, **given)
    before = set(tmp_path.iterdir())
    report = ended(start(cluster, source, dst, *options))
    assert content(dst) == content(alone)
    assert set(tmp_path.iterdir()) - before == {dst}
    assert reshard.verify(dst).ok
    shares = report["shares"]
    assert [one["share"] for one in shares] == list(range(12))  # four for each host
    assert len({one["process"] for one in shares}) > 1
    sizes = [one["n_bytes"] for one in shares]
    assert sum(sizes) == report["n_bytes"] if kind != "root" else sum(sizes) <= report["n_bytes"]
    assert max(sizes) < 1.2 * sum(sizes) / len(sizes)
    assert all(one["retried"] == [] for one in shares)


def test_a_share_whose_worker_is_killed_is_written_again(cluster: RayCluster, source: Path, tmp_path: Path) -> None:
    dst = tmp_path / "dst.safetensors"
    conversion = start(cluster, source, dst)
    os.kill(wait_for_worker(cluster), signal.SIGKILL)
    report = ended(conversion)
    assert [len(one["retried"]) for one in report["shares"] if one["retried"]] == [1]
    reshard.convert(source, tmp_path / "alone.safetensors")
    assert dst.read_bytes() == (tmp_path / "alone.safetensors").read_bytes()
    assert {path.name for path in tmp_path.iterdir()} == {"src.safetensors", "dst.safetensors", "alone.safetensors"}


def test_a_host_that_vanishes_is_replaced_by_others(cluster: RayCluster, source: Path, tmp_path: Path) -> None:
    extra = cluster.start("--num-cpus=1")
    conversion = start(cluster, source, tmp_path / "dst")
    wait_for_worker(cluster, extra)
    cluster.stop(extra)
    report = ended(conversion)
    assert sum(len(one["retried"]) for one in report["shares"]) >= 1
    reshard.convert(source, tmp_path / "alone")
    assert content(tmp_path / "dst") == content(tmp_path / "alone")
    assert {path.name for path in tmp_path.iterdir()} == {"src.safetensors", "dst", "alone"}


def test_an_interrupt_leaves_nothing_and_ends_the_workers(cluster: RayCluster, source: Path, tmp_path: Path) -> None:
    conversion = start(cluster, source, tmp_path / "new" / "dst")
    wait_for_worker(cluster)
    conversion.send_signal(signal.SIGINT)
    assert "interrupted" in ended(conversion, 130)
    assert cluster.workers() == []
    assert [path.name for path in tmp_path.iterdir()] == ["src.safetensors"]


def test_a_host_that_does_not_see_the_path_is_named(cluster: RayCluster, source: Path, tmp_path: Path) -> None:
    if os.geteuid() != 0:
        pytest.skip("mounts need root")
    hidden = f'hostname elsewhere && mount -t tmpfs none {tmp_path} && exec "$@"'
    extra = cluster.start("--num-cpus=8", before=["unshare", "--mount", "--uts", "sh", "-c", hidden, "sh"])
    try:
        message = ended(start(cluster, source, tmp_path / "dst"), 1)
    finally:
        cluster.stop(extra)
    assert "on host `elsewhere`: there is nothing at" in message
    assert "all hosts must see the source and the destination under the same paths" in message
    assert [path.name for path in tmp_path.iterdir()] == ["src.safetensors"]


def printed(cluster: RayCluster, verb: str, *arguments: object) -> tuple[int, Any]:
    command = [sys.executable, "-m", "reshard", verb, *map(str, arguments), "--json"]
    done = subprocess.run(command, env=cluster.environment, capture_output=True, text=True, check=False, timeout=240)
    report = json.loads(done.stdout)
    report.pop("seconds", None)
    return done.returncode, report


def test_a_cluster_finds_the_faults_and_differences_that_one_process_finds(
    cluster: RayCluster, source: Path, tmp_path: Path
) -> None:
    layout = LAYOUT | {"mesh": {"tp": 4}}
    reshard.convert(source, tmp_path / "run", layout=layout, iteration=1)
    whole = printed(cluster, "verify", tmp_path / "run")
    assert whole[0] == 0
    assert printed(cluster, "verify", tmp_path / "run", "--on", "ray") == whole
    same = printed(cluster, "diff", source, tmp_path / "run")
    assert same[0] == 0
    assert printed(cluster, "diff", source, tmp_path / "run", "--on", "ray") == same
    for number, at in ((0, 9 << 20), (2, 5 << 20), (2, 30 << 20)):
        with next((tmp_path / "run").glob(f"*/*000000{number}-0000004.safetensors")).open("r+b") as file:
            file.seek(at)
            file.write(b"damage")
    (tmp_path / "run" / "iteration_00000001" / "common.json").write_text("{}")
    damaged = printed(cluster, "verify", tmp_path / "run")
    assert damaged[0] == 1
    assert len(damaged[1]["checkpoints"][0]["faults"]) == 4
    assert printed(cluster, "verify", tmp_path / "run", "--on", "ray") == damaged
    arrays = {f"w{i}": np.random.default_rng(i).standard_normal((8192, 1024)).astype(np.float32) for i in (0, 1, 3)}
    arrays["w1"][5:4000:7] += 0.25
    reshard.save_file(arrays | {"b": np.arange(4), "c": np.arange(3)}, tmp_path / "other.safetensors")
    for options in ([], ["--sort", "change"], ["--atol", "0.25"]):
        different = printed(cluster, "diff", source, tmp_path / "other.safetensors", *options)
        assert different[0] == 1
        assert len(different[1]["differences"]) == 8
        assert printed(cluster, "diff", source, tmp_path / "other.safetensors", *options, "--on", "ray") == different


def test_a_cluster_counts_the_values_that_one_process_counts(cluster: RayCluster, source: Path, tmp_path: Path) -> None:
    reshard.convert(source, tmp_path / "run", layout=LAYOUT | {"mesh": {"tp": 4}}, iteration=1)
    alone = printed(cluster, "inspect", tmp_path / "run", "--stats")
    assert alone[0] == 0
    assert len(alone[1]["tensors"]) == 9
    assert printed(cluster, "inspect", tmp_path / "run", "--stats", "--on", "ray") == alone


def test_without_a_cluster_the_error_says_how_to_start_one(source: Path, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "reshard", "convert", str(source), str(tmp_path / "dst"), "--on"]
    environment = os.environ | {"RAY_ADDRESS": "127.0.0.1:1"}
    done = subprocess.run([*command, "nowhere"], capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "'nowhere' is not ranks, ray or ray://HOST:PORT" in done.stderr
    done = subprocess.run([*command, "ray"], env=environment, capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 1, done.stderr
    assert "there is no Ray cluster" in done.stderr
    assert "give the address of a cluster" in done.stderr


def refused(*words: object, prologue: str = "", **variables: str) -> str:
    """What `reshard convert` prints, which has no traceback."""
    command = [sys.executable, "-c", f"{prologue}\nfrom reshard.cli import main\nmain()", "convert", *map(str, words)]
    environment = os.environ | variables
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 1, done.stderr
    assert "Traceback" not in done.stderr
    return done.stderr


def test_a_cluster_of_another_version_is_named_with_both(cluster: RayCluster, source: Path, tmp_path: Path) -> None:
    message = refused(
        source, tmp_path / "dst", "--on", "ray", prologue="import ray; ray.__version__ = '2.0.1'", **cluster.environment
    )
    assert "this process, Ray 2.0.1 with Python 3." in message
    assert f"cannot use the Ray cluster at `{cluster.address}`: RuntimeError: Version mismatch" in message
    assert "with the same versions" in message
    assert [path.name for path in tmp_path.iterdir()] == ["src.safetensors"]


def test_a_program_that_is_no_cluster_is_refused(source: Path, tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        address = f"ray://127.0.0.1:{other.getsockname()[1]}"
        message = refused(source, tmp_path / "dst", "--on", address, prologue=(
            "import ray.util.client.worker as w; w.INITIAL_TIMEOUT_SEC, w.MAX_TIMEOUT_SEC = 1, 1"
        ), RAY_CLIENT_MAX_CONNECTION_ATTEMPTS="1")  # fmt: skip
    assert f"cannot use the Ray cluster at `{address}`: ConnectionError: ray client connection timeout" in message


def test_a_head_that_dies_is_an_error_and_leaves_nothing(source: Path, tmp_path: Path) -> None:
    with running(1, client=True) as own:
        conversion = subprocess.Popen(
            [sys.executable, "-m", "reshard", "convert", source, tmp_path / "dst", "--on", own.client],
            stderr=subprocess.PIPE, text=True, env=os.environ | {"RAY_CLIENT_RECONNECT_GRACE_PERIOD": "1"},
        )  # fmt: skip
        pause_worker(own)  # else it may end before the head does
        own.stop(own.nodes[0])
        _, errors = conversion.communicate(timeout=240)
    assert conversion.returncode == 1, errors
    assert f"the Ray cluster at `{own.client}` does not answer any more: " in errors
    assert "Traceback" not in errors
    assert [path.name for path in tmp_path.iterdir()] == ["src.safetensors"]


@pytest.mark.parametrize(
    ("module", "told"),
    [
        ("raise ImportError('there is none')", "a worker cannot import what it needs: there is none"),
        ("__version__ = '0.0.1'", f"this host has reshard 0.0.1, and the process that started the work {VERSION}"),
    ],
)
def test_a_host_with_another_installation_is_named(
    cluster: RayCluster, source: Path, tmp_path: Path, module: str, told: str
) -> None:
    (tmp_path / "site").mkdir()
    (tmp_path / "site" / "reshard.py").write_text(module)
    paths = os.pathsep.join([str(tmp_path / "site"), os.environ.get("PYTHONPATH", "")])
    extra = cluster.start("--num-cpus=8", before=["env", f"PYTHONPATH={paths}"])
    try:
        message = refused(source, tmp_path / "dst", "--on", "ray", **cluster.environment)
    finally:
        cluster.stop(extra)
    assert f"on host `{socket.gethostname()}`: {told}\nhint: install the same version" in message
    assert sorted(path.name for path in tmp_path.iterdir()) == ["site", "src.safetensors"]


def test_a_source_that_is_changed_meanwhile_is_an_error(cluster: RayCluster, source: Path, tmp_path: Path) -> None:
    conversion = start(cluster, source, tmp_path / "dst")
    wait_for_worker(cluster)
    os.utime(source)
    assert "the source was changed meanwhile" in ended(conversion, 1)
    assert [path.name for path in tmp_path.iterdir()] == ["src.safetensors"]


def run_script(cluster: RayCluster, script: str) -> list[str]:
    """What a program prints that is connected to the cluster."""
    head = "import ray, reshard\nfrom reshard.ranks.places import Work\nfrom reshard.ray import Ray\n"
    head += "ray.init('auto', log_to_driver=False, logging_level=40)\n"
    command = [sys.executable, "-c", head + script]
    done = subprocess.run(command, env=cluster.environment, capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def test_processors_that_others_use_are_not_waited_for_without_end(cluster: RayCluster) -> None:
    script = (
        "class Other:\n    def is_there(self):\n        return True\n"
        "others = [ray.remote(num_cpus=1)(Other).remote() for _ in range(3)]\n"
        "ray.get([other.is_there.remote() for other in others])\n"
        "try:\n    Ray(wait=1).run(Work(max, 1), 2, print)\n"
        "except reshard.errors.GroupError as error:\n    print(error)\n"
    )
    message, hint = run_script(cluster, script)
    assert message.startswith(
        f"no host of the Ray cluster at `{cluster.address}` has a processor free, also not after "
    )
    assert message.endswith(" s; 0 are free on all hosts together")
    assert hint.startswith("hint: `ray status` tells what is in use")


def test_processors_that_are_free_are_used_without_a_wait(cluster: RayCluster) -> None:
    script = "print(Ray(wait=0).run(Work(lambda _, share: (0, share), 1), 2, lambda _: None))\n"
    assert run_script(cluster, script) == ["[0, 1]"]


def test_tasks_that_end_by_themselves_are_not_cancelled() -> None:
    """Ray aborts the process that cancels a task while the result of the task comes in."""
    cancelled: list[str] = []

    class Tasks:
        exceptions = ray.exceptions

        def wait(self, tasks: list[str], *, num_returns: int, timeout: float) -> tuple[list[str], list[str]]:
            assert num_returns == len(tasks)
            assert timeout > 0
            return [one for one in tasks if "soon" in one], [one for one in tasks if "soon" not in one]

        def cancel(self, task: str, *, force: bool) -> None:
            assert force
            cancelled.append(task)

    end_tasks(Tasks(), ["runs", "ends soon", "waits", "waits longer", "fails soon"])
    assert cancelled == ["waits longer", "waits", "runs"]


def test_an_error_of_a_worker_that_is_of_python_is_one_of_ours(cluster: RayCluster) -> None:
    script = (
        "import reshard, sys\nfrom reshard.ranks.places import Work\nfrom reshard.ray import Ray\n"
        "def do(kind, share):\n    raise kind('no room')\n"
        "for kind in (OSError, RuntimeError):\n"
        "    try:\n        Ray().run(Work(do, kind), 1, print)\n"
        "    except reshard.errors.ReshardError as error:\n        print(type(error).__name__, error.message)\n"
    )
    command = [sys.executable, "-c", script]
    done = subprocess.run(command, env=cluster.environment, capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 0, done.stderr
    host = socket.gethostname()
    assert done.stdout.splitlines() == [
        f"StorageError on host `{host}`: OSError: no room",
        f"GroupError on host `{host}`: RuntimeError: no room",
    ]


def test_workers_reach_a_bucket_as_the_driver_does(cluster: RayCluster, tmp_path: Path) -> None:
    reshard.save(tmp_path / "run", 1, {"w": np.arange(9.0)})
    script = (
        "import sys, reshard\nfrom reshard.ray import Ray\nendpoint, folder = sys.argv[1:]\n"
        "options = reshard.BucketOptions(endpoint=endpoint, anonymous=True, allow_http=True, cache=folder + '/cache')\n"
        "reshard.convert(reshard.locate('gs://weights/run', options), folder + '/dst', on=Ray())\n"
        "assert reshard.verify('gs://weights/run', on=Ray()).ok\n"
        "assert reshard.diff('gs://weights/run', folder + '/dst', part='model', on=Ray()).equal\n"
    )
    environment = {name: value for name, value in cluster.environment.items() if not name.startswith("GOOGLE_")}
    with doubles.running("google") as double:
        double.upload(tmp_path / "run", "run")
        command = [sys.executable, "-c", script, double.endpoint, str(tmp_path)]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=240)
    assert done.returncode == 0, done.stderr
    assert reshard.load_file(tmp_path / "dst" / "model.safetensors")["w"].tolist() == list(range(9))


def test_a_signed_url_is_sent_to_no_worker(cluster: RayCluster, tmp_path: Path, source: Path) -> None:
    with doubles.running("files") as double:
        double.objects["src.safetensors"] = source.read_bytes()
        url = f"{double.endpoint}/src.safetensors?X-Amz-Signature=0f1e2d"
        for verb, words in (("convert", (url, tmp_path / "out")), ("diff", (url, source))):
            told = ended(start(cluster, *words, verb=verb), 1 if verb == "convert" else 2)
            assert "was given with a signature or a password, which is not sent to other processes" in told
            assert "0f1e2d" not in told
    assert not (tmp_path / "out").exists()
