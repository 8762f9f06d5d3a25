"""How commands speak: progress on the side, numbers for people, JSON for programs."""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import typer
from rich.console import Console
from rich.markup import escape

from umem.core.errors import UmemError
from umem.core.progress import notify_by
from umem.core.units import time_unit

__all__ = ["Progress", "check_can_write", "format_seconds", "print_json", "progress"]

Progress = Callable[[str], None]
"""Says what is being done."""

_PATIENCE_S = 2.0
"""Work that is shorter is over before words about it can be read."""


@contextmanager
def progress() -> Iterator[Progress]:
    """Show what is being done, on standard error, where that is a terminal and it takes long."""
    console = Console(stderr=True)
    if not console.is_terminal:
        with notify_by(_nothing):
            yield _nothing
        return
    status = console.status("Starting ...")
    timer = threading.Timer(_PATIENCE_S, status.start)
    timer.daemon = True
    timer.start()

    def say(words: str) -> None:
        status.update(f"{escape(words)} ...")

    try:
        with notify_by(lambda words: say(words.capitalize())):
            yield say
    finally:
        timer.cancel()
        timer.join()
        status.stop()


def _nothing(_: str) -> None:
    pass


def print_json(data: Any) -> None:
    """Print data and nothing else."""
    typer.echo(json.dumps(data, indent=2))


def format_seconds(time_s: float) -> str:
    """Write a time for a person to read, in three digits, such as ``"12.3 ms"``."""
    factor, unit = time_unit(abs(time_s))
    scaled = time_s * factor
    digits = f"{scaled:,.0f}" if abs(scaled) >= 100 else f"{scaled:.3g}"
    return f"{digits} {unit}" if scaled else "0 s"


def check_can_write(option: str, path: Path, *, folder: bool = False) -> None:
    """Check that a file, or a folder, can be made, before the work that fills it.

    Raises
    ------
    UmemError
        If it cannot; the message names the option.
    """
    if path.is_dir() and not folder:
        raise UmemError(f"{option}: {path} is a folder: give the name of a file")
    nearest = path if folder else path.parent
    while not nearest.exists() and nearest != nearest.parent:
        nearest = nearest.parent
    if not nearest.is_dir():
        raise UmemError(f"{option}: {nearest} is a file and no folder: choose another place")
    if not os.access(nearest, os.W_OK | os.X_OK):
        raise UmemError(f"{option}: the folder {nearest} is not writable: choose another place")
