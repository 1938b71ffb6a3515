"""Make README and pyproject.toml ready for a package index, where relative links lead nowhere.

    python book/release.py https://github.com/OWNER/exptilt v0.3.0

Links and pictures of README become absolute, at the tag that is released; its installation from a checkout
becomes that from the index; pyproject.toml gets the addresses of the project. The release workflow runs this
before it builds, with the address of the repository it runs in; the changes are not committed.
"""

import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
LINK = re.compile(r"(!?)\[([^\]]*)\]\((?!https?://|#)([^)\s]+)\)")
INSTALL = re.compile(r"<!-- install -->.*?<!-- /install -->", re.DOTALL)
FROM_INDEX = """```sh
pip install exptilt                              # with the compiled core
pip install 'exptilt[hf,report]'                 # to look at Hugging Face models, and for pages
```"""


def readme(text: str, url: str, tag: str) -> str:
    """README as it is shown where the package is published."""

    def absolute(match: re.Match[str]) -> str:
        mark, words, place = match.groups()
        return f"{mark}[{words}]({url}/{'raw' if mark else 'blob'}/{tag}/{place})"

    return LINK.sub(absolute, INSTALL.sub(lambda _: FROM_INDEX, text))


def project(text: str, url: str, tag: str) -> str:
    """pyproject.toml with the addresses of the project."""
    places = {
        "Homepage": url,
        "Documentation": f"{url}/blob/{tag}/docs/index.md",
        "Changelog": f"{url}/blob/{tag}/CHANGELOG.md",
        "Issues": f"{url}/issues",
    }
    lines = [f'{name} = "{place}"' for name, place in places.items()]
    return text.replace(
        "[project.scripts]", "\n".join(["[project.urls]", *lines, "", "[project.scripts]"]), 1
    )


if __name__ == "__main__":
    if len(sys.argv) != 3 or not sys.argv[1].startswith("https://"):
        sys.exit(
            "Pass the address of the repository and the tag: release.py https://HOST/OWNER/exptilt v0.3.0"
        )
    address, version = sys.argv[1].rstrip("/"), sys.argv[2]
    for name, change in (("README.md", readme), ("pyproject.toml", project)):
        path = ROOT / name
        path.write_text(change(path.read_text("utf-8"), address, version), "utf-8")
