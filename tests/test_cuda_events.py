"""Events in a forked child."""

from __future__ import annotations

import pytest
from other_process import run_forked

SCRIPT = """
import os, sys
from umem.runtime.cuda_events import KeptInForks

class AbortsAtItsEnd:
    def __del__(self):
        os._exit(7)  # to destroy torch's events in a child is an abort

class Event(KeptInForks, list):
    pass

event = Event()
event.append(AbortsAtItsEnd())
child = os.fork()
if child == 0:
    del event
    sys.exit(0)
_, status = os.waitpid(child, 0)
print(os.waitstatus_to_exitcode(status), flush=True)
del event
print("not destroyed")
"""


@pytest.mark.slow
def test_only_the_process_that_made_them_destroys_them() -> None:
    assert run_forked(SCRIPT, status=7) == "0\n"
