"""Time to record, plan and simulate a training step, without a GPU."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from umem import TensorClass, UmemError
from umem.core.units import format_bytes
from umem_bench.results import Measurement, Run, median
from umem_bench.tables import Check, Table, provenance, seconds
from umem_bench.timing import time_calls

if TYPE_CHECKING:
    from umem import Hardware, Trace
    from umem.policy import ResolvedPolicy

__all__ = [
    "MODELS",
    "RANKS",
    "SETTINGS",
    "checks",
    "heading",
    "live_bytes",
    "run_planning",
    "share_of_state",
    "tables",
]

MODELS = ("llama-2-7b", "llama-2-13b", "llama-2-70b")
RANKS = 64
"""They share the state of a model whose step fits no single machine."""

SETTINGS: dict[str, Any] = {"hardware": "gh200-96", "policy": "managed", "batch": 2, "seq": 2048}

MAX_PLANNING_S = 3.0
"""Limit for planning and one simulation of full fine-tuning of Llama-2-7B, once compiled."""

_COMPILE_LIMIT_S = 600.0
_Progress = Callable[[str], None]


def run_planning(
    models: Sequence[str],
    modes: Sequence[str],
    *,
    rounds: int,
    first_plans: bool = True,
    on_progress: _Progress,
) -> list[Measurement]:
    """Measure recording, planning and simulation; `first_plans` takes about a minute more.

    Models and modes are those of :mod:`umem.capture.offline`.
    """
    # Before anything is timed: the first recording would pay for loading them.
    on_progress("loading torch and transformers")
    import torch  # noqa: F401
    import transformers  # noqa: F401

    from umem import load_hardware, load_policy
    from umem.capture.offline import model_trace
    from umem.policy import resolve

    hardware = load_hardware(SETTINGS["hardware"])
    policy = resolve(load_policy(SETTINGS["policy"]), hardware, {})
    found: list[Measurement] = []
    for model in models:
        for mode in modes:
            on_progress(f"{model}, {mode}")
            began_s = time.perf_counter()
            trace = model_trace(model, mode, batch=SETTINGS["batch"], seq=SETTINGS["seq"])
            record_s = time.perf_counter() - began_s
            found += _workload(trace, record_s, hardware, policy, rounds)
    if first_plans:
        found += _first_plans(on_progress)
    return found


def _workload(
    trace: Trace, record_s: float, hardware: Hardware, policy: ResolvedPolicy, rounds: int
) -> Iterator[Measurement]:
    """The recording, then every planner."""
    from umem.hardware import with_durations
    from umem.pages.plan import PLANNERS, plan
    from umem.pages.simulate import simulate
    from umem.trace import save_trace

    budget_bytes = policy.device_budget_bytes or hardware.device_bytes
    if live_bytes(trace) > budget_bytes + hardware.host_bytes:
        trace = share_of_state(trace, RANKS)
    trace = with_durations(trace, hardware)
    with tempfile.TemporaryDirectory(prefix="umem-bench-") as folder:
        path = Path(folder, "trace.npz")
        save_trace(trace, path)
        figures = {
            "phases": trace.phase_count,
            "tensors": trace.tensor_count,
            "accesses": len(trace.access_tensor),
            "peak_live_bytes": live_bytes(trace),
            "budget_bytes": budget_bytes,
            "trace_bytes": path.stat().st_size,
        }
        yield Measurement(
            benchmark="recording",
            case=trace.name,
            subject="umem",
            rounds_s=(record_s,),
            figures=figures,
        )
        for planner in PLANNERS:
            make = partial(plan, trace, hardware, policy, planner)
            simulate(trace, make(), hardware, policy)  # compiles, or loads what is compiled
            schedule, plan_s = time_calls(make, rounds)
            again = partial(simulate, trace, schedule, hardware, policy)
            report, simulate_s = time_calls(again, rounds)
            yield Measurement(
                benchmark="plan",
                case=trace.name,
                subject=planner,
                rounds_s=plan_s,
                figures={
                    "simulate_s": median(simulate_s) or 0.0,
                    "hints": schedule.hint_count,
                    "step_s": report.step_s,
                    "lower_bound_s": report.lower_bound_s,
                },
            )


def _first_plans(on_progress: _Progress) -> Iterator[Measurement]:
    """The first plans of a process, with an empty numba cache and with what that process kept."""
    with tempfile.TemporaryDirectory(prefix="umem-bench-") as folder:
        for case in ("nothing compiled before", "from numba's cache"):
            on_progress(f"first plans of a process, {case}")
            done = subprocess.run(
                [sys.executable, "-m", "umem_bench.compile_planner"],
                capture_output=True,
                text=True,
                check=False,
                env={**os.environ, "NUMBA_CACHE_DIR": folder},
                timeout=_COMPILE_LIMIT_S,
            )
            if done.returncode:
                last = done.stderr.strip().splitlines()[-1:]
                raise UmemError(f"the first plans of a new process failed: {' '.join(last)}")
            yield Measurement(
                benchmark="first plans", case=case, subject="all planners",
                rounds_s=(float(done.stdout),),
            )  # fmt: skip


def live_bytes(trace: Trace) -> int:
    """The most that is allocated in any phase."""
    change = np.zeros(trace.phase_count + 1, np.int64)
    np.add.at(change, trace.first_phase, trace.tensor_bytes)
    np.subtract.at(change, trace.last_phase + 1, trace.tensor_bytes)
    return int(np.cumsum(change).max())


def share_of_state(trace: Trace, ranks: int) -> Trace:
    """The step of one of several ranks that share the state of the model evenly.

    Weights, gradients, optimizer state and what the optimizer allocates for a moment have their
    bytes divided by `ranks`, rounded up; so have the optimizer's phases their work. Activations and
    all other phases are those of the whole step. The whole weights that ranks gather for each
    layer, and the time of doing so, are not in it.
    """
    from umem.trace import check_trace

    state = (TensorClass.WEIGHTS, TensorClass.GRADIENTS, TensorClass.OPTIMIZER_STATE)
    shared = np.isin(trace.tensor_class, [it.number for it in state])
    shared |= (trace.tensor_class == TensorClass.OTHER.number) & ~trace.persistent
    steps = np.array([name.startswith("optimizer ") for name in trace.phase_names])
    made = replace(
        trace,
        name=f"{trace.name}, 1/{ranks} of the state",
        tensor_bytes=np.where(shared, -(-trace.tensor_bytes // ranks), trace.tensor_bytes),
        flops=np.where(steps, trace.flops / ranks, trace.flops),
        memory_bytes=np.where(steps, -(-trace.memory_bytes // ranks), trace.memory_bytes),
    )
    check_trace(made, made.name)
    return made


# ---- tables and checks ----


def heading(run: Run) -> str:
    """One line that says where, when and with what a run was made."""
    settings = run.header.settings
    assert isinstance(settings, dict)
    return provenance(
        run.header,
        f"plans for {settings['hardware']}, policy {settings['policy']}",
        f"batch {settings['batch']}, sequence {settings['seq']}",
        f"medians of {settings['rounds']} rounds",
    )


def tables(run: Run) -> Iterator[Table]:
    """The recorded steps, their plans, the first plans of a process, and growth."""
    columns = ("workload", "phases", "tensors", "uses", "live at the peak", "device budget")
    yield Table(
        "Recorded steps",
        (*columns, "recording it", "trace file"),
        [
            (
                it.case,
                *(f"{it.figures[name]:,.0f}" for name in ("phases", "tensors", "accesses")),
                format_bytes(int(it.figures["peak_live_bytes"])),
                format_bytes(int(it.figures["budget_bytes"])),
                seconds(median(it.rounds_s)),
                format_bytes(int(it.figures["trace_bytes"])),
            )
            for it in run.measurements("recording")
        ],
    )
    columns = ("workload", "planner", "planning", "a simulation", "hints", "predicted step")
    yield Table(
        "Plans, once compiled",
        (*columns, "over the lower bound"),
        [
            (
                it.case,
                it.subject,
                seconds(median(it.rounds_s)),
                seconds(it.figures["simulate_s"]),
                f"{it.figures['hints']:,.0f}",
                seconds(it.figures["step_s"]),
                f"{it.figures['step_s'] / it.figures['lower_bound_s']:.3f}",
            )
            for it in run.measurements("plan")
        ],
    )
    if first := run.measurements("first plans"):
        yield Table(
            "The first plans of a process after its imports, one by each planner, each simulated",
            tuple(it.case for it in first),
            [tuple(seconds(median(it.rounds_s)) for it in first)],
        )


def checks(run: Run) -> Iterator[Check]:
    """Hold planning of full fine-tuning of Llama-2-7B against its limit."""
    subject = "llama-2-7b-sft, planned: planning and a simulation"
    for it in run.measurements("plan"):
        if (it.case, it.subject) == ("llama-2-7b-sft", "planned"):
            took_s = (median(it.rounds_s) or 0.0) + it.figures["simulate_s"]
            words = f"{seconds(took_s)}, below {seconds(MAX_PLANNING_S)}"
            yield Check(subject, took_s < MAX_PLANNING_S, words)
            return
    yield Check(subject, None, "not measured")
