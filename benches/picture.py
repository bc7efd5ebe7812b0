"""A picture of results: the speed of each case as a bar, against a line at the limit. SVG, without a library."""

from __future__ import annotations

import statistics
from html import escape
from typing import TYPE_CHECKING

from benches.table import printed

if TYPE_CHECKING:
    from benches.table import Result

_COLORS = {"reshard": "#1f6feb", "peer": "#9aa4b2", "limit": "#ffffff"}
_LIMIT = "#c93c37"
_WIDTH, _NAMES, _VALUES, _ROW, _TITLE, _GAP = 510, 215, 66, 17, 40, 16


def draw(results: list[Result], heading: str) -> str:
    """The SVG of results: two columns of panels, one for each table whose cases have a rate.

    Bars are medians, and a thin line at their end reaches to the best run. The dashed line is the fastest limit.

    Args:
        results: of any number of tables.
        heading: one line above, such as the processor.
    """
    tables: dict[str, list[Result]] = {}
    for result in results:
        if result.unit == "s" and any(one.n_bytes for one in results if one.table == result.table):
            tables.setdefault(result.table, []).append(result)
    heights, parts = [34, 34], []
    for name, rows in tables.items():
        column = heights.index(min(heights))
        parts.append(
            f'<g transform="translate({_GAP + column * (_WIDTH + _GAP)} {heights[column]})">{_panel(name, rows)}</g>'
        )
        heights[column] += _TITLE + _ROW * len(rows) + _GAP
    width, height = 2 * _WIDTH + 3 * _GAP, max(heights)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" viewBox="0 0 {width} {height}" '
        'font-family="system-ui, sans-serif" font-size="11" fill="#1f2328">'
        f'<rect width="{width}" height="{height}" fill="#ffffff"/>'
        f'<text x="{_GAP}" y="22" font-size="12">{escape(heading)}</text>{"".join(parts)}</svg>\n'
    )


def _panel(name: str, rows: list[Result]) -> str:
    measured = [one for one in rows if one.costs and one.n_bytes]
    limits = [one for one in measured if one.kind == "limit"]
    fastest = max((one.speed(best=True) for one in measured), default=1.0)
    scale = (_WIDTH - _NAMES - _VALUES) / fastest
    bottom = _TITLE + _ROW * len(rows) - 6
    parts = [f'<text x="0" y="14" font-weight="600" font-size="12">{escape(name)}</text>']
    for number, row in enumerate(rows):
        top = _TITLE - 8 + number * _ROW
        bold = ' font-weight="600"' if row.kind == "reshard" else ""
        parts.append(f'<text x="{_NAMES - 6}" y="{top + 11}" text-anchor="end"{bold}>{escape(_short(row.name))}</text>')
        if not row.costs or not row.n_bytes:
            why = printed(statistics.median(row.costs), row.unit) if row.costs else row.reason
            parts.append(f'<text x="{_NAMES}" y="{top + 11}" fill="#656d76">{escape(_short(why, 50))}</text>')
            continue
        median, best = row.speed(best=False) * scale, row.speed(best=True) * scale
        outline = f' stroke="{_LIMIT}"' if row.kind == "limit" else ""
        parts.append(
            f'<rect x="{_NAMES}" y="{top + 1}" width="{median:.1f}" height="{_ROW - 5}" '
            f'fill="{_COLORS[row.kind]}"{outline}/>'
            f'<path d="M{_NAMES + median:.1f} {top + 7}H{_NAMES + best:.1f}" stroke="#1f2328"/>'
            f'<text x="{_NAMES + best + 4:.1f}" y="{top + 11}">{row.speed(best=False) / 1e9:.2f} GB/s</text>'
        )
    if limits:
        at = _NAMES + max(one.speed(best=False) for one in limits) * scale
        parts.append(
            f'<line x1="{at:.1f}" x2="{at:.1f}" y1="{_TITLE - 12}" y2="{bottom}" stroke="{_LIMIT}" '
            'stroke-width="1.5" stroke-dasharray="4 3"/>'
            f'<text x="{at:.1f}" y="{_TITLE - 14}" text-anchor="middle" fill="{_LIMIT}">limit</text>'
        )
    return "".join(parts)


def _short(text: str, length: int = 36) -> str:
    return text if len(text) <= length else f"{text[: length - 1]}…"
