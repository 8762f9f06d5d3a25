"""Attributes of torch as they are in a process whose earlier tests have guarded nothing."""

from __future__ import annotations

import weakref

import pytest

from umem.runtime.torch_hooks.memory_access import wait_at_attributes, watch_lent


def forget_guards(monkeypatch: pytest.MonkeyPatch) -> None:
    """Put attributes back, whatever earlier tests still guard: that of freed gradients stays."""
    monkeypatch.setattr("umem.runtime.guard._guards", weakref.WeakSet())
    monkeypatch.setattr("umem.runtime.held_memory._lent", {})
    monkeypatch.setattr("umem.runtime.torch_hooks.memory_access._of_data", weakref.WeakSet())
    watch_lent(None, None)
    wait_at_attributes(None)
