"""Tries each reader of files from strangers for some minutes: `make fuzz FUZZ_MINUTES=10`.

Prints a row for each reader; exit status 1 if anything is wrong. What is wrong is printed, and its
input is kept in a file whose name is printed.
"""

from __future__ import annotations

import argparse
import platform
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from fuzz_readers import READERS, Reader, Tally
from hypothesis import HealthCheck, Phase, given, seed, settings
from tallies import aligned, report

from umem.core.units import format_bytes

_AT_ONCE = 500
"""Inputs of one search. The next one starts from another seed."""

_MOST_WRONG = 20

_MOST_S = 5.0
"""Most time of the processor that an input may take: the largest are below a megabyte."""


class _TimeIsUp(Exception):  # noqa: N818
    """Ends a search, which Hypothesis stops at an exception."""


def try_for(reader: Reader, duration_s: float) -> Tally:
    """Try a reader for so long, or until much is wrong."""
    tally = Tally()
    inputs = reader.inputs()
    ends = time.monotonic() + duration_s
    number = 0
    while time.monotonic() < ends and len(tally.wrong) < _MOST_WRONG:
        number += 1
        last = b""

        @seed(number)
        @settings(
            max_examples=_AT_ONCE,
            deadline=None,
            database=None,
            phases=[Phase.generate],
            report_multiple_bugs=False,
            suppress_health_check=list(HealthCheck),
        )
        @given(inputs)
        def search(content: bytes) -> None:
            nonlocal last
            if time.monotonic() > ends:
                raise _TimeIsUp
            last = content
            took_s = reader.try_input(content, tally)
            assert took_s < _MOST_S, f"{took_s:.1f} s"

        try:
            search()
        except _TimeIsUp:
            break
        except Exception as error:
            kept = Path(tempfile.mkdtemp(prefix="umem-fuzz-wrong-")) / f"input{reader.suffix}"
            kept.write_bytes(last)
            tally.wrong.append(f"{kept}: {type(error).__name__}: {error!s:.300}")
    return tally


def table(results: Sequence[tuple[str, Tally]], minutes: float) -> str:
    """The results as text."""
    columns = ("reader", "inputs", "refused", "accepted", "worst time", "worst memory", "wrong")
    rows = [columns] + [
        (
            name,
            f"{tally.inputs:,}",
            f"{tally.refused:,}",
            f"{tally.accepted:,}",
            f"{tally.worst_s:.3f} s",
            format_bytes(tally.worst_bytes),
            f"{len(tally.wrong)}",
        )
        for name, tally in results
    ]
    machine = (
        f"{platform.machine()}, Python {platform.python_version()}, NumPy {np.__version__}, "
        f"torch {torch.__version__}, {time.strftime('%Y-%m-%d')}"
    )
    return "\n".join(
        [
            f"{minutes:g} minutes for each reader; {machine}.",
            "Time of the processor and memory, with every allocation of Python traced, which is "
            "slow.",
            "",
            *aligned(rows),
        ]
    )


def main() -> None:
    """Run the readers that the command line names."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=10.0, help="for each reader")
    parser.add_argument("--output", help="file to write the table to")
    parser.add_argument("readers", nargs="*", metavar="READER", help="all by default")
    options = parser.parse_args()
    chosen = [it for it in READERS if not options.readers or it.name in options.readers]
    report(
        ((reader.name, try_for(reader, 60 * options.minutes)) for reader in chosen),
        lambda results: table(results, options.minutes),
        options.output,
    )


if __name__ == "__main__":
    main()
