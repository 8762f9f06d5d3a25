"""Compiled models, blocks and readers see updated weights, and are compiled once more at most."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
from lazy_lanes import LazyLanes
from streamed_programs import WIDTH, Net, Program, bits
from torch import nn
from torch._dynamo.backends.registry import lookup_backend

from umem.streaming.activations import SlicedLosses

STEPS = 8


class Block(nn.Module):
    """torch does not compile a module of its own by itself."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x).sin()


class NetOfBlocks(Net):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block() for _ in range(4))


class Counting:
    """A backend that counts what it compiles."""

    def __init__(self, backend: str) -> None:
        self.count = 0
        self._compile: Callable[..., Any] = lookup_backend(backend)

    def __call__(self, graph: Any, inputs: Any) -> Any:
        self.count += 1
        return self._compile(graph, inputs)


def wrap_model(program: Program, options: Any) -> None:
    program.model = torch.compile(program.model, **options)


def compile_model(program: Program, options: Any) -> None:
    program.model.compile(**options)


def wrap_blocks(program: Program, options: Any) -> None:
    layers = program.model.layers
    for number, layer in enumerate(layers):
        layers[number] = torch.compile(layer, **options)


def compile_blocks(program: Program, options: Any) -> None:
    for layer in program.model.layers:
        layer.compile(**options)


def compile_one_block(program: Program, options: Any) -> None:
    program.model.layers[2].compile(**options)


def compile_average(program: Program, options: Any) -> None:
    @torch.compile(**options)
    def update(averages: list[torch.Tensor], weights: list[torch.Tensor]) -> None:
        for average, weight in zip(averages, weights, strict=True):
            average.lerp_(weight.detach(), 0.1)

    program.kept = update
    program.extra = [torch.zeros(it.shape) for it in program.model.parameters()]


def compile_foreach_average(program: Program, options: Any) -> None:
    @torch.compile(**options)
    def update(averages: list[torch.Tensor], weights: list[torch.Tensor]) -> None:
        torch._foreach_lerp_(averages, weights, 0.1)

    program.kept = torch.no_grad()(update)
    program.extra = [torch.zeros(it.shape) for it in program.model.parameters()]


def compile_loss(program: Program, options: Any) -> None:
    """A model that computes its loss, which umem may compute in slices once a training begins."""
    layers: Any = program.model.layers
    layers[3] = torch.compile(_LossOf(layers[3]), **options)


class _LossOf(nn.Module):
    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.layer(x)
        target = torch.arange(len(y)) % 8
        return y * nn.functional.cross_entropy(y, target)


def compile_whole_step(program: Program, options: Any) -> None:
    """Forward and backward pass, the optimizer's step, and a reader behind it: graphs break."""
    weight = program.model.head.weight

    @torch.compile(backend=options["backend"])
    def step(batch: torch.Tensor) -> Any:
        program.optimizer.zero_grad()
        loss = program.model(batch).square().mean()
        loss.backward()
        program.optimizer.step()
        return loss.detach(), weight.detach() * 2

    program.step = lambda: program.seen.append(step(program.batch()))  # type: ignore[method-assign]


def compile_optimizer(program: Program, options: Any) -> None:
    program.optimizer.step = torch.compile(program.optimizer.step, backend=options["backend"])


EVERY = [
    *(wrap_model, compile_model, wrap_blocks, compile_blocks, compile_one_block),
    *(compile_average, compile_foreach_average, compile_whole_step, compile_optimizer),
    compile_loss,
]


def run(
    lanes: Callable[[nn.Module], LazyLanes] | None,
    compiles: Callable[[Program, Any], None],
    backend: str,
    at: int,
    skips_checks_from: int,
) -> tuple[Any, int]:
    """Train, and return all bits and the number of compilations."""
    torch.compiler.reset()
    counting = Counting(backend)
    losses: list[SlicedLosses] = []

    def change(program: Program) -> None:
        if lanes is not None and program.steps == 1:
            losses.append(SlicedLosses("cpu"))
        if program.steps >= at and program.is_first("compiles"):
            compiles(program, {"backend": counting, "fullgraph": True})
        if program.kept is None:
            return
        if program.steps >= skips_checks_from:
            with torch.compiler.set_stance(skip_guard_eval_unsafe=True):
                program.kept(program.extra, list(program.model.parameters()))
        else:
            program.kept(program.extra, list(program.model.parameters()))
        program.seen.append([it.clone() for it in program.extra])

    program = Program(lanes, make_model=NetOfBlocks, prepare=change if at == 0 else lambda _: None)
    found = program.run(change, steps=STEPS)
    if program.training is not None:
        assert not program.training.is_closed
        # A compiled step is the compiler's, whose bits may be others.
        is_stocks = compiles in (compile_whole_step, compile_optimizer)
        assert (program.training.counts.in_line > 0) == is_stocks
    return bits(found), counting.count


def compare(
    compiles: Callable[[Program, Any], None],
    caplog: pytest.LogCaptureFixture,
    *,
    backend: str = "eager",
    at: int = 2,
    skips_checks_from: int = 1 << 30,
) -> None:
    expected, few = run(None, compiles, backend, at, skips_checks_from)
    with caplog.at_level(logging.WARNING, "torch._dynamo"):
        found, count = run(LazyLanes, compiles, backend, at, skips_checks_from)
    assert found == expected
    assert few <= count <= few + 1
    assert "recompile_limit" not in caplog.text


@pytest.mark.slow
@pytest.mark.parametrize(
    ("compiles", "backend", "at"),
    [
        (compiles, *way)
        for number, compiles in enumerate(EVERY)
        for way in (("eager", 2), (("eager", 0), ("aot_eager", 5))[number % 2])
    ],
)
def test_compiled_code_has_stocks_bits_and_is_compiled_once_more_at_most(
    compiles: Callable[[Program, Any], None],
    backend: str,
    at: int,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """It is compiled after the first streamed step, and by turns before it, or later."""
    compare(compiles, caplog, backend=backend, at=at)


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["eager", "inductor"])
def test_a_reader_waits_where_its_checks_are_skipped(
    backend: str, caplog: pytest.LogCaptureFixture
) -> None:
    """It is compiled before anything is streamed, and its kernels read memory past torch."""
    compare(compile_average, caplog, backend=backend, at=0, skips_checks_from=2)
