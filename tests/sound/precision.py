"""Programs with autocast, scaled losses, and weights of other types."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from small_trainings import Net, Run, Size, program, train
from torch import nn
from torch.utils.checkpoint import checkpoint


class _UsedAgain(Net):
    """Checkpoints its blocks, and from some call on uses a weight again after its block."""

    again: Callable[[torch.Tensor, torch.Tensor], torch.Tensor] | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False)
        y: torch.Tensor = self.head(x)
        if self.again is not None:
            weight = self.get_parameter("blocks.0.up.weight")
            y = y + 0.1 * self.again(x, weight)[:, :16]
        return y


@torch.jit.script
def _scripted_linear(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.linear(x, weight)


def _use_again(run: Run, again: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]) -> None:
    model, optimizer = run.model(_UsedAgain)
    wide = 2048 if run.is_cuda else 8
    factors = torch.linspace(0, 1, wide, device=run.device)
    for batch in run.batches():
        model.again = again if run.step > run.size.late + 2 else None
        with torch.autocast(run.device, torch.bfloat16):
            # As logits of many words: they take most of the peak, between the two passes.
            logits = model(batch).float()[:, :, None] * factors
            loss = logits.exp().sum(-1).log().square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        run.record("loss", loss)


@program()
def cast_weight_used_again(run: Run) -> None:
    """Under autocast with checkpoints, a weight is used again after its block, from some step."""
    _use_again(run, nn.functional.linear)


@program()
def cast_weight_used_again_by_script(run: Run) -> None:
    """The same by a scripted function."""
    _use_again(run, _scripted_linear)


@program()
def losses_scaled(run: Run) -> None:
    """float16 with a GradScaler that leaves out every fifth step; unscaled and clipped."""
    model, optimizer = run.model()
    scaler = torch.amp.GradScaler(run.device, init_scale=1024.0, growth_interval=3)
    for batch in run.batches():
        with torch.autocast(run.device, torch.float16):
            loss = model(batch).float().square().mean()
        if run.step % 5 == 4:
            loss = loss * float("inf")
        optimizer.zero_grad()
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        run.record("loss", loss)
        run.record("scale", scaler.get_scale())


@program("cuda")
def rate_in_a_tensor(run: Run) -> None:
    """A capturable AdamW whose rate is a tensor on the GPU, changed right after each step."""
    rate = torch.tensor(1e-3, device=run.device)
    model, optimizer = run.model(
        make_optimizer=lambda every: torch.optim.AdamW(
            every, lr=rate, capturable=True, foreach=True
        )
    )

    def change() -> None:
        group = optimizer.param_groups[0]
        group["lr"].mul_(0.9)
        group["weight_decay"] = 0.01 * (run.step % 3)

    train(run, model, optimizer, change)


@program()
def rate_in_a_tensor_on_the_host(run: Run) -> None:
    """A fused AdamW whose rate is a tensor, changed right after each step."""
    rate = torch.tensor(1e-3, device=run.device)
    model, optimizer = run.model(
        make_optimizer=lambda every: torch.optim.AdamW(every, lr=rate, fused=True)
    )

    def change() -> None:
        optimizer.param_groups[0]["lr"].mul_(0.9)

    train(run, model, optimizer, change)


class _ManyTypes(nn.Module):
    """Complex and float64 weights beside float32 ones."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.waves = nn.Parameter(torch.randn(width, width, dtype=torch.complex64) * 0.02)
        self.precise = nn.Parameter(torch.randn(width, width, dtype=torch.float64) * 0.02)
        self.up = nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        mixed = (x.to(torch.complex64) @ self.waves).abs() + (x.double() @ self.precise).float()
        return x + self.down(torch.tanh(self.up(mixed))) * 0.1


@program()
def types_mixed(run: Run) -> None:
    """Complex and float64 weights beside float32 ones, under Adam with amsgrad."""
    model, optimizer = run.model(
        lambda size: Net(size, _ManyTypes),
        lambda every: torch.optim.Adam(every, lr=1e-4, amsgrad=True),
    )
    train(run, model, optimizer, clip=1.0, rows=min(256, run.size.rows))


class _Normed(nn.Module):
    """A convolution with batch norm."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.convolution = nn.Conv2d(width, width, 3, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.relu(self.norm(self.convolution(x)))


class _NormedConvolutions(nn.Module):
    """Checkpointed convolutions in channels-last order."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.width = 5 * size.width // 8
        self.blocks = nn.ModuleList(_Normed(self.width) for _ in range(size.layers + 2))
        self.head = nn.Conv2d(self.width, 8, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False)
        return self.head(x)


def _in_channels_last(size: Size) -> nn.Module:
    model: Any = _NormedConvolutions(size)
    return model.to(memory_format=torch.channels_last)


@program()
def convolutions_cast(run: Run) -> None:
    """Channels-last convolutions with batch norm under autocast, checkpoints and evaluations."""
    last = torch.channels_last
    model, optimizer = run.model(_in_channels_last)
    pixels = 24 if run.is_cuda else 4
    for _ in run.batches(rows=1):
        image = torch.randn(8, model.width, pixels, pixels, device=run.device)
        image = image.to(memory_format=last)
        with torch.autocast(run.device, torch.bfloat16):
            loss = model(image).float().square().mean()
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_value_(model.parameters(), 1e-3)
        optimizer.step()
        run.record("loss", loss)
        if run.step % 5 == 4:
            model.eval()
            with torch.inference_mode():
                run.record("evaluation", model(image).clone())
            model.train()
