"""Memory that is overwritten when it is new and when it is freed, on a GPU."""

from __future__ import annotations

import pytest
from gpu_jobs import Start

ALL = 1000


@pytest.mark.parametrize("policy", ["sft", "managed"])
def test_new_and_freed_memory_is_nan_and_no_other(policy: str, start: Start) -> None:
    facts = start("poison.py", policy, UMEM_POISON="1", UMEM_MANAGED_LIMIT="512MiB").facts()
    assert facts == {
        "new": ALL,
        "at_home": ALL,
        "freed": 0,
        "another_stream_asks": 0,
        "its_stream_asks": ALL,
        "kept": 0,
    }
