"""Readers of files from strangers, tried with damaged and changed ones: see fuzz_readers.py."""

from __future__ import annotations

import pytest
from fuzz_readers import READERS, Reader, Tally
from hypothesis import HealthCheck, given, settings


@pytest.mark.slow
@pytest.mark.parametrize("reader", READERS, ids=lambda reader: reader.name)
def test_a_reader_refuses_or_accepts(reader: Reader) -> None:
    tally = Tally()

    @settings(
        max_examples=40, derandomize=True, deadline=None, suppress_health_check=list(HealthCheck)
    )
    @given(reader.inputs())
    def try_one(content: bytes) -> None:
        reader.try_input(content, tally)

    try_one()
    assert tally.refused
    assert tally.accepted
