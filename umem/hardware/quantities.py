"""Numbers with units, as people write them in a profile and read them in a table."""

from __future__ import annotations

import difflib
import itertools
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

from umem.core.units import NUMBER_PATTERN, format_bytes, parse_bytes, parse_percent
from umem.io.yaml_files import did_you_mean, shown

__all__ = [
    "BLOCK",
    "CAPACITY",
    "COUNT",
    "FLAG",
    "FLOPS",
    "RATE",
    "SHARE",
    "SIZE",
    "SLOWDOWN",
    "TIME",
    "Quantity",
    "word",
]


@dataclass(frozen=True)
class Quantity:
    """One kind of value: how it is read, checked and written.

    Parameters
    ----------
    example : str
        A value in the form that is accepted.
    parse : callable
        Value in the units of :class:`umem.hardware.Hardware`; ValueError with a message that says
        what is accepted.
    format : callable
        The same value for a person to read; in a profile it is read back, to six digits.
    """

    example: str
    parse: Callable[[Any], Any]
    format: Callable[[Any], str]


# ------------------------------------------------------------------------- a number and a unit

# The bound keeps absurdly long numbers away from big-integer arithmetic.
_MAX_TEXT = 64
_MEASURE = re.compile(rf"\s*({NUMBER_PATTERN})\s*([^\s0-9][^\s]*)\s*")


def _measure(
    example: str, units: Mapping[str, Fraction], low: str, high: str, shown_in: tuple[str, ...]
) -> Quantity:
    """A positive number with one of these units, between two bounds written in them.

    `shown_in` are the units to write values in, largest first.
    """

    def read(text: str) -> Fraction:
        match = _MEASURE.fullmatch(text) if len(text) <= _MAX_TEXT else None
        if match is None:
            raise ValueError(f"{shown(text)} is not a number and a unit: give one such as {such}")
        number, unit = match.groups()
        if unit not in units:
            raise ValueError(f"{shown(text)} has an unknown unit{hint(unit)}")
        return Fraction(number.replace("_", "")) * units[unit]

    def parse(value: Any) -> float:
        if not isinstance(value, str):
            raise ValueError(f"{shown(value)} has no unit: give one such as {such}")
        quantity = read(value)
        if not lowest <= quantity <= highest:
            raise ValueError(f"{shown(value)} is out of range: give {low} to {high}")
        return float(quantity)

    def write(value: float) -> str:
        fitting = (unit for unit in shown_in if value >= units[unit])
        unit = next(fitting, shown_in[-1] if value else shown_in[0])
        return f"{_digits(value / units[unit])} {unit}"

    def hint(unit: str) -> str:
        folded = {known.lower(): known for known in units}
        near = difflib.get_close_matches(unit.lower(), folded, n=1)
        if near:
            return f" {unit!r}, did you mean {folded[near[0]]!r}?"
        return f" {unit!r}: give a number and a unit, such as {such}"

    such = f"'{example}'"
    lowest, highest = read(low), read(high)
    return Quantity(example, parse, write)


def _digits(value: float) -> str:
    """At most six significant digits, without an exponent."""
    text = f"{value:.6g}"
    if "e" in text:
        text = f"{value:.12f}".rstrip("0").rstrip(".")
    return text


_SECONDS = {
    "s": Fraction(1),
    "ms": Fraction(1, 10**3),
    "us": Fraction(1, 10**6),
    "ns": Fraction(1, 10**9),
}
_BYTES = {
    unit: Fraction(parse_bytes(f"1 {unit}"))
    for unit in ("kB", "MB", "GB", "TB", "KiB", "MiB", "GiB", "TiB")
}

TIME = _measure("45 us", _SECONDS, "0 s", "1 s", ("s", "ms", "us", "ns"))
"""Seconds."""

RATE = _measure(
    "51 GB/s",
    {f"{unit}/s": size for unit, size in _BYTES.items()},
    "1 MB/s",
    "1000 TB/s",
    ("TB/s", "GB/s", "MB/s"),
)
"""Bytes per second."""

SLOWDOWN = _measure(
    "5 ms/GiB",
    {
        f"{time}/{unit}": seconds / size
        for (time, seconds), (unit, size) in itertools.product(_SECONDS.items(), _BYTES.items())
    },
    "0 s/GiB",
    "1 s/GiB",
    ("ms/GiB",),
)
"""Seconds per byte."""

FLOPS = _measure(
    "700 TFLOP/s",
    {f"{prefix}FLOP/s": Fraction(10**power) for prefix, power in (("G", 9), ("T", 12), ("P", 15))},
    "1 GFLOP/s",
    "1000 PFLOP/s",
    ("PFLOP/s", "TFLOP/s", "GFLOP/s"),
)
"""Floating-point operations per second."""


# ------------------------------------------------------------------------- sizes


def _size(example: str, low: str, high: str, *, power_of_two: bool = False) -> Quantity:
    lowest, highest = parse_bytes(low), parse_bytes(high)

    def parse(value: Any) -> int:
        size = parse_bytes(value)
        if not lowest <= size <= highest:
            raise ValueError(f"{shown(value)} is out of range: give {low} to {high}")
        if power_of_two and size.bit_count() != 1:
            raise ValueError(f"{shown(value)} is not a power of two: give such as '{example}'")
        return size

    return Quantity(example, parse, _write_size)


def _write_size(size: int) -> str:
    """In binary units, or in decimal ones where only those give a short number."""
    for power, unit in ((12, "TB"), (9, "GB"), (6, "MB")):
        if size % 10 ** (power - 1) == 0 and size >= 10**power:
            return f"{_digits(size / 10**power)} {unit}"
    return format_bytes(size)


CAPACITY = _size("80 GiB", "1 MiB", "1024 TiB")
"""Bytes of a memory."""

BLOCK = _size("2 MiB", "4 KiB", "1 GiB", power_of_two=True)
"""Bytes of a page or a block: a power of two."""

SIZE = _size("128 MiB", "4 KiB", "1 TiB")
"""Bytes of a range."""


# ------------------------------------------------------------------------- the rest


def _parse_count(value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= 65535:
        raise ValueError(f"{shown(value)} is not a whole number from 1 to 65535")
    return value


def _parse_flag(value: Any) -> bool:
    if not isinstance(value, bool):
        raise ValueError(f"{shown(value)} is not true or false: write one of the two")
    return value


def _write_share(share: float) -> str:
    return f"{_digits(100 * share)}%"


COUNT = Quantity("256", _parse_count, str)
FLAG = Quantity("true", _parse_flag, lambda flag: str(flag).lower())
SHARE = Quantity("51%", lambda value: float(parse_percent(value)), _write_share)
"""From above 0 to 1."""


def word(*words: str) -> Quantity:
    """One of some words."""

    def parse(value: Any) -> str:
        if value not in words:
            hint = (did_you_mean(value, words) if isinstance(value, str) else "") or "."
            raise ValueError(f"{shown(value)} is not valid{hint} Valid values: {', '.join(words)}")
        return str(value)

    return Quantity(words[0], parse, str)
