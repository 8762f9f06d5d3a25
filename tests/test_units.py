"""Sizes and percentages: reading, writing and errors."""

from __future__ import annotations

from fractions import Fraction
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from umem.core.units import (
    MAX_BYTES,
    format_bytes,
    parse_budget,
    parse_bytes,
    parse_limit,
    parse_percent,
)

UNITS = {"KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40}


@pytest.mark.parametrize(
    ("value", "size_bytes"),
    [
        (0, 0),
        (4096, 4096),
        ("4096", 4096),
        ("1_000_000", 10**6),
        ("7 B", 7),
        ("16GiB", 16 * 2**30),
        ("512 MB", 512 * 10**6),
        ("  2.5\tkib ", 2560),
        ("1kB", 1000),
        ("3TB", 3 * 10**12),
        ("0.1GiB", 107_374_182),
        (MAX_BYTES, MAX_BYTES),
    ],
)
def test_parse_bytes_reads_numbers_and_units(value: int | str, size_bytes: int) -> None:
    assert parse_bytes(value) == size_bytes


@pytest.mark.parametrize(
    ("value", "says"),
    [
        ("16G", "'16G' could mean 16GiB or 16GB"),
        ("16 k", "could mean 16KiB or 16kB"),
        ("10 potatoes", "unknown unit 'potatoes'"),
        ("1.5", "not a whole number of bytes"),
        ("1.5 B", "not a whole number of bytes"),
        ("", "KiB, MiB, GiB, TiB"),
        ("GiB", "is not a size"),
        ("-1GiB", "is not a size"),
        ("1e9", "unknown unit 'e9'|is not a size"),
        ("1,5GiB", "is not a size"),
        ("٣GiB", "is not a size"),
        ("9" * 1000, "is not a size"),
        (-1, "-1 is out of range"),
        (MAX_BYTES + 1, "out of range"),
        pytest.param(10**5000, "out of range", id="huge"),
        ("8388608TiB", "out of range"),
        (True, "True is not a size"),
        (1.5, "1.5 is not a size"),
        (None, "None is not a size"),
    ],
)
def test_parse_bytes_says_what_it_accepts(value: Any, says: str) -> None:
    with pytest.raises(ValueError, match=says) as caught:
        parse_bytes(value)
    assert len(str(caught.value)) < 250


@pytest.mark.parametrize(
    ("size_bytes", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1 KiB"),
        (3 * 2**29, "1.5 GiB"),
        (2**20 - 1, "1 MiB"),
        (-3 * 2**20, "-3 MiB"),
        (2**52, "4096 TiB"),
    ],
)
def test_format_bytes(size_bytes: int, text: str) -> None:
    assert format_bytes(size_bytes) == text


@given(st.integers(min_value=0, max_value=2**60))
@example(1111)
def test_format_then_parse_is_within_half_a_percent(size_bytes: int) -> None:
    # And less than a byte, for parsing gives whole ones.
    assert abs(parse_bytes(format_bytes(size_bytes)) - size_bytes) < 0.005 * size_bytes + 1


@given(st.integers(min_value=1, max_value=1023), st.sampled_from(sorted(UNITS)))
def test_format_then_parse_is_exact_for_whole_units(number: int, unit: str) -> None:
    size_bytes = number * UNITS[unit]
    assert format_bytes(size_bytes) == f"{number} {unit}"
    assert parse_bytes(format_bytes(size_bytes)) == size_bytes


@given(st.integers(min_value=0, max_value=MAX_BYTES))
def test_digits_alone_are_bytes(size_bytes: int) -> None:
    assert parse_bytes(str(size_bytes)) == size_bytes == parse_bytes(f"{size_bytes:_} B")


@given(st.text())
def test_parse_bytes_answers_any_text_with_a_size_or_a_value_error(text: str) -> None:
    try:
        size_bytes = parse_bytes(text)
    except ValueError:
        size_bytes = 0
    assert 0 <= size_bytes <= MAX_BYTES


@pytest.mark.parametrize(
    ("text", "share"),
    [("80%", Fraction(4, 5)), (" 100 % ", Fraction(1)), ("0.5%", Fraction(1, 200))],
)
def test_parse_percent(text: str, share: Fraction) -> None:
    assert parse_percent(text) == share


@pytest.mark.parametrize("text", ["0%", "100.1%", "-5%", "%", "80", "80 percent", "", 80, None])
def test_parse_percent_refuses(text: Any) -> None:
    with pytest.raises(ValueError, match="above 0 and at most 100"):
        parse_percent(text)


@pytest.mark.parametrize(
    ("value", "unit"), [(20, "GiB"), ("20", "GiB"), (" 1_000 ", "GiB"), (81_920, "MiB")]
)
def test_a_small_limit_has_a_unit(value: int | str, unit: str) -> None:
    digits = str(value).strip()
    with pytest.raises(ValueError, match=f"{digits} has no unit: .*'{digits}{unit}'"):
        parse_limit(value)
    assert parse_limit(f"{digits}B") == int(value)


@pytest.mark.parametrize(
    ("value", "size_bytes"), [(0, 0), ("0", 0), ("20GiB", 20 << 30), ("100000", 100_000)]
)
def test_a_limit_is_a_size(value: int | str, size_bytes: int) -> None:
    assert parse_limit(value) == size_bytes


def test_parse_budget_takes_a_share_of_the_device_or_a_size() -> None:
    # 10 % of this many bytes is not a double: floats would give one byte less or more.
    assert parse_budget("10%", 90_071_992_547_409_930) == 9_007_199_254_740_993
    assert parse_budget("1GiB", 80 * 2**30) == 2**30
    with pytest.raises(ValueError, match="out of range"):
        parse_budget("101%", 100)
