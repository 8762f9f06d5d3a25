"""Runs the real-scale benchmark: its cases, its rows, and the room that they leave free."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

from umem import UmemError, load_policy
from umem.core.units import format_bytes
from umem_bench.card import Card
from umem_bench.compile_planner import compile_planner
from umem_bench.machine import git_commit, header
from umem_bench.results import (
    SCALE_VARIANTS,
    LlamaShape,
    Run,
    ScaleCase,
    ScaleResult,
    ScaleSettings,
    ScaleVariant,
    median,
)
from umem_bench.scale.measure import ScaleJob, measure
from umem_bench.training.run import (
    ask_worker,
    require_gpu,
    require_same,
    run_missing,
    why_no_time,
)

__all__ = [
    "CARD_LEFT_BYTES",
    "CASES",
    "HOST_LEFT_BYTES",
    "Row",
    "growth",
    "host_state_bytes",
    "memory_ran_out",
    "parse_rows",
    "run_scale",
    "why_no_host_room",
]

CARD_LEFT_BYTES = 2 << 30
"""Of the card's memory, never used."""

_CONTEXT_BYTES = 1 << 30
"""For a process's context and kernels, which no allocator counts."""

_MAX_GROWTH = 2.0
"""Of a process's time with its model: a small one's is mostly its start."""

HOST_LEFT_BYTES = 16 << 30
"""Of the host's available memory, never used."""

_LLAMA_2_7B = LlamaShape(
    hidden=4096, intermediate=11_008, layers=32, heads=32, batch=4, tokens=2048
)

CASES: dict[ScaleCase, LlamaShape] = {
    # Shapes of the published configurations.
    "llama-2-7b-fp32": _LLAMA_2_7B.model_copy(update={"weights": "float32"}),
    "llama-2-13b-bf16": LlamaShape(
        hidden=5120, intermediate=13_824, layers=40, heads=40, batch=4, tokens=2048
    ),
    "llama-2-7b-bf16": _LLAMA_2_7B,
    # For tests, on the CPU too.
    "tiny": LlamaShape(
        hidden=64,
        intermediate=128,
        layers=3,
        heads=4,
        vocabulary=256,
        weights="float32",
        batch=2,
        tokens=32,
    ),
}

Row = tuple[ScaleCase, ScaleVariant]
"""What one process measures."""


def parse_rows(text: str) -> list[Row]:
    """Rows of a list such as ``llama-2-7b-fp32:umem,tiny:floor``, in its order.

    A case alone stands for all of its variants but ``umem-waiting``; an empty text for all cases
    but ``tiny``.

    Raises ``ValueError`` for an unknown case or variant.
    """
    usual = SCALE_VARIANTS[:-1]
    if not text:
        return [(case, variant) for case in CASES if case != "tiny" for variant in usual]
    rows: list[Row] = []
    for word in text.split(","):
        name, _, wanted = word.strip().partition(":")
        case = next((it for it in CASES if it == name), None)
        variants = [it for it in SCALE_VARIANTS if it == wanted] if wanted else list(usual)
        if case is None:
            raise ValueError(f"{name!r} is none of {', '.join(CASES)}")
        if not variants:
            raise ValueError(f"{wanted!r} is none of {', '.join(SCALE_VARIANTS)}")
        rows += [(case, variant) for variant in variants]
    return list(dict.fromkeys(rows))


def run_scale(
    settings: ScaleSettings,
    rows: Sequence[Row],
    on_progress: Callable[[str], None],
    on_results: Callable[[Run], None] = lambda _: None,
    *,
    seconds_limit: float,
    earlier: Run | None = None,
    again: bool = False,
    host_limit_bytes: int | None = None,
) -> Run:
    """Train every row in a process of its own, never two at a time.

    Rows are left out, with the reason, where the time or the host's memory does not suffice.

    Without a GPU only ``tiny`` runs. With `earlier` results of the same settings and machine, the
    rows that they lack are run; with `again` all `rows` are. A row may take `host_limit_bytes` of
    host memory; by default what is available less :data:`HOST_LEFT_BYTES`.

    Raises
    ------
    UnsupportedError
        Where torch sees no GPU and a row needs one.
    UmemError
        If the earlier results are of other settings, another machine or other versions, or if the
        budget does not leave :data:`CARD_LEFT_BYTES` of the card.
    """
    import torch

    if torch.cuda.device_count() == 0 and {case for case, _ in rows} != {"tiny"}:
        require_gpu()
    begun = header("scale", settings)
    if earlier is not None:
        require_same(earlier.header, begun, same_commit=False)
        begun = earlier.header
    machine = _Machine(settings, host_limit_bytes)
    plans_pages = load_policy(settings.policy).planner != "none"
    end_s = time.monotonic() + seconds_limit

    def measure_one(row: Row, so_far: list[ScaleResult], tried: ScaleResult | None) -> ScaleResult:
        if plans_pages and row[1].startswith("umem"):
            compile_planner()
        on_progress(f"{row[0]}, {row[1]}: at most {end_s - time.monotonic():.0f} s are left")
        result = machine.measure_row(row, so_far, tried, end_s - time.monotonic())
        on_progress(_line(result))
        return result

    results = run_missing(
        rows,
        {(it.case, it.variant): it for it in (earlier.scales if earlier else ())},
        measure_one,
        lambda so_far: on_results(Run(begun, tuple(so_far))),
        again=again,
    )
    return Run(begun, tuple(results))


class _Machine:
    """The card and the host, and how much of them a row may take."""

    def __init__(self, settings: ScaleSettings, host_limit_bytes: int | None) -> None:
        import torch

        self.settings = settings
        self.commit = git_commit()
        self.card: Card | None = None
        self.limit_bytes: int | None = None
        self._host_limit_bytes = host_limit_bytes
        if torch.cuda.device_count() == 0:
            return
        self.card = Card.find()
        free_bytes = self.card.free_bytes
        self.limit_bytes = free_bytes - CARD_LEFT_BYTES - _CONTEXT_BYTES
        if settings.budget_bytes is not None and settings.budget_bytes > self.limit_bytes:
            raise UmemError(
                f"a budget of {format_bytes(settings.budget_bytes)}: the card has "
                f"{format_bytes(free_bytes)} free, of which {format_bytes(CARD_LEFT_BYTES)} stay "
                f"free and {format_bytes(_CONTEXT_BYTES)} are for the process's context: give "
                f"--budget {self.limit_bytes >> 30}GiB or less"
            )

    def measure_row(
        self, row: Row, known: list[ScaleResult], tried: ScaleResult | None, left_s: float
    ) -> ScaleResult:
        """Measure a row in a process of its own, unless there is a reason not to."""
        case, variant = row
        settings, shape = self.settings, self.settings.cases[case]
        told: dict[str, Any] = {"case": case, "variant": variant, "commit": self.commit}
        in_backward = variant == "umem-backward"
        if in_backward and settings.accumulate > 1:
            reason = "a step within the backward pass cannot wait for further batches"
            return ScaleResult(**told, state="not comparable", reason=reason)
        reason = (
            why_no_time(variant, [self._as_of(case, it) for it in known], tried, left_s)
            or why_no_host_room(host_state_bytes(shape, variant), self._host_limit_bytes)
            or (self.card.why_not_idle() if self.card else "")
        )
        if reason:
            return ScaleResult(**told, state="left out", reason=reason)
        limit_bytes = self.limit_bytes
        if variant.startswith("umem"):
            limit_bytes = told["budget_bytes"] = settings.budget_bytes or limit_bytes
        job = ScaleJob(
            model=shape,
            variant=variant,
            policy=settings.policy,
            limit_bytes=limit_bytes,
            steps=settings.steps,
            accumulate=settings.accumulate,
            clip=settings.clip and not in_backward,
            deterministic=settings.deterministic,
            card=self.card,
        )
        told |= ask_worker(measure, job, self.card, left_s)
        return ScaleResult(**told | memory_ran_out(told))

    def _as_of(self, case: ScaleCase, known: ScaleResult) -> ScaleResult:
        """A row as if it were of this case: a larger model takes longer."""
        times = growth(self.settings.cases[case], self.settings.cases[known.case])
        return known.model_copy(update={"process_s": known.process_s * times})


def growth(new: LlamaShape, old: LlamaShape) -> float:
    """How many times longer a process takes with another model."""
    return min(_MAX_GROWTH, max(1.0, sum(new.matrix_sizes) / sum(old.matrix_sizes)))


def memory_ran_out(told: dict[str, Any]) -> dict[str, Any]:
    """The fields of a process's answer that change, as too little memory is a result of its own."""
    if told["state"] != "failed":
        return {}
    reason = str(told["reason"]).splitlines()[0]
    # The kernel ends a process that takes too much of the host by signal 9.
    is_memory = any(it in reason for it in ("out of memory", "status -9"))
    is_out = is_memory and not told.get("timed_out")
    return {"reason": reason, "state": "out of memory" if is_out else "failed"}


def why_no_host_room(needed_bytes: int, limit_bytes: int | None) -> str:
    """Why the host is too small for a process; empty where it is not.

    Without a limit it may take what is available less :data:`HOST_LEFT_BYTES`.
    """
    from umem.hardware.host_memory import host_memory_bytes

    _, available_bytes = host_memory_bytes() or (0, 0)
    if limit_bytes is None:
        limit_bytes = available_bytes - HOST_LEFT_BYTES
    if needed_bytes <= max(0, limit_bytes):
        return ""
    return (
        f"it needs {format_bytes(needed_bytes)} of host memory, and may take "
        f"{format_bytes(max(0, limit_bytes))}: {format_bytes(available_bytes)} are available, "
        f"and {format_bytes(HOST_LEFT_BYTES)} stay free. Where the host has more than its "
        "kernel reports, give --host"
    )


def host_state_bytes(shape: LlamaShape, variant: ScaleVariant) -> int:
    """Host memory that a variant's optimizer takes at most, by the sizes of the weights.

    umem may have all of AdamW's state there. torchao has page-locked weights and gradients, each
    rounded up to a power of two by torch's allocator, and its state. ZeRO-Offload has weights,
    gradients and state in float32.
    """
    sizes = shape.matrix_sizes
    each = 4 if shape.weights == "float32" else 2
    if variant.startswith("umem"):
        return 2 * each * sum(sizes)
    if variant == "torchao":
        rounded = sum(1 << (each * size - 1).bit_length() for size in sizes)
        return 2 * rounded + 2 * each * sum(sizes)
    return 16 * sum(sizes) if variant == "deepspeed" else 0


def _line(result: ScaleResult) -> str:
    words = f"{result.case}, {result.variant}"
    step_s = median(result.steps_s)
    if step_s is None:
        return f"{words}: {result.state}: {result.reason}"
    peak = f", card {format_bytes(result.card_peak_bytes)}" if result.card_peak_bytes else ""
    first = f", first {result.first_step_s:.1f} s" if result.first_step_s else ""
    return f"{words}: {step_s:.4g} s a step{first}{peak}, {result.process_s:.1f} s in all"
