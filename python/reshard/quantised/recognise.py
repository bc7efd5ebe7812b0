"""Finds the quantised weights among tensors, and refuses those with a missing or contradicting part.

Each kind has a function that looks at one tensor, the packed one, and finds its parts by their names. What it finds is
checked by dtypes and shapes, and compared with config.json. A tensor that only occurs as a part of a quantised weight,
such as `weight_scale_inv`, is refused where no weight has it.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NoReturn

from reshard.documents.strict_json import parse_json
from reshard.errors import DamagedFileError, MismatchError, ReshardError, UnsupportedError
from reshard.quantised.config import Group, Groups, Said, check_method, packs_loosely
from reshard.quantised.kinds import Follows, Quantised
from reshard.values.words import listed, show

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    Tensors = Mapping[str, tuple[str, tuple[int, ...]]]
    """dtype and shape of each tensor by its key."""
    ReadBytes = Callable[[str], bytes]

_SUFFIXES = (
    "_scale_inv", "_scale", "_scale_2", "_global_scale", "_blocks", "_packed", "_qdata",
    ".absmax", ".SCB", ".quant_map", ".qweight", ".qzeros", ".g_idx", ".nested_absmax",
    ".quant_state.bitsandbytes__nf4", ".quant_state.bitsandbytes__fp4",
)  # fmt: skip
# Tensors of these names are nothing else than parts. `{0}` is the name of the weight or of its module.
_ONLY_PARTS = (
    (".weight_scale_inv", ".weight"),
    (".weight_scale_2", ".weight"),
    (".weight_global_scale", ".weight_packed"),
    (".qzeros", ".qweight"),
    (".g_idx", ".qweight"),
    (".SCB", ".weight"),
    (".weight.absmax", ".weight"),
    (".weight.quant_map", ".weight"),
)
_FP8 = ("F8_E4M3", "F8_E5M2")
_SCALES = ("F32", "BF16", "F16")
_POWERS = ("F8_E8M0", "U8")
_STATES = ("nf4", "fp4")
_STORAGES = {"U8": 1, "I8": 1, "F16": 2, "BF16": 2, "F32": 4, "F64": 8}  # `bnb_4bit_quant_storage`, and its bytes
# Of activations.
_OF_MODULE = ("input_scale", "activation_scale", "input_global_scale", "input_zero_point", "output_scale",
              "output_zero_point", "pre_quant_scale")  # fmt: skip
_MAX_STATE_BYTES = 64 << 10
_NVFP4_BLOCK, _MXFP4_BLOCK = 16, 32
_INTEGERS = range(1, 9)  # bits of an integer of compressed-tensors
# Bits, and whether integers stay within their word of 32 bits, which is the same where the bits divide 32.
_WAYS = [(n, is_loose) for n in _INTEGERS for is_loose in (False, True) if 32 % n or not is_loose]


def may_be_quantised(keys: Iterable[str]) -> bool:
    """Whether a name can be that of a part of a quantised weight. Only then are dtypes and shapes needed.

    Example:
        >>> may_be_quantised(["a.weight"]), may_be_quantised(["a.weight", "a.weight_scale_inv"])
        (False, True)
    """
    return any(key.endswith(_SUFFIXES) for key in keys)


def recognise(
    tensors: Tensors,
    of: Said | None = None,
    *,
    read: ReadBytes | None = None,
    headers: Mapping[str, str] | None = None,
    is_whole: bool = True,
) -> dict[str, Quantised]:
    """The quantised weights, by name.

    Args:
        tensors: dtype and shape of each tensor by its key.
        of: what config.json says; None: there is none.
        read: gives the bytes of a small tensor, for kinds that describe themselves in one.
        headers: the `__metadata__` of the files, for kinds that describe themselves there.
        is_whole: whether these are all tensors of the model. If config.json says so, one must be quantised then.

    Raises:
        MismatchError: a part is missing, or parts, shapes or config.json contradict each other.
        UnsupportedError: a weight is quantised in a way that is not known here.

    Example:
        >>> of = recognise({"a.weight": ("F8_E4M3", (256, 128)), "a.weight_scale_inv": ("F32", (2, 1))})["a.weight"]
        >>> of.kind, of.shape, of.values["block"]
        ('fp8-block', (256, 128), (128, 128))
    """
    found = _Finder(tensors, of or Said(), read, headers or {})
    weights = {one.name: one for one in found.all()}
    check_method(found.of, ((one.name, one.kind) for one in weights.values()), is_whole=is_whole)
    return weights


@dataclass
class _Finder:
    tensors: Tensors
    of: Said
    read: ReadBytes | None
    headers: Mapping[str, str]
    used: dict[str, str] = field(default_factory=dict)  # name of the weight, by the key of each part

    @functools.cached_property
    def groups(self) -> Groups:
        return Groups(self.of, (key.rpartition(".")[0] for key in self.tensors))

    def all(self) -> Iterator[Quantised]:
        kinds = (
            self._torchao,
            self._gptq_or_awq,
            self._compressed,
            self._bitsandbytes,
            self._mxfp4,
            self._modelopt,
            self._int8,
            self._fp8,
        )
        for key, (dtype, shape) in self.tensors.items():
            if not shape or 0 in shape or key in self.used:
                continue
            for kind in kinds:
                one = kind(key, dtype, shape)
                if one is not None:
                    self._use(one)
                    yield one
                    break
        self._check_rest()

    def _use(self, one: Quantised) -> None:
        for key in one.parts.values():
            if self.used.setdefault(key, one.name) != one.name:
                self._fail(key, f"{show(key)} is a part of {show(self.used[key])} and of {show(one.name)}")

    def _check_rest(self) -> None:
        """Refuse parts without a weight, and weights without their scales beside others that have them."""
        for key in self.tensors:
            if key in self.used:
                continue
            for end, whole in _ONLY_PARTS:
                if key.endswith(end) and (weight := key.removesuffix(end) + whole) not in self.tensors:
                    self._missing(weight, key, f"the weight that {show(key)} belongs to")
                if key.endswith(end) and whole != ".qweight" and self.tensors[weight][0] in ("F32", "F16", "BF16"):
                    self._fail(key, f"{show(key)} is a part of a quantised weight, and {show(weight)} is "
                        f"{self.tensors[weight][0]}")  # fmt: skip
        scaled = [key for key in self.used if self.tensors[key][0] in _FP8 and key == self.used[key]]
        if not scaled:
            return
        end = next(end for end in ("_scale_inv", "_scale") if scaled[0] + end in self.tensors)
        for key, (dtype, shape) in self.tensors.items():
            if key not in self.used and dtype in _FP8 and len(shape) > 1 and 0 not in shape:
                self._missing(key + end, key, f"the scale of {show(key)} ({dtype})")

    # -- errors

    def _fail(self, key: str, message: str, hint: str | None = None) -> NoReturn:
        raise MismatchError(message, key=key, hint=hint)

    def _missing(self, part: str, key: str, what: str) -> NoReturn:
        raise MismatchError(
            f"{show(part)} is missing: {what}",
            key=part,
            hint=f"without it the values of {show(key)} are not known; fetch the files of the model again, or give the "
            "folder with all of its files",
        )

    def _part(
        self, key: str, part: str, what: str, dtypes: tuple[str, ...] = (), shape: tuple[int, ...] | None = None
    ) -> str:
        """The key of a part, which must be there."""
        if part not in self.tensors:
            self._missing(part, key, f"the {what} of {show(key)}")
        found, its = self.tensors[part]
        if dtypes and found not in dtypes:
            self._fail(part, f"{show(part)}, the {what} of {show(key)}, is {found}, expected {' or '.join(dtypes)}")
        if shape is not None and its != shape:
            self._fail(part, f"{show(part)}, the {what} of {show(key)}, has shape {its}, expected {shape}")
        return part

    def _of_module(self, module: str) -> dict[str, str]:
        """Scales of activations beside a weight."""
        return {role: part for role in _OF_MODULE if (part := f"{module}.{role}") in self.tensors}

    # -- FP8

    def _fp8(self, key: str, dtype: str, shape: tuple[int, ...]) -> Quantised | None:
        ends = [end for end in ("_scale_inv", "_scale") if key + end in self.tensors]
        if dtype not in _FP8 or not ends:
            return None
        if len(ends) > 1:
            self._fail(key, f"{show(key)} has two scales, {show(key + ends[0])} and {show(key + ends[1])}")
        return self._scaled(key, shape, key + ends[0], _SCALES + _POWERS, "fp8")

    def _scaled(self, key: str, shape: tuple[int, ...], scale: str, dtypes: tuple[str, ...], kind: str) -> Quantised:
        """Values that are multiplied by the scale of their block, row, expert or tensor."""
        its = self.tensors[self._part(key, scale, "scale", dtypes)][1]
        # One number of scales for each dim of the weight.
        grid = its
        if math.prod(its) == 1:
            grid = (1,) * len(shape)
        elif len(its) < len(shape) and its == shape[: len(its)]:
            grid = (*its, *(1,) * (len(shape) - len(its)))
        elif len(its) == 4 and len(shape) == 2 and its[1::2] == (1, 1):  # of modelopt: rows, 1, columns, 1
            grid = its[::2]
        if len(grid) != len(shape):
            self._fail(
                scale, f"{show(scale)} has shape {its}, and {show(key)} {shape}: no scale a row, block or tensor"
            )
        block = self._block(key, shape, scale, grid, kind)
        is_row = grid[-1] == 1 and len(shape) > 1 and grid[-2] == shape[-2]
        grain = "tensor" if set(grid[-2:]) == {1} else "channel" if is_row else "block"
        dims = (0, None, 1, None) if (len(its), len(shape)) == (4, 2) else range(min(len(its), len(shape)))
        follows = tuple(Follows(dim, block[dim]) if dim is not None and grid[dim] > 1 else None for dim in dims)
        module = key.removesuffix(".weight")
        parts = {"weight": key, "scale": scale}
        if kind == "int8" and self._has_zeros(key + "_zero_point", self._groups(key, "int", _INTEGERS)):
            parts["zero_point"] = self._part(key, key + "_zero_point", "zero point", ("I8",), its)
        return Quantised(
            key,
            f"fp8-{grain}" if kind == "fp8" else "int8-channel",
            shape,
            {**parts, **(self._of_module(module) if module != key else {})},
            {part: follows for part in ("scale", "zero_point") if part in parts},
            {dim: n for dim, n in enumerate(block) if grid[dim] > 1 and n > 1},
            values={"block": block[-2:] if len(block) > 1 else (1, *block)},
        )

    def _block(self, key: str, shape: tuple[int, ...], scale: str, grid: tuple[int, ...], kind: str) -> tuple[int, ...]:
        """For each dim of the weight, how many elements share a scale."""
        told = self.of.values.get("weight_block_size") if kind == "fp8" and self.of.method == "fp8" else None
        groups = self._groups(key, *(("float", range(8, 9)) if kind == "fp8" else ("int", _INTEGERS)))
        if told is None and set(grid) == {1}:
            return shape
        matrix = shape[-2:]
        tried: list[tuple[int, ...]] = [(128, 128) if kind == "fp8" else (1, shape[-1])]
        says = ""
        if told is not None:
            if not (isinstance(told, list) and len(told) == 2 and all(type(n) is int and n > 0 for n in told)):
                path = show(str(self.of.path))
                self._fail(key, f"{path}: `weight_block_size` is {show(str(told))}, expected two numbers")
            tried, says = [tuple(told)], f", as `weight_block_size` of {show(str(self.of.path))} says,"
        elif groups:
            blocks = [one.block[-len(matrix) :] for one in groups]
            tried = [tuple(n or size for n, size in zip(block, matrix, strict=True)) for block in blocks]
            says = f", as `config_groups` of {show(str(self.of.path))} says,"
        elif all(n and size % n == 0 for size, n in zip(shape, grid, strict=True)):
            tried.append(tuple(size // n for size, n in zip(matrix, grid[-2:], strict=True)))
        wanted: list[tuple[int, ...]] = []
        fits: dict[tuple[int, ...], tuple[int, ...]] = {}
        for two in tried:
            block = ((1,) * (len(shape) - 2) + two)[-len(shape) :]
            wanted.append(tuple(-(-size // n) for size, n in zip(shape, block, strict=True)))
            if wanted[-1] == grid:
                whole = tuple(size if n == 1 else of for size, n, of in zip(shape, grid, block, strict=True))
                fits.setdefault(whole, two)
                if not groups:
                    break
        if len(fits) > 1:
            both = " and ".join(" x ".join(map(str, two)) for two in fits.values())
            self._fail(scale, f"{show(scale)} has {grid} scales for the {shape} values of {show(key)}: blocks of {both}"
                f"{says} fit, which are different values")  # fmt: skip
        if fits:
            return next(iter(fits))
        return self._fail(
            scale,
            f"{show(scale)} has {grid} scales for the {shape} values of {show(key)}: blocks of "
            f"{' x '.join(map(str, tried[0]))}{says} need {wanted[0]}",
        )

    def _has_zeros(self, part: str, told: Sequence[Group]) -> bool:
        """Whether there are zero points: as config.json says, else as the tensors are."""
        return part in self.tensors or (len(told) > 0 and not any(one.is_symmetric for one in told))

    def _groups(self, key: str, kind: str, bits: range) -> list[Group]:
        """What config.json says of weights of a type and of so many bits; empty: it has no groups."""
        told = self.groups.of(key.removesuffix("_packed").removesuffix(".weight"))
        found = [one for one in told if one.type == kind and one.bits in bits]
        if told and not found:
            kinds = listed([f"{one.type} of {one.bits} bits" for one in told])
            of = f"{bits[0]} to {bits[-1]}" if len(bits) > 1 else f"{bits[0]}"
            self._fail(key, f"{show(key)} has values of type {kind} of {of} bits, and `config_groups` of "
                f"{show(str(self.of.path))} has weights of type {kinds}")  # fmt: skip
        return found

    def _int8(self, key: str, dtype: str, shape: tuple[int, ...]) -> Quantised | None:
        scale = key + "_scale"
        if dtype != "I8" or scale not in self.tensors or self.tensors[scale][0] not in _SCALES:
            return None
        return self._scaled(key, shape, scale, _SCALES, "int8")

    # -- 4 bits with a scale a block

    def _mxfp4(self, key: str, dtype: str, shape: tuple[int, ...]) -> Quantised | None:
        name = key.removesuffix("_blocks")
        is_said = self.of.method == "mxfp4"
        if name == key or dtype != "U8" or not (name + "_scales" in self.tensors or is_said):
            return None
        if len(shape) != 4 or shape[-1] != _MXFP4_BLOCK // 2:
            self._fail(key, f"{show(key)} has shape {shape}, expected (experts, rows, blocks, {_MXFP4_BLOCK // 2})")
        scales = self._part(key, name + "_scales", "scale", ("U8", "F8_E8M0"), shape[:-1])
        experts, rows, blocks, _ = shape
        return Quantised(
            name,
            "mxfp4",
            (experts, blocks * _MXFP4_BLOCK, rows),  # as transformers computes with it
            {"blocks": key, "scales": scales},
            {"scales": (Follows(0), Follows(1), Follows(2))},
            {3: _MXFP4_BLOCK // 2},
            values={"transposed": True},
        )

    def _modelopt(self, key: str, dtype: str, shape: tuple[int, ...]) -> Quantised | None:
        scale, second = key + "_scale", key + "_scale_2"
        if dtype != "U8" or scale not in self.tensors or len(shape) < 2:
            return None
        of, its = self.tensors[scale]
        parts = {"weight": key, "scale": scale}
        of_module = self._of_module(key.removesuffix(".weight"))
        if of == "U8" and its == (*shape[:-1], shape[-1] * 2 // _MXFP4_BLOCK):
            return self._fp4(key, key, shape, {**parts, **of_module}, "mxfp4-modelopt")
        if of == "F32" and len(shape) == len(its) == 2 and its[0] == shape[0] * 2 and its[1] and not shape[1] % its[1]:
            parts |= {"global": second} if second in self.tensors else {}
            return Quantised(key, "int4-modelopt", (its[0], shape[1]), {**parts, **of_module}, is_whole=True)
        if of != "F8_E4M3":
            return None
        self._part(key, second, "global scale", ("F32",))
        return self._fp4(key, key, shape, {**parts, "global": second, **of_module}, "nvfp4-modelopt")

    def _group_sizes(self) -> set[int]:
        """The sizes of blocks that the configuration of modelopt says, of all modules; none: it says nothing."""
        said = self.of.values
        found = [said]
        for name in ("config_groups", "quantized_layers"):
            entries = said.get(name)
            for one in entries.values() if isinstance(entries, dict) else ():
                found += (
                    [of for of in (one, one.get("weights")) if isinstance(of, dict)] if isinstance(one, dict) else []
                )
        return {size for one in found if type(size := one.get("group_size")) is int and size > 0}

    def _fp4(self, key: str, name: str, shape: tuple[int, ...], parts: dict[str, str], kind: str) -> Quantised:
        n_scales = (0, *self.tensors[parts["scale"]][1])[-1]
        is_wide = kind.startswith("mxfp4") or (kind == "nvfp4-modelopt" and n_scales * _MXFP4_BLOCK == 2 * shape[-1])
        block = _MXFP4_BLOCK if is_wide else _NVFP4_BLOCK
        if kind == "nvfp4-modelopt" and is_wide and (told := self._group_sizes()) and block not in told:
            self._fail(
                parts["scale"],
                f"{show(str(self.of.path))} says `group_size` {listed(map(str, sorted(told)))}, and "
                f"{show(parts['scale'])} of shape {self.tensors[parts['scale']][1]} has blocks of {block}",
            )
        if shape[-1] * 2 % block:
            self._fail(key, f"{show(key)} has rows of {2 * shape[-1]} values, not a multiple of {block}, its block")
        self._part(key, parts["scale"], "scale", (), (*shape[:-1], shape[-1] * 2 // block))
        if "global" in parts and self.tensors[parts["global"]][1] not in ((), (1,), shape[:-2]):
            its = self.tensors[parts["global"]][1]
            self._fail(parts["global"], f"{show(parts['global'])}, the global scale of {show(key)}, has shape {its}")
        n = len(shape)
        follows = {"scale": (*map(Follows, range(n - 1)), Follows(n - 1, block // 2))}
        if "global" in parts and len(shape) > 2 and self.tensors[parts["global"]][1] == shape[:-2]:
            follows["global"] = tuple(map(Follows, range(n - 2)))
        values = {"block": block}
        return Quantised(name, kind, (*shape[:-1], shape[-1] * 2), parts, follows, {n - 1: block // 2}, values=values)

    def _compressed(self, key: str, dtype: str, shape: tuple[int, ...]) -> Quantised | None:
        name = key.removesuffix("_packed")
        if name == key or dtype not in ("U8", "I32") or len(shape) < 2:
            return None
        module = name.removesuffix(".weight")
        parts = {"weight": key, "scale": self._part(key, name + "_scale", "scale")}
        if dtype == "I32":
            return self._packed_integers(key, name, shape, parts)
        told = [one.bits for one in self.groups.of(module) if one.type == "float"]
        if told and 4 not in told:
            raise UnsupportedError(
                f"{show(key)} has floats of {listed(map(str, dict.fromkeys(told)))} bits, as `config_groups` of "
                f"{show(str(self.of.path))} says: of packed floats only those of 4 bits are supported",
                key=key,
            )
        if self.tensors[parts["scale"]][0] in _POWERS:
            return self._fp4(key, name, shape, parts | self._of_module(module), "mxfp4-packed")
        self._part(key, parts["scale"], "scale", ("F8_E4M3",))
        parts["global"] = self._part(key, name + "_global_scale", "global scale", ("F32",))
        return self._fp4(key, name, shape, parts | self._of_module(module), "nvfp4")

    def _packed_integers(self, key: str, name: str, shape: tuple[int, ...], parts: dict[str, str]) -> Quantised:
        if len(shape) != 2:
            self._fail(key, f"{show(key)} has shape {shape}, expected two dims")
        parts["shape"] = self._part(key, name + "_shape", "shape", ("I64", "I32"), (2,))
        parts |= {"g_idx": name + "_g_idx"} if name + "_g_idx" in self.tensors else {}
        its = self.tensors[parts["scale"]][1]
        rows, of_row = shape[0], its[-1] if its else 1
        columns = self._integers(parts["shape"])
        if len(columns) != 2 or columns[0] != rows or not columns[1] or columns[1] > shape[1] * 32:
            self._fail(parts["shape"], f"{show(parts['shape'])} is {columns}, and {show(key)} has shape {shape}")
        one_for_all = math.prod(its) == 1
        self._part(key, parts["scale"], "scale", _SCALES, its if one_for_all else (rows, of_row))
        told = self._groups(key, "int", _INTEGERS)
        ways = [way for way in _WAYS if _n_words(columns[1], *way) == shape[1]]
        if told:
            ways = [way for way in ways if any(one.bits == way[0] for one in told)]
            of_size = {one.bits for one in told if (one.block[1] or columns[1]) * of_row == columns[1]}
            ways = [way for way in ways if way[0] in of_size] or ways
        bits = list(dict.fromkeys(n for n, is_loose in ways if not is_loose)) or [n for n, _ in ways]
        if len(bits) != 1 or not of_row or columns[1] % of_row:
            path = f", as `config_groups` of {show(str(self.of.path))} says" if told else ""
            counts = [str(n) for n in (bits or sorted({one.bits for one in told}) or _INTEGERS)]
            self._fail(key, f"{show(key)} of shape {shape} packs no {columns} integers of {listed(counts)} bits{path}, "
                f"in {of_row} groups a row" if len(bits) < 2 else f"{show(key)} of shape {shape} can hold "
                f"{columns} integers of {listed(counts)} bits{path}")  # fmt: skip
        told = [one for one in told if one.bits == bits[0]]
        sizes = {one.block[1] or columns[1] for one in told}
        if told and columns[1] // of_row not in sizes:
            self._fail(key, f"{show(parts['scale'])} has {of_row} groups a row of {columns[1]}, and `config_groups` of "
                f"{show(str(self.of.path))} has groups of {listed(map(str, sorted(sizes)))}")  # fmt: skip
        told = [one for one in told if (one.block[1] or columns[1]) == columns[1] // of_row]
        zeros = name + "_zero_point"
        n_packed = columns[1]
        if self._has_zeros(zeros, told):
            parts["zero_point"] = self._part(key, zeros, "zero point")
            if self.tensors[zeros][0] == "I32":
                fit = [way for way in ways if self.tensors[zeros][1] == (_n_words(rows, *way), of_row)]
                self._part(key, zeros, "zero point", (), None if fit else (_n_words(rows, bits[0]), of_row))
                ways, n_packed = fit, max(n_packed, rows)
        values: dict[str, Any] = {"bits": bits[0]}
        ways = [way for way in ways if n_packed > 32 // way[0] or not way[1]]  # in one word both lie alike
        of_version = packs_loosely(self.of)
        if of_version is not None:
            ways = [way for way in ways if not 32 % way[0] or way[1] is of_version] or ways
        if ways != [(bits[0], False)]:
            values["packings"] = tuple(ways)
        return Quantised(name, "int-packed", columns, parts, is_whole=True, values=values)

    # -- GPTQ and AWQ

    def _gptq_or_awq(self, key: str, dtype: str, shape: tuple[int, ...]) -> Quantised | None:
        module = key.removesuffix(".qweight")
        if module == key or dtype != "I32" or len(shape) != 2:
            return None
        scales = self._part(key, f"{module}.scales", "scale", _SCALES)
        zeros = self._part(key, f"{module}.qzeros", "zero point", ("I32",))
        its = self.tensors[scales][1]
        if len(its) != 2 or not its[0]:
            self._fail(scales, f"{show(scales)}, the scale of {show(key)}, has shape {its}, expected two dims")
        groups, columns = its
        name = f"{module}.weight"
        is_gptq = columns == shape[1]
        if is_gptq:
            order = self._part(key, f"{module}.g_idx", "order of the groups", ("I32",))
            rows = self.tensors[order][1][0] if len(self.tensors[order][1]) == 1 else 0
            bits = self._bits(key, rows, shape[0])
            self._part(key, zeros, "zero point", (), (groups, -(-columns * bits // 32)))
            self._check_numbers(key, bits, rows, groups)
            return Quantised(
                name,
                "gptq",
                (columns, rows),
                {"qweight": key, "qzeros": zeros, "scales": scales, "g_idx": order},
                {
                    "qzeros": (None, Follows(1, 32 // math.gcd(bits, 32), bits // math.gcd(bits, 32))),
                    "scales": (None, Follows(1)),
                    "g_idx": (Follows(0, bits // math.gcd(bits, 32), 32 // math.gcd(bits, 32)),),
                },
                {0: bits // math.gcd(bits, 32), 1: 32 // math.gcd(bits, 32)},
                values={"bits": bits, "zero_offset": 0 if self.of.values.get("checkpoint_format") == "gptq_v2" else 1},
            )
        bits = 4
        if columns != shape[1] * 8:
            self._fail(
                scales,
                f"{show(scales)} has shape {its}, and {show(key)} {shape}: neither GPTQ, with {shape[1]} columns of "
                f"scales, nor AWQ, with {shape[1] * 8}",
            )
        rows = shape[0]
        if rows % groups:
            self._fail(
                scales, f"{show(scales)} has {groups} groups, which do not divide the {rows} rows of {show(key)}"
            )
        self._part(key, zeros, "zero point", (), (groups, shape[1]))
        self._check_numbers(key, bits, rows, groups)
        group = rows // groups
        of_groups = Follows(0, group) if groups > 1 else None
        return Quantised(
            name,
            "awq",
            (columns, rows),
            {"qweight": key, "qzeros": zeros, "scales": scales},
            {"qzeros": (of_groups, Follows(1)), "scales": (of_groups, Follows(1, 1, 8))},
            {0: group} if groups > 1 else {},
            values={"bits": bits, "group": group},
        )

    def _bits(self, key: str, rows: int, packed: int) -> int:
        bits = 32 * packed // rows if rows else 0
        if bits not in (2, 3, 4, 8) or rows * bits != 32 * packed:
            self._fail(
                key,
                f"{show(key)} has {packed} x 32 bits, and its `g_idx` {rows} rows: no 2, 3, 4 or 8 bits a row",
            )
        return bits

    def _check_numbers(self, key: str, bits: int, rows: int, groups: int) -> None:
        """Compare `bits` and `group_size` of config.json with the shapes."""
        said = self.of.values
        told = said.get("bits", said.get("w_bit"))
        if type(told) is int and told != bits:
            self._fail(key, f"{show(str(self.of.path))} says `bits` {told}, and {show(key)} has {bits}")
        size = said.get("group_size", said.get("q_group_size"))
        if type(size) is int and groups != (1 if size <= 0 else -(-rows // size)):
            self._fail(
                key,
                f"{show(str(self.of.path))} says `group_size` {size}, and {show(key)} has {groups} groups of {rows}",
            )

    # -- bitsandbytes

    def _bitsandbytes(self, key: str, dtype: str, shape: tuple[int, ...]) -> Quantised | None:
        scb = key.removesuffix(".weight") + ".SCB"
        states = [of for name in _STATES if (of := f"{key}.quant_state.bitsandbytes__{name}") in self.tensors]
        if (
            dtype == "I8"
            and not states
            and key.endswith(".weight")
            and (scb in self.tensors or self.of.method == "bitsandbytes")
        ):
            if len(shape) != 2:
                self._fail(key, f"{show(key)} has shape {shape}, expected two dims")
            self._part(key, scb, "scale", ("F32",), shape[:1])
            order = key + "_format"
            parts = {"weight": key, "scale": scb, **({"format": order} if order in self.tensors else {})}
            return Quantised(key, "bnb-int8", shape, parts, {"scale": (Follows(0),)})
        ends = (".absmax", ".quant_map", ".nested_absmax", ".nested_quant_map")
        if dtype not in _STORAGES or not (states or any(key + end in self.tensors for end in ends)):
            return None
        if not states:
            self._missing(f"{key}.quant_state.bitsandbytes__nf4", key, f"the state of {show(key)}")
        state = self._json(states[0])
        size = state.get("blocksize")
        logical = state.get("shape")
        if (
            type(size) is not int
            or size < 1
            or not isinstance(logical, list)
            or any(type(n) is not int or n < 0 for n in logical)
        ):
            self._fail(states[0], f"{show(states[0])} has no `blocksize` or `shape`")
        n = math.prod(logical)
        if math.prod(shape) * _STORAGES[dtype] != -(-n // 2) or sum(extent != 1 for extent in shape) > 1:
            self._fail(
                key, f"{show(key)} is {dtype} of shape {shape}, and its state says {n} values of 4 bits, two a byte"
            )
        parts = {"weight": key}
        blocks = -(-n // size)
        nested = "nested_blocksize" in state
        parts["absmax"] = self._part(key, key + ".absmax", "scale", ("U8",) if nested else ("F32",), (blocks,))
        parts["quant_map"] = self._part(key, key + ".quant_map", "table", ("F32",), (16,))
        if nested:
            second = state["nested_blocksize"]
            if type(second) is not int or second < 1 or type(state.get("nested_offset")) is not float:
                self._fail(states[0], f"{show(states[0])} has no `nested_blocksize` or `nested_offset`")
            for role, what, its in (("absmax", "scale", -(-blocks // second)), ("quant_map", "table", 256)):
                part = f"nested_{role}"
                parts[part] = self._part(key, f"{key}.{part}", f"{what} of the scales", ("F32",), (its,))
        parts["state"] = states[0]
        return Quantised(key, "bnb-4bit", tuple(logical), parts, is_whole=True, values=state)

    def _json(self, key: str) -> dict[str, Any]:
        dtype, shape = self.tensors[key]
        if self.read is None or dtype != "U8" or math.prod(shape) > _MAX_STATE_BYTES:
            raise MismatchError(f"{show(key)} is {dtype} of shape {shape}, expected a short text as U8", key=key)
        value = parse_json(self.read(key), key)
        if not isinstance(value, dict):
            raise DamagedFileError(f"{show(key)} is no JSON object", key=key)
        return value

    def _integers(self, key: str) -> tuple[int, ...]:
        width = 8 if self.tensors[key][0] == "I64" else 4
        data = b"" if self.read is None else self.read(key)
        return tuple(int.from_bytes(data[at : at + width], "little", signed=True) for at in range(0, len(data), width))

    # -- torchao

    def _torchao(self, key: str, _: str, shape: tuple[int, ...]) -> Quantised | None:
        module, _, last = key.rpartition(".")
        if not (last.startswith("_") and last.endswith("_qdata")):
            return None
        name = f"{module}.{last[1:].removesuffix('_qdata')}"
        text = self.headers.get(name)
        if text is None:
            self._fail(key, f"the header of the file does not say what {show(name)} is, of which {show(key)} is a part",
                "torchao describes its tensors in `__metadata__` of the file; fetch the file again")  # fmt: skip
        try:
            told = parse_json(text.encode(), name)
        except ReshardError as error:
            self._fail(key, f"the header of the file describes {show(name)} by no JSON: {error.message}")
        names = told.get("_tensor_data_names") if isinstance(told, dict) else None
        if (
            not isinstance(told, dict)
            or not isinstance(names, list)
            or "qdata" not in names
            or not isinstance(told.get("_data"), dict)
        ):
            self._fail(key, f"the header of the file does not list the parts of {show(name)}")
        start = key.removesuffix("qdata")
        parts = {"qdata": key}
        parts |= {str(one): self._part(key, f"{start}{one}", str(one)) for one in names if one != "qdata"}
        values = {"type": told.get("_type"), **told["_data"]}
        return Quantised(name, "torchao", _torchao_shape(shape, values), parts, is_whole=True, values=values)


def _n_words(count: int, bits: int, is_loose: bool = False) -> int:  # noqa: FBT001, FBT002
    """How many words of 32 bits hold so many integers."""
    return -(-count // (32 // bits)) if is_loose else -(-count * bits // 32)


def _torchao_shape(shape: tuple[int, ...], values: Mapping[str, Any]) -> tuple[int, ...]:
    """The shape of a tensor of torchao, of which two values of 4 bits are one byte."""
    elements = values.get("elem_dtype")
    is_half = values.get("type") in ("Int4Tensor", "NVFP4Tensor") or (
        isinstance(elements, dict) and elements.get("_data") == "float4_e2m1fn_x2"
    )
    return (*shape[:-1], shape[-1] * 2) if is_half else shape
