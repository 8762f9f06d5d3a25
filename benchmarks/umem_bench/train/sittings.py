"""Runs of `umem bench training` that are made in several sittings, one call each."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from umem.core.errors import UmemError
from umem_bench.train.order import Cell, Configuration, cell_of
from umem_bench.train.results import Outcome, Sitting, TrainingRun

__all__ = ["is_missing", "require_same", "sittings_of", "still_to_run"]

_SAME_MACHINE = ("gpu", "driver", "cuda", "torch", "rmm", "umem", "python", "cpu", "cpu_count")


def is_missing(outcome: Outcome) -> bool:
    """Whether a later sitting has to run it: there was no time for it, or not enough."""
    return outcome.state == "left out" or outcome.timed_out


def sittings_of(run: TrainingRun) -> tuple[Sitting, ...]:
    """A run's sittings; of a file of earlier days the one that it was made in."""
    return run.sittings or (Sitting(date=run.date, seconds=run.seconds),)


def still_to_run(
    cells: Sequence[Configuration], outcomes: Iterable[Outcome]
) -> Iterator[Configuration]:
    """What a sitting runs, given what there is; what was too slow before goes behind the rest.

    Stock is run again where something is compared with it, and at the beginning in any case.
    """
    known = {cell_of(it): it for it in outcomes}
    missing = [it for it in cells if it.key not in known or is_missing(known[it.key])]
    subjects = {(it.workload, it.method) for it in missing}
    again = [
        it
        for it in cells
        if it.variant == "stock" and missing and (it is cells[0] or _subject(it) in subjects)
    ]
    slow = {key for key, outcome in known.items() if outcome.timed_out}
    wanted: set[Cell] = {it.key for it in (*missing, *again)}
    ordered = sorted(cells, key=lambda it: it.variant != "stock" and it.key in slow)
    return (it for it in ordered if it.key in wanted)


def require_same(earlier: TrainingRun, now: TrainingRun) -> None:
    """Check that a run may go on with an earlier one's results.

    Raises
    ------
    UmemError
        If it has other settings, or another machine, driver or version; the message names them.
    """
    pairs: list[tuple[str, object, object]] = [
        (name, getattr(earlier.machine, name), getattr(now.machine, name)) for name in _SAME_MACHINE
    ]
    packages = sorted({*earlier.packages, *now.packages})
    pairs += [(it, earlier.packages.get(it), now.packages.get(it)) for it in packages]
    pairs.append(("commit", earlier.git_commit, now.git_commit))
    pairs += [
        (name, getattr(earlier.settings, name), getattr(now.settings, name))
        for name in ("steps", "deterministic", "managed_limit_bytes")
    ]
    words = [f"{name} {was}, and now {it}" for name, was, it in pairs if was != it]
    names = [[it.name for it in run.settings.workloads] for run in (earlier, now)]
    if names[0] != names[1]:
        words.append(f"workloads {', '.join(names[0])}, and now {', '.join(names[1])}")
    else:
        for was, it in zip(earlier.settings.workloads, now.settings.workloads, strict=True):
            words += [
                f"{name} of {it.name} {getattr(was, name)}, and now {getattr(it, name)}"
                for name in ("model", "methods", "variants", "budgets_percent")
                if getattr(was, name) != getattr(it, name)
            ]
    if words:
        raise UmemError(
            f"the earlier results cannot be continued: they have {'; '.join(words)}: give the same "
            "options on the same machine, or begin a new file"
        )


def _subject(it: Configuration) -> tuple[str, str]:
    return it.workload, it.method
