"""A worker process: `python -m umem_bench._worker JOB`, started by `umem_bench.runner`.

Answers are lines of JSON on standard output: one when the task is ready, one for each line
`round` on standard input, one for `finish`, after which it exits.
"""

from __future__ import annotations

import os
import sys
import traceback
from typing import TextIO

from umem_bench._allocators import select
from umem_bench.jobs import Answer, Job

__all__ = ["main"]


def main(job_json: str) -> int:
    """Swap, prepare, and measure on command; the exit status."""
    answers = _own_output()
    job = Job.model_validate_json(job_json)
    try:
        # Before anything else of torch: the swap comes before CUDA starts.
        select(job.allocator, job.policy, job.managed_limit_bytes)
        _serve(job, answers)
    except Exception as error:
        traceback.print_exc()
        _send(answers, Answer(error=f"{type(error).__name__}: {error}"))
        return 1
    return 0


def _serve(job: Job, answers: TextIO) -> None:
    from umem_bench._tasks import AllocTask, StepTask, Task

    task: Task = AllocTask(job) if job.benchmark == "alloc" else StepTask(job)
    _send(answers, Answer())
    for line in sys.stdin:
        command = line.strip()
        if command == "finish":
            _send(answers, task.finish())
            return
        _send(answers, task.round())


def _own_output() -> TextIO:
    """Standard output for answers alone: what libraries print goes to standard error."""
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "w", encoding="utf-8")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    return answers


def _send(answers: TextIO, answer: Answer) -> None:
    answers.write(answer.model_dump_json() + "\n")
    answers.flush()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
