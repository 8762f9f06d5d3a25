"""The memory behind tensors, plain and wrapped."""

from __future__ import annotations

from typing import Any, cast

import torch
from torch.testing._internal.two_tensor import TwoTensor

from umem.runtime.tensor_memory import (
    named_parts,
    plain_tensors,
    storage_addresses,
    wrapped_tensors,
)


class Pair(TwoTensor):
    """A wrapper that names more among its parts than tensors, as a DTensor does its mesh."""

    mesh = "of devices"

    def __tensor_flatten__(self) -> Any:
        return ["a", "b", "mesh"], None


def pair(*parts: torch.Tensor) -> torch.Tensor:
    return cast(torch.Tensor, cast(Any, Pair)(*parts))


def test_a_plain_tensor_wraps_nothing() -> None:
    tensor = torch.ones(4)
    assert wrapped_tensors(tensor) is None
    assert list(plain_tensors(tensor)) == [tensor]


def test_views_and_parameters_are_where_their_storage_is() -> None:
    tensor = torch.ones(4)
    assert storage_addresses(tensor[1:]) == [tensor.data_ptr()]
    assert storage_addresses(torch.nn.Parameter(tensor)) == [tensor.data_ptr()]


def test_a_wrapper_is_where_its_parts_are() -> None:
    parts = [torch.ones(4), torch.zeros(4)]
    wrapper = pair(*parts)
    assert storage_addresses(wrapper) == [part.data_ptr() for part in parts]
    nested = pair(wrapper, pair(torch.ones(4), torch.ones(4)))
    assert len(storage_addresses(nested)) == 4


def test_parts_are_told_by_numbers_where_there_are_several() -> None:
    parts = [torch.ones(4), torch.zeros(4)]
    assert named_parts("weight", parts[0]) == [("weight", parts[0])]
    assert [name for name, _ in named_parts("weight", pair(*parts))] == ["weight[0]", "weight[1]"]
    assert named_parts("weight", torch.eye(4).to_sparse()) == []


def test_what_has_no_memory_has_no_address() -> None:
    assert storage_addresses(torch.empty(0)) == []
    assert storage_addresses(torch.ones(4, device="meta")) == []
    assert storage_addresses(torch.eye(4).to_sparse()) == []
