"""The checksum of a tensor's bits."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from umem.executor.bit_checksum import bit_checksum


@pytest.mark.parametrize(
    "kind", [torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.complex128]
)
@pytest.mark.parametrize("shape", [(), (3,), (64, 33), (5, 6, 7), (1 << 12,)])
def test_changed_bits_change_the_checksum(kind: torch.dtype, shape: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    tensor = torch.randn(shape).to(kind)
    known = bit_checksum(tensor)
    assert (known.dtype, known.shape) == (torch.int64, ())
    assert torch.equal(bit_checksum(tensor.clone()), known)
    changes: list[Callable[[torch.Tensor], Any]] = [
        lambda it: it.mul_(0.5),
        lambda it: it.neg_(),
        lambda it: it.view(-1)[-1:].add_(1),
        lambda it: it.view(-1)[:1].fill_(float("nan")),
        lambda it: it.zero_(),
    ]
    if tensor.numel() > 1 << 11:
        changes.append(lambda it: it.copy_(it.roll(1024)))
    for change in changes:
        changed = tensor.clone()
        change(changed.data)
        assert not torch.equal(bit_checksum(changed), known)


def test_tensors_of_other_layouts() -> None:
    torch.manual_seed(0)
    flat = torch.randn(4096)
    for view in (flat[1:].view(torch.int32), flat.view(64, 64).t(), flat.view(64, 64)[:, ::2]):
        known = bit_checksum(view)
        assert torch.equal(bit_checksum(view), known)
        changed = view + 1
        assert not torch.equal(bit_checksum(changed), known)
