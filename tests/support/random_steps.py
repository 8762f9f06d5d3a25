"""Random steps for Hypothesis, and budgets for them."""

from __future__ import annotations

import itertools
from typing import Any

from hypothesis import strategies as st

from umem.trace import Trace

BLOCK = 2**21


@st.composite
def workloads(
    draw: st.DrawFn, most_tensors: int = 8, most_phases: int = 12
) -> tuple[list[tuple[int, bool]], list[list[tuple[int, int]]]]:
    """What makes a random trace: sizes and persistence of tensors, and accesses of phases."""
    tensor = st.tuples(st.integers(1, 3 * BLOCK), st.booleans())
    sizes = draw(st.lists(tensor, min_size=1, max_size=most_tensors))
    access = st.tuples(st.integers(0, len(sizes) - 1), st.integers(1, 3))
    phases = draw(st.lists(st.lists(access, max_size=3), min_size=1, max_size=most_phases))
    return sizes, phases


def problems(most_spare_bytes: int) -> st.SearchStrategy[tuple[Any, int]]:
    """The same, and bytes beyond the largest working set."""
    return st.tuples(workloads(), st.integers(1, most_spare_bytes))


def working_set(trace: Trace) -> int:
    """Bytes of the tensors of the phase that uses most."""
    return max(
        int(trace.tensor_bytes[trace.access_tensor[first:last]].sum())
        for first, last in itertools.pairwise(trace.access_start)
    )
