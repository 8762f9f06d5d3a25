"""The command `umem` itself: help, start-up, and how commands print."""

from __future__ import annotations

import json
import subprocess
import sys
import threading

import pytest
import umem_bench.cli
from command_line import Run
from typer.main import get_command
from umem_bench.commands import COMMANDS as BENCHMARKS

import umem
from umem.cli import COMMANDS, load_command, output
from umem.core.progress import notify


def test_help_has_a_line_for_every_command(run: Run) -> None:
    status, text, errors = run("--help")
    assert (status, errors) == (0, "")
    lines = [line.strip() for line in text.splitlines()]
    for name, summary in COMMANDS.items():
        assert f"{name:<8}  {summary}" in lines  # whole, not cut off to fit


@pytest.mark.slow
def test_help_imports_no_library_that_takes_long() -> None:
    code = """
import json, sys
from contextlib import suppress
from umem.cli import main
for words in sys.argv[1:]:
    sys.argv = ["umem", *words.split(), "--help"]
    with suppress(SystemExit):
        main()
print(json.dumps(list(sys.modules)), file=sys.stderr)
"""
    command = [sys.executable, "-c", code, "", *COMMANDS, "policy show"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    imported = set(json.loads(done.stderr))
    assert {f"umem.cli.{name}" for name in COMMANDS} <= imported
    slow = {"torch", "numpy", "numba", "yaml", "matplotlib", "rich", "pydantic", "umem_bench.cli"}
    assert not imported & slow


def test_benchmarks_have_a_line_each(run: Run) -> None:
    assert list(BENCHMARKS) == list(get_command(umem_bench.cli.app).commands)  # type: ignore[attr-defined]
    status, text, errors = run("bench", "--help")
    assert (status, errors) == (0, "")
    lines = [" ".join(line.split()) for line in text.splitlines()]
    for name, summary in BENCHMARKS.items():
        assert f"{name} {summary}" in lines


@pytest.mark.parametrize("name", [name for name in COMMANDS if name != "bench"])
def test_a_commands_help_is_its_own(run: Run, name: str) -> None:
    status, text, errors = run(name, "--help")
    assert (status, errors) == (0, "")
    assert text.startswith(f"Usage: umem {name} ")
    for parameter in load_command(name).params:
        assert parameter.param_type_name == "argument" or parameter.opts[0] in text
    assert all(len(line) <= 80 for line in text.splitlines())


@pytest.mark.parametrize("columns", ["0", "-1", "²", "1" + "0" * 30, ""])
def test_columns_of_no_terminal(run: Run, monkeypatch: pytest.MonkeyPatch, columns: str) -> None:
    monkeypatch.setenv("COLUMNS", columns)
    monkeypatch.setenv("LINES", columns)
    status, text, errors = run("policy", "list")
    assert (status, errors) == (0, "")
    assert "managed" in text
    assert max(map(len, text.splitlines())) <= 500


def test_version(run: Run) -> None:
    assert run("--version") == (0, f"umem {umem.__version__}\n", "")


def test_a_misspelt_command_gets_the_nearest(run: Run) -> None:
    status, text, errors = run("simulat")
    assert (status, text) == (2, "")
    assert "'simulate'" in errors
    assert "Traceback" not in errors


class Terminal:
    """Standard error that is a terminal."""

    def __init__(self) -> None:
        self.written = ""
        self.shown = threading.Event()

    def write(self, text: str) -> int:
        self.written += text
        if "busy" in self.written:
            self.shown.set()
        return len(text)

    def flush(self) -> None:
        pass

    def isatty(self) -> bool:
        return True


def test_progress_is_shown_on_a_terminal_if_it_takes_long(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("TERM", "xterm")
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    with output.progress() as say:
        say("busy")
    assert "busy" not in terminal.written
    monkeypatch.setattr(output, "_PATIENCE_S", 0.0)
    with output.progress() as say:
        say("busy")
        assert terminal.shown.wait(timeout=10)


def test_progress_shows_notices(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("TERM", "xterm")
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    monkeypatch.setattr(output, "_PATIENCE_S", 0.0)
    with output.progress():
        notify("for a while: busy")
        assert terminal.shown.wait(timeout=10)
    assert "For a while: busy ..." in terminal.written
    assert caplog.records == []


def test_progress_is_silent_elsewhere(
    capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    with output.progress() as say:
        say("busy")
        notify("busy")
    assert capsys.readouterr() == ("", "")
    assert caplog.records == []


@pytest.mark.parametrize(
    ("time_s", "text"),
    [(0, "0 s"), (1.5e-6, "1.5 µs"), (0.0123, "12.3 ms"), (0.436, "436 ms"), (3.379, "3.38 s")],
)
def test_times_for_people(time_s: float, text: str) -> None:
    assert output.format_seconds(time_s) == text
