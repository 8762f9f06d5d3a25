"""Programs that read or write by TorchScript, by functions of torch.func, and compiled."""

from __future__ import annotations

from typing import Any

import torch
from small_trainings import Run, program, train


@torch.jit.script
def _lerp(average: torch.Tensor, weight: torch.Tensor, decay: float) -> None:
    average.mul_(decay).add_(weight.detach(), alpha=1.0 - decay)


@torch.jit.script
def _zero(gradient: torch.Tensor) -> None:
    gradient.zero_()


@program()
def average_scripted(run: Run) -> None:
    """An average of weights by a scripted function."""
    model, optimizer = run.model()
    averages = [torch.zeros_like(weight) for weight in model.parameters()]

    @torch.no_grad()
    def average() -> None:
        for mean, weight in zip(averages, model.parameters(), strict=True):
            _lerp(mean, weight, 0.9)
        run.record("averages", averages)

    train(run, model, optimizer, average)


@program()
def gradients_zeroed_by_script(run: Run) -> None:
    """Gradients are zeroed by a scripted function while a deferred update still reads them."""
    model, optimizer = run.model()
    for batch in run.batches():
        loss = model(batch).square().mean()
        loss.backward()
        optimizer.step()
        for weight in model.parameters():
            _zero(weight.grad)
        run.record("loss", loss)


@program()
def squares_traced(run: Run) -> None:
    """A traced function of weights."""
    model, optimizer = run.model()
    traced: Any = torch.jit.trace(
        lambda weight: (weight * weight).sum(), (torch.ones(8, 8, device=run.device),)
    )

    @torch.no_grad()
    def read() -> None:
        run.record("squares", [traced(each) for each in model.parameters() if each.ndim == 2])

    train(run, model, optimizer, read)


@program()
def penalty_by_func(run: Run) -> None:
    """The gradient of a penalty on weights by torch.func.grad."""
    model, optimizer = run.model()

    def penalty(weights: dict[str, torch.Tensor]) -> torch.Tensor:
        return torch.stack([(weight**3).sum() for weight in weights.values()]).sum()

    def read() -> None:
        run.record("penalty", torch.func.grad(penalty)(dict(model.named_parameters())))

    train(run, model, optimizer, read)


def _average_compiled(run: Run, *, checks_always: bool) -> None:
    model, optimizer = run.model()
    averages = [torch.zeros_like(weight) for weight in model.parameters()]

    @torch.compile(backend="eager")
    def lerp(means: list[torch.Tensor], weights: list[torch.Tensor]) -> None:
        torch._foreach_lerp_(means, weights, 0.1)

    @torch.no_grad()
    def average() -> None:
        weights = list(model.parameters())
        if checks_always or run.step < 3:
            lerp(averages, weights)
        else:
            with torch.compiler.set_stance(skip_guard_eval_unsafe=True):
                lerp(averages, weights)
        run.record("averages", averages)

    train(run, model, optimizer, average)


@program("one process")
def average_compiled(run: Run) -> None:
    """An average by a compiled function, which the compiler has seen with plain tensors."""
    _average_compiled(run, checks_always=True)


@program("one process")
def average_compiled_unchecked(run: Run) -> None:
    """The same where the compiler's guards are not evaluated any more, as in hot loops."""
    _average_compiled(run, checks_always=False)


@program("one process")
def step_compiled(run: Run) -> None:
    """``torch.compile`` of the optimizer's step."""
    model, optimizer = run.model(
        make_optimizer=lambda every: torch.optim.AdamW(every, lr=1e-3, foreach=True)
    )
    step: Any = torch.compile(optimizer.step, backend="eager")
    for batch in run.batches():
        loss = model(batch).square().mean()
        optimizer.zero_grad()
        loss.backward()
        step()
        run.record("loss", loss)
