"""Memory that torch does not fill, also where algorithms are deterministic."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch

from umem.runtime.unfilled_memory import unfilled_bytes, unfilled_like

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def _deterministic() -> Iterator[None]:
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


def fills(make: Callable[[], torch.Tensor]) -> bool:
    with torch.profiler.profile(record_shapes=True) as profile:
        make()
    shapes = [event.input_shapes[0] for event in profile.events() if event.name == "aten::fill_"]
    return any(0 not in shape for shape in shapes)


def test_torch_fills_and_umem_does_not() -> None:
    like = torch.ones(8, 16).t()
    assert fills(lambda: torch.empty(1024, dtype=torch.uint8))
    assert fills(lambda: torch.empty_like(like))
    assert not fills(lambda: unfilled_bytes(1024, CPU))
    assert not fills(lambda: unfilled_like(like))


def test_memory_is_as_was_asked_for() -> None:
    like = torch.arange(128, dtype=torch.bfloat16).view(8, 16).t()
    new = unfilled_like(like)
    assert (new.dtype, new.size(), new.stride()) == (like.dtype, like.size(), like.stride())
    assert new.untyped_storage().nbytes() == like.nbytes
    assert torch.equal(new.copy_(like), like)
    some = unfilled_bytes(1000, CPU)
    assert (some.dtype, some.nbytes, some.untyped_storage().nbytes()) == (torch.uint8, 1000, 1000)
