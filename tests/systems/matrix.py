"""Runs the programs of many systems as they are and under `umem run`, and compares.

``python tests/systems/matrix.py --output FILE`` with ``benchmarks`` in PYTHONPATH; `make systems`
does so. Each run is a process of its own, or one for each rank, never two runs at a time: stock
twice, umem without a budget, and umem within a share of stock's peak.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import re
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeVar, get_args

from umem_bench.card import Card, MemorySampler
from umem_bench.card_processes import Peaks
from umem_bench.machine import git_commit, header
from umem_bench.processes import end_status, environment
from umem_bench.results import Header, ProcessResult, read_records, write_records
from umem_bench.rows import continued, memory_ran_out, require_gpu, run_missing, why_no_time
from umem_bench.tables import NOTHING, Table, notes_table, print_tables, provenance, size_text
from umem_bench.training.tables import exceeds_budget, peak_and_base

from umem import UmemError
from umem.cuda import bindings

if TYPE_CHECKING:
    from forked_programs import ForkedPrograms

PROGRAMS = Path(__file__).resolve().parent / "programs"

BUDGET_PERCENT = 60
"""Of the card memory that stock's tensors take at their peak."""

GOAL_PERCENT = 80
"""Of stock's speed, within `BUDGET_PERCENT`."""

MANAGED_LIMIT = "8GiB"
SHARED_MANAGED_LIMIT = "512MiB"
"""Where other programs use the card, too: all together stay below a machine's limit."""

PROCESS_LIMIT_S = 240.0
"""For one run; what is compiled on a machine's first run counts."""

CARD_PATIENCE_S = 60.0
"""For the card to be as empty as at its beginning: others may use it for a while."""

UMEM = (sys.executable, "-c", "from umem.cli import main; main()", "run")
"""The command ``umem run``, wherever its script is installed."""

TORCHRUN = (sys.executable, "-m", "torch.distributed.run", "--standalone")

Size = Literal["tiny", "small", "large", "xlarge"]
STEPS: dict[Size, int] = {"tiny": 4, "small": 20, "large": 24, "xlarge": 20}

Variant = Literal[
    "stock",
    "stock-again",
    "umem",
    "umem-budget",
    "umem-fallback",
    "umem-budget-40",
    "checkpoints",
    "umem-at-checkpoints",
]
GPU_VARIANTS: tuple[Variant, ...] = ("stock", "stock-again", "umem", "umem-budget")
CPU_VARIANTS: tuple[Variant, ...] = ("stock", "stock-again", "umem-fallback")
GOAL_VARIANTS: tuple[Variant, ...] = (
    *GPU_VARIANTS,
    *("umem-budget-40", "checkpoints", "umem-at-checkpoints"),
)
_CHECKPOINTS: tuple[Variant, ...] = ("checkpoints", "umem-at-checkpoints")

_BUDGETS: dict[Variant, tuple[Variant, int]] = {
    "umem-budget": ("stock", BUDGET_PERCENT),
    "umem-budget-40": ("stock", 40),
    "umem-at-checkpoints": ("checkpoints", 100),
}
"""Percent of the card memory that another variant's tensors take at their peak."""

_NO_BUDGET: tuple[Variant, int] = ("stock", 0)


@dataclass(frozen=True)
class System:
    """How a program is started, and what it needs."""

    packages: tuple[str, ...] = ()
    """Distributions that it imports, beside torch."""
    program: str = ""
    """Its file's name, if it is not the system's."""
    options: tuple[str, ...] = ()
    """Of the program, beside those of all."""
    policy: str = "sft"
    launched: bool = False
    """By torchrun."""
    gpus: Literal[0, 1, 2] = 0
    """That it needs: of two, each for a rank; with none it also runs on the CPU."""
    writer: int = 0
    """The rank whose figures are told, and whose GPU's."""
    checkpoints: bool = False
    """Whether it can run its blocks within checkpoints of its own."""

    @property
    def can_be_forked(self) -> bool:
        """Whether it needs neither a launcher nor what starts CUDA when it is imported."""
        return not self.launched and "bitsandbytes" not in self.packages


FIELDS: dict[str, System] = {
    "residual_net": System(checkpoints=True),
    # Which algorithms a search finds depends on the moment, and so do the bits.
    "residual_net_search": System(program="residual_net", options=("--search",), checkpoints=True),
    "vision_transformer": System(checkpoints=True),
    "vision_transformer_autocast": System(
        program="vision_transformer", options=("--autocast",), checkpoints=True
    ),
    "diffusion": System(checkpoints=True),
    "translation": System(("transformers",), checkpoints=True),
    "lstm": System(),
    "lstm_by_hand": System(program="lstm", options=("--by-hand",)),
    "cells": System(checkpoints=True),
    "graph_net": System(checkpoints=True),
    "gan": System(checkpoints=True),
    "contrastive": System(checkpoints=True),
    "preferences": System(("transformers",), checkpoints=True),
    "group_rewards": System(("transformers",), checkpoints=True),
    "gpt": System(checkpoints=True),
    "volumes": System(checkpoints=True),
}
"""Programs of other fields, which need no system."""

SYSTEMS: dict[str, System] = {
    "hf_trainer_sft": System(("transformers", "accelerate")),
    "hf_trainer_device_map": System(
        ("transformers", "accelerate"), program="hf_trainer_sft", options=("--device-map", "auto")
    ),
    "hf_trainer_lora": System(("transformers", "accelerate", "peft"), policy="lora"),
    "hf_trainer_qlora": System(
        ("transformers", "accelerate", "peft", "bitsandbytes"), policy="lora"
    ),
    "trl_sft": System(("transformers", "accelerate", "datasets", "trl")),
    "accelerate_loop": System(("transformers", "accelerate")),
    "lightning_fit": System(("transformers", "lightning")),
    "torch_compile": System(("transformers",)),
    "deepspeed_zero2": System(("transformers", "deepspeed"), launched=True),
    "deepspeed_zero3": System(("transformers", "deepspeed"), launched=True),
    "fsdp2": System(("transformers",), launched=True),
    "ddp": System(("transformers",), launched=True),
    "megatron_core": System(("megatron-core",), launched=True, gpus=1),
    "megatron_core_tensor": System(
        ("megatron-core",),
        program="megatron_core",
        options=("--parallel", "tensor"),
        launched=True,
        gpus=2,
    ),
    # The last stage has the logits, and takes the most memory: the budget goes by it.
    "megatron_core_pipeline": System(
        ("megatron-core",),
        program="megatron_core",
        options=("--parallel", "pipeline"),
        launched=True,
        gpus=2,
        writer=1,
    ),
    "transformer_lens_forward": System(("transformer-lens",), policy="inference"),
    "transformer_lens_cache": System(("transformer-lens",), policy="inference"),
    "transformer_lens_two_devices": System(
        ("transformer-lens",),
        program="transformer_lens_cache",
        options=("--devices", "2"),
        policy="inference",
        gpus=2,
    ),
    "hf_generate": System(("transformers",), policy="inference"),
    **FIELDS,
}
"""Name of a system, mostly its program's -> how it is started."""

Row = tuple[str, Variant]
"""System and variant: what one process runs."""

_MODULES = {"megatron-core": "megatron.core", "transformer-lens": "transformer_lens"}
"""Where a distribution's module is not named as it is."""

_SETTLED_SHARE = 3
"""The last 1/3 of the steps are timed: umem measures and plans in those before."""

_AS_FAST, _LEAST_STEPS = 1.15, 3
"""A processor is as fast as another one that takes 1/1.15 of its time; and so many such steps make
a figure."""

_EQUAL_SHARE = 0.02
"""By which equal runs differ."""

_T = TypeVar("_T")

_PLAN = re.compile(r":umem:umem: (?:weights, )?plan \d+: |:umem:umem: \w+ under the budget of ")
_NOTE = re.compile(
    r"(?:WARNING:umem:(?:umem: )?|INFO:umem:umem: (?=.* not (?:managed|streamed))"
    r"|^umem: (?=.* of each step went to memory))(.*)$",
    re.MULTILINE,
)
_PLAN_ENDS = ("not measured any more", "the executor ends", "are not managed")
_ERROR = re.compile(r"^(?:\[rank\d+\]: ?)?([\w.]*(?:Error|Exception|Interrupt)\b.*)$", re.MULTILINE)
_MOST_NOTES = 3
_ABSENT = ("not installed", "not comparable")
_END_S = 40.0
"""For a process that was told to end: torchrun waits 30 s for its own."""


class SystemResult(ProcessResult):
    """One variant of one system. `plan_running`: umem logged a plan, and no end of it."""

    kind: Literal["system"] = "system"
    system: str
    variant: Variant
    commit: str | None = None
    weights_hex: str | None = None
    """A checksum of those behind the last step, and of buffers; None in older files."""
    work_s: tuple[float, ...] = ()
    """Of work that is always the same, behind each step: how fast the processor was."""
    peak_allocated_bytes: int | None = None
    host_process_bytes: int | None = None
    """VmHWM. Page-locked memory that the driver allocates is not in it."""
    host_locked_bytes: int | None = None
    """Of older files: VmLck and VmPin, in which the driver's page-locked memory is not."""


@dataclass(frozen=True)
class Matrix:
    """The content of a results file."""

    header: Header
    results: tuple[SystemResult, ...]

    def row(self, system: str, variant: Variant) -> SystemResult | None:
        """What a system's run of this variant gave."""
        return find(self.results, system, variant)


def find(
    results: Iterable[SystemResult], system: str, variant: Variant, state: str | None = None
) -> SystemResult | None:
    """The result of a system and variant, in this state if one is named."""
    return next(
        (
            it
            for it in results
            if (it.system, it.variant) == (system, variant) and state in (None, it.state)
        ),
        None,
    )


# ---- running ----


@dataclass(frozen=True)
class Runner:
    """Runs rows; without a card on the CPU."""

    size: Size
    steps: int
    deterministic: bool
    cards: tuple[Card, ...]
    """Each rank's."""
    ranks: int
    """Of systems that are launched."""
    end_s: float
    say: Callable[[str], None]
    forked: ForkedPrograms | None = None
    """Starts the systems that can be forked; without it all are started anew."""
    peaks: Peaks | None = None
    """Of processes, where other programs use the first card meanwhile; else all of it is read."""
    logs: Path | None = None
    """A folder for what programs print, plans among it."""

    def measure(
        self, row: Row, known: Sequence[SystemResult], tried: SystemResult | None
    ) -> SystemResult:
        """Run a row in a process of its own, unless there is a reason not to."""
        name, variant = row
        system = SYSTEMS[name]
        told: dict[str, Any] = {"system": name, "variant": variant, "commit": git_commit()}
        if lacking := [it for it in system.packages if not is_installed(it)]:
            reason = f"it lacks {', '.join(lacking)}"
            return SystemResult(**told, state="not installed", reason=reason)
        if reason := self._why_not_comparable(system, variant):
            return SystemResult(**told, state="not comparable", reason=reason)
        own = [it for it in known if it.system == name]
        reason = why_no_time(variant, own, tried, self.end_s - time.monotonic())
        reason = reason or self._why_not_idle()
        whose, percent = _BUDGETS.get(variant, _NO_BUDGET)
        base = find(own, name, whose, "measured")
        if variant != "stock" and base is None:
            reason = f"{whose} was not measured"
        elif percent and base is not None:
            told["budget_bytes"] = _working_set_bytes(base) * percent // 100
        if reason:
            return SystemResult(**told, state="left out", reason=reason)
        left_s = self.end_s - time.monotonic()
        self.say(f"{name}, {variant}: at most {left_s:.0f} s are left")
        told |= self._run(name, variant, told.get("budget_bytes"), left_s)
        result = SystemResult(**told | memory_ran_out(told))
        self.say(_line(result))
        return result

    def _why_not_comparable(self, system: System, variant: Variant) -> str:
        if variant in _CHECKPOINTS and not system.checkpoints:
            return "it has no checkpoints of its own"
        if system.gpus == 1 and not self.cards:
            return "it needs a GPU"
        if system.gpus == 2 and len(self.cards) != 2:
            return "it needs two GPUs, and --ranks 2"
        return ""

    def _why_not_idle(self) -> str:
        if self.peaks is not None:
            return ""
        end_s = time.monotonic() + CARD_PATIENCE_S
        reasons = (it.why_not_idle(end_s - time.monotonic()) for it in self.cards)
        return next(filter(None, reasons), "")

    def _run(
        self, name: str, variant: Variant, budget_bytes: int | None, left_s: float
    ) -> dict[str, Any]:
        card = self.cards[SYSTEMS[name].writer] if self.cards else None
        if card is not None and self.peaks is None:
            card = card.between_processes()
        began_s = time.monotonic()
        with tempfile.TemporaryDirectory(prefix="umem-systems-") as folder:
            output, log = Path(folder, "output.json"), Path(folder, "log")
            command = [*self.command(name, variant), "--output", str(output)]
            limit_s = max(1.0, min(PROCESS_LIMIT_S, left_s))
            limit = MANAGED_LIMIT if self.peaks is None else SHARED_MANAGED_LIMIT
            variables = _variables(budget_bytes, self.ranks, limit)
            with MemorySampler(card) as sampler, log.open("wb") as log_file:
                if self.forked is not None and SYSTEMS[name].can_be_forked:
                    is_umem = command[: len(UMEM)] == [*UMEM]
                    arguments = ["umem", *command[len(UMEM) - 1 :]] if is_umem else command[1:]
                    status = self.forked.run(
                        arguments, Path(folder), log, log, limit_s, variables=variables
                    )
                else:
                    status = end_status(command, variables, Path(folder), log_file, limit_s, _END_S)
            # Progress bars return to the beginning of their line.
            words = log.read_text(errors="replace").replace("\r", "\n")
            if self.logs is not None:
                self.logs.mkdir(parents=True, exist_ok=True)
                (self.logs / f"{name}-{variant}.log").write_text(words)
            found = json.loads(output.read_text()) if output.exists() else {}
        told: dict[str, Any] = sampler.figures()
        told["process_s"] = time.monotonic() - began_s
        told["notes"] = tuple(dict.fromkeys(_NOTE.findall(words)))[:_MOST_NOTES]
        if status is None:
            reason = f"it did not end within {told['process_s']:.0f} s"
            return told | {"state": "failed", "timed_out": True, "reason": reason}
        if status != 0 or not found:
            return told | {"state": "failed", "reason": _reason(words, status)}
        if self.peaks is not None:
            process_bytes = self.peaks.take(found["process"])
            told |= {"card_peak_bytes": process_bytes, "process_bytes": process_bytes}
        if card is not None and not variant.startswith("umem"):
            used_bytes = found["card_used_bytes"] - card.idle_bytes
            if self.peaks is not None:
                used_bytes = told["process_bytes"] or 0
            told["outside_bytes"] = used_bytes - found["reserved_bytes"]
        if variant.startswith("umem") and variant != "umem-fallback":
            told["plan_running"] = bool(_PLAN.search(words)) and not any(
                end in note for note in told["notes"] for end in _PLAN_ENDS
            )
        kept = ("peak_allocated_bytes", "host_process_bytes", "parameters")
        return (
            told
            | {field: found.get(field) for field in kept}
            | {
                "state": "measured",
                "losses_hex": found["losses"],
                "weights_hex": found["weights"],
                "steps_s": found["seconds"],
                "work_s": found["work_seconds"],
            }
        )

    def command(self, name: str, variant: Variant) -> Iterator[str]:
        """What runs a variant of a system, without its output's path."""
        system = SYSTEMS[name]
        is_umem = variant.startswith("umem")
        if system.launched:
            yield from (*TORCHRUN, f"--nproc-per-node={self.ranks}")
            yield from ("--no-python",) if is_umem else ()
        if is_umem:
            yield from (*UMEM, "--policy", system.policy)
            yield from ("--fallback",) if variant == "umem-fallback" else ()
        elif not system.launched:
            yield sys.executable
        yield str(PROGRAMS / f"{system.program or name}.py")
        yield from system.options
        yield from ("--checkpoints",) if variant == "checkpoints" else ()
        yield from ("--size", self.size, "--steps", str(self.steps))
        yield from ("--writer", str(system.writer))
        yield from ("--deterministic",) if self.deterministic else ()


def is_installed(package: str) -> bool:
    """Whether a distribution's module can be imported."""
    try:
        return importlib.util.find_spec(_MODULES.get(package, package)) is not None
    except ImportError:  # of the package around it
        return False


def _variables(
    budget_bytes: int | None, ranks: int, managed_limit: str = MANAGED_LIMIT
) -> dict[str, str]:
    every = ",".join(map(str, range(ranks)))
    devices = os.environ.get("CUDA_VISIBLE_DEVICES", every).split(",")[:ranks]
    more = {"CUDA_VISIBLE_DEVICES": ",".join(devices), "HF_HUB_OFFLINE": "1"}
    return environment(budget_bytes, managed_limit, **more)


def _reason(log: str, status: int) -> str:
    """The first error that ended a program: launchers add their own below it."""
    errors = [it for it in _ERROR.findall(log) if "ChildFailedError" not in it]
    lines = [line.strip() for line in log.splitlines() if line.strip()]
    return (errors or lines or [""])[-1] or f"ended with status {status}"


def _working_set_bytes(result: SystemResult) -> int:
    """Card memory that tensors take at their peak, without umem."""
    return (result.card_peak_bytes or 0) - (result.outside_bytes or 0)


def _forked(ranks: int) -> ForkedPrograms | None:
    from forked_programs import ForkedPrograms  # of tests/support, which only tests have in reach

    try:
        return ForkedPrograms(["common_imports"], _variables(None, ranks), PROCESS_LIMIT_S)
    except OSError as error:
        print(f"all processes are started anew: {error}", file=sys.stderr, flush=True)
        return None


def run_matrix(
    rows: Sequence[Row],
    runner: Runner,
    on_results: Callable[[Matrix], None],
    earlier: Matrix | None = None,
    *,
    again: bool = False,
) -> Matrix:
    """Run rows one after the other; with `earlier` results those that they lack, or all `again`.

    Raises ``UmemError`` if the earlier results are of other settings, another machine or versions.
    """
    settings = {
        "size": runner.size,
        "steps": runner.steps,
        "deterministic": int(runner.deterministic),
        "budget_percent": BUDGET_PERCENT,
        "ranks": runner.ranks,
    }
    packages = dict.fromkeys(name for it in SYSTEMS.values() for name in it.packages)
    begun = continued(
        earlier, Matrix(header("systems", settings, *packages), ()), same_commit=False
    )
    earlier_results = {(it.system, it.variant): it for it in begun.results}
    return run_missing(begun, rows, earlier_results, runner.measure, on_results, again=again)


# ---- files ----


def write(matrix: Matrix, path: Path) -> None:
    """Write a results file: a line with the provenance, then one for each result."""
    write_records(matrix.header, matrix.results, path)


def read(path: Path) -> Matrix:
    """Read a results file. Raises ``UmemError`` if it is none."""
    return Matrix(*read_records(path, SystemResult, "this matrix"))


# ---- the table ----


def tables(matrix: Matrix) -> Iterator[Table]:
    """All rows; then what umem warned of."""
    columns = (
        *("system", "variant", "losses, weights", "of stock's speed (fastest step)"),
        "at equal speed of the processor",
        *("card's peak (base)", "budget", "plan", "host (process)"),
    )
    # What keeps a system from running at all is said once.
    told = [it for it in matrix.results if it.state not in _ABSENT or it.variant == "stock"]
    yield Table("Systems", columns, [_cells(matrix, it) for it in told])
    noted = [it for it in matrix.results if it.notes]
    yield from notes_table(
        (f"{it.system}, {it.variant}", size_text(it.budget_bytes), it) for it in noted
    )


def goals(matrix: Matrix) -> Iterator[Table]:
    """One row for each system: speed within shares of stock's memory, and beside checkpoints."""
    columns = (
        *("program", "stock's step and memory", "umem", f"within {BUDGET_PERCENT} %"),
        *("within 40 %", "own checkpoints, in a share of the memory", "umem in as much memory"),
        "goal",
    )
    names = dict.fromkeys(it.system for it in matrix.results)
    rows = [_goal_cells(matrix, name) for name in names if matrix.row(name, "umem-budget")]
    title = f"Speed, as a share of stock's (fastest step); the goal is {GOAL_PERCENT} %"
    yield Table(title, columns, rows)


def _goal_cells(matrix: Matrix, name: str) -> tuple[str, ...]:
    stock = matrix.row(name, "stock")
    stock_text = checkpoints_text = NOTHING
    if stock is not None and stock.state == "measured":
        step_ms = 1e3 * statistics.median(_settled(stock.steps_s))
        stock_text = f"{step_ms:.4g} ms, {size_text(_working_set_bytes(stock) or None)}"
    checkpoints = matrix.row(name, "checkpoints")
    if stock is not None and checkpoints is not None:
        checkpoints_text = _goal_cell(matrix, checkpoints)
        if stock.state == checkpoints.state == "measured" and _working_set_bytes(stock):
            percent = 100 * _working_set_bytes(checkpoints) / _working_set_bytes(stock)
            checkpoints_text += f", in {percent:.3g} %"
    variants: tuple[Variant, ...] = ("umem", "umem-budget", "umem-budget-40")
    return (
        name,
        stock_text,
        *(_goal_cell(matrix, matrix.row(name, it)) for it in variants),
        checkpoints_text,
        _goal_cell(matrix, matrix.row(name, "umem-at-checkpoints")),
        _goal_reached(matrix, name),
    )


def _goal_cell(matrix: Matrix, result: SystemResult | None) -> str:
    """Shares of stock's speed, by the median and the fastest step, and what is wrong with it."""
    if result is None or result.state == "not comparable":
        return NOTHING
    share = _share(matrix, result)
    if result.state != "measured" or share is None:
        return result.state
    words = [_speed(matrix, result)]
    stock = matrix.row(result.system, "stock")
    words += ["no plan"] if result.plan_running is False else []
    words += ["over its budget"] if exceeds_budget(result, stock) else []
    if result.variant.startswith("umem") and "differ" in _equality(matrix, result):
        words.append("values differ")
    return ", ".join(words)


def _goal_reached(matrix: Matrix, name: str) -> str:
    """Whether umem has the goal's speed, and that of the program's own checkpoints."""
    names: tuple[Variant, ...] = ("umem-budget", *_CHECKPOINTS)
    rows = [matrix.row(name, it) for it in names]
    budget, own, within = (None if it is None else _share(matrix, it) for it in rows)
    if budget is None:
        return NOTHING
    missed = [f"below {GOAL_PERCENT} %"] if 100 * budget < GOAL_PERCENT else []
    if own is not None and (within is None or within < (1 - _EQUAL_SHARE) * own):
        missed.append("slower than checkpoints")
    if any(row is not None and row.state == "left out" for row in rows):
        missed.append("not all is measured")
    return ", ".join(missed) or "reached"


def _cells(matrix: Matrix, result: SystemResult) -> tuple[str, ...]:
    if result.state != "measured":
        words = f"{result.state}: {result.reason}"
        size = size_text(result.budget_bytes)
        return (result.system, result.variant, words, *[NOTHING] * 3, size, NOTHING, NOTHING)
    stock = matrix.row(result.system, "stock")
    return (
        result.system,
        result.variant,
        _equality(matrix, result),
        _speed(matrix, result),
        _speed_at_equal_processor(matrix, result),
        peak_and_base(result, stock),
        size_text(result.budget_bytes),
        {None: NOTHING, True: "yes", False: "no"}[result.plan_running],
        f"{size_text(result.host_bytes)} ({size_text(result.host_process_bytes)})",
    )


def _equality(matrix: Matrix, result: SystemResult) -> str:
    """Whether losses and last weights are stock's; its own are compared with its second run's.

    Older files have no checksum of the weights.
    """
    other = matrix.row(result.system, "stock-again" if result.variant == "stock" else "stock")
    if other is None or other.state != "measured":
        return NOTHING
    pairs = list(zip(result.losses_hex, other.losses_hex, strict=False))
    differing = next((step for step, (own, its) in enumerate(pairs, 1) if own != its), None)
    are_equal = differing is None and len(result.losses_hex) == len(other.losses_hex)
    words = "equal" if are_equal else f"differ from step {differing or len(pairs) + 1} on"
    if result.weights_hex is None or other.weights_hex is None:
        return words
    return f"{words}, {'equal' if result.weights_hex == other.weights_hex else 'differ'}"


def _settled(values: Sequence[_T]) -> Sequence[_T]:
    """Those of the last steps."""
    return values[-max(1, len(values) // _SETTLED_SHARE) :]


def _speed(matrix: Matrix, result: SystemResult) -> str:
    """By the faster of stock's runs: on a busy host they differ.

    There the fastest step of each run says more than the median.
    """
    shares = _share(matrix, result), _share(matrix, result, min)
    settled, fastest = (NOTHING if it is None else f"{100 * it:.3g} %" for it in shares)
    return f"{settled} ({fastest})" if fastest != NOTHING else NOTHING


def _share(
    matrix: Matrix, result: SystemResult, of: Callable[[Sequence[float]], float] = statistics.median
) -> float | None:
    """Part of stock's speed, by one of a run's settled steps."""
    stock = [_settled(it.steps_s) for it in _stock(matrix, result) if it.steps_s]
    own = _settled(result.steps_s)
    return min(map(of, stock)) / of(own) if stock and own else None


def _speed_at_equal_processor(matrix: Matrix, result: SystemResult) -> str:
    """By the steps of either in which the processor was as fast as in most of stock's.

    Some hosts' processors are slower for seconds, in whichever process runs then.
    """
    stock = [pair for it in _stock(matrix, result) for pair in _settled(_steps_and_work(it))]
    if len(stock) < _LEAST_STEPS:
        return NOTHING
    lower_quartile, *_ = statistics.quantiles((work_s for _, work_s in stock), n=4)
    fast, own = (
        [step_s for step_s, work_s in pairs if work_s <= _AS_FAST * lower_quartile]
        for pairs in (stock, _settled(_steps_and_work(result)))
    )
    if min(len(fast), len(own)) < _LEAST_STEPS:
        return NOTHING
    return f"{100 * statistics.median(fast) / statistics.median(own):.3g} %"


def _steps_and_work(result: SystemResult) -> list[tuple[float, float]]:
    return list(zip(result.steps_s, result.work_s, strict=False))


def _stock(matrix: Matrix, result: SystemResult) -> list[SystemResult]:
    runs = [matrix.row(result.system, it) for it in ("stock", "stock-again")]
    return [it for it in runs if it is not None]


def _line(result: SystemResult) -> str:
    words = f"{result.system}, {result.variant}"
    settled = _settled(result.steps_s)
    if result.state != "measured" or not settled:
        return f"{words}: {result.state}: {result.reason}"
    step_ms = 1e3 * statistics.median(settled)
    return f"{words}: {step_ms:.4g} ms a step, {result.process_s:.1f} s in all"


def show(matrix: Matrix, *, as_markdown: bool, only_goals: bool = False) -> None:
    """Print the tables."""
    settings = matrix.header.settings
    assert isinstance(settings, dict)
    words = (
        f"size {settings['size']}, {settings['steps']} steps",
        f"{settings['ranks']} ranks" if settings.get("ranks", 1) != 1 else "",
        "deterministic algorithms" if settings["deterministic"] else "",
        f"medians of the last 1/{_SETTLED_SHARE} of the steps",
    )
    shown = goals(matrix) if only_goals else tables(matrix)
    print_tables(provenance(matrix.header, *words), shown, as_markdown=as_markdown)


# ---- the command ----


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--systems", help="default: all but programs of other fields")
    parser.add_argument(
        "--goals",
        action="store_true",
        help="run programs of other fields also within 40 %% and beside their own checkpoints, and "
        "print one row for each; with --report, print these rows",
    )
    parser.add_argument(
        "--ranks",
        type=int,
        default=1,
        metavar="N",
        help="GPUs, each with a rank of the systems that torchrun starts; with more than one, the "
        "others are left out that do not need several; figures are the first rank's, of a pipeline "
        "the last one's",
    )
    parser.add_argument("--size", choices=get_args(Size), default="small")
    parser.add_argument("--steps", type=int, help="default: the size's")
    parser.add_argument("--deterministic", action="store_true")
    parser.add_argument("--minutes", type=float, default=9.0, help="rows that take more wait")
    parser.add_argument("--output", type=Path, metavar="FILE")
    parser.add_argument("--continue", dest="continued", type=Path, metavar="FILE")
    parser.add_argument("--again", action="store_true", help="with --continue: run all rows anew")
    parser.add_argument("--cpu", action="store_true", help="stock twice, and umem's fallback")
    parser.add_argument(
        "--forked",
        action="store_true",
        help="fork processes where that can be, from one that has imported transformers: for "
        "tests, as the host's memory is not that of a program which Python starts",
    )
    parser.add_argument(
        "--shared",
        action="store_true",
        help="other programs use the card meanwhile: read what NVML counts for each row's process, "
        "and believe no time",
    )
    parser.add_argument("--logs", type=Path, metavar="FOLDER", help="keep what programs print")
    parser.add_argument("--report", type=Path, metavar="FILE", help="print its tables, run nothing")
    parser.add_argument("--markdown", action="store_true")
    options = parser.parse_args()
    if options.report is not None:
        show(read(options.report), as_markdown=options.markdown, only_goals=options.goals)
        return 0
    can_run = [
        name for name, it in SYSTEMS.items() if it.launched or it.gpus == 2 or options.ranks == 1
    ]
    usual = [name for name in can_run if (name in FIELDS) == options.goals]
    names = [name.strip() for name in (options.systems or ",".join(usual)).split(",")]
    if unknown := [name for name in names if name not in can_run]:
        parser.error(f"{', '.join(unknown)}: none of {', '.join(can_run)}")
    if options.shared and (options.cpu or options.ranks > 1):
        parser.error("--shared is for one GPU")
    if not options.cpu:
        require_gpu("the matrix")
        if (gpus := bindings.device_count()) < options.ranks:
            parser.error(f"--ranks {options.ranks}: CUDA sees {gpus} GPUs")
    output = options.output or options.continued
    cards = () if options.cpu else tuple(map(Card.find, range(options.ranks)))
    runner = Runner(
        size=options.size,
        steps=options.steps or STEPS[options.size],
        deterministic=options.deterministic,
        cards=cards,
        ranks=options.ranks,
        end_s=time.monotonic() + 60 * options.minutes,
        say=lambda words: print(words, file=sys.stderr, flush=True),
        logs=options.logs,
        forked=_forked(options.ranks) if options.forked else None,
        peaks=Peaks(cards[0].pci_address) if options.shared else None,
    )
    variants = GOAL_VARIANTS if options.goals else GPU_VARIANTS
    variants = CPU_VARIANTS if options.cpu else variants
    matrix = run_matrix(
        [(name, variant) for name in names for variant in variants],
        runner,
        lambda so_far: write(so_far, output) if output else None,
        read(options.continued) if options.continued else None,
        again=options.again,
    )
    only_goals = options.goals and not options.cpu
    show(matrix, as_markdown=options.markdown, only_goals=only_goals)
    return int(any(it.state in ("failed", "out of memory") for it in matrix.results))


if __name__ == "__main__":
    try:
        sys.exit(main())
    except UmemError as error:
        sys.exit(f"matrix.py: {error}")
