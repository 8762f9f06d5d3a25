"""Another checkout's umem beside this one's, in one run: planner, simulator, allocator, step.

Each side is a process with its checkout's umem, and both take turns. As a program this module is
such a process: it measures one round for each line that it reads, and uses names that umem had and
has, wherever they moved.
"""

from __future__ import annotations

import importlib
import inspect
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from umem_bench.results import Measurement
from umem_bench.timing import loops_for, time_calls, time_loops_s

__all__ = ["run_against"]

_CASE_S = 0.5
_MOVED = {
    "model_trace": ("umem.capture.offline", "umem.trace"),
    "native": ("umem.runtime.native_library", "umem._library"),
    "native_config": ("umem.runtime.state", "umem.allocator"),
}
"""Modules that have had a name, the newest first."""
_PAGES = {"device_budget": "90%", "defaults": {"kind": "managed", "min_bytes": "1MiB"}}
"""A policy that both sides can read, whatever their presets are."""


def run_against(
    checkout: Path, rounds: int, on_progress: Callable[[str], None], model: str = "llama-2-7b"
) -> list[Measurement]:
    """Time both checkouts in turns; a side that cannot be measured says why.

    The checkout needs its native extension. Its ``.venv`` is used if there is one.
    """
    here = Path(__file__).resolve().parents[2]
    sides = {"before": _start(checkout.resolve(), model), "after": _start(here, model)}
    found: dict[tuple[str, str], list[float]] = {}
    errors: dict[str, str] = {}
    for number in range(rounds + 1):  # the first one compiles and warms up
        on_progress(f"round {number} of {rounds}" if number else "loading, recording, compiling")
        for side, process in sides.items():
            if side in errors:
                continue
            assert process.stdin is not None
            assert process.stdout is not None
            try:
                process.stdin.write("round\n")
                process.stdin.flush()
                times_s = json.loads(process.stdout.readline())
            except (OSError, ValueError):
                errors[side] = f"ended with status {process.wait()}: its words are above"
                continue
            for case, time_s in times_s.items() if number else ():
                found.setdefault((case, side), []).append(time_s)
    for process in sides.values():
        process.kill()
        process.wait()
    known = [
        Measurement(benchmark="against", case=case, subject=side, rounds_s=tuple(times_s))
        for (case, side), times_s in found.items()
    ]
    failed = [
        Measurement(benchmark="against", case="all", subject=side, error=error)
        for side, error in errors.items()
    ]
    return known + failed


def _start(checkout: Path, model: str) -> subprocess.Popen[str]:
    own = checkout / ".venv" / "bin" / "python"
    python = str(own) if own.exists() else sys.executable
    paths = (str(checkout), str(Path(__file__).resolve().parents[1]))
    return subprocess.Popen(
        [python, "-m", "umem_bench.before_after", str(checkout), model],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        cwd=checkout,  # `python -m` looks there first
        env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
    )


def _serve(checkout: str, model: str) -> None:
    import umem

    if not Path(str(umem.__file__)).resolve().is_relative_to(checkout):
        sys.exit(f"{umem.__file__} is not the umem of {checkout}: build it in a .venv there")
    cases = dict(_cases(model))
    for _ in sys.stdin:
        times_s = {case: measure() for case, measure in cases.items()}
        print(json.dumps(times_s), flush=True)


def _cases(model: str) -> Iterator[tuple[str, Callable[[], float]]]:
    """Functions that measure a case once and return seconds."""
    import torch

    import umem
    from umem.hardware import with_durations

    on_gpu = torch.cuda.is_available()
    if on_gpu:
        umem.enable("sft")  # before anything starts CUDA
    hardware = umem.load_hardware("gh200-96")
    policy = _resolved(_PAGES, hardware)
    trace = with_durations(_moved("model_trace")(model, "sft", batch=2), hardware)
    paging = umem.plan(trace, hardware, policy, "fault")  # the same work for both sides

    def once(call: Callable[[], object]) -> Callable[[], float]:
        return lambda: time_calls(call, 1)[1][0]

    yield f"plan of {model}, sft", once(lambda: umem.plan(trace, hardware, policy))
    yield "simulation of paging", once(lambda: umem.simulate(trace, paging, hardware, policy))
    config = _moved("native_config")(policy)
    allocator = _moved("native")().Allocator.on_host(config, 80 << 30)

    def pairs(passes: int) -> None:
        for _ in range(passes):
            allocator.free(allocator.malloc(1 << 20))

    yield "1 MiB, native core over host memory", _looped(pairs)
    if on_gpu:
        from umem_bench.allocators import SHAPES, alloc_loop, train_steps

        yield "1 MiB through torch", _looped(alloc_loop(1 << 20))
        shape = SHAPES["small"]
        train = train_steps(shape, "sft")
        batch = torch.randint(0, shape.vocabulary, (shape.batch, shape.tokens), device="cuda")

        def steps(passes: int) -> None:
            for _ in range(passes):
                train(batch)
            torch.cuda.synchronize()

        yield "training step of a small Llama", _looped(steps)


def _looped(loop: Callable[[int], None]) -> Callable[[], float]:
    return lambda: time_loops_s(loop, loops_for(loop, _CASE_S))


def _resolved(policy: dict[str, Any], hardware: Any) -> Any:
    """A policy on a machine, of which umem took the bytes alone once."""
    from umem.policy import load_policy, resolve

    of_bytes = "hardware" not in inspect.signature(resolve).parameters
    return resolve(load_policy(policy), hardware.device_bytes if of_bytes else hardware, {})


def _moved(name: str) -> Any:
    for module in _MOVED[name]:
        try:
            return getattr(importlib.import_module(module), name)
        except (ImportError, AttributeError):
            continue
    raise ImportError(f"{name} is in none of {', '.join(_MOVED[name])}")


if __name__ == "__main__":
    _serve(*sys.argv[1:])
