"""The README's figures are those of the committed results, and its links lead somewhere."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results"
README = (ROOT / "README.md").read_text(encoding="utf-8")

PREDICTIONS = {
    "--model llama-2-7b": ("README.md", "predicted-llama-2-7b-gh200-96.txt"),
}
"""Where what `umem simulate` said stands, and where it is kept.

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


def test_memory_summary_is_a_runs() -> None:
    found = re.search(r"^GPU 0, policy .*?(?=\n```)", README, re.DOTALL | re.MULTILINE)
    assert found, "README.md shows no memory summary"
    run = ROOT / "benchmarks" / "results" / "h200-finetune-sft-small.txt"
    assert found.group() in run.read_text(encoding="utf-8")


@pytest.mark.parametrize("options", PREDICTIONS)
def test_predictions_are_the_committed_ones(options: str) -> None:
    page, kept = PREDICTIONS[options]
    found = re.search(
        rf"^\$ umem simulate {re.escape(options)}\n(.*?)\n(?=```|\$ )",
        (ROOT / page).read_text(encoding="utf-8"),
        re.DOTALL | re.MULTILINE,
    )
    assert found, f"{page} shows no such prediction"
    assert found.group(1).strip() == (RESULTS / kept).read_text(encoding="utf-8").strip()
