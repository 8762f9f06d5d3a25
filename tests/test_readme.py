"""Predictions on the pages are the committed ones, and links lead somewhere."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results"

STREAMED = (
    "--model llama-2-7b --mode sft --precision fp32-autocast --batch 4 --checkpoint --policy sft "
    "--hardware h100-pcie"
)
PREDICTIONS = [
    ("docs/simulate.md", "--model llama-2-7b", "predicted-llama-2-7b-gh200-96.txt"),
    ("docs/simulate.md", STREAMED, "predicted-streamed.txt"),
    ("README.md", STREAMED, "predicted-streamed.txt"),
]
"""Pages that show what `umem simulate` said, its options, and the file that keeps it.

tests/test_examples.py compares the first one with what the demo says.
"""


def test_links_lead_somewhere() -> None:
    pages = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
    missing = [
        f"{page.name}: {target}"
        for page in pages
        for target in re.findall(r"\]\(([^)#]+)[^)]*\)", page.read_text(encoding="utf-8"))
        if "://" not in target and not (page.parent / target).exists()
    ]
    assert missing == []


@pytest.mark.parametrize(("page", "options", "kept"), PREDICTIONS)
def test_predictions_are_the_committed_ones(page: str, options: str, kept: str) -> None:
    found = re.search(
        rf"^\$ umem simulate {re.escape(options)}\n(.*?)\n(?=```|\$ )",
        (ROOT / page).read_text(encoding="utf-8"),
        re.DOTALL | re.MULTILINE,
    )
    assert found, f"{page} shows no such prediction"
    assert f"\n{found.group(1).strip()}\n" in "\n" + (RESULTS / kept).read_text(encoding="utf-8")


def test_texts_on_pages_are_the_committed_ones() -> None:
    """`python benchmarks/fill_pages.py docs/*.md` puts them there."""
    shown = [
        (file, text)
        for page in (ROOT / "docs").glob("*.md")
        for file, text in re.findall(
            r"<!-- text (\S+) -->\n(.*?)<!-- end of text -->",
            page.read_text(encoding="utf-8"),
            re.DOTALL,
        )
    ]
    assert shown
    for file, text in shown:
        assert text == f"```text\n{(ROOT / file).read_text(encoding='utf-8').strip()}\n```\n"
