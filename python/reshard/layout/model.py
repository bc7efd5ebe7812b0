"""`ModelLayout`, the one value that `layout=` takes, and every way to get one."""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Self, TypeAlias

from reshard import _core
from reshard.arguments import check, check_given, check_shapes, checked
from reshard.errors import ArgumentError
from reshard.layout import presets, tp_plan
from reshard.layout.bind import BoundLayout, bind, bound_of
from reshard.layout.file import LayoutFile
from reshard.layout.like import CheckpointLike, mapping_like
from reshard.layout.strategy import Strategy
from reshard.layout.strategy_file import is_strategy
from reshard.layout.strategy_folder import read_strategy
from reshard.layout.strategy_layout import layouts_of
from reshard.layout.strategy_writer import strategy_of, write_stage_files
from reshard.storage.location import locate
from reshard.strict_yaml import quote, read_yaml

if TYPE_CHECKING:
    from pathlib import Path

__all__ = ["LayoutLike", "ModelLayout", "as_layout", "write_strategy"]


@dataclass(frozen=True, eq=False)
class ModelLayout(LayoutFile):
    """How the tensors of a model lie on a mesh of ranks: a layout file as a value. Printed, it is such a file.

    Attributes:
        strategy: the strategy that it was made of, or None. Bound, it is asked again: it can need a tensor's shape.
        uncertain: tensors of which the strategy does not say without their shapes how they are cut. Printed, they are
            cut as is likely.

    Example:
        >>> layout = ModelLayout.from_mapping({
        ...     "mesh": {"tp": 2},
        ...     "rules": [{"match": "*.down_proj.weight", "cut": [None, "tp"]}, {"match": "*"}],
        ... })
        >>> print(layout)
        mesh: {tp: 2}
        rules:
          - match: "*.down_proj.weight"
            cut: [null, tp]
          - match: "*"
        <BLANKLINE>
    """

    strategy: Strategy | None = field(default=None, repr=False)
    uncertain: tuple[str, ...] = field(default=(), repr=False)

    @classmethod
    @checked
    def from_yaml(cls, path: str | os.PathLike[str]) -> Self:
        r"""Read a layout file.

        Args:
            path: the file, UTF-8 YAML (JSON is YAML too), at most 16 MiB.

        Raises:
            CheckpointNotFoundError: there is no such file.
            LayoutError: it is not YAML, or not a layout; the message names file, line and field.

        Example:
            >>> import tempfile, pathlib
            >>> with tempfile.TemporaryDirectory() as folder:
            ...     path = pathlib.Path(folder) / "layout.yaml"
            ...     _ = path.write_text('mesh: {tp: 2}\nrules: [{match: "*"}]')
            ...     ModelLayout.from_yaml(path).mesh
            {'tp': 2}
        """
        value, lines = read_yaml(path)
        return cls.from_lines(value, source=os.fspath(path), lines=lines)

    @classmethod
    def replicated(cls) -> Self:
        """One rank that holds everything whole.

        Example:
            >>> ModelLayout.replicated().to_mapping()
            {'mesh': {'dp': 1}, 'rules': [{'match': '*'}]}
        """
        return cls.from_mapping({"mesh": {"dp": 1}, "rules": [{"match": "*"}]})

    @classmethod
    @checked
    def from_tp_plan(cls, plan: Mapping[str, str], tp: int) -> Self:
        """The layout of a tensor-parallel plan as transformers has it (`base_model_tp_plan`, `model.tp_plan`).

        Args:
            plan: module or parameter name, `*` for the number of a layer: style. The names may stand behind any prefix
                in the checkpoint (`model.`); `weight` and `bias` of a module are cut, what is not named is whole.
            tp: ranks of the tensor-parallel group.

        Raises:
            LayoutError: a style is unknown.

        Example:
            >>> print(ModelLayout.from_tp_plan({"layers.*.mlp.down_proj": "rowwise"}, tp=4))
            mesh: {tp: 4}
            rules:
              - match: "*layers.*.mlp.down_proj.weight"
                cut: [null, tp]
                uneven: ceil
                optional: true
              - match: "*"
            <BLANKLINE>
        """
        return cls.from_mapping(tp_plan.mapping_of_plan(plan, tp))

    @classmethod
    @checked
    def preset(
        cls,
        name_or_config: str | os.PathLike[str] | Mapping[str, object],
        *,
        tp: int = 1,
        pp: int = 1,
        ep: int = 1,
        dp: int = 1,
    ) -> Self:
        """The usual layout of a Hugging Face model family: tensor, pipeline and expert parallel.

        Args:
            name_or_config: a family ("llama", "mixtral", ...), a `config.json`, a folder with one, or its content.
                A config says more: heads are checked, and layers that do not divide by `pp` get `sizes`.
            tp: ranks over which each layer is cut.
            pp: pipeline stages, in blocks of layers.
            ep: ranks over which the experts of each layer are divided; each expert is cut over `tp` too.
            dp: replicas of everything. The world is pp x dp x ep x tp ranks, tp innermost.

        Raises:
            ArgumentError: no such family or config, or the family has no experts to divide.
            LayoutError: the heads of the config do not divide by `tp`.

        Example:
            >>> ModelLayout.preset("llama", tp=4, pp=2).mesh
            {'pp': 2, 'tp': 4}
        """
        return cls.from_mapping(presets.mapping_of_preset(name_or_config, tp=tp, pp=pp, ep=ep, dp=dp))

    @classmethod
    def like(cls, checkpoint: CheckpointLike) -> Self:
        """The layout in which a checkpoint is stored; `replicated()` for one that is stored whole.

        Raises:
            ArgumentError: it is no opened checkpoint.
            LayoutError: its device matrices cannot be refined to one mesh, or its stages overlap.
        """
        if not hasattr(checkpoint, "_layout_mapping"):
            raise ArgumentError(f"`checkpoint` is of type {type(checkpoint).__name__}, expected an opened checkpoint")
        mapping = mapping_like(checkpoint)
        return cls.replicated() if mapping is None else cls.from_mapping(mapping)

    @classmethod
    def from_strategy(cls, path: str | os.PathLike[str] | Strategy) -> Self:
        """The layout of a strategy of the original: what each of its ranks holds.

        Tensors that the strategy does not list are whole on every rank, and reported where the layout is bound.

        Args:
            path: a merged strategy file, the file of a job of one stage, or a folder with the files of all stages, in
                protobuf or JSON; or a strategy that was read.

        Raises:
            CheckpointNotFoundError: there is no such file, or the files of a stage are missing.
            DamagedFileError: a file is no strategy file, contradicts itself or another one of its stage.
            LayoutError: no layout says what the strategy says.
            UnsupportedError: the strategy says something that is not known how to carry out.

        Example:
            >>> import tempfile
            >>> layout = ModelLayout.from_mapping({"mesh": {"tp": 2}, "rules": [{"match": "*.w", "cut": ["tp"]}]})
            >>> with tempfile.TemporaryDirectory() as folder:
            ...     _ = write_strategy(layout, {"a.w": (4, 6)}, folder)
            ...     print(ModelLayout.from_strategy(folder))
            mesh: {axis0: 2}
            rules:
              - match: "a.w"
                cut: [axis0]
              - match: "*"
            optimizer: {follow: false}
            <BLANKLINE>
        """
        if not isinstance(path, Strategy):
            check_given(path=path)
        strategy = path if isinstance(path, Strategy) else read_strategy(path)
        found = layouts_of(strategy)
        layout = cls.from_mapping(found.mapping(), source=strategy.source)
        return replace(layout, strategy=strategy, uncertain=found.uncertain)

    def to_yaml(self) -> str:
        """The layout as a layout file; comments say which tensors' shapes it takes to be certain of it."""
        notes = [f"# not certain without its shape: {quote(key)}\n" for key in self.uncertain]
        return "".join([*notes, super().to_yaml()])

    @checked
    def settled(self, tensors: Mapping[str, Sequence[int]]) -> ModelLayout:
        """This layout in words that are right for these tensors: that of a strategy can need their shapes.

        Args:
            tensors: the global shape of every tensor of the whole checkpoint.

        Raises:
            LayoutError, MismatchError, UnsupportedError: the strategy does not fit the tensors.
        """
        if self.strategy is None:
            return self
        return ModelLayout.from_mapping(layouts_of(self.strategy, tensors).mapping(), source=self.strategy.source)

    @checked
    def to_strategy(self, tensors: Mapping[str, tuple[int, ...]], *, optimizer_keys: Collection[str] = ()) -> Strategy:
        """The strategy of the original that says what this layout says of the tensors of a checkpoint.

        Args:
            tensors: the global shape, in elements, of every tensor of the whole checkpoint, in order.
            optimizer_keys: which of them belong to the optimizer part.

        Raises:
            UnsupportedError: a strategy has no words for the cut or the place of a tensor; names it, and the reason.
            LayoutError: the layout does not fit the tensors.

        Example:
            >>> layout = ModelLayout.from_mapping({"mesh": {"tp": 2}, "rules": [{"match": "*", "cut": ["tp"]}]})
            >>> layout.to_strategy({"w": (4, 6)}).stages[0]["w"].tensor_map
            ((0, -1),)
        """
        return self.strategy or strategy_of(self.bind(tensors, optimizer_keys=optimizer_keys))

    @checked
    def bind(
        self, tensors: Mapping[str, tuple[int, ...]], *, optimizer_keys: Collection[str] = (), strict: bool = False
    ) -> BoundLayout:
        """Decide for each tensor of a checkpoint how it is cut and who holds it.

        Args:
            tensors: the global shape, in elements, of every tensor of the whole checkpoint, in order.
            optimizer_keys: which of them belong to the optimizer part; state follows its parameter.
            strict: what would be a warning is an error: a rule or a place that matches no key and is not `optional`,
                and state that the layout would cut further and does not divide. Where a layout is written, by
                `reshard.convert` or `reshard.save`, the former is an error in every case; where it is loaded, a
                warning.

        Raises:
            LayoutError: no rule matches a key, a cut does not fit its shape, or two things contradict each other; the
                message names the key and what to do.

        Example:
            >>> layout = ModelLayout.from_mapping({"mesh": {"tp": 2}, "rules": [{"match": "*", "cut": ["tp"]}]})
            >>> layout.bind({"w": (6, 4)}).layouts["w"].local_shape(1)
            (3, 4)
        """
        check_shapes("tensors", tensors)
        if self.strategy is not None:
            found = layouts_of(self.strategy, tensors)
            return bound_of(_core.Mesh(list(found.mesh.items())), found.resolved(), strict=strict)
        return bind(self, tensors, optimizer_keys=optimizer_keys, strict=strict)


LayoutLike: TypeAlias = ModelLayout | str | os.PathLike[str] | Mapping[str, object]
"""What `layout=` takes: a layout, the path of a layout file, of a strategy file or folder, or a mapping."""


def as_layout(value: LayoutLike) -> ModelLayout:
    """The layout that an argument `layout=` means. Whether a file is a layout or a strategy is told by its content.

    Raises:
        ArgumentError: it is neither a layout nor a path nor a mapping.

    Example:
        >>> as_layout({"mesh": {"tp": 2}, "rules": []}).mesh
        {'tp': 2}
    """
    if isinstance(value, ModelLayout):
        return value
    if isinstance(value, Mapping):
        return ModelLayout.from_mapping(value)
    if isinstance(value, str | os.PathLike):
        check(layout=value)
        path = locate(value)
        if path.is_folder() or (path.is_file() and is_strategy(path)):
            return ModelLayout.from_strategy(path)
        return ModelLayout.from_yaml(value)
    raise ArgumentError(f"a layout is a ModelLayout, a path or a mapping, found a {type(value).__name__}")


def write_strategy(
    layout: LayoutLike,
    tensors: Mapping[str, tuple[int, ...]],
    folder: str | os.PathLike[str],
    *,
    optimizer_keys: Collection[str] = (),
    ranks: Collection[int] | None = None,
    suffix: str = ".ckpt",
    mode: int = 0o666,
    durable: bool = True,
) -> list[Path]:
    """Write a layout as the strategy files that the ranks of the original would leave.

    Args:
        layout: the layout.
        tensors: the global shape, in elements, of every tensor of the whole checkpoint, in order.
        folder: made if it is not there; files of the same names are replaced.
        optimizer_keys: which of the tensors belong to the optimizer part.
        ranks: whose files; None: all.
        suffix: ".ckpt" for protobuf or ".json".
        mode: permission bits of the files.
        durable: sync the files before this returns.

    Returns:
        The files, in the order of the ranks.

    Raises:
        UnsupportedError: a strategy has no words for the cut or the place of a tensor; names it, and the reason.
        LayoutError: the layout does not fit the tensors.
        StorageError: the system failed.

    Example:
        >>> import tempfile
        >>> layout = {"mesh": {"pp": 2}, "rules": [{"match": "*"}], "place": [{"match": "l.{i}.*", "axis": "pp"}]}
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     [path.name for path in write_strategy(layout, {"l.0.w": (4, 6), "l.1.w": (4, 6)}, folder)]
        ['ckpt_strategy_rank_0.ckpt', 'ckpt_strategy_rank_1.ckpt']
    """
    strategy = as_layout(layout).to_strategy(tensors, optimizer_keys=optimizer_keys)
    return write_stage_files(strategy, folder, ranks=ranks, suffix=suffix, mode=mode, durable=durable)
