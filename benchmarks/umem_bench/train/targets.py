"""What umem's training is held to, and whether a run of `umem bench training` shows it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import product

from umem_bench.report import Check, Grid
from umem_bench.train.cells import budget_cell, subject_cell
from umem_bench.train.details import differences
from umem_bench.train.figures import (
    device_peak_bytes,
    fits,
    is_over,
    lower_bound_s,
    median_s,
    outcomes_of,
    stock_of,
)
from umem_bench.train.results import (
    PLANNERS,
    Method,
    Outcome,
    OutcomeState,
    TrainingRun,
    Variant,
    Workload,
    WorkloadName,
)
from umem_bench.train.verdicts import (
    LEAST_PREDICTED,
    LEAST_SPEED_UP,
    LEAST_STOCK_SHARE,
    MAX_BYTES_ERROR,
    MAX_FAULT_SHARE,
    MAX_LORA_TIME_SHARE,
    MAX_OVER_BOUND,
    MAX_STEP_ERROR,
    NO_PROFILE,
    Verdict,
    ahead,
    faults,
    ms_words,
    percent_words,
    share_of_stock,
    speed_up,
    stalls,
    time_share,
    time_shares,
)

__all__ = ["checks", "target_grid", "targets"]

_WHOLE_PERCENT, _HEAD_PERCENT, _TIGHT_PERCENT = 100.0, 60.0, 30.0
_ALL_PLANNED = "all planned runs"
_COMPUTE_BOUND: WorkloadName = "long"
_PLANNED = tuple(variant for variant, planner in PLANNERS.items() if planner == "planned")
_ALTERNATIVES: tuple[Variant, ...] = (
    "backward-step",
    "save-on-cpu",
    "bnb-paged-adamw",
    "torchao-offload",
    "deepspeed-offload",
    "rmm-pool",
)
_UNCOUNTED: Variant = "rmm-pool"
"""Nobody counts what it has on the device: it fits nothing, measured or not."""

_NO_MATCH: tuple[OutcomeState, ...] = ("not installed", "not comparable")

_PAGED: Variant = "bnb-paged-adamw"
"""Its state is managed memory, fetched to the device in each step and evicted by nobody while the
card has room: it is not off the device."""

_OFFLOADS: tuple[Variant, ...] = ("torchao-offload", "deepspeed-offload")


@dataclass(frozen=True)
class Target:
    """One thing that umem is held to, in one part of a run.

    Parameters
    ----------
    what, subject : str
        What is asked for; of which part of the run.
    held : bool or None
        None where the run does not tell.
    detail : str
        The figures, or why there are none.
    """

    what: str
    subject: str
    held: bool | None
    detail: str


def targets(run: TrainingRun) -> Iterator[Target]:
    """Every target that a run is about; variants that were not asked for have none."""
    for workload in run.settings.workloads:
        for method in workload.methods:
            yield from _beside_paging(run, workload, method)
            yield from _beside_alternatives(run, workload, method)
        yield from _optimizer_on_host(run, workload)
    yield from _shares_of_lora(run)
    yield from _predictions(run)


def checks(run: TrainingRun) -> Iterator[Check]:
    """The same for `--check`: what a run does not tell counts as missed."""
    for it in targets(run):
        yield Check(f"{it.subject}: {it.what}", bool(it.held), it.detail)


def target_grid(run: TrainingRun) -> Grid:
    """The same as a table."""
    words = {True: "holds", False: "missed", None: "not known"}
    return Grid(
        "Targets",
        ("target", "run", "", "figures"),
        tuple((it.what, it.subject, words[it.held], it.detail) for it in targets(run)),
    )


def _beside_paging(run: TrainingRun, workload: Workload, method: Method) -> Iterator[Target]:
    """The plan against demand paging under the same budget, where that is less than the whole."""
    stock_s = _stock_s(run, workload.name, method)
    for percent, variant in product(workload.budgets_percent, _PLANNED):
        planned = _outcome(run, workload.name, method, variant, percent)
        paged = _outcome(run, workload.name, method, "umem-fault", percent)
        if planned is None or paged is None or percent >= _WHOLE_PERCENT:
            continue
        subject = _subject(planned)
        yield _compared(
            f"page faults at most {percent_words(MAX_FAULT_SHARE)} of demand paging's",
            subject,
            (planned, paged),
            faults,
        )
        if method != "sft":
            continue
        if percent == _HEAD_PERCENT:
            yield _compared(
                f"at least {LEAST_SPEED_UP:g} times as fast as demand paging",
                subject,
                (planned, paged),
                speed_up,
            )
            if workload.name == _COMPUTE_BOUND:
                yield _compared(
                    f"at least {percent_words(LEAST_STOCK_SHARE)} of stock's speed",
                    subject,
                    (planned,),
                    partial(share_of_stock, stock_s),
                )
        yield _compared(
            "unified memory's share of time no more than under demand paging",
            subject,
            (planned, paged),
            time_shares,
        )
        yield _compared(
            "exposed stall at most a third of demand paging's",
            subject,
            (planned, paged),
            partial(stalls, stock_s),
        )


def _beside_alternatives(run: TrainingRun, workload: Workload, method: Method) -> Iterator[Target]:
    others = [it for it in outcomes_of(run, workload.name, method) if it.variant in _ALTERNATIVES]
    if not others:
        return

    for variant in _PLANNED:
        planned = _outcome(run, workload.name, method, variant, _TIGHT_PERCENT)
        if planned is not None:
            yield _compared(
                "ahead of every alternative that fits the same memory",
                _subject(planned),
                (planned,),
                partial(_ahead_of_all, run, others, lambda it: fits(run, it, _TIGHT_PERCENT)),
            )


def _ahead_of_all(
    run: TrainingRun, others: list[Outcome], may_count: Callable[[Outcome], bool], ours: Outcome
) -> Verdict:
    """Speed against that of every alternative; those that are no match are named.

    What does not fit, is not installed or does other work does not count. What was not measured for
    another reason might have been faster: then it is not known, unless another one is.
    """
    measured = [it for it in others if it.state == "measured"]
    counted = [it for it in measured if may_count(it)]
    missing = [
        it for it in others if it.state not in ("measured", *_NO_MATCH) and it.variant != _UNCOUNTED
    ]
    held, words = None, "no alternative was measured"
    if counted:
        held, words = ahead(run, ours, counted)
    elif measured:
        held, words = True, "no alternative fits"
    named = (
        ("not measured", missing),
        ("do not fit", [it for it in measured if it not in counted]),
        *((state, [it for it in others if it.state == state]) for state in _NO_MATCH),
    )
    words = "; ".join(
        [words, *(f"{why}: {', '.join(it.variant for it in who)}" for why, who in named if who)]
    )
    return (None if held and missing else held), words


def _optimizer_on_host(run: TrainingRun, workload: Workload) -> Iterator[Target]:
    ours = _outcome(run, workload.name, "sft", "umem-optimizer-host", None)
    if ours is None:
        return
    subject = f"{workload.name}, sft, optimizer's state off the device"
    bound_s = lower_bound_s(run, workload.name)

    def over_bound(own: Outcome) -> Verdict:
        own_s = median_s(own)
        if own_s is None or bound_s is None:
            return None, "the bound is not known"
        return own_s <= MAX_OVER_BOUND * bound_s, (
            f"{ms_words(own_s)}, bound {ms_words(bound_s)}: {own_s / bound_s:.2f}x"
        )

    rivals = outcomes_of(run, workload.name, "sft")
    others = [it for it in rivals if it.variant in _OFFLOADS]
    is_paged = any(it.variant == _PAGED and it.state == "measured" for it in rivals)

    def beside_others(own: Outcome) -> Verdict:
        held, words = _ahead_of_all(run, others, lambda _: True, own)
        return held, f"{words}; not off the device: {_PAGED}" if is_paged else words

    yield _compared(
        f"step at most {MAX_OVER_BOUND:g} times the lower bound", subject, (ours,), over_bound
    )
    yield _compared(
        "faster than every alternative",
        subject,
        (ours,),
        beside_others,
    )


def _shares_of_lora(run: TrainingRun) -> Iterator[Target]:
    for workload in run.settings.workloads:
        for outcome in outcomes_of(run, workload.name, "lora"):
            if outcome.variant in _PLANNED:
                yield _compared(
                    f"unified memory's share of time at most {percent_words(MAX_LORA_TIME_SHARE)}",
                    _subject(outcome),
                    (outcome,),
                    time_share,
                )


def _predictions(run: TrainingRun) -> Iterator[Target]:
    """One target for steps and one for bytes, over all that umem planned.

    Both are about every configuration that was asked for, but for those that umem refused, and
    those in which all stays where it is.
    """
    asked = [
        it
        for it in run.outcomes
        if it.variant in PLANNERS
        and it.state != "off"
        and not (it.manager is not None and it.manager.state == "resident")
    ]
    planned = [
        it
        for it in asked
        if it.state == "measured"
        and it.plan_running is not False
        and it.manager
        and it.manager.predicted_step_s is not None
    ]
    for what, limit, is_step in (
        ("step", MAX_STEP_ERROR, True),
        ("bytes each way", MAX_BYTES_ERROR, False),
    ):
        found = [
            (outcome, difference.relative)
            for outcome in planned
            for difference in differences(outcome)
            if (difference.name == "step_s") is is_step
            # What the engine says of itself is no measurement of what arrived.
            and not difference.name.startswith("hinted_")
        ]
        name = f"measured {what} within {percent_words(limit)} of the predicted"
        if not found:
            if planned:
                yield Target(name, _ALL_PLANNED, None, NO_PROFILE)
            elif any(it.state != "measured" for it in asked):
                yield Target(name, _ALL_PLANNED, None, "nothing under a plan was measured")
            continue
        near = [it for _, it in found if it is not None and abs(it) <= limit]
        far, error = max(found, key=lambda it: float("inf") if it[1] is None else abs(it[1]))
        most = (
            "nothing was predicted, and something moved"
            if error is None
            else f"{100 * error:+.1f} %"
        )
        measured = len({id(outcome) for outcome, _ in found})
        unknown = len(asked) - measured
        held = None if unknown or measured < LEAST_PREDICTED else True
        yield Target(
            name,
            _ALL_PLANNED,
            held if len(near) == len(found) else False,
            f"{len(near)} of {len(found)} figures; farthest: {most}, "
            f"{subject_cell(far)}, {budget_cell(far)}"
            + (
                f"; {LEAST_PREDICTED} runs at least are asked for"
                if measured < LEAST_PREDICTED
                else ""
            )
            + (f"; not known of {unknown} of {len(asked)} runs" if unknown else ""),
        )


def _compared(
    what: str,
    subject: str,
    outcomes: tuple[Outcome, ...],
    compare: Callable[..., Verdict],
) -> Target:
    """A target, if all that it is about was measured under its plan; the plan's own comes first."""
    for it in outcomes:
        if it.state != "measured":
            return Target(what, subject, None, f"{it.variant}: {it.state}: {it.reason}")
        if it.plan_running is False:
            return Target(what, subject, None, f"{it.variant}: its plan was not running")
        if it.manager is not None and it.manager.state == "off":
            reason = f"{it.variant}: umem's manager was off after the timed steps"
            return Target(what, subject, None, f"{reason}: {it.manager.reason}")
    ours = outcomes[0]
    held, words = compare(*outcomes)
    if held and ours.budget_bytes is not None:
        # What takes more than it was given has not done what is asked for.
        peak_bytes = device_peak_bytes(ours)
        if peak_bytes is None:
            held, words = None, f"{words}; what it had on the device is not known"
        elif is_over(peak_bytes, ours.budget_bytes):
            held, words = False, f"{words}; {ours.variant} was over its own budget"
    return Target(what, subject, held, words)


def _outcome(
    run: TrainingRun,
    workload: WorkloadName,
    method: Method,
    variant: Variant,
    percent: float | None,
) -> Outcome | None:
    for it in outcomes_of(run, workload, method):
        if (it.variant, it.budget_percent) == (variant, percent):
            return it
    return None


def _stock_s(run: TrainingRun, workload: WorkloadName, method: Method) -> float | None:
    stock = stock_of(run, workload, method)
    return median_s(stock) if stock else None


def _subject(planned: Outcome) -> str:
    """Which part of the run; with the variant, where it is more than the plan."""
    variant = "" if planned.variant == "umem-planned" else f"{planned.variant}, "
    return f"{planned.workload}, {planned.method}, {variant}{planned.budget_percent:g} %"
