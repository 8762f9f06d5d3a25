"""Memory of several tensors is found, and whatever takes memory without an operator waits."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

from umem import torch_compat
from umem.runtime.aliases import has_alias
from umem.runtime.guard import Guard

ALIASES: dict[str, Callable[[torch.Tensor], object]] = {
    "detached": torch.Tensor.detach,
    "a view": lambda tensor: tensor[1:],
    "other metadata": lambda tensor: tensor.data.t(),
    "a parameter": nn.Parameter,
}


@pytest.mark.parametrize("with_objects", [(), (0,), (1,), (0, 1, 2)])
def test_only_memory_of_one_tensor_alone_has_no_alias(with_objects: tuple[int, ...]) -> None:
    tensors = [torch.zeros(4, 4) for _ in range(3)]
    for number in with_objects:
        tensors[number].untyped_storage()
    assert not has_alias(tensors)
    for tensor in tensors:
        for make in ALIASES.values():
            alias = make(tensor)
            assert has_alias(tensors)
            assert has_alias([tensor])
            del alias
            assert not has_alias(tensors)


def test_what_has_no_storage_may_be_shared() -> None:
    assert has_alias([torch.zeros(4, 4).to_sparse()])


@pytest.mark.skipif(
    not torch.distributed.is_available(), reason="this torch is built without torch.distributed"
)
@pytest.mark.parametrize("name", ["allreduce", "broadcast", "_allgather_base", "send", "alltoall"])
def test_a_collective_that_a_backend_is_asked_for_is_a_use(name: str) -> None:
    uses: list[None] = []
    guard, tensor = Guard(lambda: uses.append(None)), torch.ones(2)
    guard.hold([tensor])
    with pytest.raises(TypeError, match="incompatible function arguments"):
        getattr(torch_compat.ProcessGroupBackend, name)(None, [tensor])
    assert uses
    guard.release()
