"""Programs that a process starts by ``fork`` which has imported what takes long: see zygote.py."""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path


class ForkedPrograms:
    """Runs one program at a time.

    Parameters
    ----------
    modules
        What is imported before.
    environment
        Of all programs. This process's ``sys.path`` is handed on behind its ``PYTHONPATH``: umem
        may be found there only.
    limit_s
        For the imports.

    Raises ``OSError`` if nothing can be started.
    """

    def __init__(
        self, modules: Sequence[str], environment: Mapping[str, str], limit_s: float
    ) -> None:
        paths = [environment.get("PYTHONPATH", ""), *map(os.path.abspath, sys.path)]
        self._process = subprocess.Popen(
            [sys.executable, str(Path(__file__).with_name("zygote.py")), *modules],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            bufsize=0,
            # To ask for GPUs starts no CUDA, behind which a process cannot be forked.
            env={
                **environment,
                "PYTHONPATH": os.pathsep.join(filter(None, paths)),
                "PYTORCH_NVML_BASED_CUDA_CHECK": "1",
            },
        )
        answer = self._answer(limit_s)
        if answer != "ready":
            self.close()
            raise OSError(answer or "it has ended")

    def close(self) -> None:
        """End the process that starts the others."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()

    def run(
        self,
        arguments: Sequence[str],
        folder: Path,
        output: Path,
        errors: Path,
        limit_s: float,
        *,
        variables: Mapping[str, str] | None = None,
        number: signal.Signals | None = None,
        after_s: float = 0.0,
    ) -> int | None:
        """The exit status of ``umem`` or of a program's file; None if its time ran out.

        With the `number` of a signal, the process gets that some time after its begin. One whose
        time runs out is killed with its children.
        """
        job = {
            "arguments": list(arguments),
            "variables": dict(variables or {}),
            "folder": str(folder),
            "output": str(output),
            "errors": str(errors),
        }
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(job).encode() + b"\n")
        child = int(self._answer(limit_s) or 0)
        try:
            process = os.pidfd_open(child)
        except ProcessLookupError:  # it has ended by now
            return int(self._answer(limit_s) or 0)
        try:
            if number is not None:
                time.sleep(after_s)
                with suppress(ProcessLookupError):
                    signal.pidfd_send_signal(process, number)
            status = self._answer(limit_s)
            if status is None:
                os.killpg(child, signal.SIGKILL)
                self._answer(limit_s)
                return None
            return int(status)
        finally:
            os.close(process)

    def _answer(self, limit_s: float) -> str | None:
        """The next line of the process that starts others; None if there is none in time."""
        assert self._process.stdout is not None
        if not select.select([self._process.stdout], [], [], limit_s)[0]:
            return None
        return self._process.stdout.readline().decode().strip()
