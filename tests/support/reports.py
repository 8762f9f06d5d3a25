"""Tables in pages that a command prints: found, compared, and put in anew.

A page has them between two comments. The first one names the command, and what of its output is
meant: ``heading`` is what comes before the first table, other words are in tables' titles. Where a
question mark follows, there need not be such a table::

    <!-- umem bench ... --markdown, of which: heading; by device budget; Notes? -->
    <!-- end of report -->

Run as a script, with pages as arguments, it puts in what the commands print now.
"""

from __future__ import annotations

import functools
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

__all__ = ["ROOT", "Report", "fill", "reports"]

ROOT = Path(__file__).resolve().parents[2]
HEADING = "heading"
NOTHING = "There is nothing of this in the run."

_REPORT = re.compile(
    r"(?P<first><!-- umem (?P<command>[^,>]*?)(?:, of which: (?P<parts>[^>]*?))? -->\n)"
    r"(?P<text>.*?)(?P<last><!-- end of report -->)",
    re.DOTALL,
)


@dataclass(frozen=True)
class Report:
    """What a page shows of one command's output; no `parts`: all of it."""

    command: str
    parts: tuple[str, ...]
    text: str

    def printed(self) -> str:
        """The same part of what the command prints now."""
        whole = _printed(self.command)
        if not self.parts:
            return whole
        heading, *tables = re.split(r"\n\n(?=\*\*)", whole)
        shown = []
        for part in self.parts:
            words = part.removesuffix("?")
            found = [it for it in tables if words in it.partition("\n")[0]]
            found = [heading] if part == HEADING else found
            if not found and words == part:
                raise ValueError(f"`umem {self.command}` prints no table about {part!r}")
            shown += found
        return "\n\n".join(shown) or NOTHING


def reports(page: str) -> Iterator[Report]:
    """The reports of a page's text."""
    for found in _REPORT.finditer(page):
        yield _report(found)


def fill(page: str) -> str:
    """The page's text, every report printed anew.

    Raises
    ------
    ValueError
        If a command fails, or does not print what the page is about.
    """
    return _REPORT.sub(
        lambda found: f"{found['first']}{_report(found).printed()}\n{found['last']}", page
    )


def _report(found: re.Match[str]) -> Report:
    parts = [part.strip() for part in (found["parts"] or "").split(";")]
    return Report(found["command"], tuple(filter(None, parts)), found["text"].strip())


@functools.cache
def _printed(command: str) -> str:
    done = subprocess.run(
        [Path(sys.executable).with_name("umem"), *shlex.split(command)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        raise ValueError(f"`umem {command}` failed: {done.stderr.strip()}")
    return done.stdout.strip()


if __name__ == "__main__":
    for name in sys.argv[1:]:
        path = Path(name)
        path.write_text(fill(path.read_text(encoding="utf-8")), encoding="utf-8")
