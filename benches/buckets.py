"""Loads from and uploads into a bucket beside other clients: `python benches/buckets.py`. It needs nginx and SeaweedFS.

Each program runs in a new process against one server on this host, in rounds in a random order. nginx sends files as an
S3 server without lists and writes does: at the speed of the machine, and limited to 90 MB/s for each connection.
Uploads go to SeaweedFS. Only ratios of one run mean something: server and clients share the processors.

A virtual machine gives free memory back to its host, within seconds; then new memory takes up to 2 s of the processor
for a GB. So each process touches and frees twice the size of the file before it is timed.
"""

# ruff: noqa: ARG001, PLC0415  programs have one signature; each process imports the client that it measures

from __future__ import annotations

import argparse
import concurrent.futures
import importlib
import json
import mmap
import os
import random
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

sys.path.insert(0, str(Path(__file__).parent.parent))

import numpy as np

from benches import model

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

BUCKET, FILE, REQUEST_BYTES = "reshard", "model.safetensors", 8 << 20
RANK = 1
LIMITED, UNLIMITED = "90 MB/s a connection", "line speed"


# -- what is loaded, for clients that only know ranges


def header_of(path: Path) -> tuple[int, dict[str, Any]]:
    with path.open("rb") as file:
        n_bytes = int.from_bytes(file.read(8), "little")
        header: dict[str, Any] = json.loads(file.read(n_bytes))
    header.pop("__metadata__", None)
    return 8 + n_bytes, header


def arrays_of(path: Path, case: str) -> Iterator[tuple[str, np.ndarray, int, tuple[slice, ...]]]:
    """The arrays that are fetched, where each begins in the file, and what a rank keeps of it."""
    start, header = header_of(path)
    for key, one in header.items():
        shape = tuple(one["shape"])
        first, index = start + one["data_offsets"][0], tuple(slice(None) for _ in shape)
        if case == "rank":
            index = model.own_slice(key, shape, RANK)
            if model.cut_dim(key) == 0:  # rows lie together
                first += index[0].start * int(np.prod(shape[1:])) * 2
                shape, index = (index[0].stop - index[0].start, *shape[1:]), tuple(slice(None) for _ in shape)
        yield key, np.empty(shape, np.uint16), first, index


def by_ranges(path: Path, case: str, fetch: Callable[[list[tuple[int, memoryview]]], object]) -> dict[str, np.ndarray]:
    """Arrays whose bytes `fetch` gets: pairs of a position and memory of at most 8 MiB."""
    arrays = list(arrays_of(path, case))
    wanted = []
    for _, array, first, _ in arrays:
        view = array.reshape(-1).view(np.uint8).data
        wanted += [(first + at, view[at : at + REQUEST_BYTES]) for at in range(0, len(view), REQUEST_BYTES)]
    fetch(wanted)
    return {key: np.ascontiguousarray(array[index]) for key, array, _, index in arrays}


# -- programs: each imports, connects, and returns what is timed


def reshard(path: Path, case: str, _: int) -> Any:
    import reshard
    from reshard.storage.location import locate

    def load(place: str) -> Any:
        if case == "whole":
            return reshard.load_file(place)
        with reshard.open(place) as opened:
            return opened.load(layout=model.LAYOUT, rank=RANK)

    with tempfile.TemporaryDirectory() as folder:  # its modules are imported when they are first used
        small = Path(folder, FILE)
        model.write(small, 0)
        load(str(small))
    locate(f"s3://{BUCKET}/{FILE}").exists()  # the client is made, as those of the others are
    return lambda: load(f"s3://{BUCKET}/{FILE}")


def boto3(path: Path, case: str, n_threads: int) -> Any:
    client = _boto_client(n_threads)
    pool = concurrent.futures.ThreadPoolExecutor(n_threads)

    def one(wanted: tuple[int, memoryview]) -> None:
        at, to = wanted
        body = client.get_object(Bucket=BUCKET, Key=FILE, Range=f"bytes={at}-{at + len(to) - 1}")["Body"]
        done = 0
        while n := body.readinto(to[done:]):
            done += n
        assert done == len(to)

    return lambda: by_ranges(path, case, lambda wanted: list(pool.map(one, wanted)))


def _boto_client(n_threads: int) -> Any:
    boto3 = importlib.import_module("boto3")
    configs = importlib.import_module("botocore.config")

    config = configs.Config(max_pool_connections=n_threads, s3={"addressing_style": "path"})
    return boto3.client("s3", config=config)


def s3fs(path: Path, case: str, _: int) -> Any:
    s3fs = importlib.import_module("s3fs")

    files = s3fs.S3FileSystem()

    def fetch(wanted: list[tuple[int, memoryview]]) -> None:
        starts = [at for at, _ in wanted]
        ends = [at + len(to) for at, to in wanted]
        for (_, to), found in zip(
            wanted, files.cat_ranges([f"{BUCKET}/{FILE}"] * len(wanted), starts, ends), strict=True
        ):
            to[:] = found

    return lambda: by_ranges(path, case, fetch)


def _obstore() -> Any:
    stores = importlib.import_module("obstore.store")

    endpoint = os.environ["AWS_ENDPOINT_URL"]
    return stores.S3Store(BUCKET, endpoint=endpoint, client_options={"allow_http": True})


def obstore(path: Path, case: str, n_threads: int) -> Any:
    client = importlib.import_module("obstore")

    store = _obstore()
    pool = concurrent.futures.ThreadPoolExecutor(n_threads)

    def one(wanted: tuple[int, memoryview]) -> None:
        at, to = wanted
        to[:] = memoryview(client.get_range(store, FILE, start=at, end=at + len(to)))

    return lambda: by_ranges(path, case, lambda wanted: list(pool.map(one, wanted)))


def run_ai(path: Path, case: str, n_threads: int) -> Any:
    os.environ |= {"RUNAI_STREAMER_CONCURRENCY": str(n_threads), "RUNAI_STREAMER_S3_USE_VIRTUAL_ADDRESSING": "0"}
    os.environ["RUNAI_STREAMER_S3_ENDPOINT"] = os.environ["AWS_ENDPOINT_URL"]
    import torch

    SafetensorsStreamer = importlib.import_module("runai_model_streamer").SafetensorsStreamer  # noqa: N806

    def load() -> dict[str, np.ndarray]:
        found = {}
        with SafetensorsStreamer() as streamer:
            streamer.stream_file(f"s3://{BUCKET}/{FILE}")
            for key, tensor in streamer.get_tensors():
                index = model.own_slice(key, tuple(tensor.shape), RANK) if case == "rank" else ()
                found[key] = tensor[index].clone().view(torch.uint16).numpy()
        return found

    return load


def _by_dcp(path: Path, reader: Callable[[], Any]) -> Any:
    import torch
    from torch.distributed.checkpoint import state_dict_loader

    def load() -> dict[str, np.ndarray]:
        _, header = header_of(path)
        state = {key: torch.empty(one["shape"], dtype=torch.uint16) for key, one in header.items()}
        state_dict_loader.load(state, storage_reader=reader(), no_dist=True)
        return {key: tensor.numpy() for key, tensor in state.items()}

    return load


def dcp_fsspec(path: Path, case: str, n_threads: int) -> Any:
    if case != "whole":
        return None
    importlib.import_module("s3fs")
    from torch.distributed.checkpoint._fsspec_filesystem import FsspecReader

    return _by_dcp(path, lambda: FsspecReader(f"s3://{BUCKET}/dcp"))


def _connector(kind: str, **more: Any) -> Any:
    connector = importlib.import_module("s3torchconnector")
    kinds = importlib.import_module("s3torchconnector.dcp")

    os.environ["S3_ENDPOINT_URL"] = os.environ["AWS_ENDPOINT_URL"]
    config = connector.S3ClientConfig(force_path_style=True, throughput_target_gbps=100)
    return getattr(kinds, kind)("us-east-1", f"s3://{BUCKET}/{more.pop('folder')}", s3client_config=config, **more)


def dcp_connector(path: Path, case: str, n_threads: int) -> Any:
    if case != "whole":
        return None
    importlib.import_module("s3torchconnector.dcp")

    return _by_dcp(path, lambda: _connector("S3StorageReader", folder="dcp"))


def curl(path: Path, case: str, n_threads: int) -> Any:
    arrays = arrays_of(path, case)
    lines = []
    url = f"{os.environ['AWS_ENDPOINT_URL']}/{BUCKET}/{FILE}"
    for _, array, first, _ in arrays:
        for at in range(first, first + array.nbytes, REQUEST_BYTES):
            last = min(at + REQUEST_BYTES, first + array.nbytes) - 1
            lines.append(f'url = "{url}"\noutput = "/dev/null"\nrange = "{at}-{last}"\n')
    text = "next\n".join(lines)
    return lambda: subprocess.run(
        ["curl", "-s", "-f", "-Z", "--parallel-immediate", "--parallel-max", str(n_threads), "-K", "-"],
        input=text.encode(),
        check=True,
    )


# -- uploads


def upload_reshard(path: Path, case: str, _: int) -> Any:
    import reshard

    tensors = dict(model.read(path))
    url = f"s3://{BUCKET}/up/reshard.safetensors"
    return lambda: reshard.save_file({key: np.array(array) for key, array in tensors.items()}, url)


def upload_reshard_file(path: Path, case: str, _: int) -> Any:
    from reshard.storage.remote import remote_store

    store, name = remote_store(f"s3://{BUCKET}/up/file.safetensors")
    return lambda: store.upload(path, name)


def upload_boto3(path: Path, case: str, n_threads: int) -> Any:
    client = _boto_client(n_threads)
    return lambda: client.upload_file(str(path), BUCKET, "up/boto3.safetensors")


def upload_s3fs(path: Path, case: str, _: int) -> Any:
    s3fs = importlib.import_module("s3fs")

    files = s3fs.S3FileSystem()
    return lambda: files.put_file(str(path), f"{BUCKET}/up/s3fs.safetensors")


def upload_obstore(path: Path, case: str, _: int) -> Any:
    client = importlib.import_module("obstore")

    store = _obstore()
    return lambda: client.put(store, "up/obstore.safetensors", path)


def _save_dcp(path: Path, writer: Callable[[], Any]) -> Any:
    import torch
    from torch.distributed.checkpoint import state_dict_saver

    state = {key: torch.from_numpy(np.array(array)) for key, array in model.read(path).items()}
    return lambda: state_dict_saver.save(state, storage_writer=writer(), no_dist=True) and None


def upload_dcp_fsspec(path: Path, case: str, n_threads: int) -> Any:
    importlib.import_module("s3fs")
    from torch.distributed.checkpoint._fsspec_filesystem import FsspecWriter

    return _save_dcp(path, lambda: FsspecWriter(f"s3://{BUCKET}/up/fsspec", thread_count=n_threads))


def upload_dcp_connector(path: Path, case: str, n_threads: int) -> Any:
    importlib.import_module("s3torchconnector.dcp")

    return _save_dcp(path, lambda: _connector("S3StorageWriter", folder="up/connector", overwrite=True))


LOADS = {
    "reshard": reshard,
    "boto3": boto3,
    "s3fs": s3fs,
    "obstore": obstore,
    "Run:ai streamer": run_ai,
    "DCP over fsspec": dcp_fsspec,
    "DCP, S3 connector": dcp_connector,
    "curl, parallel": curl,
}
UPLOADS = {
    "reshard, tensors": upload_reshard,
    "reshard, file": upload_reshard_file,
    "boto3, file": upload_boto3,
    "s3fs, file": upload_s3fs,
    "obstore, file": upload_obstore,
    "DCP over fsspec": upload_dcp_fsspec,
    "DCP, S3 connector": upload_dcp_connector,
}


# -- measuring


def work(name: str, case: str, path: Path, n_threads: int, *, checks: bool) -> None:
    """Run a program once, and print what it took as JSON."""
    try:
        run = (
            {**UPLOADS, **LOADS}[name](path, case, n_threads)
            if case != "upload"
            else UPLOADS[name](path, case, n_threads)
        )
    except ImportError as error:
        print(json.dumps({"missing": str(error)}))
        return
    if run is None:
        print(json.dumps({"missing": "not for one rank"}))
        return
    _touch(2 * path.stat().st_size)
    before, begun = _cpu_s(), time.perf_counter()
    found = run()
    took = time.perf_counter() - begun
    cpu_s = _cpu_s() - before
    if checks and isinstance(found, dict):
        bits = {key: np.asarray(array).view(np.uint16) for key, array in found.items()}
        model.check_whole(path, bits) if case == "whole" else model.check_rank(path, bits, RANK)
    print(json.dumps({"seconds": took, "cpu_s": cpu_s}))


def _touch(n_bytes: int) -> None:
    """Make the machine have as much free memory as a load takes."""
    with mmap.mmap(-1, n_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as memory:
        memory.madvise(mmap.MADV_HUGEPAGE)
        np.frombuffer(memory, np.uint8)[:: mmap.PAGESIZE] = 1


def _cpu_s() -> float:
    kinds = (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)
    return sum(found.ru_utime + found.ru_stime for found in map(resource.getrusage, kinds))


def n_bytes_of(path: Path, case: str) -> int:
    return model.own_bytes(path, RANK) if case == "rank" else path.stat().st_size


def measure(
    names: list[str], case: str, path: Path, *, n_threads: int, environment: dict[str, str], n_rounds: int
) -> dict[str, dict[str, Any]]:
    """The fastest of some rounds of each program."""
    best: dict[str, dict[str, Any]] = {}
    for number in range(n_rounds):
        for name in random.sample(names, len(names)):
            words = [sys.executable, __file__, "--work", name, case, str(path), str(n_threads), str(int(number == 0))]
            done = subprocess.run(
                words, env={**os.environ, **environment}, capture_output=True, text=True, timeout=600, check=False
            )
            lines = done.stdout.strip().splitlines()
            found = json.loads(lines[-1]) if done.returncode == 0 and lines else {"missing": done.stderr.strip()[-300:]}
            if name not in best or found.get("seconds", 1e9) < best[name].get("seconds", 1e9):
                best[name] = found
    return best


def show(title: str, best: dict[str, dict[str, Any]], n_bytes: int) -> None:
    """Print a table, the fastest program first."""
    print(f"\n### {title}, {n_bytes / 1e9:.2f} GB\n")
    print("| program | GB/s | CPU s/GB | speed of reshard is |\n|---|--:|--:|--:|")
    own = best.get("reshard", best.get("reshard, file", {})).get("seconds", 0)
    for name, found in sorted(best.items(), key=lambda one: one[1].get("seconds", 1e9)):
        if "seconds" not in found:
            print(f"| {name} | {str(found['missing']).splitlines()[-1]} | | |")
            continue
        rate, cpu = n_bytes / found["seconds"] / 1e9, found["cpu_s"] / (n_bytes / 1e9)
        times = f"{found['seconds'] / own:.2f} times its" if own else ""
        print(f"| {name} | {rate:.2f} | {cpu:.2f} | {times} |")
    sys.stdout.flush()


def _nginx(folder: Path, port: int, rate: str | None) -> subprocess.Popen[bytes]:
    own = folder / f"nginx-{port}"
    own.mkdir()
    temporary = "".join(
        f"{kind}_temp_path {own}/{kind}; " for kind in ("client_body", "proxy", "fastcgi", "uwsgi", "scgi")
    )
    user = "user root;" if os.geteuid() == 0 else ""
    text = f"""{user} daemon off; worker_processes 2; pid {own}/pid; error_log {own}/log;
events {{ worker_connections 1024; }}
http {{ access_log off; sendfile on; sendfile_max_chunk 2m; tcp_nodelay on; keepalive_requests 1000000; {temporary}
  server {{ listen 127.0.0.1:{port}; root {folder}/files; {f"limit_rate {rate};" if rate else ""} }} }}
"""
    (own / "conf").write_text(text)
    process = subprocess.Popen(["nginx", "-e", str(own / "log"), "-c", str(own / "conf")])
    time.sleep(1)
    return process


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--gb", type=float, default=1.0, help="size of the model")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--packages", help="a folder with other clients, made by `pip install --target`")
    parser.add_argument("--only", choices=["loads", "uploads"], help="a part of the tables")
    parser.add_argument("--work", nargs=5, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.work:
        name, case, path, n_threads, checks = given.work
        work(name, case, Path(path), int(n_threads), checks=checks == "1")
        return
    from tests.helpers.ports import unused_port
    from tests.servers import s3

    paths = [given.packages, os.environ.get("PYTHONPATH")]
    keys = {"AWS_ACCESS_KEY_ID": s3.KEY, "AWS_SECRET_ACCESS_KEY": s3.SECRET, "AWS_REGION": "us-east-1"}
    keys |= {"AWS_DEFAULT_REGION": "us-east-1", "AWS_ALLOW_HTTP": "true", "AWS_EC2_METADATA_DISABLED": "true"}
    environment = keys | {"PYTHONPATH": os.pathsep.join(filter(None, paths)), "CUDA_VISIBLE_DEVICES": ""}
    print(f"{_processor()}, {os.cpu_count()} processors, load {os.getloadavg()[0]:.0f}, {time.strftime('%d %b %Y')}")
    with tempfile.TemporaryDirectory(prefix="reshard-buckets-", dir="/dev/shm") as text:
        folder = Path(text)
        (folder / "files" / BUCKET).mkdir(parents=True)
        folder.chmod(0o755)
        path = folder / "files" / BUCKET / FILE
        model.write(path, given.gb)
        if given.only != "uploads":
            _save_dcp_folder(path, environment)
            for title, rate, n_threads in ((UNLIMITED, None, 8), (LIMITED, "90m", 32)):
                port = unused_port()
                server = _nginx(folder, port, rate)
                try:
                    here = environment | {"AWS_ENDPOINT_URL": f"http://127.0.0.1:{port}"}
                    for case, what in (("rank", f"rank {RANK} of {model.N_RANKS}"), ("whole", "whole model")):
                        best = measure(
                            list(LOADS), case, path, n_threads=n_threads, environment=here, n_rounds=given.rounds
                        )
                        show(f"{what}, {title}", best, n_bytes_of(path, case))
                finally:
                    server.terminate()
                    server.wait()
        if given.only != "loads":
            with s3.running() as store:
                best = measure(
                    list(UPLOADS),
                    "upload",
                    path,
                    n_threads=8,
                    environment=environment | store.environment,
                    n_rounds=given.rounds,
                )
            show("uploads, SeaweedFS", best, path.stat().st_size)


def _save_dcp_folder(path: Path, environment: dict[str, str]) -> None:
    code = (
        "import sys, torch, numpy as np; from pathlib import Path; from benches import model\n"
        "from torch.distributed.checkpoint import FileSystemWriter, state_dict_saver\n"
        "state = {k: torch.from_numpy(np.array(a)) for k, a in model.read(Path(sys.argv[1])).items()}\n"
        "state_dict_saver.save(state, storage_writer=FileSystemWriter(sys.argv[2], thread_count=8), no_dist=True)\n"
    )
    words = [sys.executable, "-c", code, str(path), str(path.parent / "dcp")]
    root = str(Path(__file__).parent.parent)
    subprocess.run(words, env={**os.environ, **environment}, cwd=root, check=True, capture_output=True)


def _processor() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    return next(
        (line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "unknown processor"
    )


if __name__ == "__main__":
    main()
