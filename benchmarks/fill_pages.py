"""Puts the tables of committed results into pages: `python benchmarks/fill_pages.py PAGE ...`.

A page has each report between two comments, of which the first names the command that prints it, in
the project's folder::

    <!-- umem bench report benchmarks/results/FILE.jsonl --markdown -->
    <!-- end of report -->

Results of systems are printed by `python tests/systems/matrix.py --report FILE --markdown`, and
those of small programs by `tests/sound/sound.py`. `python -m umem.patches` prints what umem changes
in torch. Results that are text are shown as they are::

    <!-- text benchmarks/results/FILE.txt -->
    <!-- end of text -->
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

_REPORT = re.compile(
    r"(<!-- ((?:umem bench report [^>]*?|python tests/(?:systems/matrix|sound/sound)\.py --report"
    r" [^>]*?|python -m umem\.patches)) -->\n)"
    r".*?(<!-- end of report -->)",
    re.DOTALL,
)
_TEXT = re.compile(r"(<!-- text (\S+) -->\n).*?(<!-- end of text -->)", re.DOTALL)
_ENVIRONMENT = os.environ | {"PYTHONPATH": str(Path(__file__).parent)}


def _printed(found: re.Match[str]) -> str:
    program, *words = shlex.split(found[2])
    command = [str(Path(sys.executable).with_name(program)), *words]
    printed = subprocess.run(
        command, stdout=subprocess.PIPE, text=True, check=True, env=_ENVIRONMENT
    ).stdout
    return f"{found[1]}{printed.strip()}\n{found[3]}"


def _shown(found: re.Match[str]) -> str:
    text = Path(found[2]).read_text(encoding="utf-8")
    return f"{found[1]}```text\n{text.strip()}\n```\n{found[3]}"


for name in sys.argv[1:]:
    page = Path(name)
    filled = _REPORT.sub(_printed, page.read_text(encoding="utf-8"))
    page.write_text(_TEXT.sub(_shown, filled), encoding="utf-8")
