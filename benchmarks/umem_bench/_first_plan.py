"""The first plans of a process: `python -m umem_bench._first_plan TRACE HARDWARE POLICY`.

That process prints the seconds that they take; :func:`time_first_use` starts it, with a cache of
numba's that is empty, and again with what the first one left there.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from umem.core.errors import UmemError
from umem_bench._scaled import with_layers
from umem_bench.planning_results import FirstUse

if TYPE_CHECKING:
    from umem.trace import Trace

__all__ = ["main", "time_first_use"]

_LAYERS = 4
"""Few, so that their own time is next to nothing beside that of compilation."""

_TIMEOUT_S = 600.0


def time_first_use(
    trace: Trace, hardware: str, policy: str, on_progress: Callable[[str], None]
) -> FirstUse:
    """Time a new process's first plans of a few layers of a trace.

    Raises
    ------
    UmemError
        If the process fails.
    """
    from umem.trace import save_trace

    times_s = []
    with tempfile.TemporaryDirectory(prefix="umem-bench-") as folder:
        path = Path(folder, "trace.npz")
        save_trace(with_layers(trace, _LAYERS), path)
        environment = dict(os.environ, NUMBA_CACHE_DIR=str(Path(folder, "numba")))
        for words in ("compiling", "from numba's cache"):
            on_progress(f"first plans of a process, {words}")
            done = subprocess.run(
                [sys.executable, "-m", __name__, str(path), hardware, policy],
                capture_output=True,
                text=True,
                check=False,
                env=environment,
                timeout=_TIMEOUT_S,
            )
            if done.returncode:
                last = done.stderr.strip().splitlines()[-1:]
                raise UmemError(f"the first plans of a new process failed: {' '.join(last)}")
            times_s.append(float(done.stdout))
    return FirstUse(compiling_s=times_s[0], cached_s=times_s[1])


def main(path: str, hardware_name: str, policy_name: str) -> None:
    """Plan a trace with every planner, and simulate each plan, once."""
    from umem.hardware import load_hardware, with_durations
    from umem.planning import PLANNERS, plan
    from umem.policy import load_policy, resolve
    from umem.simulation import simulate
    from umem.trace import load_trace

    hardware = load_hardware(hardware_name)
    policy = resolve(load_policy(policy_name), hardware.device_bytes)
    trace = with_durations(load_trace(path), hardware)
    began_s = time.perf_counter()
    for planner in PLANNERS:
        simulate(trace, plan(trace, hardware, policy, planner), hardware, policy)
    print(time.perf_counter() - began_s)


if __name__ == "__main__":
    main(*sys.argv[1:])
