"""Weights and optimizer state that are streamed together: no bit changes.

A step is queued and updates weights at home; the next forward pass stages them behind that.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from streamed_programs import WIDTH, Branches, Net, NetWithFlat, Program, Tied, compare
from streamed_uses import USES
from torch import nn

EVERY = frozenset(["", "stem", *(f"layers.{number}" for number in range(4)), "norm", "head"])


@pytest.mark.parametrize("eagerness", [0.0, 0.8])
@pytest.mark.parametrize("use", USES)
def test_no_use_sees_another_value(use: Callable[[Program], None], eagerness: float) -> None:
    program = compare(use, eagerness, streams_weights=True)
    assert program.weights is not None
    assert program.weights.streamed.counts.fetched


@pytest.mark.parametrize("make_model", [NetWithFlat, Tied, Branches])
@pytest.mark.parametrize("batches", [1, 2])
@pytest.mark.parametrize("copied", [EVERY, frozenset[str]()])
def test_no_bit_changes(
    make_model: Callable[[], nn.Module], batches: int, copied: frozenset[str]
) -> None:
    compare(
        make_model=make_model,
        batches=batches,
        copied_gradients=copied,
        streams_weights=True,
        eagerness=0.5,
    )


@pytest.mark.slow
def test_updates_stay_deferred_and_weights_are_fetched_ahead() -> None:
    # On a GPU, too, updates are launched when they are queued.
    program = compare(steps=8, eagerness=1.0, streams_weights=True)
    assert program.training is not None
    assert program.weights is not None
    counts, weights = program.training.counts, program.weights.streamed.counts
    # At the end the program looks at all weights itself.
    assert (counts.waited, counts.early, counts.in_line) == (0, 8, 0)
    # In each step the first block comes late: its update is what the step began with.
    assert weights.late <= 8 + 2


@pytest.mark.slow
def test_updates_in_the_backward_pass_use_weights_in_place() -> None:
    program = compare(steps=6, clips=False, in_backward=True, streams_weights=True)
    assert program.weights is not None
    assert program.weights.status().streamed_bytes == 0


class Packed(nn.Parameter):
    """Two numbers of four bits in each byte, in a class of their own as bitsandbytes has one."""


class Multiply(torch.autograd.Function):
    """Unpacks the weight in both passes, and saves it packed."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, packed: torch.Tensor, scale: float) -> torch.Tensor:
        ctx.save_for_backward(packed)
        ctx.scale = scale
        return x @ unpacked(packed, scale).T

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        (packed,) = ctx.saved_tensors
        return gradients[0] @ unpacked(packed, ctx.scale), None, None


def unpacked(packed: torch.Tensor, scale: float) -> torch.Tensor:
    return scale * (torch.stack([packed & 15, packed >> 4], -1).flatten(-2).float() - 8)


class Adapted(nn.Module):
    """A frozen weight of four bits, and a trained product of two small ones beside it."""

    def __init__(self, rank: int = 4) -> None:
        super().__init__()
        codes = torch.randint(0, 256, (WIDTH, WIDTH // 2), dtype=torch.uint8)
        self.weight = Packed(codes, requires_grad=False)
        self.down = nn.Linear(WIDTH, rank, bias=False)
        self.up = nn.Linear(rank, WIDTH, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = Multiply.apply(x, self.weight, 1 / 64)  # type: ignore[no-untyped-call]
        return y + self.up(self.down(x))


class QLoRA(Net):
    """Trains the adapters alone."""

    def __init__(self) -> None:
        super().__init__()
        self.requires_grad_(False)
        self.layers = nn.ModuleList(Adapted() for _ in range(4))


def adamw_of_trained(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW([it for it in parameters if it.requires_grad], lr=1e-2)


OF_FLOATS = frozenset(
    (
        *("change_weights_in_place", "copy_model", "ema", "foreach_ema", "freeze_by_turns"),
        *("from_one_vector", "hooks_on_gradients", "new_parameter", "old_graph", "replace_data"),
        *("share_state", "use_a_weight_elsewhere"),
    )
)
"""Uses of weights that are plain parameters of floating point numbers, and trained."""


@pytest.mark.parametrize("use", [it for it in USES if it.__name__ not in OF_FLOATS])
def test_quantised_weights_under_adapters(use: Callable[[Program], None]) -> None:
    program = compare(
        use, 0.5, make_model=QLoRA, make_optimizer=adamw_of_trained, streams_weights=True
    )
    assert program.weights is not None
    assert program.weights.streamed.counts.fetched
    kinds = {type(it) for it in program.model.parameters()}
    assert kinds == {Packed, nn.Parameter}
