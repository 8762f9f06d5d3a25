"""Verdicts on measured training steps: each figure against its limit, and the figures in words."""

from __future__ import annotations

from umem_bench.train.figures import median_s, tokens_per_s
from umem_bench.train.results import Outcome, TrainingRun

__all__ = [
    "LEAST_PREDICTED",
    "LEAST_SPEED_UP",
    "LEAST_STOCK_SHARE",
    "MAX_BYTES_ERROR",
    "MAX_FAULT_SHARE",
    "MAX_LORA_TIME_SHARE",
    "MAX_OVER_BOUND",
    "MAX_STALL_SHARE",
    "MAX_STEP_ERROR",
    "NO_PROFILE",
    "Verdict",
    "ahead",
    "faults",
    "ms_words",
    "percent_words",
    "share_of_stock",
    "speed_up",
    "stalls",
    "time_share",
    "time_shares",
]

MAX_FAULT_SHARE = 0.01
"""Page faults on the device under the plan, as a share of demand paging's."""

LEAST_SPEED_UP = 3.0
"""SFT at 60 %: time of a step under demand paging over that under the plan."""

LEAST_STOCK_SHARE = 0.85
"""SFT at 60 %, where computing dominates: speed, as a share of stock's."""

MAX_OVER_BOUND = 1.2
"""SFT, the optimizer's state on the host: time of a step over the lower bound."""

MAX_LORA_TIME_SHARE = 0.002
"""LoRA under the plan: unified memory's share of the time of memory operations."""

MAX_STALL_SHARE = 1 / 3
"""SFT: time beyond stock's step under the plan, as a share of demand paging's."""

MAX_STEP_ERROR = 0.15
MAX_BYTES_ERROR = 0.1
"""How far a measured figure may be from the predicted one, relative to that."""

LEAST_PREDICTED = 6
"""Steps under a plan that were measured: fewer say little of all of them."""

NO_PROFILE = "what unified memory did is not known: see the notes"
NO_COPIES = "shares are not known, because copies and memory sets were not recorded"

Verdict = tuple[bool | None, str]
"""Whether it holds, None where that is not known, and the figures, or why there are none."""


def faults(ours: Outcome, theirs: Outcome) -> Verdict:
    """Page faults on the device, of the plan and of demand paging."""
    if ours.profile is None or theirs.profile is None:
        return None, NO_PROFILE
    own, other = ours.profile.fault_batches, theirs.profile.fault_batches
    if own == other == 0:
        return None, "0 against 0: nothing faulted, so that nothing is compared"
    return _below(own <= MAX_FAULT_SHARE * other, f"{own:,}", f"{other:,}", theirs)


def speed_up(ours: Outcome, theirs: Outcome) -> Verdict:
    """Times of a step, of the plan and of demand paging."""
    own_s, other_s = median_s(ours), median_s(theirs)
    assert own_s is not None
    assert other_s is not None
    return other_s >= LEAST_SPEED_UP * own_s, (
        f"{ms_words(own_s)} against {ms_words(other_s)}: {other_s / own_s:.2f}x"
    )


def share_of_stock(stock_s: float | None, ours: Outcome) -> Verdict:
    """Speed, as a share of stock's, whose step is given in seconds."""
    own_s = median_s(ours)
    assert own_s is not None
    if stock_s is None:
        return None, "stock was not measured"
    return stock_s >= LEAST_STOCK_SHARE * own_s, f"{percent_words(stock_s / own_s)}"


def time_share(ours: Outcome) -> Verdict:
    """Unified memory's share of the time of memory operations."""
    if ours.profile is None:
        return None, NO_PROFILE
    share = ours.profile.um_time_share
    if share is None:
        return None, NO_COPIES
    return share <= MAX_LORA_TIME_SHARE, percent_words(share)


def time_shares(ours: Outcome, theirs: Outcome) -> Verdict:
    """The same share, of the plan and of demand paging."""
    if ours.profile is None or theirs.profile is None:
        return None, NO_PROFILE
    own, other = ours.profile.um_time_share, theirs.profile.um_time_share
    if own is None or other is None:
        return None, NO_COPIES
    words = percent_words(own), percent_words(other)
    if own == other == 0:
        return None, f"{' against '.join(words)}: nothing moved, so that nothing is compared"
    return _below(own <= other, *words, theirs)


def _below(held: bool, own: str, other: str, theirs: Outcome) -> Verdict:
    """The verdict where what is not to be passed may be a lower bound."""
    assert theirs.profile is not None
    if theirs.profile.is_lower_bound:
        return held or None, f"{own} against at least {other}"
    return held, f"{own} against {other}"


def stalls(stock_s: float | None, ours: Outcome, theirs: Outcome) -> Verdict:
    """Time beyond stock's step, given in seconds, of the plan and of demand paging."""
    own_s, other_s = median_s(ours), median_s(theirs)
    assert own_s is not None
    assert other_s is not None
    if stock_s is None:
        return None, "stock was not measured"
    own_s, other_s = own_s - stock_s, other_s - stock_s
    words = f"{ms_words(own_s)} against {ms_words(other_s)}"
    if other_s <= 0:
        return None, f"{words}: demand paging was no slower than stock"
    return own_s <= MAX_STALL_SHARE * other_s, words


def ahead(run: TrainingRun, ours: Outcome, others: list[Outcome]) -> Verdict:
    """Speed, against that of the fastest of others, of which there is at least one."""
    own = tokens_per_s(run, ours) or 0.0
    best = max(others, key=lambda it: tokens_per_s(run, it) or 0.0)
    other = tokens_per_s(run, best) or 0.0
    return (
        own > other,
        f"{own:,.0f} tokens/s; the best of {len(others)}: {best.variant} {other:,.0f}",
    )


def percent_words(share: float) -> str:
    """A share, for people."""
    return f"{100 * share:.3g} %"


def ms_words(seconds: float) -> str:
    """Seconds, for people."""
    return f"{seconds * 1e3:.4g} ms"
