"""Make the relative links of README.md absolute, because PyPI shows it without the other files.

    python .ci/readme_for_pypi.py https://github.com/OWNER/NAME v0.1.0

Also adds the address to `[project.urls]` of pyproject.toml. `.ci/wheels build` calls this in its clone if GitHub
Actions sets the name of the repository. uv and ruff do the same before a release.
"""

import re
import sys
from pathlib import Path


def absolute(text: str, repository: str, revision: str) -> str:
    """The text with absolute links: pages as GitHub shows them, images as files."""
    text = re.sub(r"(!\[[^\]]*\]\()(?!\w+:)", rf"\1{repository}/raw/{revision}/", text)
    return re.sub(r"(?<!!)(\[[^\]]*\]\()(?!\w+:|#)", rf"\1{repository}/blob/{revision}/", text)


if __name__ == "__main__":
    repository, revision = sys.argv[1:]
    readme, project = Path("README.md"), Path("pyproject.toml")
    readme.write_text(absolute(readme.read_text(), repository, revision))
    urls = f'Repository = "{repository}"\nChangelog = "{repository}/blob/{revision}/CHANGELOG.md"\n'
    project.write_text(f"{project.read_text()}\n[project.urls]\n{urls}")
