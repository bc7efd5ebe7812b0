"""The documentation site: the pages of this folder, the API from docstrings, the command line from its own help.

The search runs in the browser on an index that is part of the site.
"""

import re
from importlib.metadata import version as version_of

import click
from sphinx.application import Sphinx

project = "reshard"
author = "The reshard developers"
copyright = author  # noqa: A001  the name that Sphinx reads
release = version = version_of("reshard")

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx_click", "sphinx_copybutton"]
exclude_patterns = ["_build"]
nitpicky = False

smartquotes = False  # `--layout` stays as it is
default_role = "code"  # docstrings write code between single backquotes

html_theme = "furo"
html_title = f"reshard {release}"
html_show_sourcelink = False

myst_enable_extensions = ["colon_fence", "deflist"]
myst_heading_anchors = 3

autodoc_typehints = "signature"
autodoc_member_order = "bysource"
autodoc_mock_imports = ["accelerate", "jax", "lightning", "mindspore", "transformers"]  # a build needs torch only
autodoc_default_options = {"members": True, "undoc-members": False, "show-inheritance": False}
napoleon_numpy_docstring = False
napoleon_use_ivar = True

copybutton_prompt_text = "$ "
linkcheck_timeout = 10


def _examples_as_code(_app: Sphinx, _context: click.Context, lines: list[str]) -> None:
    """Show the examples of a help text as code. Other words that end in `_` are not links."""
    shown: list[str] = []
    for line in lines:
        example = line.removeprefix("| ") if line.startswith("|   ") else None
        if example is not None and not (shown and shown[-1].startswith("  ")):
            shown += ["", ".. code-block:: text", ""]
        elif example is None and shown and shown[-1].startswith("  "):
            shown.append("")
        shown.append(re.sub(r"(?<=\w)_(?!\w)", r"\\_", line) if example is None else f"  {example}")
    lines[:] = shown


def setup(app: Sphinx) -> None:
    """Called by Sphinx."""
    app.connect("sphinx-click-process-description", _examples_as_code)
