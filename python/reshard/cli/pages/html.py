"""Makes one self-contained HTML page of a JSON value.

The page has a Content-Security-Policy that allows its own script and style, by their digests, and nothing else: no
request to a host, no other script. Text of files is data, never markup: it is escaped by `shown`, embedded as JSON
without `<`, and the scripts only set the text of elements.
"""

from __future__ import annotations

import base64
import hashlib
import html
import json
import pkgutil

from reshard.cli.output import shown

_MAX_TEXT = 300  # characters of a name or a message


def text(value: object) -> str:
    r"""Text of a file for the page: control characters and characters that reorder a line are escaped; at most 300.

    Example:
        >>> text("a" + chr(0x202E) + "b"), len(text("x" * 1000))
        ('a\\u202eb', 300)
    """
    escaped = shown(str(value)[: _MAX_TEXT + 1])
    return escaped if len(escaped) <= _MAX_TEXT else f"{escaped[: _MAX_TEXT - 3]}..."


def page(title: str, kind: str, data: object) -> str:
    """The page as text.

    Args:
        title: its title, escaped here.
        kind: the script that draws it: "inspect" or "plan".
        data: what it shows. Text in it must be escaped by `text`.
    """
    style = _resource("page.css")
    script = f'"use strict";\n{_resource("common.js")}\n{_resource(f"{kind}.js")}'
    policy = f"default-src 'none'; style-src '{_digest(style)}'; script-src '{_digest(script)}'; base-uri 'none'"
    # `<` ends no element and starts no comment inside a script element if it is written as an escape of JSON.
    content = json.dumps(data, ensure_ascii=True, allow_nan=False, separators=(",", ":")).replace("<", "\\u003c")
    return f"""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="{policy}">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="referrer" content="no-referrer">
<title>{html.escape(text(title))}</title>
<style>{style}</style>
</head>
<body>
<main id="page"><noscript>This page draws its data with a script. They are disabled in this browser.</noscript></main>
<script type="application/json" id="data">{content}</script>
<script>{script}</script>
</body>
</html>
"""


def _resource(name: str) -> str:
    content = pkgutil.get_data(__package__, name)
    assert content is not None
    return content.decode()


def _digest(content: str) -> str:
    return f"sha256-{base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()}"
