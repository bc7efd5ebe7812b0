"""`ModelLayout`, the one value that `layout=` takes, and every way to get one."""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping
from typing import Self, TypeAlias

from reshard.errors import ArgumentError
from reshard.layout import presets, tp_plan
from reshard.layout.bind import BoundLayout, bind
from reshard.layout.file import LayoutFile
from reshard.layout.like import CheckpointLike, mapping_like
from reshard.strict_yaml import read_yaml

__all__ = ["LayoutLike", "ModelLayout", "as_layout"]


class ModelLayout(LayoutFile):
    """How the tensors of a model lie on a mesh of ranks: a layout file as a value. Printed, it is such a file.

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

    @classmethod
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
              - match: "*"
            <BLANKLINE>
        """
        return cls.from_mapping(tp_plan.mapping_of_plan(plan, tp))

    @classmethod
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
            LayoutError: its device matrices cannot be refined to one mesh, or its stages overlap.
        """
        mapping = mapping_like(checkpoint)
        return cls.replicated() if mapping is None else cls.from_mapping(mapping)

    def bind(
        self, tensors: Mapping[str, tuple[int, ...]], *, optimizer_keys: Collection[str] = (), strict: bool = False
    ) -> BoundLayout:
        """Decide for each tensor of a checkpoint how it is cut and who holds it.

        Args:
            tensors: the global shape, in elements, of every tensor of the whole checkpoint, in order.
            optimizer_keys: which of them belong to the optimizer part; state follows its parameter.
            strict: what would be a warning is an error.

        Raises:
            LayoutError: no rule matches a key, a cut does not fit its shape, or two things contradict each other; the
                message names the key and what to do.

        Example:
            >>> layout = ModelLayout.from_mapping({"mesh": {"tp": 2}, "rules": [{"match": "*", "cut": ["tp"]}]})
            >>> layout.bind({"w": (6, 4)}).layouts["w"].local_shape(1)
            (3, 4)
        """
        return bind(self, tensors, optimizer_keys=optimizer_keys, strict=strict)


LayoutLike: TypeAlias = ModelLayout | str | os.PathLike[str] | Mapping[str, object]
"""What `layout=` takes: a layout, the path of a layout file, or a mapping."""


def as_layout(value: LayoutLike) -> ModelLayout:
    """The layout that an argument `layout=` means.

    Raises:
        ArgumentError: it is none of the three.

    Example:
        >>> as_layout({"mesh": {"tp": 2}, "rules": []}).mesh
        {'tp': 2}
    """
    if isinstance(value, ModelLayout):
        return value
    if isinstance(value, Mapping):
        return ModelLayout.from_mapping(value)
    if isinstance(value, str | os.PathLike):
        return ModelLayout.from_yaml(value)
    raise ArgumentError(f"a layout is a ModelLayout, a path or a mapping, found a {type(value).__name__}")
