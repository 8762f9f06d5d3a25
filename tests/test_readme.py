"""The README's figures are those of the committed results, and its links lead somewhere."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
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
