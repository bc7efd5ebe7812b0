"""Follow the links inside the built site and print the broken ones: `python docs/check_site.py docs/_build`."""

import sys
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit


class _Page(HTMLParser):
    """The anchors of a page, and what it links to."""

    def __init__(self) -> None:
        super().__init__()
        self.anchors: set[str] = set()
        self.links: set[str] = set()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        for name, value in attrs:
            if value and name in ("id", "name"):
                self.anchors.add(value)
            elif value and name in ("href", "src") and tag != "base":
                self.links.add(value)


def broken_links(site: Path) -> list[str]:
    """Links of the pages of a folder to files and anchors that it does not hold."""
    pages = {}
    for file in sorted(site.rglob("*.html")):
        pages[file.resolve()] = page = _Page()
        page.feed(file.read_text())
    broken = []
    for file, page in pages.items():
        for link in sorted(page.links):
            parts = urlsplit(link)
            if parts.scheme or parts.netloc:
                continue
            target = (file.parent / unquote(parts.path)).resolve() if parts.path else file
            anchor = unquote(parts.fragment)
            is_found = target.is_file() and (not anchor or target not in pages or anchor in pages[target].anchors)
            if not is_found:
                broken.append(f"{file.relative_to(site.resolve())}: {link}")
    return broken


if __name__ == "__main__":
    found = broken_links(Path(sys.argv[1]))
    print("\n".join(found) or "all links lead somewhere")  # noqa: T201
    sys.exit(bool(found))
