"""Events in a forked child."""

from __future__ import annotations

import subprocess
import sys

SCRIPT = """
import os, sys
from umem import cuda_events

class Event:
    def __del__(self):
        os._exit(7)  # as torch's, whose end in a child is an abort

event = Event()
cuda_events._events.add(event)
child = os.fork()
if child == 0:
    del event
    sys.exit(0)
_, status = os.waitpid(child, 0)
print(os.waitstatus_to_exitcode(status), flush=True)
os._exit(0)
"""


def test_a_forked_child_does_not_destroy_them() -> None:
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT], capture_output=True, text=True, timeout=120, check=True
    )
    assert done.stdout.strip() == "0"
