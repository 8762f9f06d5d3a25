"""Starts `umem` over and over by ``fork``, with all imported already: each ends as Python does.

Each line of standard input is a job as JSON: arguments, folder, files of standard output and error.
The answers are the number of the process and, when it has ended, its status.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from typing import Any

from training_program import TrainedProgram
from umem_bench.compile_planner import compile_planner

from umem.__main__ import main
from umem.cli import plan, run, simulate

__all__ = ["plan", "run", "simulate"]


def become(job: dict[str, Any]) -> None:
    """Be the process of a job, and say so."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    answers = os.dup(1)
    for name, descriptor in (("/dev/null", 0), (job["output"], 1), (job["errors"], 2)):
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC if descriptor else os.O_RDONLY
        file = os.open(name, flags)
        os.dup2(file, descriptor)
        os.close(file)
    os.chdir(job["folder"])
    sys.argv = ["umem", *job["arguments"]]
    os.write(answers, f"{os.getpid()}\n".encode())
    os.close(answers)


if __name__ == "__main__":
    compile_planner()
    TrainedProgram(None).optimizer.zero_grad()  # imports the compiler, which takes seconds
    for line in sys.stdin:
        child = os.fork()
        if child == 0:
            become(json.loads(line))
            main()
            sys.exit()
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
