"""The README's figures are those of the committed results, and its links lead somewhere."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PREDICTED = ROOT / "benchmarks" / "results" / "predicted-llama-2-7b-gh200-96.txt"
README = (ROOT / "README.md").read_text(encoding="utf-8")


def test_tables_are_the_reports() -> None:
    found = re.search(
        r"<!-- umem (bench report (\S+) --markdown) -->\n(.*?)\n<!-- end of report -->",
        README,
        re.DOTALL,
    )
    assert found, "README.md holds no report"
    command, results, tables = found.groups()
    assert (ROOT / results).is_file()
    report = subprocess.run(
        [Path(sys.executable).parent / "umem", *command.split()],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    assert report.stdout.strip() == tables.strip()


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


def test_prediction_is_the_committed_one() -> None:
    found = re.search(
        r"^\$ umem simulate --model llama-2-7b\n(.*?)\n```", README, re.DOTALL | re.MULTILINE
    )
    assert found, "README.md shows no prediction"
    assert found.group(1).strip() == PREDICTED.read_text(encoding="utf-8").strip()


@pytest.mark.slow
def test_the_committed_prediction_is_what_the_command_says() -> None:
    said = subprocess.run(
        [Path(sys.executable).parent / "umem", "simulate", "--model", "llama-2-7b"],
        env=os.environ | {"COLUMNS": "80"},
        capture_output=True,
        text=True,
        check=True,
    ).stdout.split()
    committed = PREDICTED.read_text(encoding="utf-8").split()
    assert len(said) == len(committed)
    for word, expected in zip(said, committed, strict=True):
        number = expected.rstrip(",%").replace(",", "")
        if re.fullmatch(r"[0-9.]+", number):
            # Another torch may record a few operators more or less.
            assert float(word.rstrip(",%").replace(",", "")) == pytest.approx(
                float(number), rel=0.03
            )
        else:
            assert word == expected
