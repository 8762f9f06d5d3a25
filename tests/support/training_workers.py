"""What processes of the training benchmark do in tests, in the place of training."""

from __future__ import annotations

import sys
import time
from io import TextIOWrapper
from multiprocessing.connection import Connection

from umem_bench.train.jobs import TrainingAnswer
from umem_bench.train.worker import _watched

__all__ = ["answer_what_json_cannot_say", "print_and_hang"]


def answer_what_json_cannot_say(answers: Connection, log: str, limit_s: float) -> None:
    """Answer with an infinite time."""
    with _watched(answers, log, limit_s):
        answer = TrainingAnswer(state="measured", steps_s=(float("inf"),))
        answers.send(answer.model_dump_json())


def print_and_hang(answers: Connection, log: str, limit_s: float) -> None:
    """Say something, and nothing more."""
    if isinstance(sys.stdout, TextIOWrapper):
        sys.stdout.reconfigure(write_through=False)  # as where PYTHONUNBUFFERED is not set
    with _watched(answers, log, limit_s):
        print("compiling")
        _hang()


def _hang() -> None:
    time.sleep(600)
