"""Time to record, plan and simulate a step: known models, and networks of more and more layers."""

from __future__ import annotations

import cProfile
import platform
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from umem._version import __version__
from umem.hardware import Hardware, load_hardware, with_durations
from umem.policy import ResolvedPolicy, load_policy, resolve
from umem_bench._first_plan import time_first_use
from umem_bench._scaled import peak_live_bytes, share_of_state, with_layers
from umem_bench._timing import no_garbage_collection
from umem_bench.planning_results import (
    GrowthPoint,
    PlannerTimes,
    PlanningMachine,
    PlanningRun,
    PlanningSettings,
    SimulatorTimes,
    WorkloadTimes,
)

if TYPE_CHECKING:
    from umem.core.schedule import Schedule
    from umem.trace import Trace

__all__ = ["DEFAULT_MODELS", "GROWTH_LAYERS", "GROWTH_MODEL", "RANKS", "run_planning"]

DEFAULT_MODELS = ("llama-2-7b", "llama-2-13b", "llama-2-70b")
GROWTH_MODEL = "llama-2-7b"
GROWTH_LAYERS = (8, 16, 32, 64, 128, 256, 512, 690)
"""Of that model; 690 make 100,000 phases."""

RANKS = 64
"""That share the state of a model whose step fits no single machine."""

BATCH, SEQ, WINDOW = 2, 2048, 8

_GROWTH_ROUNDS = 3

_Result = TypeVar("_Result")
_Progress = Callable[[str], None]


@dataclass(frozen=True)
class _Setting:
    """The machine that is planned for."""

    hardware: Hardware
    policy: ResolvedPolicy


def run_planning(
    models: Sequence[str],
    modes: Sequence[str],
    *,
    hardware: str = "gh200-96",
    policy: str = "sft",
    rounds: int = 5,
    growth_model: str = GROWTH_MODEL,
    growth_layers: Sequence[int] = GROWTH_LAYERS,
    first_use: bool = True,
    on_progress: _Progress,
) -> PlanningRun:
    """Measure recording, planning and simulation.

    Parameters
    ----------
    models, modes
        Of :data:`umem.trace.MODELS` and :data:`umem.trace.MODES`.
    hardware, policy
        A profile's and a preset's name, or files.
    rounds
        Times that each thing is timed; those that grow, 3 times at most.
    growth_model, growth_layers
        Model and numbers of layers for which growth is measured; without any, it is not.
    first_use
        Whether to time the first plans of a new process, which takes about a minute.
    on_progress
        Called with a few words now and then.

    Raises
    ------
    UmemError
        If something cannot be recorded or planned.
    """
    # Once, before anything is timed: the first recording pays for loading them.
    on_progress("loading torch and transformers")
    import torch  # noqa: F401
    import transformers  # noqa: F401

    machine = load_hardware(hardware)
    setting = _Setting(machine, resolve(load_policy(policy), machine.device_bytes))
    traces = [_record(model, mode, on_progress) for model in models for mode in modes]
    first = time_first_use(traces[0][0], hardware, policy, on_progress) if first_use else None
    workloads = [
        _workload(trace, record_s, setting, rounds, on_progress) for trace, record_s in traces
    ]
    growth: list[GrowthPoint] = []
    if growth_layers:
        known = [trace for trace, _ in traces if trace.name == f"{growth_model}-sft"]
        base = known[0] if known else _record(growth_model, "sft", on_progress)[0]
        for layers in growth_layers:
            growth += _grow(base, layers, setting, min(rounds, _GROWTH_ROUNDS), on_progress)
    return PlanningRun(
        date=datetime.now(UTC).isoformat(timespec="seconds"),
        machine=_machine(),
        settings=PlanningSettings(
            hardware=machine.name,
            policy=setting.policy.name,
            window=WINDOW,
            batch=BATCH,
            seq=SEQ,
            rounds=rounds,
        ),
        first_use=first,
        workloads=tuple(workloads),
        growth=tuple(growth),
    )


def _record(model: str, mode: str, on_progress: _Progress) -> tuple[Trace, float]:
    from umem.capture.offline import model_trace

    on_progress(f"{model}, {mode}: recording")
    began_s = time.perf_counter()
    trace = model_trace(model, mode, batch=BATCH, seq=SEQ)
    return trace, time.perf_counter() - began_s


def _workload(
    recorded: Trace, record_s: float, setting: _Setting, rounds: int, on_progress: _Progress
) -> WorkloadTimes:
    from umem.planning import PLANNERS, plan_key
    from umem.trace import save_trace

    hardware = setting.hardware
    fits = peak_live_bytes(recorded) <= _budget_bytes(setting) + hardware.host_bytes
    ranks = 1 if fits else RANKS
    trace = with_durations(recorded if fits else share_of_state(recorded, ranks), hardware)
    with tempfile.TemporaryDirectory(prefix="umem-bench-") as folder:
        path = Path(folder, "trace.npz")
        save_trace(trace, path)
        trace_bytes = path.stat().st_size
    planners = []
    for planner in PLANNERS:
        on_progress(f"{trace.name}: {planner}")
        planners.append(_planner(trace, setting, planner, rounds))
    on_progress(f"{trace.name}: simulators of demand paging")
    _, key_s = _timed(
        lambda: plan_key(trace, hardware, setting.policy, "planned", window=WINDOW), rounds
    )
    return WorkloadTimes(
        name=trace.name,
        model=str(recorded.metadata["model"]),
        mode=str(recorded.metadata["mode"]),
        ranks=ranks,
        phases=trace.phase_count,
        tensors=trace.tensor_count,
        accesses=len(trace.access_tensor),
        record_s=record_s,
        trace_bytes=trace_bytes,
        peak_live_bytes=peak_live_bytes(trace),
        budget_bytes=_budget_bytes(setting),
        key_s=key_s,
        planners=tuple(planners),
        simulators=tuple(_simulators(trace, setting, rounds)),
    )


def _planner(trace: Trace, setting: _Setting, planner: str, rounds: int) -> PlannerTimes:
    from umem.planning import load_schedule, plan, plan_key, save_schedule
    from umem.simulation import simulate

    hardware, policy = setting.hardware, setting.policy

    def make() -> Schedule:
        return plan(trace, hardware, policy, planner, window=WINDOW)

    schedule, simulations = _count_simulations(make)  # and compile, or load what is compiled
    schedule, plan_s = _timed(make, rounds)
    simulate(trace, schedule, hardware, policy)
    report, simulate_s = _timed(lambda: simulate(trace, schedule, hardware, policy), rounds)
    key = plan_key(trace, hardware, policy, planner, window=WINDOW)
    with tempfile.TemporaryDirectory(prefix="umem-bench-") as folder:
        path = Path(folder, "plan.npz")
        _, store_s = _timed(lambda: save_schedule(schedule, path, key=key), rounds)
        _, load_s = _timed(lambda: load_schedule(path, trace, key=key), rounds)
        plan_bytes = path.stat().st_size
    return PlannerTimes(
        planner=planner,
        plan_s=plan_s,
        simulate_s=simulate_s,
        simulations=simulations,
        hints=schedule.hint_count,
        plan_bytes=plan_bytes,
        store_s=store_s,
        load_s=load_s,
        step_s=report.step_s,
        ideal_s=report.ideal_s,
        lower_bound_s=report.lower_bound_s,
    )


def _simulators(trace: Trace, setting: _Setting, rounds: int) -> list[SimulatorTimes]:
    """Demand paging by umem's engine and by plain Python, each for one step in steady state."""
    from umem.planning import plan
    from umem.simulation import run, simulate
    from umem_bench._python_lru import PythonLru

    hardware, policy = setting.hardware, setting.policy
    schedule = plan(trace, hardware, policy, "fault")
    outcome, run_s = _timed(lambda: run(trace, schedule, hardware, policy), rounds)
    report = simulate(trace, schedule, hardware, policy)
    results = [
        SimulatorTimes(
            simulator="umem",
            unit_bytes=hardware.block_bytes,
            units=_block_count(trace, hardware),
            step_s=tuple(seconds / outcome.steps for seconds in run_s),
            to_device_bytes=report.moved_bytes("to_device"),
        )
    ]
    for unit_bytes in (hardware.block_bytes, None):
        python = PythonLru(trace, _budget_bytes(setting), unit_bytes)
        for _ in range(outcome.steps - 1):
            python.step()
        moved_bytes, step_s = _timed(python.step, rounds)
        results.append(
            SimulatorTimes(
                simulator="plain Python",
                unit_bytes=unit_bytes,
                units=python.unit_count,
                step_s=step_s,
                to_device_bytes=moved_bytes,
            )
        )
    return results


def _grow(
    base: Trace, layers: int, setting: _Setting, rounds: int, on_progress: _Progress
) -> list[GrowthPoint]:
    """Plan and simulate so many layers, on a machine whose memories have grown as the step has."""
    from umem.planning import PLANNERS, plan
    from umem.simulation import simulate

    trace = with_layers(base, layers)
    growth = peak_live_bytes(trace) / peak_live_bytes(base)
    hardware = replace(
        setting.hardware,
        device_bytes=int(setting.hardware.device_bytes * growth),
        host_bytes=int(setting.hardware.host_bytes * growth),
    )
    policy = replace(setting.policy, device_budget_bytes=int(_budget_bytes(setting) * growth))
    trace = with_durations(trace, hardware)
    points = []
    for planner in PLANNERS:
        on_progress(f"{layers} layers: {planner}")

        def both(planner: str = planner) -> None:
            schedule = plan(trace, hardware, policy, planner, window=WINDOW)
            simulate(trace, schedule, hardware, policy)

        _, simulations = _count_simulations(both)
        # Of the processor: others at work make long calls longer, and spare some short ones.
        _, times_s = _timed(both, rounds, clock=time.process_time)
        points.append(
            GrowthPoint(
                layers=layers,
                phases=trace.phase_count,
                tensors=trace.tensor_count,
                accesses=len(trace.access_tensor),
                blocks=_block_count(trace, hardware),
                planner=planner,
                times_s=times_s,
                simulations=simulations,
            )
        )
    return points


def _timed(
    call: Callable[[], _Result], rounds: int, clock: Callable[[], float] = time.perf_counter
) -> tuple[_Result, tuple[float, ...]]:
    """The call's last answer, and how long it takes: seconds, by round."""
    times_s = []
    with no_garbage_collection():
        for _ in range(rounds):
            began_s = clock()
            result = call()
            times_s.append(clock() - began_s)
    return result, tuple(times_s)


def _count_simulations(call: Callable[[], _Result]) -> tuple[_Result, int]:
    """The call's answer, and how often it simulates a schedule until the step is steady."""
    from umem.simulation import run

    profile = cProfile.Profile()
    result = profile.runcall(call)
    return result, sum(
        entry.callcount for entry in profile.getstats() if entry.code is run.__code__
    )


def _block_count(trace: Trace, hardware: Hardware) -> int:
    return int((-(-trace.tensor_bytes // hardware.block_bytes)).sum())


def _budget_bytes(setting: _Setting) -> int:
    budget = setting.policy.device_budget_bytes
    return setting.hardware.device_bytes if budget is None else budget


def _machine() -> PlanningMachine:
    from umem.doctor import collect

    environment = collect()
    return PlanningMachine(
        cpu=environment.host.cpu_model,
        cpu_count=environment.host.cpu_count,
        system=environment.host.system,
        python=platform.python_version(),
        umem=__version__,
        numpy=_version("numpy"),
        numba=_version("numba"),
        torch=_version("torch"),
        transformers=_version("transformers"),
    )


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None
