"""Names of files of whole weights, and the sets that the files of a folder form.

```text
<base>[.<variant>].safetensors                     one file
<base>[.<variant>]-00001-of-00002.safetensors      several files; the variant may also stand before the suffix
<base>.safetensors.index[.<variant>].json          the index of several files
```

The same names exist with `.bin` in place of `.safetensors`. A single file and an index have to have a known base; the
files of any base are a set if they are numbered.

Source: `diffusers/utils/constants.py`, `models/model_loading_utils.py` and `loaders/lora_base.py` of diffusers 0.36;
`peft/utils/constants.py` of peft 0.18; `transformers/modeling_utils.py` of transformers 5.
"""

from __future__ import annotations

import itertools
import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from reshard.values.traits import Traits

if TYPE_CHECKING:
    from collections.abc import Iterable

    from reshard.storage.location import Location

TRAITS = Traits("weight-files", is_pretrained=True)

PIPELINE_FILE = "model_index.json"

ADAPTER = "adapter_model"
DIFFUSERS = "diffusion_pytorch_model"
LORA = "pytorch_lora_weights"
BASES = (DIFFUSERS, ADAPTER, LORA, "consolidated", "model", "pytorch_model")
"""Bases of which one file is a set."""

KEPT = (DIFFUSERS, ADAPTER, LORA)
"""Bases that the library of the weights expects, also where they are written again."""

PIPELINE_TRAITS = TRAITS._replace(is_pretrained=False)
"""Those of a folder of components: the files beside them are not those of one model."""

_NUMBERS = r"(?:-(?P<number>[0-9]{4,9})-of-(?P<count>[0-9]{4,9}))"
_VARIANT = r"(?:\.(?P<{}>[A-Za-z0-9_]{{1,32}}))"
_ENDING = r"\.(?P<suffix>safetensors|bin)"
_KNOWN = re.compile(
    rf"(?P<base>{'|'.join(BASES)}){_VARIANT.format('before')}?{_NUMBERS}?{_VARIANT.format('after')}?{_ENDING}"
)
_NUMBERED = re.compile(rf"(?P<base>.+){_NUMBERS}{_ENDING}")
_INDEX = re.compile(rf"(?P<base>[^.].*){_ENDING}\.index(?:\.(?P<variant>[A-Za-z0-9_]{{1,32}}))?\.json")
_SUFFIX = re.compile(r"\.(safetensors|bin|json)$")
_OF_OPTIMIZER = re.compile(r"optim(izer)?([._-].*)?")


@dataclass
class FileSet:
    """The files of one set of weights.

    Attributes:
        base: what their names begin with.
        variant: such as "fp16"; "" if there is none.
        suffix: "safetensors" or "bin".
        single: the one file, or None.
        index: the index of several files, or None.
        numbered: numbered files by number, for each count that their names have.
    """

    base: str
    variant: str
    suffix: str
    single: str | None = None
    index: str | None = None
    numbered: dict[int, dict[int, str]] = field(default_factory=dict)

    @property
    def title(self) -> str:
        """The name of a file or of a pattern for the files."""
        variant = f".{self.variant}" if self.variant else ""
        return self.index or self.single or f"{self.base}{variant}-*.{self.suffix}"

    @property
    def files(self) -> set[str]:
        """The names of the files with weights."""
        numbered = {name for of_count in self.numbered.values() for name in of_count.values()}
        return numbered if self.single is None else {self.single, *numbered}


def sets_in(folder: Location) -> list[FileSet]:
    """The sets that the files of a folder form. Links to files count as files, and broken links do not.

    Raises:
        StorageError: the folder cannot be listed.
    """
    entries = [one for one in folder.entries() if _SUFFIX.search(one.name) is not None]
    return file_sets(
        one.name for one in entries if one.kind == "file" or (one.kind == "link" and (folder / one.name).is_file())
    )


def file_sets(names: Iterable[str]) -> list[FileSet]:
    """The sets that files form: of each base those without a variant first, safetensors before `.bin`.

    Args:
        names: names of files in one folder.

    Example:
        >>> [one.title for one in file_sets(["consolidated.safetensors", "notes.safetensors"])]
        ['consolidated.safetensors']
        >>> [found] = file_sets(["x-00002-of-00002.bin", "x-00001-of-00002.bin"])
        >>> found.base, found.numbered
        ('x', {2: {2: 'x-00002-of-00002.bin', 1: 'x-00001-of-00002.bin'}})
    """
    found: dict[tuple[str, str, str], FileSet] = {}

    def of(base: str, variant: str, suffix: str) -> FileSet:
        return found.setdefault((base, variant, suffix), FileSet(base, variant, suffix))

    for name in names:
        if (index := parse_index(name)) is not None:
            of(*index).index = name
        elif (match := _KNOWN.fullmatch(name) or _NUMBERED.fullmatch(name)) is not None:
            if _OF_OPTIMIZER.fullmatch(match["base"]):
                continue
            groups = match.groupdict()
            one = of(match["base"], groups.get("before") or groups.get("after") or "", match["suffix"])
            if match["number"] is None:
                one.single = name
            else:
                one.numbered.setdefault(int(match["count"]), {})[int(match["number"])] = name
    return sorted(found.values(), key=lambda one: (one.base, one.variant, one.suffix != "safetensors"))


def parse_index(name: str) -> tuple[str, str, str] | None:
    """Base, variant and suffix of the files that an index lists, by its name; None: it is called otherwise.

    Example:
        >>> parse_index("diffusion_pytorch_model.safetensors.index.fp16.json")
        ('diffusion_pytorch_model', 'fp16', 'safetensors')
    """
    match = _INDEX.fullmatch(name)
    return None if match is None else (match["base"], match["variant"] or "", match["suffix"])


def missing(numbers: Iterable[int], count: int, n: int) -> list[int]:
    """The first numbers from 1 to `count` that are not there, at most `n`.

    Args:
        numbers: those that are there.
        count: how many there should be.
        n: how many are named.

    Example:
        >>> missing([1, 3], 999999999, 2)
        [2, 4]
    """
    there = set(numbers)
    return list(itertools.islice((one for one in range(1, count + 1) if one not in there), n))


def numbered_like(name: str, number: int) -> str:
    """The name of a numbered file with another number.

    Example:
        >>> numbered_like("x-00001-of-00003.safetensors", 2)
        'x-00002-of-00003.safetensors'
    """
    return re.sub(r"-([0-9]+)-of-", lambda found: f"-{number:0{len(found[1])}d}-of-", name)
