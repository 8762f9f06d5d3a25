"""Runs the real-scale benchmark: its cases, its rows, and the room that they leave free."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

from umem import UmemError, load_policy
from umem.core.units import format_bytes
from umem_bench.card import Card
from umem_bench.compile_planner import compile_planner
from umem_bench.machine import git_commit, header
from umem_bench.results import (
    LORA_CASES,
    SCALE_VARIANTS,
    LlamaShape,
    Method,
    Run,
    ScaleCase,
    ScaleResult,
    ScaleSettings,
    ScaleVariant,
    median,
)
from umem_bench.rows import (
    ask_worker,
    continued,
    find_card,
    memory_ran_out,
    rows_named,
    run_missing,
    why_no_host_room,
    why_no_time,
)
from umem_bench.scale.measure import ScaleJob, measure
from umem_bench.shapes import CODE_LLAMA_34B, LLAMA_2_7B, LLAMA_2_13B, TINYLLAMA_1B

__all__ = [
    "BUDGETS_BYTES",
    "CARD_LEFT_BYTES",
    "CASES",
    "USUAL_VARIANTS",
    "Row",
    "growth",
    "host_state_bytes",
    "parse_rows",
    "run_scale",
]

CARD_LEFT_BYTES = 2 << 30
"""Of the card's memory, never used."""

_CONTEXT_BYTES = 1 << 30
"""For a process's context and kernels, which no allocator counts."""

_START_S = 15.0
"""Of a process's time, what does not grow with its steps: its start, the model and homes."""

_MAX_GROWTH = 2.0
"""Of a process's time with its model: a small one's is mostly its start."""

_KEPT_BY_LOSS = 4
"""Tensors as large as a layer's input that the last norm and the head keep, at most."""

_FULL = {"batch": 4, "tokens": 2048}
_LONG = {"batch": 1, "tokens": 4096}
_FP32 = {"weights": "float32", **_FULL}

CASES: dict[ScaleCase, LlamaShape] = {
    "llama-2-7b-fp32": LLAMA_2_7B.model_copy(update=_FP32),
    "llama-2-7b-fp32-40gib": LLAMA_2_7B.model_copy(update=_FP32),
    # As far beyond its budget, and small enough for hosts that hold all of it twice.
    "tinyllama-1b-fp32-8gib": TINYLLAMA_1B.model_copy(update=_FP32),
    "llama-2-13b-bf16": LLAMA_2_13B.model_copy(update=_FULL),
    "llama-2-7b-bf16": LLAMA_2_7B.model_copy(update=_FULL),
    "llama-2-7b-lora": LLAMA_2_7B.model_copy(update=_LONG),
    "llama-2-13b-lora": LLAMA_2_13B.model_copy(update=_LONG),
    "code-llama-34b-lora": CODE_LLAMA_34B.model_copy(update=_LONG),
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

BUDGETS_BYTES: dict[ScaleCase, int] = {
    "llama-2-7b-fp32-40gib": 40 << 30,
    "tinyllama-1b-fp32-8gib": 8 << 30,
    "llama-2-7b-lora": 8 << 30,
    "llama-2-13b-lora": 16 << 30,
}
"""Of device memory, for umem's variants. Other cases have what the card has free."""

USUAL_VARIANTS: dict[Method, tuple[ScaleVariant, ...]] = {
    "sft": ("umem", "floor", "torchao", "umem-backward", "stock", "deepspeed"),
    "lora": ("umem", "floor", "stock"),
}
"""Those that a case stands for; others run where they are named."""

_VARIANTS: dict[Method, tuple[ScaleVariant, ...]] = {
    "sft": SCALE_VARIANTS,
    "lora": (*USUAL_VARIANTS["lora"], "save-on-cpu", "umem-waiting"),
}

Row = tuple[ScaleCase, ScaleVariant]
"""What one process measures."""


def parse_rows(text: str) -> list[Row]:
    """The rows that a text names, as :func:`umem_bench.rows.rows_named` reads it."""
    # SFT's usual variants include LoRA's.
    return rows_named(text, {it: _VARIANTS[_method(it)] for it in CASES}, USUAL_VARIANTS["sft"])


def _method(case: ScaleCase) -> Method:
    return "lora" if case in LORA_CASES else "sft"


def _policy(settings: ScaleSettings, case: ScaleCase) -> str:
    return "lora" if case in LORA_CASES else settings.policy


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
    predicted_s: Mapping[Row, float] = MappingProxyType({}),
) -> Run:
    """Train every row in a process of its own, never two at a time.

    Rows are left out, with the reason, where the time or the host's memory does not suffice.

    Without a GPU only ``tiny`` runs. With `earlier` results of the same settings and machine, the
    rows that they lack are run; with `again` all `rows` are. A row may take `host_limit_bytes` of
    host memory; by default what is available less :data:`umem_bench.rows.HOST_LEFT_BYTES`.
    `predicted_s` stands beside each row's result, measured or not.

    Raises
    ------
    UnsupportedError
        Where torch sees no GPU and a row needs one.
    UmemError
        If the earlier results are of other settings, another machine or other versions, or if the
        budget of all cases does not leave :data:`CARD_LEFT_BYTES` of the card.
    """
    card = find_card([case for case, _ in rows], "training")
    begun = continued(earlier, Run(header("scale", settings), ()), same_commit=False)
    machine = _Machine(settings, card, host_limit_bytes, predicted_s)
    end_s = time.monotonic() + seconds_limit

    def measure_one(row: Row, so_far: list[ScaleResult], tried: ScaleResult | None) -> ScaleResult:
        is_umem = row[1].startswith("umem")
        if is_umem and load_policy(_policy(settings, row[0])).planner != "none":
            compile_planner()
        on_progress(f"{row[0]}, {row[1]}: at most {end_s - time.monotonic():.0f} s are left")
        result = machine.measure_row(row, so_far, tried, end_s - time.monotonic())
        on_progress(_line(result))
        return result

    earlier_results = {(it.case, it.variant): it for it in begun.scales}
    return run_missing(begun, rows, earlier_results, measure_one, on_results, again=again)


class _Machine:
    """The card and the host, and how much of them a row may take."""

    def __init__(
        self,
        settings: ScaleSettings,
        card: Card | None,
        host_limit_bytes: int | None,
        predicted_s: Mapping[Row, float],
    ) -> None:
        self.settings = settings
        self.predicted_s = predicted_s
        self.commit = git_commit()
        self.card = card
        self.limit_bytes: int | None = None
        self._host_limit_bytes = host_limit_bytes
        if card is None:
            return
        self.limit_bytes = card.free_bytes - CARD_LEFT_BYTES - _CONTEXT_BYTES
        if reason := self._why_no_card_room(settings.budget_bytes):
            raise UmemError(reason)

    def measure_row(
        self, row: Row, known: list[ScaleResult], tried: ScaleResult | None, left_s: float
    ) -> ScaleResult:
        """Measure a row in a process of its own, unless there is a reason not to."""
        case, variant = row
        settings, shape = self.settings, self.settings.cases[case]
        is_held = variant.startswith("umem") or (settings.holds_all and variant != "floor")
        limit_bytes = self._budget_bytes(case) if is_held else self.limit_bytes
        host_bytes = host_state_bytes(shape, variant, _method(case), limit_bytes)
        told: dict[str, Any] = {"case": case, "variant": variant, "commit": self.commit}
        told["predicted_s"] = self.predicted_s.get(row)
        in_backward = variant == "umem-backward"
        accumulate = settings.batches(case)
        if in_backward and accumulate > 1:
            reason = "a step within the backward pass cannot wait for further batches"
            return ScaleResult(**told, state="not comparable", reason=reason)
        reason = (
            why_no_time(variant, [self._as_of(case, it) for it in known], tried, left_s)
            or why_no_host_room(host_bytes, self._host_limit_bytes)
            or self._why_no_card_room(limit_bytes)
            or (self.card.why_not_idle() if self.card else "")
        )
        if reason:
            return ScaleResult(**told, state="left out", reason=reason)
        if is_held:
            told["budget_bytes"] = limit_bytes
        job = ScaleJob(
            model=shape,
            method=_method(case),
            variant=variant,
            policy=_policy(settings, case),
            limit_bytes=limit_bytes,
            steps=settings.steps,
            accumulate=accumulate,
            clip=settings.clip and not in_backward,
            deterministic=settings.deterministic,
            card=self.card,
        )
        told |= ask_worker(measure, job, self.card, left_s)
        return ScaleResult(**told | memory_ran_out(told))

    def _budget_bytes(self, case: ScaleCase) -> int | None:
        """That of all cases, or the case's, or what the card has free."""
        settings = self.settings
        return settings.budget_bytes or settings.budgets_bytes.get(case, self.limit_bytes)

    def _why_no_card_room(self, budget_bytes: int | None) -> str:
        """Why the card is too small for a budget; empty where it is not."""
        if self.card is None or self.limit_bytes is None or budget_bytes is None:
            return ""
        if budget_bytes <= self.limit_bytes:
            return ""
        return (
            f"a budget of {format_bytes(budget_bytes)}: the card has "
            f"{format_bytes(self.card.free_bytes)} free, of which {format_bytes(CARD_LEFT_BYTES)} "
            f"stay free and {format_bytes(_CONTEXT_BYTES)} are for the process's context: give "
            f"--budget {self.limit_bytes >> 30}GiB or less"
        )

    def _as_of(self, case: ScaleCase, known: ScaleResult) -> ScaleResult:
        """A row as if it were of this case: a larger model takes longer, and a longer step."""
        times = growth(self.settings.cases[case], self.settings.cases[known.case])
        process_s = known.process_s * times
        step_s = self.predicted_s.get((case, known.variant))
        if step_s and known.predicted_s:
            steps_s = max(0.0, known.process_s - _START_S)
            process_s = _START_S + steps_s * step_s / known.predicted_s
        return known.model_copy(update={"process_s": process_s})


def growth(new: LlamaShape, old: LlamaShape) -> float:
    """How many times longer a process takes with another model."""
    return min(_MAX_GROWTH, max(1.0, sum(new.matrix_sizes) / sum(old.matrix_sizes)))


def host_state_bytes(
    shape: LlamaShape,
    variant: ScaleVariant,
    method: Method = "sft",
    budget_bytes: int | None = None,
) -> int:
    """Host memory that a variant takes, by the sizes of the weights.

    umem may have all of AdamW's state there, and the weights and gradients that a budget has no
    room for; with LoRA the weights. torchao and FSDP have
    page-locked weights and gradients, each rounded up to a power of two by torch's allocator, and
    the state. ZeRO-Offload has weights, gradients and state in float32; its third stage has
    bfloat16 weights besides. save-on-cpu has page-locked copies of each layer's input, and of what
    the loss keeps.
    """
    sizes = shape.matrix_sizes
    each = 4 if shape.weights == "float32" else 2
    if variant.startswith("umem"):
        if method == "lora":
            return shape.weight_bytes
        state_bytes = weights_and_gradients = 2 * each * sum(sizes)
        if budget_bytes is None:
            return state_bytes
        return state_bytes + max(0, weights_and_gradients - budget_bytes)
    if variant in ("torchao", "fsdp-offload"):
        return sum(2 * _page_locked_bytes(each * it) + 2 * each * it for it in sizes)
    if variant == "save-on-cpu":
        tokens = shape.batch * shape.tokens
        head = [each * shape.vocabulary * shape.hidden, 4 * tokens * shape.vocabulary]
        inputs = [each * tokens * shape.hidden] * (shape.layers + _KEPT_BY_LOSS)
        return sum(map(_page_locked_bytes, head + inputs))
    per_weight = {"deepspeed": 16, "deepspeed-3": 18}.get(variant, 0)
    return per_weight * sum(sizes)


def _page_locked_bytes(size_bytes: int) -> int:
    return 1 << (size_bytes - 1).bit_length()


def _line(result: ScaleResult) -> str:
    words = f"{result.case}, {result.variant}"
    step_s = median(result.steps_s)
    if step_s is None:
        return f"{words}: {result.state}: {result.reason}"
    peak = f", card {format_bytes(result.card_peak_bytes)}" if result.card_peak_bytes else ""
    first = f", first {result.first_step_s:.1f} s" if result.first_step_s else ""
    first += f", third {result.third_step_s:.1f} s" if result.third_step_s else ""
    return f"{words}: {step_s:.4g} s a step{first}{peak}, {result.process_s:.1f} s in all"
