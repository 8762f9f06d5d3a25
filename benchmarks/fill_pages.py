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

With `--check`, pages are not written: the status is 1 if one would change, or has a figure without
a source. A figure is a number with a unit, a factor (3x) or a model's size (7B), outside of reports
and code. Its source stands after it in its paragraph: a row of a table of a report, whose medians
and parameters count, with its variant where the table has several systems, or a constant::

    umem takes 1,444 ms <!-- from h100-scale-7b.jsonl: llama-2-7b-fp32: umem -->
    and 93 % <!-- from h200-systems-sft-xlarge.jsonl: Systems: hf_trainer_sft, umem-budget -->
    85 % of it <!-- from umem/hardware/host_memory.py: PINNED_SHARE -->
"""

from __future__ import annotations

import io
import json
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from contextlib import redirect_stdout
from functools import cache
from pathlib import Path

_FOLDER = Path(__file__).resolve().parent
_REPORT = re.compile(
    r"(<!-- ((?:umem bench report [^>]*?|python tests/(?:systems/matrix|sound/sound)\.py --report"
    r" [^>]*?|python -m umem\.patches)) -->\n)"
    r".*?(<!-- end of report -->)",
    re.DOTALL,
)
_TEXT = re.compile(r"(<!-- text (\S+) -->\n).*?(<!-- end of text -->)", re.DOTALL)
_ENVIRONMENT = os.environ | {"PYTHONPATH": str(_FOLDER)}

_UNITS = {
    "s": ("time", 1.0),
    "ms": ("time", 1e-3),
    "%": ("share", 1.0),
    "GB": ("bytes", 1e9),
    "MiB": ("bytes", 2.0**20),
    "GiB": ("bytes", 2.0**30),
    "tokens/s": ("rate", 1.0),
    "x": ("factor", 1.0),
    "B": ("parameters", 1e9),
}
"""Unit -> what it measures, and its factor."""

_NUMBER = r"(?<![\w.,-])(\d[\d,]*(?:\.\d+)?)"
_UNIT = rf"({'|'.join(_UNITS)})(?![\w/]| \d)"  # "4 x 2,048" is no factor
_FIGURE = re.compile(rf"{_NUMBER}(?: |\n *)?{_UNIT}")
_SOURCE = re.compile(r"<!-- from (\S+): (.*?) -->")
_IGNORED = re.compile(r"^```.*?^```|`[^`\n]*`|\]\([^)]*\)", re.DOTALL | re.MULTILINE)


def _printed(found: re.Match[str]) -> str:
    return f"{found[1]}{_output(tuple(shlex.split(found[2])))}\n{found[3]}"


@cache
def _output(words: tuple[str, ...]) -> str:
    """What a command prints; ``umem bench report`` in this process, which imports torch once."""
    program, *its = words
    if words[:3] == ("umem", "bench", "report"):
        sys.path.insert(0, str(_FOLDER))
        from umem_bench.cli import app

        with redirect_stdout(io.StringIO()) as printed:
            app(its[1:], standalone_mode=False)
        return printed.getvalue().strip()
    command = [str(Path(sys.executable).with_name(program)), *its]
    return subprocess.run(
        command, stdout=subprocess.PIPE, text=True, check=True, env=_ENVIRONMENT
    ).stdout.strip()


def _shown(found: re.Match[str]) -> str:
    text = Path(found[2]).read_text(encoding="utf-8")
    return f"{found[1]}```text\n{text.strip()}\n```\n{found[3]}"


def _filled(text: str) -> str:
    return _TEXT.sub(_shown, _REPORT.sub(_printed, text))


def problems(text: str) -> Iterator[tuple[int, str]]:
    """Figures of a page that have no source, or that their source has not: line and words."""
    for hidden in (_REPORT, _TEXT, _IGNORED):
        text = hidden.sub(lambda found: "\n" * found[0].count("\n"), text)
    for paragraph in re.finditer(r"(?:.+\n?)+", text):
        begin = paragraph.start()
        for source in _SOURCE.finditer(text, begin, paragraph.end()):
            known = _figures_of(source[1], source[2])
            for line, number, unit in _figures(text, begin, source.start()):
                if not any(_is_same(number, unit, *it) for it in known):
                    yield line, f"{number} {unit} is not in {source[1]}: {source[2]}"
            begin = source.end()
        for line, number, unit in _figures(text, begin, paragraph.end()):
            yield line, f"{number} {unit} has no source: add <!-- from FILE: TABLE: ROW -->"


def _figures(text: str, begin: int, end: int) -> Iterator[tuple[int, str, str]]:
    for found in _FIGURE.finditer(text, begin, end):
        yield text.count("\n", 0, found.start()) + 1, found[1], found[2]


def _is_same(number: str, unit: str, known: float, known_unit: str) -> bool:
    """Whether a figure is a known one, rounded to the figure's digits."""
    (measures, factor), (known_measures, known_factor) = _UNITS[unit], _UNITS[known_unit]
    digits = len(number.partition(".")[2])
    apart = abs(known * known_factor / factor - float(number.replace(",", "")))
    return measures == known_measures and apart <= 0.5001 * 10.0**-digits


@cache
def _figures_of(file: str, place: str) -> list[tuple[float, str]]:
    """What a table's rows say, their report's heading, and models' sizes; or a constant."""
    if file.endswith(".py"):
        source = (_FOLDER.parent / file).read_text(encoding="utf-8")
        values = re.findall(rf"^{place} = ([\d.]+)$", source, re.MULTILINE)
        return [(100 * float(value), "%") for value in values]
    table, _, name = place.partition(": ")
    command: tuple[str, ...] = ("umem", "bench", "report")
    if "systems" in file or "goals" in file:
        matrix = str(_FOLDER.parent / "tests" / "systems" / "matrix.py")
        command = ("python", matrix, *(["--goals"] if "goals" in file else []), "--report")
    report = _output((*command, str(_FOLDER / "results" / file), "--markdown"))
    heading, *tables = re.split(r"^\*\*", report, flags=re.MULTILINE)
    chosen = next((it for it in tables if re.match(rf"{re.escape(table)}[:;*]", it)), "")
    lines = [[it.strip() for it in line.split("|")[1:-1]] for line in chosen.splitlines()]
    columns = next(filter(None, lines), [])
    row = next((it for it in lines if name in {", ".join(it[:1]), ", ".join(it[:2])}), None)
    if row is None:
        raise SystemExit(f"{file} has no row {place}")
    found = [(float(number.replace(",", "")), unit) for number, unit in _FIGURE.findall(heading)]
    named = {*place.split(": "), *name.split(", ")}
    for line in (_FOLDER / "results" / file).read_text(encoding="utf-8").splitlines()[1:]:
        its = json.loads(line)
        if "parameters" in its and named & {its.get("case"), its.get("system")}:
            found.append((its["parameters"] / 1e9, "B"))
    for column, cell in zip(columns, row, strict=True):
        unit = column.rpartition(", ")[2] if ", " in column else column
        cell = re.sub(r"\[.*?\]", "", cell)  # the lowest and the highest
        for number, own_unit in re.findall(rf"{_NUMBER}(?: ?{_UNIT})?", cell):
            if (own_unit or unit) in _UNITS:
                found.append((float(number.replace(",", "")), own_unit or unit))
    return found


def main(words: list[str]) -> int:
    """Fill or check pages; return the status."""
    is_check = words[:1] == ["--check"]
    wrong = []
    for name in words[is_check:]:
        page = Path(name)
        text = page.read_text(encoding="utf-8")
        filled = _filled(text)
        if not is_check:
            page.write_text(filled, encoding="utf-8")
            continue
        if filled != text:
            wrong.append(f"{name}: a table is not that of its results: python {sys.argv[0]} {name}")
        wrong += [f"{name}:{line}: {words}" for line, words in problems(text)]
    print(*wrong, sep="\n", end="\n" if wrong else "", file=sys.stderr)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
