"""The command `umem`, run in the test's process."""

from __future__ import annotations

import sys
from collections.abc import Callable

import pytest

from umem.cli import main

Run = Callable[..., tuple[int, str, str]]
"""Takes the command's arguments; exit status, standard output and standard error."""


def umem_command(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    """The command as on a terminal of 80 columns."""
    monkeypatch.setenv("COLUMNS", "80")

    def run(*arguments: object) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["umem", *map(str, arguments)])
        with pytest.raises(SystemExit) as ended:
            main()
        output, errors = capsys.readouterr()
        code = ended.value.code
        if isinstance(code, str):  # which Python prints when the process ends
            return 1, output, f"{errors}{code}\n"
        return code or 0, output, errors

    return run
