"""`reshard.jax`: arrays with shardings over 8 devices of the CPU, in and out."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.slow

ENVIRONMENT = {**os.environ, "XLA_FLAGS": "--xla_force_host_platform_device_count=8", "JAX_PLATFORMS": "cpu"}
PRELUDE = """
import jax, numpy as np, reshard, reshard.jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P

def sharding(shape, names, *spec):
    return NamedSharding(Mesh(np.reshape(jax.devices()[: np.prod(shape)], shape), names), P(*spec))

def put(array, *where):
    return jax.device_put(array, sharding(*where))

def raises(kind, text, call):
    try:
        call()
    except kind as error:
        assert text in str(error), error
    else:
        raise AssertionError(f"no {kind}")

rng = np.random.default_rng(0)
A, B = ((4, 2), ("dp", "tp")), ((2, 4), ("x", "y"))
tree = {
    "w": put(rng.standard_normal((8, 16), np.float32), *A, "dp", "tp"),
    "layers": [{"b": put(rng.standard_normal(16).astype(jnp.bfloat16), *A, ("tp", "dp"))}, (put(np.arange(5), *A),)],
    "f8": put(rng.standard_normal((4, 4)).astype(jnp.float8_e4m3fn), *A, None, "tp"),
    "re[x]*": put(np.arange(8, dtype=np.int8), *A, "dp"),
    "key": jax.random.split(jax.random.key(7), 2),
    "count": jnp.int32(3),
    "step": 5,
    "host": np.arange(3.0),
}
whole = {"/".join(map(str, path)): np.asarray(jax.random.key_data(leaf) if reshard.jax.tree.is_key(leaf) else leaf)
         for path, leaf in jax.tree_util.tree_flatten_with_path(tree)[0]}

def check(loaded):
    for path, leaf in jax.tree_util.tree_flatten_with_path(loaded)[0]:
        expected = whole["/".join(map(str, path))]
        found = np.asarray(jax.random.key_data(leaf) if reshard.jax.tree.is_key(leaf) else leaf)
        assert found.dtype == expected.dtype and found.tobytes() == expected.tobytes(), path
"""


def run(code: str, folder: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", PRELUDE + code], cwd=folder, env=ENVIRONMENT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]


def test_arrays_come_back_under_any_sharding(tmp_path: Path) -> None:
    run(
        """
report = reshard.jax.save("root", 7, tree, extra={"note": "x"}, metrics={"loss": 1.0})
assert report.n_files == 8
same = reshard.jax.load("root", like=tree)
assert (same.iteration, same.extra, same.tree["step"]) == (7, {"note": "x"}, 5)
check(same.tree)
assert same.tree["w"].sharding == tree["w"].sharding and not same.tree["count"].committed
assert same.tree["key"].dtype == tree["key"].dtype

# Every shard is written once, and the layout has the axes of the mesh.
with reshard.open("root") as checkpoint:
    n_bytes = sum(array.nbytes for name, array in whole.items() if "step" not in name)
    assert sum(checkpoint[key].n_bytes for key in checkpoint.keys()) == n_bytes
    layout = reshard.ModelLayout.like(checkpoint)
    assert layout.mesh == {"dp": 4, "tp": 2}
    assert checkpoint.load({"mesh": {"tp": 4}, "rules": [{"match": "w", "cut": [None, "tp"]}, {"match": "*"}]}, rank=1)[
        "w"].tolist() == np.asarray(tree["w"])[:, 4:8].tolist()

def wanted(leaf):
    if not isinstance(leaf, jax.Array):
        return leaf
    spec = [None] * (leaf.ndim - 1) + ["y"] if leaf.ndim and leaf.shape[-1] % 4 == 0 else []
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding(*B, *spec))

other = reshard.jax.load("root", like=jax.tree.map(wanted, tree)).tree
check(other)
assert other["w"].sharding == sharding(*B, None, "y")
assert [shard.data.shape for shard in other["w"].addressable_shards] == [(8, 4)] * 8
assert reshard.jax.load("none", like=tree).tree is None
""",
        tmp_path,
    )


def test_several_meshes_and_damage(tmp_path: Path) -> None:
    run(
        """
mixed = {**tree, "w": put(np.asarray(tree["w"]), *B, "x", "y"), "small": put(np.arange(4), (2,), ("z",), "z")}
reshard.jax.save("mixed", 1, mixed)
check({name: leaf for name, leaf in reshard.jax.load("mixed", like=mixed).tree.items() if name != "small"})
assert reshard.jax.load("mixed", like=mixed).tree["small"].tolist() == [0, 1, 2, 3]

reshard.jax.save("root", 1, tree)
reshard.jax.save("root", 2, tree)
import pathlib
file = max(pathlib.Path("root/iteration_00000002").glob("*.safetensors"), key=lambda one: one.stat().st_size)
content = bytearray(file.read_bytes())
content[-1] ^= 1
file.write_bytes(content)
loaded = reshard.jax.load("root", like=tree, verify="full")
assert loaded.iteration == 1, loaded.decision
assert "iteration_00000002" in str(loaded.decision), loaded.decision
check(loaded.tree)
""",
        tmp_path,
    )


def test_differences_are_refused(tmp_path: Path) -> None:
    run(
        """
from reshard.errors import ArgumentError, MismatchError, UnsupportedError
reshard.jax.save("root", 1, tree)
load = lambda like, **words: reshard.jax.load("root", like, **words)
half = jax.ShapeDtypeStruct((8, 16), jnp.bfloat16)
raises(MismatchError, "is F32 with shape (8, 16)", lambda: load({**tree, "w": half}))
raises(MismatchError, "with shape (8, 8) in the tree", lambda: load({**tree, "w": jnp.zeros((8, 8))}))
raises(MismatchError, "lacks `new`", lambda: load({**tree, "new": jnp.zeros(2)}))
raises(MismatchError, "the tree does not have `f8`", lambda: load({k: v for k, v in tree.items() if k != "f8"}))
assert load({"count": tree["count"]}, partial=True).tree == {"count": 3}
other = jax.random.split(jax.random.key(1, impl="rbg"), 2)
raises(MismatchError, "random keys of dtype key<fry>", lambda: load({**tree, "key": other}))
raises(MismatchError, "no random keys in ", lambda: load({**tree, "w": other}))
raises(MismatchError, "jax_enable_x64", lambda: load({**tree, "w": jax.ShapeDtypeStruct((8, 16), np.float64)}))
save = lambda tree, **words: reshard.jax.save("x", 1, tree, **words)
raises(ArgumentError, "two leaves of the tree are named `a.b`", lambda: save({"a.b": 1, "a": {"b": 2}}))
raises(ArgumentError, "expected an array", lambda: save({"a": object()}))
raises(UnsupportedError, "int4", lambda: save({"a": jnp.ones(4, jnp.int4)}))
raises(ArgumentError, "no option", lambda: save(tree, group=None))
""",
        tmp_path,
    )


def test_the_killed_example_goes_on(tmp_path: Path) -> None:
    """On the same devices to the last bit, and sharded in another way."""

    def start(folder: str, *words: str) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-m", "reshard.examples.train_jax", "--steps", "60", "--tp", "4", *words]
        with (tmp_path / f"{folder}.log").open("ab") as log:
            return subprocess.Popen([*command, "--out", str(tmp_path / folder)], env=ENVIRONMENT, stdout=log)

    assert start("whole").wait() == 0
    killed, log = start("torn", "--steps", "1000000"), tmp_path / "torn.log"
    while not log.exists() or len(log.read_text().splitlines()) < 27:
        assert killed.poll() is None
        time.sleep(0.005)
    killed.kill()
    killed.wait()
    n_before = len(log.read_text().splitlines())
    assert start("torn").wait() == 0
    lines = log.read_text().splitlines()
    expected = (tmp_path / "whole.log").read_text().splitlines()
    if n_before < 60:
        assert int(lines[n_before].split()[0]) > 20
        assert set(lines) == set(expected)
    assert start("torn", "--tp", "2", "--steps", "63").wait() == 0
