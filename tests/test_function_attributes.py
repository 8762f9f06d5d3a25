"""What autograd functions keep as attributes of their nodes, past the hooks on saved tensors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from umem.runtime.torch_hooks.backward import nodes_of
from umem.runtime.torch_hooks.function_attributes import let_go_of_lent
from umem.runtime.torch_hooks.saved_tensors import lend

Product = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


@pytest.fixture
def product() -> Product:
    """A function of a class that no other test has seen: classes are watched for good."""

    class Function(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
            ctx.tensors = [weight[1:], weight.size(0), x]
            return x * weight[1:].sum()

        @staticmethod
        def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
            part, rows, x = ctx.tensors
            assert rows == ctx.tensors[1]
            assert torch.equal(ctx.tensors[:1][0], part)
            assert x is ctx.tensors[2]
            return gradients[0] * part.sum(), None

    def product(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = Function.apply(x, weight)  # type: ignore[no-untyped-call]
        return y

    return product


def test_lent_memory_is_found_when_it_is_needed(product: Product) -> None:
    weight, x = torch.arange(4.0), torch.ones(2, requires_grad=True)
    asked = []

    def find(view: torch.Tensor) -> Any:
        asked.append(view.storage_offset())
        return lambda: torch.full((3,), 10.0)

    end = lend(weight.untyped_storage(), find)
    first = product(x, weight)
    second = product(2 * first, weight)
    let_go_of_lent(nodes_of([second]), nodes_of([first]))
    assert asked == [1], "the other product is behind the inputs"
    second.sum().backward()
    assert x.grad is not None
    assert x.grad.tolist() == [30.0 * 2 * 6] * 2

    third = product(x, weight)
    assert asked == [1, 1], "without another look at the graph"
    third.sum().backward()
    assert x.grad.tolist() == [30.0 * 2 * 6 + 30] * 2
    end()
    keeping: Any = product(x, weight)
    assert keeping.grad_fn.tensors[0].tolist() == [1, 2, 3]
    assert asked == [1, 1]


def test_what_a_checkpoint_computes_again_keeps_it(product: Product) -> None:
    weight, x = torch.arange(4.0), torch.ones(2, requires_grad=True)
    asked = []

    def find(view: torch.Tensor) -> Any:
        asked.append(view.storage_offset())
        return view.clone

    end = lend(weight.untyped_storage(), find)
    let_go_of_lent(nodes_of([product(x, weight)]), ())
    asked.clear()
    checkpoint(product, x, weight, use_reentrant=False).sum().backward()
    assert asked == [1]
    assert x.grad is not None
    assert x.grad.tolist() == [6.0, 6.0]
    end()


def test_other_tensors_stay_attributes(product: Product) -> None:
    weight, x = torch.arange(4.0), torch.ones(2, requires_grad=True)
    y: Any = product(x, weight)
    kept = y.grad_fn.tensors
    let_go_of_lent(nodes_of([y]), ())
    assert y.grad_fn.tensors is kept
