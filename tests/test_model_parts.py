"""Names and classes of a model's parameters, and the memory of plain and wrapped tensors."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, cast

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.testing._internal.two_tensor import TwoTensor

from umem.core.classes import TensorClass
from umem.core.errors import EnableError
from umem.runtime.model_parts import (
    buffers_of,
    gpu_of,
    named_parts,
    named_tensors,
    optimizer_parameters,
    optimizer_state,
    parameter_names,
    plain_tensors,
    storage_addresses,
    unwrapped,
    weight_classes,
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
    assert list(unwrapped(tensor)) == [tensor]
    assert list(plain_tensors(tensor)) == [tensor]


def test_views_and_parameters_are_where_their_storage_is() -> None:
    tensor = torch.ones(4)
    assert storage_addresses(tensor[1:]) == [tensor.data_ptr()]
    assert storage_addresses(torch.nn.Parameter(tensor)) == [tensor.data_ptr()]


def test_a_wrapper_is_where_its_parts_are() -> None:
    parts = [torch.ones(4), torch.zeros(4)]
    wrapper = pair(*parts)
    assert storage_addresses(wrapper) == [part.data_ptr() for part in parts]
    assert len(storage_addresses(pair(wrapper, pair(torch.ones(4), torch.ones(4))))) == 4


def test_several_parts_of_a_tensor_are_numbered() -> None:
    parts = [torch.ones(4), torch.zeros(4)]
    assert named_parts("weight", parts[0]) == [("weight", parts[0])]
    assert [name for name, _ in named_parts("weight", pair(*parts))] == ["weight[0]", "weight[1]"]
    assert named_parts("weight", torch.eye(4).to_sparse()) == []


def test_what_has_no_memory_has_no_address() -> None:
    assert storage_addresses(torch.empty(0)) == []
    assert storage_addresses(torch.ones(4, device="meta")) == []
    assert storage_addresses(torch.eye(4).to_sparse()) == []


def test_each_parameter_has_one_name() -> None:
    shared = nn.Linear(2, 2, bias=False)
    model = nn.Sequential(shared, nn.Linear(2, 2), shared)
    alone = nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([alone, *model.parameters()])
    named = model.named_parameters(remove_duplicate=False)
    names = parameter_names(named, optimizer_parameters(optimizer))
    assert list(names.values()) == ["0.weight", "1.weight", "1.bias", "parameter 3"]
    assert names[alone] == "parameter 3"


def test_a_storage_that_frozen_and_trained_parameters_share_is_tagged_as_trained_last() -> None:
    trained = nn.Parameter(torch.ones(4))
    frozen = nn.Parameter(trained.detach()[:2], requires_grad=False)
    assert weight_classes([trained, frozen]) == [
        (frozen, TensorClass.FROZEN_WEIGHTS),
        (trained, TensorClass.WEIGHTS),
    ]


def test_optimizer_state_is_named_by_parameter_and_key() -> None:
    model = nn.Linear(2, 2, bias=False)
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    cast(Any, optimizer.state)["all"] = {"scales": [torch.ones(1)], "count": 3}
    names = parameter_names(model.named_parameters())
    keys = {key for key, _ in optimizer_state(optimizer, names)}
    assert keys == {"weight.step", "weight.exp_avg", "weight.exp_avg_sq", "optimizer.scales.0"}


def test_tensors_are_found_in_nested_containers() -> None:
    @dataclass
    class Batch:
        labels: torch.Tensor

    held: dict[str, Any] = {"batch": Batch(torch.ones(1)), "pair": (1, torch.ones(2))}
    held["self"] = held
    found = [name for name, _ in named_tensors(held)]
    assert found[:3] == ["batch.labels", "pair.1", "self.batch.labels"]
    assert len(found) == 14, "a container that holds itself is searched to a limited depth"


def test_a_model_with_a_list_named_buffers_has_its_buffers() -> None:
    """Megatron-core's wrapper for data parallelism has one, of gradients."""
    inner = nn.BatchNorm1d(4)
    model = nn.Sequential(inner)
    model.buffers = [torch.zeros(3)]  # type: ignore[assignment]
    assert list(map(id, buffers_of(model))) == list(map(id, inner.buffers()))


def test_a_model_that_is_divided_among_gpus_is_refused_by_name() -> None:
    def model_on(*devices: str) -> nn.Module:
        return nn.ParameterList(torch.empty(2, device=it) for it in devices)

    with FakeTensorMode():
        with pytest.raises(EnableError, match="no parameters on a GPU"):
            gpu_of(model_on("cpu"))
        assert gpu_of(model_on("cuda:1", "cpu")) == torch.device("cuda:1")
        with pytest.raises(EnableError, match=r"among 2 GPUs.*n_devices"):
            gpu_of(model_on("cuda:0", "cuda:1"))
