"""Blocks whose weights are views of one flat partition, gathered for each pass: a stand-in.

BMTrain's blocks (ZeRO-3, with checkpoints) and its manager of optimizers do so; it is compiled on
a machine with a GPU, and so not run here. As there, the optimizer updates the blocks' own
parameters. Outside the passes they are flat views of the rank's partition, and their gradients are
views of its gradient. A list of blocks gathers before it calls what a block holds.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from found_trainings import Streams, streaming
from streamed_programs import bits
from torch import nn

WIDTH, LAYERS, STEPS = 16, 4, 9

STATE = 2 * LAYERS * 4 * (WIDTH * WIDTH + WIDTH)
"""Bytes of two moments of all."""


class Block(nn.Module):
    """Holds a layer, and the partition of its parameters; one rank has all of it."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer
        self.shapes = [it.shape for it in layer.parameters()]
        self.partition = torch.cat([it.detach().flatten() for it in layer.parameters()])
        self.gradient = torch.zeros_like(self.partition)
        self._set(self.partition, None)

    def _set(
        self, weights: torch.Tensor, gradients: torch.Tensor | None, *, flat: bool = True
    ) -> None:
        begin = 0
        for it, shape in zip(self.layer.parameters(), self.shapes, strict=True):
            end, view = begin + shape.numel(), (-1,) if flat else shape
            it.grad = None
            it.data = weights[begin:end].view(view)
            if gradients is not None:
                it.grad = gradients[begin:end].view(view)
            begin = end

    @contextmanager
    def gathered(self) -> Iterator[None]:
        """Parameters with their shapes, in memory of their own, within the context."""
        sums = torch.zeros_like(self.gradient) if torch.is_grad_enabled() else None
        self._set(self.partition.clone(), sums, flat=False)
        yield
        if sums is not None:
            self.gradient += sums
        self._set(self.partition, self.gradient)

    def forward(self, x: torch.Tensor) -> Any:
        return Checkpoint.apply(x, self)  # type: ignore[no-untyped-call]


class Checkpoint(torch.autograd.Function):
    """Gathers in both passes, and saves the block's input alone."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, block: Block) -> torch.Tensor:
        ctx.block = block
        ctx.save_for_backward(x)
        with torch.no_grad(), block.gathered():
            return x + torch.tanh(block.layer(x))

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        (x,) = ctx.saved_tensors
        x = x.detach().requires_grad_()
        with torch.enable_grad(), ctx.block.gathered():
            torch.autograd.backward(x + torch.tanh(ctx.block.layer(x)), gradients)
        return x.grad, None


class Blocks(nn.Module):
    """Calls its blocks, or only what they hold, as BMTrain's list of blocks does."""

    def __init__(self, *, calls_blocks: bool) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block(nn.Linear(WIDTH, WIDTH)) for _ in range(LAYERS))
        self._calls_blocks = calls_blocks

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.layers:
            x = block(x) if self._calls_blocks else block.forward(x)
        return x


def train(*, calls_blocks: bool, clips: bool, kind: Any) -> list[Any]:
    """Losses are scaled, and gradients that are too large cost a step, as its manager has it."""
    torch.manual_seed(0)
    model = Blocks(calls_blocks=calls_blocks)
    optimizer = kind(model.parameters(), lr=1e-2)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
    scale, seen = 1024.0, []
    for number in range(STEPS):
        optimizer.zero_grad(set_to_none=False)
        batch = torch.randn(8, WIDTH, generator=torch.Generator().manual_seed(number))
        loss = model(batch.requires_grad_()).square().mean()
        (loss * scale).backward()
        seen.append(loss.detach())
        gradients: list[Any] = [it.grad for it in model.parameters()]
        if number == 5:
            gradients[0][0] = torch.inf
        if any(it.isinf().any() for it in gradients):
            scale /= 2
            continue
        if clips:
            norm = sum(it.norm() ** 2 for it in gradients) ** 0.5
            for it in gradients:
                it.mul_(scale / (norm + 1e-6))
            seen.append(norm / scale)
        for it in gradients:
            it /= scale
        optimizer.step()
        schedule.step()
    return [*seen, optimizer.state_dict()["state"], *(block.partition for block in model.layers)]


@pytest.mark.slow
@pytest.mark.parametrize("kind", [torch.optim.Adam, torch.optim.AdamW])
@pytest.mark.parametrize("clips", [False, True])
@pytest.mark.parametrize("calls_blocks", [False, True])
def test_no_bit_changes(
    calls_blocks: bool, clips: bool, kind: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = bits(train(calls_blocks=calls_blocks, clips=clips, kind=kind))
    for more_bytes in (-1, STATE // 2, 10**6):
        streams = Streams(more_bytes)
        with streaming(streams, monkeypatch):
            assert bits(train(calls_blocks=calls_blocks, clips=clips, kind=kind)) == expected
        (training,) = streams.trainings
        counts = training.counts
        # One step makes the state, and one is left out.
        assert counts.streamed + counts.resident == STEPS - 2
        assert counts.streamed > 1
        # A block reads its partition past all that guards its parameters: no update is deferred.
        assert (counts.waited, counts.early, counts.in_line) == (LAYERS * counts.streamed, 0, 0)
