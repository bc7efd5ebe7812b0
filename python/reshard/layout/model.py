"""`ModelLayout`, its constructors, and the conversion of a `layout=` argument to it."""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Self, TypeAlias

from reshard import _core
from reshard.documents.strict_yaml import quote, read_yaml
from reshard.errors import ArgumentError
from reshard.layout import presets, tp_plan
from reshard.layout.bind import BoundLayout, bound_of
from reshard.layout.file import LayoutFile
from reshard.layout.like import CheckpointLike, mapping_like
from reshard.layout.resolve import resolve
from reshard.layout.strategy import Strategy
from reshard.layout.strategy_file import is_strategy
from reshard.layout.strategy_folder import read_strategy
from reshard.layout.strategy_layout import layouts_of
from reshard.layout.strategy_writer import strategy_of, write_stage_files
from reshard.storage.location import locate
from reshard.values.arguments import check_described, check_path, check_shapes, checked

if TYPE_CHECKING:
    from pathlib import Path


@dataclass(frozen=True, eq=False)
class ModelLayout(LayoutFile):
    """The layout of the tensors of a model on a mesh of ranks. `str()` returns it as the text of a layout file.

    Attributes:
        strategy: the strategy from which the layout was created, or None. `bind` uses it again, because the partition
            of a tensor can depend on the shape of the tensor.
        uncertain: tensors whose partition does not follow from the strategy without their shapes. `to_yaml` writes the
            most probable partition.

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
            path: the file: UTF-8 YAML or JSON, at most 16 MiB.

        Raises:
            CheckpointNotFoundError: the file does not exist.
            LayoutError: the file is not YAML or not a layout. The message names the file, the line and the field.

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
        """The layout of one rank that holds every tensor in full.

        Example:
            >>> ModelLayout.replicated().to_mapping()
            {'mesh': {'dp': 1}, 'rules': [{'match': '*'}]}
        """
        return cls.from_mapping({"mesh": {"dp": 1}, "rules": [{"match": "*"}]})

    @classmethod
    @checked
    def from_tp_plan(cls, plan: Mapping[str, str], tp: int) -> Self:
        """The layout of a tensor-parallel plan of Hugging Face transformers (`base_model_tp_plan`, `model.tp_plan`).

        Args:
            plan: the style of each module or parameter, by name. `*` in a name is the index of a layer. The keys of the
                checkpoint can have a prefix before the name (`model.`). The `weight` and `bias` of a module are
                partitioned. Tensors that the plan does not list are replicated.
            tp: the number of ranks of the tensor-parallel group.

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
            name_or_config: a family ("llama", "mixtral", ...), the path of a `config.json` or of its folder, or the
                content of a config. With a config, the number of heads is checked, and `sizes` are set if the number of
                layers is not divisible by `pp`.
            tp: the number of ranks over which each layer is partitioned.
            pp: the number of pipeline stages. Each stage has consecutive layers.
            ep: the number of ranks over which the experts of each layer are distributed. Each expert is also
                partitioned over `tp`.
            dp: the number of replicas of every tensor. The world size is pp x dp x ep x tp, with tp innermost.

        Raises:
            ArgumentError: the family or config does not exist, or `ep` is above 1 and the family has no experts.
            LayoutError: the number of heads in the config is not divisible by `tp`.

        Example:
            >>> ModelLayout.preset("llama", tp=4, pp=2).mesh
            {'pp': 2, 'tp': 4}
        """
        return cls.from_mapping(presets.mapping_of_preset(name_or_config, tp=tp, pp=pp, ep=ep, dp=dp))

    @classmethod
    def like(cls, checkpoint: CheckpointLike) -> Self:
        """The layout in which a checkpoint is stored; `replicated()` if its tensors are not partitioned.

        Raises:
            ArgumentError: `checkpoint` is not an opened checkpoint.
            LayoutError: the device matrices of the checkpoint cannot be refined to one mesh, or its stages overlap.
        """
        if not hasattr(checkpoint, "_layout_mapping"):
            raise ArgumentError(f"`checkpoint` is of type {type(checkpoint).__name__}, expected an opened checkpoint")
        mapping = mapping_like(checkpoint)
        return cls.replicated() if mapping is None else cls.from_mapping(mapping)

    @classmethod
    def from_strategy(cls, path: str | os.PathLike[str] | Strategy) -> Self:
        """The layout of a strategy of MindSpore Transformers.

        Tensors that the strategy does not list are replicated on every rank. `bind` reports them.

        Args:
            path: a merged strategy file, the file of a job with one stage, or a folder with the files of all stages, in
                protobuf or JSON; or a `Strategy`.

        Raises:
            CheckpointNotFoundError: the file does not exist, or the files of a stage are missing.
            DamagedFileError: a file is not a strategy file, contradicts itself, or contradicts another file of its
                stage.
            LayoutError: a layout cannot express the strategy.
            UnsupportedError: the strategy uses a feature that is not supported.

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
            check_path("path", path)
        strategy = path if isinstance(path, Strategy) else read_strategy(path)
        found = layouts_of(strategy)
        layout = cls.from_mapping(found.mapping(), source=strategy.source)
        return replace(layout, strategy=strategy, uncertain=found.uncertain)

    def to_yaml(self) -> str:
        """The text of the layout file. Comments list the tensors in `uncertain`."""
        notes = [f"# not certain without its shape: {quote(key)}\n" for key in self.uncertain]
        return "".join([*notes, super().to_yaml()])

    @checked
    def to_strategy(self, tensors: Mapping[str, tuple[int, ...]], *, optimizer_keys: Collection[str] = ()) -> Strategy:
        """Convert the layout to a strategy of MindSpore Transformers for the tensors of a checkpoint.

        Args:
            tensors: the global shape, in elements, of every tensor of the checkpoint, in order.
            optimizer_keys: the keys that belong to the optimizer part.

        Raises:
            UnsupportedError: a strategy cannot express the partition or the place of a tensor. The message names the
                tensor and the reason.
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
        """Determine the partition of each tensor of a checkpoint and the ranks that hold it.

        Args:
            tensors: the global shape, in elements, of every tensor of the checkpoint, in order.
            optimizer_keys: the keys that belong to the optimizer part. State has the partition of its parameter.
            strict: raise an error instead of a warning in two cases: a rule or a place that is not `optional` matches
                no key; the further partition of optimizer state does not divide its shape. `reshard.convert` and
                `reshard.save` always raise an error in the first case.

        Raises:
            LayoutError: no rule matches a key, a partition does not fit the shape of a tensor, or two entries
                contradict each other. The message names the key and has a hint.

        Example:
            >>> layout = ModelLayout.from_mapping({"mesh": {"tp": 2}, "rules": [{"match": "*", "cut": ["tp"]}]})
            >>> layout.bind({"w": (6, 4)}).layouts["w"].local_shape(1)
            (3, 4)
        """
        check_shapes("tensors", tensors)
        if self.strategy is not None:
            found = layouts_of(self.strategy, tensors)
            mesh = _core.Mesh(list(found.mesh.items()))
            return bound_of(
                mesh, found.resolved(), lambda: LayoutFile.from_mapping(found.mapping()).to_mapping(), strict=strict
            )
        mesh = _core.Mesh(list(self.mesh.items()), self.ranks)
        return bound_of(mesh, resolve(self, tensors, optimizer_keys), self.to_mapping, strict=strict)


LayoutLike: TypeAlias = ModelLayout | str | os.PathLike[str] | Mapping[str, object]
"""The types that `layout=` accepts: a layout, a mapping, or the path of a layout file, strategy file or its folder."""


def as_layout(value: LayoutLike) -> ModelLayout:
    """Convert a `layout=` argument to a layout. The content of a file determines whether it is a layout or a strategy.

    Raises:
        ArgumentError: `value` is not a layout, a path or a mapping.

    Example:
        >>> as_layout({"mesh": {"tp": 2}, "rules": []}).mesh
        {'tp': 2}
    """
    if isinstance(value, ModelLayout):
        return value
    if isinstance(value, Mapping):
        return ModelLayout.from_mapping(value)
    if isinstance(value, str | os.PathLike):
        check_described("layout", value)
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
    """Write a layout as strategy files of MindSpore Transformers: one file for each rank.

    Args:
        layout: the layout.
        tensors: the global shape, in elements, of every tensor of the checkpoint, in order.
        folder: the destination. It is created if it does not exist. Files with the same names are replaced.
        optimizer_keys: the keys that belong to the optimizer part.
        ranks: the ranks whose files are written; None: all ranks.
        suffix: ".ckpt" for protobuf, ".json" for JSON.
        mode: permission bits of the files.
        durable: sync the files before the function returns.

    Returns:
        The paths of the files, in the order of the ranks.

    Raises:
        UnsupportedError: a strategy cannot express the partition or the place of a tensor. The message names the tensor
            and the reason.
        LayoutError: the layout does not fit the tensors.
        StorageError: the operating system reported an error.

    Example:
        >>> import tempfile
        >>> layout = {"mesh": {"pp": 2}, "rules": [{"match": "*"}], "place": [{"match": "l.{i}.*", "axis": "pp"}]}
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     [path.name for path in write_strategy(layout, {"l.0.w": (4, 6), "l.1.w": (4, 6)}, folder)]
        ['ckpt_strategy_rank_0.ckpt', 'ckpt_strategy_rank_1.ckpt']
    """
    strategy = as_layout(layout).to_strategy(tensors, optimizer_keys=optimizer_keys)
    return write_stage_files(strategy, folder, ranks=ranks, suffix=suffix, mode=mode, durable=durable)
