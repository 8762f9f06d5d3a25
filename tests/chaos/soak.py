"""Long trainings, in which nothing may grow."""

from __future__ import annotations

import gc
import os
import threading
from collections.abc import Callable
from pathlib import Path

from managed_training import MIB, Training
from random_training import Pair, clear

from umem.runtime import managed_runs
from umem.runtime.guard import Guard
from umem.streaming import StreamedTraining

_MOST_OBJECTS = 1.02
"""Objects of Python, of those behind the warm-up: a random step keeps some more or fewer."""

_MOST_BYTES = 24 << 20
"""Host memory beyond that behind the warm-up: the C library keeps what other sizes do not fit."""


def soak_a_streamed_training(seed: int, steps: int) -> None:
    """A random schedule."""
    pair = Pair(seed)
    pair.chance.seed(seed)
    program = pair.streamed

    def train() -> None:
        program.plan = pair.next_step()
        program.step()
        program.behind()
        clear(program)

    def figures() -> dict[str, int]:
        assert program.training is not None
        program.training.join()
        return {"updates under way": int(program.training.step.is_under_way)}

    soak(train, figures, steps)


def soak_many_trainings(seed: int, trainings: int) -> None:
    """One training after the other, each of which is closed behind some steps."""

    def train() -> None:
        pair = Pair(seed)
        pair.train(2)
        training = pair.streamed.training
        assert isinstance(training, StreamedTraining)
        training.close()
        managed_runs._runs.clear()  # what is told of the last 64 of them

    soak(train, dict, trainings)


def soak_a_managed_training(seed: int, steps: int) -> None:
    """Hints to the engine of the host."""
    training = Training()
    manager = training.manage("planned", (34 + seed % 8) * MIB)

    def figures() -> dict[str, int]:
        return {"hints under way": manager.engine.statistics().open_requests}

    soak(lambda: training.step(), figures, steps)
    manager.close()


def soak(step: Callable[[], None], figures: Callable[[], dict[str, int]], steps: int) -> None:
    """Run steps; behind a third of them, nothing is more than at one of the looks before."""
    looks = []
    every = max(1, steps // 24)
    for number in range(1, steps + 1):
        step()
        if number % every == 0:
            looks.append(_figures() | figures())
    warm, later = looks[len(looks) // 6 : len(looks) // 2], looks[-len(looks) // 4 :]
    for name in looks[0]:
        before = max(it[name] for it in warm)
        after = min(it[name] for it in later)
        most = {"objects": _MOST_OBJECTS * before, "bytes": _MOST_BYTES + before}.get(name, before)
        assert after <= most, f"{name}: {[it[name] for it in looks]}"


def _figures() -> dict[str, int]:
    gc.collect()
    descriptors = [_target(it) for it in os.listdir("/proc/self/fd")]
    resident = int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    return {
        "descriptors": len(descriptors),
        "sockets": sum(it.startswith("socket:") for it in descriptors),
        "threads": threading.active_count(),
        "guards": sum(isinstance(it, Guard) for it in gc.get_objects()),
        "objects": len(gc.get_objects()),
        "bytes": resident,
    }


def _target(descriptor: str) -> str:
    try:
        return os.readlink(f"/proc/self/fd/{descriptor}")
    except FileNotFoundError:  # that of the list itself
        return ""
