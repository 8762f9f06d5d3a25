"""One process for each allocator or variant: a process can swap its allocator only once.

Workers are forked from a server process that has imported torch and not started CUDA. Importing
everything anew in each process would take longer than most of the measurements.
"""

from __future__ import annotations

import contextlib
import faulthandler
import multiprocessing
import multiprocessing.process
import os
import select
import signal
import sys
import tempfile
import threading
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from multiprocessing import forkserver, resource_tracker
from multiprocessing.connection import Connection
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from umem import UmemError
from umem_bench.results import Record

__all__ = ["Answers", "Worker", "WorkerError"]

Answers = Callable[[Any], Iterator[Any]]
"""What a worker runs: a generator function of the job, which yields one answer at each request."""

_END_S = 20.0
"""For a process to end, after its last answer or after it was killed."""

_STACK_S = 5.0
"""For a worker whose time ran out, to write to its log where it is, and to end."""

_STACK_TITLE = "Stack (most recent call first):\n"
"""faulthandler's, above the stack of one thread."""

_LOG_LINES = 3


class WorkerError(UmemError):
    """A worker failed or did not answer; `timed_out` where its time ran out."""

    def __init__(self, reason: str, *, timed_out: bool = False) -> None:
        super().__init__(reason)
        self.timed_out = timed_out


@dataclass(frozen=True)
class _Failure:
    reason: str


class Worker:
    """A process that answers requests one after the other. Leaving the context ends it.

    Its answers are those of a module's generator function, called with the job. Workers share the
    preloaded modules; only those of a program's first worker count.
    """

    stuck = ""
    """Set on the class once a killed process did not end: it may hold managed memory."""

    def __init__(self, answers: Answers, job: Record, preload: Sequence[str]) -> None:
        # NVML says whether there is a GPU: CUDA does not start, and processes can be forked.
        os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"
        context: Any = multiprocessing.get_context(os.environ.get("UMEM_BENCH_START", "forkserver"))
        context.set_forkserver_preload(list(preload))
        if context.get_start_method() == "forkserver":
            # Ctrl-C is this process's: the server would show where it was, and so would workers.
            resource_tracker.ensure_running()  # which unblocks the signal, when it starts
            before = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
            forkserver.ensure_running()
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
        self._folder = tempfile.TemporaryDirectory(prefix="umem-bench-")
        self._log = Path(self._folder.name, "log")
        self._connection, theirs = context.Pipe()
        self._process = context.Process(
            target=_serve, args=(answers, job, theirs, str(self._log)), daemon=True
        )
        self._process.start()
        theirs.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._connection.close()  # the worker ends itself
        self._process.join(_END_S if kind is None else 1)
        if self._process.is_alive():
            self._process.kill()
            self._process.join(_END_S)
        if self._process.is_alive():
            Worker.stuck = (
                f"process {self._process.pid} did not end within {_END_S:.0f} s of being killed, "
                "and may hold managed memory: no other was started beside it"
            )
            # Python would wait for it at its own end, for ever.
            multiprocessing.process._children.discard(self._process)  # type: ignore[attr-defined]
        self._folder.cleanup()

    def request(self) -> None:
        """Let the worker begin its next answer."""
        with contextlib.suppress(OSError):  # the worker has ended, which `answer` reports
            self._connection.send(None)

    def answer(self, limit_s: float) -> Any:
        """Wait for the answer to the last request.

        Raises
        ------
        WorkerError
            If the worker failed, ended or did not answer in time.
        """
        try:
            if not self._connection.poll(limit_s):
                # It leaves its stack, which can crash it: no answer will come in any case.
                self._process.terminate()
                self._process.join(_STACK_S)
                self._process.kill()
                words = " / ".join([f"no answer within {limit_s:.0f} s", *self._last_words()])
                raise WorkerError(words, timed_out=True)
            answer = self._connection.recv()
        except (EOFError, ConnectionError):
            self._process.join(_END_S)
            status = f"ended with status {self._process.exitcode}"
            raise WorkerError(" / ".join([status, *self._last_words()])) from None
        if isinstance(answer, _Failure):
            raise WorkerError(answer.reason)
        return answer

    def ask(self, limit_s: float) -> Any:
        """Request an answer and wait for it; errors as of :meth:`answer`."""
        self.request()
        return self.answer(limit_s)

    def _last_words(self) -> list[str]:
        """The last lines of the log; where it hung, the innermost calls of the main thread too."""
        text = self._log.read_text(errors="replace") if self._log.exists() else ""
        printed, _, stack = text.partition(_STACK_TITLE)
        lines = [line.strip() for line in printed.splitlines() if line.strip()][-_LOG_LINES:]
        return [*lines, *(line.strip() for line in stack.splitlines()[:_LOG_LINES])]


def _serve(answers: Answers, job: Record, connection: Connection, log: str) -> None:
    """The worker's process: answer requests until the connection is closed."""
    # What libraries print goes to the log.
    sys.stdout.flush()
    sys.stderr.flush()
    try:
        file = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    except FileNotFoundError:  # who asked for this process was interrupted before it began
        return
    os.dup2(file, 1)
    os.dup2(file, 2)
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    # The kernel gives it to the main thread: reading the frames of running threads can crash. Then
    # the process ends, for nothing else handles the signal.
    faulthandler.register(signal.SIGTERM, all_threads=False, chain=True)
    threading.Thread(target=_end_with_parent, args=(connection.fileno(),), daemon=True).start()
    generator = answers(job)
    while True:
        connection.recv()
        try:
            answer = next(generator)
        except Exception as error:
            traceback.print_exc()
            answer = _Failure(f"{type(error).__name__}: {error}")
        connection.send(answer)


def _end_with_parent(descriptor: int) -> None:
    """End this process once the other end of the connection is closed, even by a kill.

    Otherwise it would train on, and hold the device's memory.
    """
    poller = select.poll()
    poller.register(descriptor, 0)  # hang-ups are reported in any case
    poller.poll()
    os._exit(0)
