"""Sizes in bytes and shares of a device, as people write and read them."""

from __future__ import annotations

import re
from fractions import Fraction

__all__ = [
    "LEAST_WITHOUT_UNIT",
    "MAX_BYTES",
    "MAX_TEXT",
    "NUMBER_PATTERN",
    "format_bytes",
    "parse_budget",
    "parse_bytes",
    "parse_limit",
    "parse_percent",
    "time_unit",
]

MAX_BYTES = 2**63 - 1
"""Largest size accepted: the native library counts bytes in signed 64-bit numbers."""

LEAST_WITHOUT_UNIT = 100_000
"""A budget or a limit that may be given without a unit: fewer are no bytes, but GiB or MiB."""

NUMBER_PATTERN = r"[0-9]+(?:_[0-9]+)*(?:\.[0-9]+)?"
"""Regular expression of the number in a size or a percentage, in the syntax of JSON schemas too."""

MAX_TEXT = 64
"""Most characters of a quantity: longer numbers would cost long arithmetic."""

_DECIMAL_UNITS = {unit: 1000**power for power, unit in enumerate(("B", "kB", "MB", "GB", "TB"))}
_BINARY_UNITS = {unit: 1024**power for power, unit in enumerate(("B", "KiB", "MiB", "GiB", "TiB"))}
_UNITS = _DECIMAL_UNITS | _BINARY_UNITS
_BYTES_PER_UNIT = {unit.lower(): size for unit, size in _UNITS.items()}
_SIZE = re.compile(rf"\s*({NUMBER_PATTERN})\s*([A-Za-z]*)\s*")
_PERCENT = re.compile(rf"\s*({NUMBER_PATTERN})\s*%\s*")

_SIZE_FORM = (
    f"give a whole number of bytes, or a number and a unit of {', '.join(_UNITS)}, such as '16GiB'"
)
_PERCENT_FORM = "give a number above 0 and at most 100 and a percent sign, such as '80%'"


def parse_bytes(value: int | str) -> int:
    """Read a size in bytes.

    Parameters
    ----------
    value
        A whole number of bytes, or a number and a unit: ``B``, the decimal ``kB MB GB TB``
        (powers of 1000) or the binary ``KiB MiB GiB TiB`` (powers of 1024), in upper or lower case,
        with optional spaces, and underscores between digits. Fractions of a byte are dropped.

    Returns
    -------
    int
        Bytes, from 0 to :data:`MAX_BYTES`.

    Raises
    ------
    ValueError
        For anything else; the message says what is accepted. ``16G`` is ambiguous: 16e9 or
        16 * 2**30.

    Examples
    --------
    >>> parse_bytes("16GiB"), parse_bytes("512 MB"), parse_bytes(4096)
    (17179869184, 512000000, 4096)
    """
    if isinstance(value, bool) or not isinstance(value, int | str):
        raise ValueError(f"{_shown(value)} is not a size: {_SIZE_FORM}")
    if isinstance(value, int):
        # Python refuses to print integers of thousands of digits.
        return _in_range(value, str(value) if abs(value) <= MAX_BYTES else "a number this large")
    match = _SIZE.fullmatch(value) if len(value) <= MAX_TEXT else None
    if match is None:
        raise ValueError(f"{_shown(value)} is not a size: {_SIZE_FORM}")
    number, unit = match.groups()
    factor = _BYTES_PER_UNIT.get(unit.lower() or "b")
    if factor is None:
        letter = unit.upper()
        if letter in ("K", "M", "G", "T"):
            either = f"{number}{letter}iB or {number}{letter.replace('K', 'k')}B"
            raise ValueError(f"{_shown(value)} could mean {either}: write the one that is meant")
        raise ValueError(f"{_shown(value)} has an unknown unit {unit!r}: {_SIZE_FORM}")
    size_bytes = Fraction(number.replace("_", "")) * factor
    if factor == 1 and size_bytes.denominator != 1:
        raise ValueError(f"{_shown(value)} is not a whole number of bytes: {_SIZE_FORM}")
    return _in_range(int(size_bytes), _shown(value))


def parse_limit(value: int | str) -> int:
    """Read the size of a budget or a limit as :func:`parse_bytes`, but refuse 20 for 20 GiB.

    ``ValueError`` also for a number below :data:`LEAST_WITHOUT_UNIT` that has no unit.
    """
    size_bytes = parse_bytes(value)
    digits = str(value).strip()
    if 0 < size_bytes < LEAST_WITHOUT_UNIT and digits[-1].isdigit():
        unit = "GiB" if size_bytes < 2048 else "MiB"
        raise ValueError(f"{digits} has no unit: give one, such as '{digits}{unit}' or '{digits}B'")
    return size_bytes


def format_bytes(size_bytes: int) -> str:
    """Write a size in binary units with at most two decimals, such as ``"-1.5 GiB"``.

    :func:`parse_bytes` reads the result back to within 0.5 %, and exactly where the size is a whole
    number, below 1024, of the unit chosen.
    """
    scaled: float = abs(size_bytes)
    units = list(_BINARY_UNITS)
    # Rounded first: 1023.996 KiB would be printed as "1024 KiB" instead of "1 MiB".
    while round(scaled, 2) >= 1024 and len(units) > 1:
        scaled /= 1024
        del units[0]
    digits = f"{scaled:.2f}".rstrip("0").rstrip(".")
    return f"{'-' if size_bytes < 0 else ''}{digits} {units[0]}"


def parse_percent(text: str) -> Fraction:
    """Read a percentage such as ``"80%"`` as a share above 0 and at most 1.

    For anything else a ``ValueError`` says what is accepted.
    """
    match = _PERCENT.fullmatch(text) if isinstance(text, str) and len(text) <= MAX_TEXT else None
    if match is None:
        raise ValueError(f"{_shown(text)} is not a percentage: {_PERCENT_FORM}")
    share = Fraction(match.group(1).replace("_", "")) / 100
    if not 0 < share <= 1:
        raise ValueError(f"{_shown(text)} is out of range: {_PERCENT_FORM}")
    return share


def parse_budget(value: int | str, total_bytes: int) -> int:
    """Read a size as :func:`parse_limit`, or a percentage of `total_bytes`, rounded down.

    A number has been read before, and may be any.

    ``ValueError`` if `value` is neither.
    """
    if isinstance(value, str) and "%" in value:
        return int(parse_percent(value) * total_bytes)
    return parse_limit(value) if isinstance(value, str) else parse_bytes(value)


def time_unit(longest_s: float) -> tuple[float, str]:
    """Unit for times up to `longest_s`: how many of it are a second, and its name."""
    if longest_s < 1e-3:
        return 1e6, "µs"
    return (1e3, "ms") if longest_s < 1 else (1.0, "s")


def _in_range(size_bytes: int, shown: str) -> int:
    if not 0 <= size_bytes <= MAX_BYTES:
        raise ValueError(f"{shown} is out of range: a size is from 0 to {MAX_BYTES} bytes")
    return size_bytes


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= MAX_TEXT else f"{text[:MAX_TEXT]}..."
