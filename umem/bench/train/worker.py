"""A training worker: a process that trains one variant with one budget, and ends.

Its process is forked from one that has the imports behind it and has not started CUDA: for a run
of some thirty processes, importing torch and transformers anew would take longer than training.
"""

from __future__ import annotations

import os
import sys
import traceback
from multiprocessing.connection import Connection

from umem.bench.train.jobs import TrainingAnswer, TrainingJob

__all__ = ["be_ready", "work"]


def be_ready(answers: Connection, log: str) -> None:
    """Answer that there is a process: then what processes are forked from has its imports.

    Arguments as those of :func:`work`.
    """
    _print_into(log)
    answers.send(TrainingAnswer(state="ready").model_dump_json())
    answers.close()


def work(job_json: str, answers: Connection, log: str) -> None:
    """Train as a job says and send one answer, as JSON.

    Parameters
    ----------
    job_json
        A :class:`TrainingJob`.
    answers
        Where the answer goes.
    log
        File for all that libraries print.
    """
    _print_into(log)
    answers.send(_answer(TrainingJob.model_validate_json(job_json)).model_dump_json())
    answers.close()


def _answer(job: TrainingJob) -> TrainingAnswer:
    import torch

    if torch.cuda._is_in_bad_fork():
        return TrainingAnswer(state="cannot fork")
    from umem.bench.train.step import NotInstalledError
    from umem.bench.train.task import measure

    try:
        return measure(job)
    except NotInstalledError as error:
        return TrainingAnswer(state="not installed", reason=str(error))
    except Exception as error:
        traceback.print_exc()
        return TrainingAnswer(state="failed", reason=f"{type(error).__name__}: {error}")


def _print_into(log: str) -> None:
    sys.stdout.flush()
    sys.stderr.flush()
    file = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    for stream in (1, 2):
        os.dup2(file, stream)
    os.close(file)
