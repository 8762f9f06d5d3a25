"""Starts programs over and over by ``fork``, with all imported already: ``zygote.py MODULE...``.

It says ``ready`` once it has imported the modules, or why it cannot start anything. Each line of
standard input is a job as JSON: arguments, of which the first is ``umem``, a program's file or
``-c``, with a program behind it; variables of the environment, folder, files of standard output and
error. The answers are the number of the process and, when it has ended, its status. A process ends
as Python does.
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import runpy
import signal
import sys
from pathlib import Path
from typing import Any


def become(job: dict[str, Any]) -> None:
    """Be the process of a job, and say so."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.setsid()
    os.environ |= job["variables"]
    answers = os.dup(1)
    for name, descriptor in (("/dev/null", 0), (job["output"], 1), (job["errors"], 2)):
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND if descriptor else os.O_RDONLY
        file = os.open(name, flags)
        os.dup2(file, descriptor)
        os.close(file)
    os.chdir(job["folder"])
    sys.argv = job["arguments"]
    os.write(answers, f"{os.getpid()}\n".encode())
    os.close(answers)


def run(program: str) -> None:
    """Run what the first argument names."""
    if program == "umem":
        from umem.__main__ import main

        main()
    elif program == "-c":
        exec(sys.argv.pop(1), {"__name__": "__main__"})
    else:
        sys.path.insert(0, str(Path(program).parent))
        runpy.run_path(program, run_name="__main__")


def why_not() -> str:
    """Why no process can be forked that uses CUDA; empty where one can."""
    opened = [os.readlink(it) for it in Path("/proc/self/fd").iterdir() if it.is_symlink()]
    return "CUDA has started" if any("nvidia-uvm" in it for it in opened) else ""


if __name__ == "__main__":
    for module in sys.argv[1:]:
        importlib.import_module(module)
    gc.freeze()  # no process need go through all of it at its end, and copy its pages
    print(why_not() or "ready", flush=True)
    for line in sys.stdin:
        child = os.fork()
        if child == 0:
            become(json.loads(line))
            run(sys.argv[0])
            sys.exit()
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
