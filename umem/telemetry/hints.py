"""Hints in a profile: what the engine that drives the run did in each step, by its own counts."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import fields, replace
from operator import attrgetter
from typing import TYPE_CHECKING, Any

from umem.core.classes import TensorClass
from umem.core.report import Cause, Direction, HintReport, HintUse, Traffic

if TYPE_CHECKING:
    from umem.runtime.hints import HintCounts, HintStatistics

__all__ = [
    "HINT_COUNTS",
    "HINT_FIGURES",
    "HINT_OPS",
    "HINT_TOTALS",
    "HintLog",
    "hint_row",
    "hint_traffic",
    "hints_between",
]

HINT_OPS = ("prefetch", "evict", "discard", "copy_in", "copy_out", "advise")
"""Operations of the hint engine, in the order of their numbers in saved profiles."""

HINT_FIGURES = tuple(it.name for it in fields(HintUse) if it.name not in ("op", "tensor_class"))
"""Figures by operation and class."""

HINT_COUNTS = ("asked", "done", "late", "early", "missed", "wasted")
"""Those figures that are numbers of requests."""

HINT_TOTALS = tuple(it.name for it in fields(HintReport) if it.name != "uses")
"""Figures of an engine as a whole."""

_MOVES: dict[str, tuple[Direction, Cause]] = {
    "prefetch": ("to_device", "hint"),
    "evict": ("to_host", "hint"),
    "copy_in": ("to_device", "copy"),
    "copy_out": ("to_host", "copy"),
}
_WASTED = ("superseded", "forgotten", "dropped", "failed")

_Key = tuple[str, TensorClass]


def hints_between(before: HintStatistics | None, after: HintStatistics) -> HintReport:
    """What an engine did between two looks at its statistics.

    Parameters
    ----------
    before
        None where there was no engine yet. That of an engine which another one has replaced since
        counts as none.
    after
        The later look.
    """
    old = {} if before is None else _uses(before)
    new = _uses(after)
    if any(key not in new or new[key].asked < use.asked for key, use in old.items()):
        old, before = {}, None
    uses = [_difference(use, old.get(key)) for key, use in new.items()]
    return HintReport(
        uses=_in_order(use for use in uses if any(_figures(use).values())),
        **{
            name: _total(after, name) - (0 if before is None else _total(before, name))
            for name in HINT_TOTALS
        },
    )


def hint_traffic(report: HintReport) -> tuple[Traffic, ...]:
    """What hints moved, as the engine counts it; its driver calls stand in for transfers."""
    moved = [
        Traffic(*_MOVES[use.op], use.tensor_class, use.moved_bytes, use.driver_s, use.calls)
        for use in report.uses
        if use.op in _MOVES and use.moved_bytes
    ]
    return tuple(sorted(moved, key=lambda it: it.direction != "to_device"))


def hint_row(report: HintReport) -> dict[str, Any]:
    """Put hints into plain values, for JSON.

    Returns
    -------
    dict
        Requests in all (``issued`` are those asked for, as in a prediction), and all figures in
        ``by_operation``, from operation to class.
    """
    total = {name: sum(map(attrgetter(name), report.uses)) for name in HINT_COUNTS}
    by_operation: dict[str, dict[str, Any]] = {}
    for use in report.uses:
        by_operation.setdefault(use.op, {})[use.tensor_class.value] = _figures(use)
    return {
        "issued": total.pop("asked"),
        **total,
        **{name: getattr(report, name) for name in HINT_TOTALS},
        "by_operation": by_operation,
    }


class HintLog:
    """Looks at a hint engine's statistics, one at each mark of a run.

    Parameters
    ----------
    ask : callable
        Returns the statistics, or None while no engine is at work.
    """

    def __init__(self, ask: Callable[[], HintStatistics | None]) -> None:
        self._ask = ask
        self._looks: list[HintStatistics | None] = []

    def mark(self) -> None:
        """Look now: at the start of the run, and at the end of each step."""
        self._looks.append(self._ask())

    def reports(self) -> tuple[HintReport | None, ...]:
        """What was done between each mark and the next one; empty where there was no engine."""
        if not any(self._looks):
            return ()
        pairs = zip(self._looks, self._looks[1:], strict=False)
        return tuple(
            None if after is None else hints_between(before, after) for before, after in pairs
        )

    def notes(self) -> list[str]:
        """Calls of the engine that the driver refused between the first mark and the last."""
        looks = [look for look in self._looks if look is not None]
        if not looks:
            return []
        before = {(it.call, it.error): it.count for it in looks[0].failures}
        since = [
            (it, it.count - before.get((it.call, it.error), 0) if len(looks) > 1 else it.count)
            for it in looks[-1].failures
        ]
        return [
            f"the driver refused hints: {it.call}, {it.text} ({it.error}), count {count}"
            for it, count in since
            if count > 0
        ]


def _uses(found: HintStatistics) -> dict[_Key, HintUse]:
    return {(op, of): _use(op, of, counts) for (op, of), counts in found.counts.items()}


def _use(op: str, tensor_class: TensorClass, counts: HintCounts) -> HintUse:
    requests = {outcome.value: count for outcome, count in counts.requests.items()}
    return HintUse(
        op=op,
        tensor_class=tensor_class,
        asked=sum(requests.values()),
        done=requests.get("done", 0),
        late=counts.late,
        early=counts.early,
        missed=counts.missed,
        wasted=sum(requests.get(outcome, 0) for outcome in _WASTED),
        asked_bytes=counts.asked_bytes,
        moved_bytes=counts.moved_bytes,
        wasted_bytes=counts.wasted_bytes,
        calls=counts.calls,
        driver_s=counts.driver_s,
        late_s=counts.late_s,
    )


def _figures(use: HintUse) -> dict[str, int | float]:
    return {name: getattr(use, name) for name in HINT_FIGURES}


def _difference(use: HintUse, before: HintUse | None) -> HintUse:
    if before is None:
        return use
    # Sums of floats may fall below by a rounding.
    return replace(
        use,
        **{name: max(value - getattr(before, name), 0) for name, value in _figures(use).items()},
    )


def _in_order(uses: Iterable[HintUse]) -> tuple[HintUse, ...]:
    return tuple(sorted(uses, key=lambda it: (HINT_OPS.index(it.op), it.tensor_class.number)))


def _total(found: HintStatistics, name: str) -> int:
    if name == "failures":
        return sum(failure.count for failure in found.failures)
    return int(getattr(found, name))
