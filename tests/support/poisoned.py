"""Tests that the allocator's poison keeps from seeing what they look for."""

from __future__ import annotations

import os

import pytest

NOT_POISONED = pytest.mark.skipif(
    os.environ.get("UMEM_POISON") == "1",
    reason="UMEM_POISON writes to all new memory, and keeps a freed block until its stream asks",
)
"""For tests of when memory is used anew, and of how much of it has pages."""
