"""Programs that run in a process of their own: their environment, and their end within a limit."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

__all__ = ["end_status", "environment"]


def environment(budget_bytes: int | None, managed_limit: str, **more: str) -> dict[str, str]:
    """This process's environment without umem's variables but for these limits and poison's."""
    kept = {
        name: value
        for name, value in os.environ.items()
        if name == "UMEM_POISON" or not name.startswith("UMEM_")
    }
    budget = {} if budget_bytes is None else {"UMEM_DEVICE_BUDGET": str(budget_bytes)}
    return {**kept, **budget, "UMEM_MANAGED_LIMIT": managed_limit, **more}


def end_status(
    command: Sequence[str],
    variables: Mapping[str, str],
    folder: Path,
    log: Any,
    limit_s: float,
    patience_s: float = 0.0,
) -> int | None:
    """A process's exit status; None if its time ran out.

    It is killed with its children then. With `patience_s` it is told to end first, as a launcher
    ends the processes that it has started in sessions of their own.
    """
    process = subprocess.Popen(
        command,
        env=variables,
        cwd=folder,
        stdin=subprocess.DEVNULL,
        stdout=log,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )
    try:
        return process.wait(limit_s)
    except subprocess.TimeoutExpired:
        return None
    finally:
        if process.poll() is None and patience_s:
            process.terminate()
            with suppress(subprocess.TimeoutExpired):
                process.wait(patience_s)
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
