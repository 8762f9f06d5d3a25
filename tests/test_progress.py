"""Progress messages go to the log, or to the function that a command sets."""

from __future__ import annotations

import logging

import pytest

from umem.core.progress import notify, notify_by


def test_messages_go_to_the_log_unless_a_function_is_set(caplog: pytest.LogCaptureFixture) -> None:
    shown: list[str] = []
    with notify_by(shown.append):
        notify("one")
    assert (shown, caplog.records) == (["one"], [])
    notify("two")
    assert shown == ["one"]
    assert caplog.record_tuples == [("umem", logging.WARNING, "umem: two")]
