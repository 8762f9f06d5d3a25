"""Tries what may go wrong around a training, at random, for some minutes: `make chaos`.

Prints a row for each kind of fault; exit status 1 if anything is wrong. What is wrong is printed
with the seed that shows it again: ``campaign.py --seed SEED ROW``.
"""

from __future__ import annotations

import argparse
import contextlib
import logging
import os
import platform
import random
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

# Before torch is loaded: the last bit of a function may depend on how threads share its numbers.
os.environ["OMP_NUM_THREADS"] = "1"


import torch
from ended_processes import Processes
from faults import Interrupt, OutOfMemory, Signal
from faulty_training import train_with_faults
from forked_training import train_beside_forks, train_beside_loaders
from interrupted_weights import interrupt_streamed_weights
from random_training import Pair
from soak import soak_a_managed_training, soak_a_streamed_training, soak_many_trainings
from tallies import aligned, report

from umem._version import __version__

_MOST_WRONG = 5
_FAULTS, _FORKS = 20, 3
_STEPS, _COMPARED = 100, 25
_TRAININGS, _MANAGED_STEPS = 48, 48
_PROGRESS_S = 60.0

_MINUTES = 20.0
"""Of a whole campaign, whose least sizes are below."""

_SIGNALS, _RANDOM_STEPS = 200, 10_000
_SOAKED_STEPS = 20_000
"""Eight hours of steps of 1.44 s, as Llama-2-7B's on an H100 (docs/streaming.md)."""

Attempt = Callable[[int], tuple[int, int]]
"""Takes a seed, and returns what was tried, and how much of it umem has refused."""


@dataclass
class Tally:
    """What became of the attempts of a row."""

    tried: int = 0
    refused: int = 0
    wrong: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Row:
    """A kind of fault.

    Parameters
    ----------
    name
        What is tried.
    share
        Of the campaign's time; 0 for a single attempt, however long it takes.
    make
        Returns the attempt, for a campaign of some minutes; a context, for what it needs.
    least
        What is tried at least in a campaign of 20 minutes, and in proportion in another one, also
        where the machine takes longer for it.
    """

    name: str
    share: float
    make: Callable[[float], contextlib.AbstractContextManager[Attempt]]
    least: int = 1


def _row(
    name: str,
    share: float,
    attempt: Callable[..., object],
    *arguments: object,
    count: int = 1,
    least: int = 1,
) -> Row:
    """A row whose attempts need nothing, and try `count` of what is named."""

    @contextlib.contextmanager
    def make(_minutes: float) -> Iterator[Attempt]:
        def once(seed: int) -> tuple[int, int]:
            attempt(seed, *arguments)
            return count, 0

        yield once

    return Row(name, share, make, least)


def _of_processes(name: str, share: float, method: str, least: int = 1) -> Row:
    @contextlib.contextmanager
    def make(_minutes: float) -> Iterator[Attempt]:
        with contextlib.closing(Processes(is_gpu=torch.cuda.is_available())) as processes:

            def once(seed: int) -> tuple[int, int]:
                getattr(processes, method)(seed)
                return 1, 0

            yield once

    return Row(name, share, make, least)


def _of_faults(name: str, share: float, *kinds: type[Interrupt | OutOfMemory | Signal]) -> Row:
    """A row whose attempts take the kinds of fault by turns."""

    @contextlib.contextmanager
    def make(_minutes: float) -> Iterator[Attempt]:
        def once(seed: int) -> tuple[int, int]:
            met = train_with_faults(seed, kinds[seed // 4 % len(kinds)], _FAULTS)
            return len(met), sum(it.startswith("refused") for it in met)

        yield once

    return Row(name, share, make)


def _random_schedule(seed: int) -> None:
    pair = Pair(seed)
    for _ in range(_STEPS // _COMPARED):
        pair.train(_COMPARED)
        pair.check()


def _refused_memory(seed: int) -> None:
    """From some step on, memory on host and device is refused now and then, or always."""
    pair = Pair(seed)
    pair.train(pair.chance.randint(0, 5))
    chance, share = random.Random(seed), pair.chance.choice((0.1, 0.5, 1.0))
    pair.streamed.memory.refuses = lambda: chance.random() < share
    for _ in range(_COMPARED):
        pair.train(1)
        pair.check()


@contextlib.contextmanager
def _soak(minutes: float) -> Iterator[Attempt]:
    steps = max(120, round(_SOAKED_STEPS * minutes / _MINUTES))

    def once(seed: int) -> tuple[int, int]:
        soak_a_streamed_training(seed, steps)
        return steps, 0

    yield once


ROWS = (
    _of_processes("training killed, and the next one", 0.09, "kill_a_training"),
    _of_processes("SIGINT or SIGTERM to a training", 0.36, "end_a_training", _SIGNALS),
    _of_processes("SIGINT or SIGTERM to a command", 0.04, "end_a_command"),
    _of_faults("Ctrl-C that the program catches", 0.04, Interrupt, Signal),
    _row(
        "Ctrl-C, weights and activations streamed",
        *(0.03, interrupt_streamed_weights, _FAULTS),
        count=_FAULTS,
    ),
    _of_faults("out of memory, smaller batch", 0.04, OutOfMemory),
    _row("step, while memory is refused", 0.03, _refused_memory, count=_COMPARED),
    _row("fork in a training", 0.02, train_beside_forks, _FORKS, count=_FORKS),
    _row("DataLoader, forked", 0.01, train_beside_loaders, "fork"),
    _row("DataLoader, spawned", 0.01, train_beside_loaders, "spawn"),
    _row("step of a random schedule", 0.07, _random_schedule, count=_STEPS, least=_RANDOM_STEPS),
    Row("step of one long training", 0.0, _soak),  # a quarter of the time, on two quiet cores
    _row("training, one after the other", 0.01, soak_many_trainings, _TRAININGS, count=_TRAININGS),
    _row(
        "step with hints to the host engine",
        *(0.01, soak_a_managed_training, _MANAGED_STEPS),
        count=_MANAGED_STEPS,
    ),
)


def try_for(row: Row, minutes: float, seed: int = 0) -> Tally:
    """Try a row for its share of so many minutes and as often as it asks, less if much is wrong."""
    tally, least = Tally(), row.least * minutes / _MINUTES
    with row.make(minutes) as attempt:
        ends = shown = time.monotonic()
        ends += 60 * minutes * row.share
        while True:
            try:
                tried, refused = attempt(seed)
            except Exception as error:
                tally.tried += 1
                tally.wrong.append(f"seed {seed}: {type(error).__name__}: {error!s:.2000}")
            else:
                tally.tried += tried
                tally.refused += refused
            seed += 1
            is_over = time.monotonic() > ends and tally.tried >= least
            if is_over or len(tally.wrong) == _MOST_WRONG:
                return tally
            if time.monotonic() > shown + _PROGRESS_S:
                shown = time.monotonic()
                print(f"  {row.name}: {tally.tried:,} so far", flush=True)


def table(results: Sequence[tuple[str, Tally]], minutes: float) -> str:
    """The results as text."""
    columns = ("what", "tried", "survived", "refused", "wrong")
    rows = [columns] + [
        (
            name,
            f"{tally.tried:,}",
            f"{tally.tried - tally.refused - len(tally.wrong):,}",
            f"{tally.refused:,}",
            f"{len(tally.wrong)}",
        )
        for name, tally in results
    ]
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "no GPU"
    machine = (
        f"{platform.machine()}, {os.cpu_count()} cores, {device}, umem {__version__}, Python "
        f"{platform.python_version()}, torch {torch.__version__}, {time.strftime('%Y-%m-%d')}"
    )
    return "\n".join([f"{minutes:g} minutes; {machine}.", "", *aligned(rows)])


def main() -> None:
    """Run the rows that the command line names."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=_MINUTES, help="of all rows together")
    parser.add_argument("--seed", type=int, default=0, help="of the first attempt of each row")
    parser.add_argument("--output", help="file to write the table to")
    parser.add_argument("rows", nargs="*", metavar="ROW", help="all by default")
    options = parser.parse_args()
    logging.disable(logging.WARNING)  # umem says what it does without
    chosen = [it for it in ROWS if not options.rows or it.name in options.rows]
    report(
        ((row.name, try_for(row, options.minutes, options.seed)) for row in chosen),
        lambda results: table(results, options.minutes),
        options.output,
    )


if __name__ == "__main__":
    main()
