"""Small quantised weights of every kind, as the libraries that own the kinds write them, in plain numpy."""

import json
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]
ARCHITECTURE = {"architectures": ["LlamaForCausalLM"], "model_type": "llama"}


def fp8(rng: np.random.Generator, shape: tuple[int, ...], kind: Any = ml_dtypes.float8_e4m3fn) -> Array:
    return np.asarray(rng.normal(size=shape) * 50).astype(kind)


def integers(rng: np.random.Generator, shape: tuple[int, ...], dtype: Any) -> Array:
    info = np.iinfo(dtype)
    return rng.integers(info.min, info.max, shape, dtype, endpoint=True)


def scales(rng: np.random.Generator, shape: tuple[int, ...], dtype: Any = np.float32) -> Array:
    return np.asarray(rng.uniform(0.25, 2, shape)).astype(dtype)


def state_4bit(shape: tuple[int, ...], **more: object) -> Array:
    state = {"quant_type": "nf4", "blocksize": 64, "dtype": "bfloat16", "shape": list(shape), **more}
    return np.frombuffer(json.dumps(state).encode(), np.uint8)


NF4 = np.array(
    [
        -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635,
        -0.18477343022823334, -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634,
        0.33791524171829224, 0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
    ],
    np.float32,
)  # fmt: skip


def weight(kind: str, m: str, rng: np.random.Generator, rows: int = 256, columns: int = 256) -> dict[str, Array]:
    """The tensors of one quantised weight of a module `m`, of `rows` x `columns` values."""
    if kind == "fp8-block":
        grid = (-(-rows // 128), -(-columns // 128))
        return {f"{m}.weight": fp8(rng, (rows, columns)), f"{m}.weight_scale_inv": scales(rng, grid)}
    if kind == "fp8-channel":
        return {
            f"{m}.weight": fp8(rng, (rows, columns)),
            f"{m}.weight_scale": scales(rng, (rows, 1), ml_dtypes.bfloat16),
        }
    if kind == "fp8-tensor":
        both = {f"{m}.weight_scale": scales(rng, ()), f"{m}.input_scale": scales(rng, ())}
        return {f"{m}.weight": fp8(rng, (rows, columns)), **both}
    if kind == "mxfp4":
        blocks = integers(rng, (2, rows, columns // 32, 16), np.uint8)
        return {f"{m}.w_blocks": blocks, f"{m}.w_scales": rng.integers(110, 140, blocks.shape[:-1], np.uint8)}
    packed = integers(rng, (rows, columns // 2), np.uint8)
    if kind in ("mxfp4-packed", "mxfp4-modelopt"):
        of = rng.integers(110, 140, (rows, columns // 32), np.uint8)
        return {f"{m}.weight{'_packed' * (kind == 'mxfp4-packed')}": packed, f"{m}.weight_scale": of}
    of_16 = np.abs(fp8(rng, (rows, columns // 16)).astype(np.float32)).astype(ml_dtypes.float8_e4m3fn)
    if kind == "nvfp4":
        both = {f"{m}.weight_global_scale": scales(rng, (1,)) * 300, f"{m}.input_global_scale": scales(rng, (1,))}
        return {f"{m}.weight_packed": packed, f"{m}.weight_scale": of_16, **both}
    if kind == "nvfp4-modelopt":
        both = {f"{m}.weight_scale_2": scales(rng, ()) / 300, f"{m}.input_scale": scales(rng, ())}
        return {f"{m}.weight": packed, f"{m}.weight_scale": of_16, **both}
    if kind == "int8-channel":
        return {f"{m}.weight": integers(rng, (rows, columns), np.int8), f"{m}.weight_scale": scales(rng, (rows, 1))}
    if kind == "int-packed":
        return {
            f"{m}.weight_packed": integers(rng, (rows, columns // 8), np.int32),
            f"{m}.weight_scale": scales(rng, (rows, columns // 128), ml_dtypes.bfloat16),
            f"{m}.weight_shape": np.array([rows, columns]),
        }
    if kind == "gptq":
        return {
            f"{m}.qweight": integers(rng, (columns // 8, rows), np.int32),
            f"{m}.qzeros": integers(rng, (columns // 128, rows // 8), np.int32),
            f"{m}.scales": scales(rng, (columns // 128, rows), np.float16),
            f"{m}.g_idx": rng.permutation(columns).astype(np.int32) // 128,
        }
    if kind == "awq":
        return {
            f"{m}.qweight": integers(rng, (columns, rows // 8), np.int32),
            f"{m}.qzeros": integers(rng, (columns // 128, rows // 8), np.int32),
            f"{m}.scales": scales(rng, (columns // 128, rows), np.float16),
        }
    if kind == "bnb-4bit":
        n = rows * columns
        return {
            f"{m}.weight": integers(rng, (n // 2, 1), np.uint8),
            f"{m}.weight.absmax": scales(rng, (n // 64,)),
            f"{m}.weight.quant_map": NF4,
            f"{m}.weight.quant_state.bitsandbytes__nf4": state_4bit((rows, columns)),
        }
    if kind == "bnb-int8":
        return {
            f"{m}.weight": integers(rng, (rows, columns), np.int8),
            f"{m}.SCB": scales(rng, (rows,)),
            f"{m}.weight_format": np.zeros((), np.uint8),
        }
    raise AssertionError(kind)


CONFIGS: dict[str, dict[str, Any]] = {
    "fp8-block": {"quant_method": "fp8", "weight_block_size": [128, 128]},
    "fp8-channel": {"quant_method": "compressed-tensors", "format": "float-quantized"},
    "fp8-tensor": {"quant_method": "modelopt", "quant_algo": "FP8"},
    "mxfp4": {"quant_method": "mxfp4"},
    "mxfp4-packed": {"quant_method": "compressed-tensors", "format": "mxfp4-pack-quantized"},
    "mxfp4-modelopt": {"quant_method": "modelopt", "quant_algo": "mxfp4"},
    "nvfp4": {"quant_method": "compressed-tensors", "format": "nvfp4-pack-quantized"},
    "nvfp4-modelopt": {"quant_method": "modelopt", "quant_algo": "NVFP4"},
    "int8-channel": {"quant_method": "compressed-tensors", "format": "int-quantized"},
    "int-packed": {"quant_method": "compressed-tensors", "format": "pack-quantized"},
    "gptq": {"quant_method": "gptq", "bits": 4, "group_size": 128, "desc_act": True, "sym": False},
    "awq": {"quant_method": "awq", "bits": 4, "group_size": 128, "zero_point": True, "version": "gemm"},
    "bnb-4bit": {"quant_method": "bitsandbytes", "load_in_4bit": True},
    "bnb-int8": {"quant_method": "bitsandbytes", "load_in_8bit": True},
}
"""`quantization_config` of each kind."""


def config_of(kind: str) -> dict[str, Any]:
    return {**ARCHITECTURE, "quantization_config": CONFIGS[kind]}
