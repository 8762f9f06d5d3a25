"""Hooks of mkdocs: pages that lie outside of docs/, links to files outside of it, and roles.

README.md is the site's front page. Files of the repository that a page links to are copied into the
site, so that every link leads somewhere without a network.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parent
_PAGES = {
    "README.md": "index.md",
    "CONTRIBUTING.md": "contributing.md",
    "SECURITY.md": "security.md",
    "CHANGELOG.md": "changelog.md",
    "benchmarks/README.md": "results.md",
    "examples/README.md": "examples.md",
}
"""Pages outside of docs/, by their name in the site."""

_LINK = re.compile(r"(\]\()([^)#\s:]+)(#[^)]*)?(\))")
_ROLE = re.compile(r":(?:func|class|meth|mod|data|attr|exc):(?=<code>)")
_CODE = re.compile(r"(?<=<code>)[^<]+(?=</code>)")
_LONGEST_WHOLE = 28
"""Letters of a word of code that a telephone shows in one line, also in a table."""


def on_files(files: Files, *, config: MkDocsConfig) -> Files:
    """Add the pages outside of docs/, and every other file there that a page links to."""
    for name, page in _PAGES.items():
        files.append(File.generated(config, page, content=_as_in_docs(name)))
    linked = {
        target
        for file in files.documentation_pages()
        for _, link, *_ in _LINK.findall(file.content_string)
        if (target := _outside(link)) is not None
    }
    for target in sorted(linked - _PAGES.keys()):
        content = (ROOT / target).read_bytes()
        files.append(File.generated(config, f"source/{target}", content=content))
    return files


def on_page_markdown(markdown: str, *, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Lead links that leave docs/ to the page or the copy in the site."""

    def lead(link: re.Match[str]) -> str:
        before, target, anchor, after = link.groups()
        outside = _outside(target)
        if outside is None:
            return link[0]
        return f"{before}{_PAGES.get(outside, f'source/{outside}')}{anchor or ''}{after}"

    return _LINK.sub(lead, markdown)


def on_page_content(html: str, **_: Any) -> str:
    """Drop the roles of reStructuredText before names in docstrings; say where code may be broken.

    A browser breaks a line after any hyphen, also after those of `--option`, and none at a dot.
    """
    return _CODE.sub(lambda it: re.sub(r"\S+", _breaks, it[0]), _ROLE.sub("", html))


def _breaks(word: re.Match[str]) -> str:
    if len(word[0]) > _LONGEST_WHOLE:
        return re.sub(r"(?<=[/(=,])|(?<=\.)(?=\w{4})", "<wbr>", word[0])
    return f'<span class="whole">{word[0]}</span>' if "-" in word[0] else word[0]


def _as_in_docs(name: str) -> str:
    """A page outside of docs/, with the links that it would have there."""
    folder = (ROOT / name).parent

    def lead(link: re.Match[str]) -> str:
        before, target, anchor, after = link.groups()
        path = os.path.relpath(folder / target, ROOT / "docs")
        return f"{before}{path}{anchor or ''}{after}"

    return _LINK.sub(lead, (ROOT / name).read_text(encoding="utf-8"))


def _outside(link: str) -> str | None:
    """The path from the root of what a page in docs/ links to outside of it; of a folder, the page.

    None for a link within docs/.
    """
    if not link.startswith("../"):
        return None
    path = link.removeprefix("../").rstrip("/")
    return f"{path}/README.md" if (ROOT / path).is_dir() else path
