"""A training worker: a process that trains one variant with one budget, and ends.

Its process is forked from one that has the imports behind it and has not started CUDA: for a run
of some thirty processes, importing torch and transformers anew would take longer than training.
"""

from __future__ import annotations

import faulthandler
import os
import select
import sys
import threading
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from io import TextIOWrapper
from multiprocessing.connection import Connection

from umem_bench.train.jobs import TrainingAnswer, TrainingJob

__all__ = ["be_ready", "work"]

_STACKS_SHARE = 0.9
"""Of a process's time: by then what hangs has hung, and there is time left to write where."""


def be_ready(answers: Connection, log: str, limit_s: float) -> None:
    """Answer that there is a process: then what processes are forked from has its imports.

    Arguments as those of :func:`work`.
    """
    with _watched(answers, log, limit_s):
        answers.send(TrainingAnswer(state="ready").model_dump_json())


def work(job_json: str, answers: Connection, log: str, limit_s: float) -> None:
    """Train as a job says and send one answer, as JSON.

    Parameters
    ----------
    job_json
        A :class:`TrainingJob`.
    answers
        Where the answer goes. Where nobody waits for it any more, the process ends at once.
    log
        File for all that libraries print.
    limit_s
        The process is killed after so long: shortly before, the log is told where it is.
    """
    with _watched(answers, log, limit_s):
        answers.send(_answer(TrainingJob.model_validate_json(job_json)).model_dump_json())


def _answer(job: TrainingJob) -> TrainingAnswer:
    import torch

    if torch.cuda._is_in_bad_fork():
        return TrainingAnswer(state="cannot fork")
    from umem_bench.train.step import NotInstalledError
    from umem_bench.train.task import measure

    try:
        return measure(job)
    except NotInstalledError as error:
        return TrainingAnswer(state="not installed", reason=str(error))
    except Exception as error:
        traceback.print_exc()
        return TrainingAnswer(state="failed", reason=f"{type(error).__name__}: {error}")


@contextmanager
def _watched(answers: Connection, log: str, limit_s: float) -> Iterator[None]:
    _print_into(log)
    faulthandler.dump_traceback_later(_STACKS_SHARE * limit_s)
    answered = threading.Event()
    poller = select.poll()
    poller.register(answers.fileno(), 0)  # hang-ups and errors are told in any case
    threading.Thread(target=_end_with_parent, args=(poller, answered), daemon=True).start()
    yield
    answered.set()
    faulthandler.cancel_dump_traceback_later()
    answers.close()


def _end_with_parent(poller: select.poll, answered: threading.Event) -> None:
    """End this process if the other end of its pipe is closed, which a killed parent's is.

    Otherwise it would train on, and hold the device's memory.
    """
    poller.poll()
    if not answered.is_set():
        os._exit(1)


def _print_into(log: str) -> None:
    sys.stdout.flush()
    sys.stderr.flush()
    file = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    for stream in (1, 2):
        os.dup2(file, stream)
    os.close(file)
    # What is killed flushes nothing.
    for text in (sys.stdout, sys.stderr):
        if isinstance(text, TextIOWrapper):
            text.reconfigure(line_buffering=True)
