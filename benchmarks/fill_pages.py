"""Puts the tables of committed results into pages: `python benchmarks/fill_pages.py PAGE ...`.

A page has each report between two comments, of which the first names the command that prints it::

    <!-- umem bench report benchmarks/results/FILE.jsonl --markdown -->
    <!-- end of report -->
"""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from pathlib import Path

_REPORT = re.compile(
    r"(<!-- umem (bench report [^>]*?) -->\n).*?(<!-- end of report -->)", re.DOTALL
)


def _printed(found: re.Match[str]) -> str:
    command = [str(Path(sys.executable).with_name("umem")), *shlex.split(found[2])]
    printed = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout
    return f"{found[1]}{printed.strip()}\n{found[3]}"


for name in sys.argv[1:]:
    page = Path(name)
    page.write_text(_REPORT.sub(_printed, page.read_text(encoding="utf-8")), encoding="utf-8")
