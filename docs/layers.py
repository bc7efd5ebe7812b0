"""The picture of the layers in docs/architecture.md, drawn from the imports of all modules.

    python docs/layers.py           # compares the page with the picture; exit status 1 if they differ
    python docs/layers.py --write   # writes the picture into the page

The order of the layers is that of the contract in pyproject.toml, which `lint-imports` checks.
"""

from __future__ import annotations

import ast
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "docs" / "architecture.md"
BEGIN, END = "<!-- layers: python docs/layers.py --write -->\n", "<!-- end of layers -->\n"


def package_of(module: str) -> str:
    """The package or module directly below `reshard`."""
    return module.split(".")[1] if "." in module else ""


def layers() -> list[list[str]]:
    """Packages by layer, the highest first. A package whose modules are in several layers is where its highest is."""
    contract = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"][0]
    seen: set[str] = set()
    found: list[list[str]] = []
    for line in contract["layers"]:
        names = list(dict.fromkeys(package_of(one.strip()) for one in line.split("|")))
        new = [name for name in names if name not in seen]
        seen |= set(new)
        if new:
            found.append(new)
    return found


def imports() -> dict[str, set[str]]:
    """The packages that each package imports when its modules run; not those for type checkers only."""
    found: dict[str, set[str]] = {}
    for path in sorted((ROOT / "python" / "reshard").rglob("*.py")):
        parts = path.relative_to(ROOT / "python").with_suffix("").parts
        of = package_of(".".join(parts))
        if of not in {"__init__", "__main__", "lazy", "examples"}:
            used = found.setdefault(of, set())
            _collect(ast.parse(path.read_text()), used)
            used.discard(of)
    return found


def _collect(node: ast.AST, used: set[str]) -> None:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.If) and isinstance(child.test, ast.Name) and child.test.id == "TYPE_CHECKING":
            continue
        if isinstance(child, ast.ImportFrom) and child.module == "reshard":
            used.update(alias.name for alias in child.names)
        elif isinstance(child, ast.ImportFrom) and child.module and child.module.startswith("reshard."):
            used.add(package_of(child.module))
        _collect(child, used)


def picture() -> str:
    """The layers as text: what each imports directly, from the nearest layer down."""
    order, graph = layers(), imports()
    depth = {name: n for n, names in enumerate(order) for name in names}
    width = max(len(name) for names in order for name in names)
    lines = ["```text"]
    for names in order:
        for name in names:
            below = sorted((one for one in graph.get(name, ()) if one in depth), key=lambda one: (depth[one], one))
            lines.append(f"{name:<{width}}  {' '.join(below)}".rstrip())
        lines.append("")
    lines[-1] = "```"
    return "\n".join(lines) + "\n"


def main() -> int:
    """Compare or write."""
    text = PAGE.read_text()
    before, _, rest = text.partition(BEGIN)
    old, _, after = rest.partition(END)
    new = picture()
    if "--write" in sys.argv:
        PAGE.write_text(before + BEGIN + new + END + after)
    elif old != new:
        sys.stderr.write(f"{PAGE}: the picture of the layers is out of date: python docs/layers.py --write\n")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
