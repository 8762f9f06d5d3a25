"""Words for whoever waits reach the log, or what a command puts in its place."""

from __future__ import annotations

import logging

import pytest

from umem.core.progress import notify, notify_by


def test_words_go_to_the_log_but_where_somebody_takes_them(
    caplog: pytest.LogCaptureFixture,
) -> None:
    told: list[str] = []
    with notify_by(told.append):
        notify("one")
    assert (told, caplog.records) == (["one"], [])
    notify("two")
    assert told == ["one"]
    assert caplog.record_tuples == [("umem", logging.WARNING, "umem: two")]
