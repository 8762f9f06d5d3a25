"""Kinds of figures in a profile: how each is written with its unit, checked, and shown."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from fractions import Fraction
from typing import Annotated, Any

from pydantic import GetCoreSchemaHandler, StrictBool
from pydantic_core import CoreSchema, core_schema

from umem.core.units import MAX_TEXT, NUMBER_PATTERN, format_bytes, parse_bytes, parse_percent
from umem.io.problems import did_you_mean, shown

__all__ = [
    "BlockSize",
    "BytesPerSecond",
    "Capacity",
    "Count",
    "Flag",
    "FlopsPerSecond",
    "Quantity",
    "RangeSize",
    "Seconds",
    "SecondsPerByte",
    "Share",
]


@dataclass(frozen=True)
class Quantity:
    """A kind of figure. As an annotation of a type, it tells pydantic how to read one."""

    example: str
    """A value in the accepted form."""
    format: Callable[[Any], str] = str
    """The value for a person to read; `parse` reads it back to six digits."""
    parse: Callable[[Any], Any] | None = None
    """Value in the units of :class:`umem.hardware.Hardware`; raises ValueError with a message that
    says what is accepted. None where pydantic's check of the type is enough."""

    def __get_pydantic_core_schema__(
        self, source: Any, handler: GetCoreSchemaHandler
    ) -> CoreSchema:
        if self.parse is None:
            return handler(source)
        return core_schema.no_info_plain_validator_function(self.parse)


# A number and a unit.

_MEASURE = re.compile(rf"\s*({NUMBER_PATTERN})\s*([^\s0-9][^\s]*)\s*")


def _measure(
    example: str, units: Mapping[str, Fraction], low: str, high: str, shown_in: tuple[str, ...]
) -> Quantity:
    """A number with one of these units, from `low` to `high`.

    It is shown in one of `shown_in`, which are ordered from the largest unit to the smallest.
    """

    def read(value: Any) -> Fraction:
        if not isinstance(value, str):
            raise ValueError(f"{shown(value)} has no unit: give one such as '{example}'")
        match = _MEASURE.fullmatch(value) if len(value) <= MAX_TEXT else None
        if match is None:
            raise ValueError(
                f"{shown(value)} is not a number and a unit: give one such as '{example}'"
            )
        number, unit = match.groups()
        if unit not in units:
            hint = did_you_mean(unit, units)
            hint = hint or f": give a number and a unit, such as '{example}'"
            raise ValueError(f"{shown(value)} has an unknown unit {unit!r}{hint}")
        return Fraction(number.replace("_", "")) * units[unit]

    def parse(value: Any) -> float:
        quantity = read(value)
        if not lowest <= quantity <= highest:
            raise ValueError(f"{shown(value)} is out of range: give {low} to {high}")
        return float(quantity)

    def show(value: float) -> str:
        fitting = (unit for unit in shown_in if value >= units[unit])
        unit = next(fitting, shown_in[-1] if value else shown_in[0])
        return f"{_digits(value / units[unit])} {unit}"

    lowest, highest = read(low), read(high)
    return Quantity(example, show, parse)


def _digits(value: float) -> str:
    """At most six significant digits, without an exponent."""
    text = f"{value:.6g}"
    if "e" in text:
        text = f"{value:.12f}".rstrip("0").rstrip(".")
    return text


_SECONDS = {unit: Fraction(1, 1000**power) for power, unit in enumerate(("s", "ms", "us", "ns"))}
_BYTES = {
    unit: Fraction(parse_bytes(f"1 {unit}"))
    for unit in ("kB", "MB", "GB", "TB", "KiB", "MiB", "GiB", "TiB")
}
_BYTE_RATES = {f"{unit}/s": size for unit, size in _BYTES.items()}
_SLOWDOWNS = {
    f"{time}/{unit}": seconds / size
    for (time, seconds), (unit, size) in itertools.product(_SECONDS.items(), _BYTES.items())
}
_FLOP_RATES = {
    f"{prefix}FLOP/s": Fraction(10**power) for power, prefix in ((15, "P"), (12, "T"), (9, "G"))
}

Seconds = Annotated[float, _measure("45 us", _SECONDS, "0 s", "1 s", tuple(_SECONDS))]
BytesPerSecond = Annotated[
    float, _measure("51 GB/s", _BYTE_RATES, "1 MB/s", "1000 TB/s", ("TB/s", "GB/s", "MB/s"))
]
SecondsPerByte = Annotated[
    float, _measure("5 ms/GiB", _SLOWDOWNS, "0 s/GiB", "1 s/GiB", ("ms/GiB",))
]
FlopsPerSecond = Annotated[
    float,
    _measure("700 TFLOP/s", _FLOP_RATES, "1 GFLOP/s", "1000 PFLOP/s", tuple(_FLOP_RATES)),
]
"""Floating-point operations per second."""


# Sizes in bytes.


def _size(example: str, low: str, high: str, *, power_of_two: bool = False) -> Quantity:
    def parse(value: Any) -> int:
        size = parse_bytes(value)
        if not parse_bytes(low) <= size <= parse_bytes(high):
            raise ValueError(f"{shown(value)} is out of range: give {low} to {high}")
        if power_of_two and size.bit_count() != 1:
            raise ValueError(f"{shown(value)} is not a power of two: give such as '{example}'")
        return size

    return Quantity(example, _show_size, parse)


def _show_size(size: int) -> str:
    """In binary units, or in decimal ones where only those give a short number."""
    for power, unit in ((12, "TB"), (9, "GB"), (6, "MB")):
        if size % 10 ** (power - 1) == 0 and size >= 10**power:
            return f"{_digits(size / 10**power)} {unit}"
    return format_bytes(size)


Capacity = Annotated[int, _size("80 GiB", "1 MiB", "1024 TiB")]
"""Bytes of a memory."""
BlockSize = Annotated[int, _size("2 MiB", "4 KiB", "1 GiB", power_of_two=True)]
"""Bytes of a page or a block: a power of two."""
RangeSize = Annotated[int, _size("128 MiB", "4 KiB", "1 TiB")]
"""Bytes of a range of addresses."""


# Counts, shares and flags.


def _parse_count(value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= 65535:
        raise ValueError(f"{shown(value)} is not a whole number from 1 to 65535")
    return value


Count = Annotated[int, Quantity("256", parse=_parse_count)]
Share = Annotated[
    float,
    Quantity(
        "51%", lambda share: f"{_digits(100 * share)}%", lambda text: float(parse_percent(text))
    ),
]
"""Above 0 and at most 1, written as a percentage."""
Flag = Annotated[StrictBool, Quantity("true", shown)]
