"""Losses in slices of rows on a GPU: the bits of torch's own, in a part of their memory."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import pytest
import torch
from gpu_jobs import SIDE_BY_SIDE, Start, under
from torch import nn
from torch.nn import functional

from umem.streaming.activations import SlicedLosses

pytestmark = pytest.mark.usefixtures("settled")

WIDTH = 64
cross_entropy = functional.cross_entropy


@pytest.fixture
def losses() -> Iterator[SlicedLosses]:
    found = SlicedLosses("cuda", least_bytes=1)
    yield found
    found.end()


class Result(NamedTuple):
    tensors: list[torch.Tensor]
    node: str
    peak_bytes: int


def run(
    rows: int, vocabulary: int, dtype: torch.dtype, way: str, reduction: str = "mean"
) -> Result:
    """Loss and gradients of a head and its input."""
    torch.manual_seed(0)
    is_autocast = way == "autocast"
    kept = torch.float32 if is_autocast else dtype
    head = nn.Linear(WIDTH, vocabulary, bias=False, device="cuda", dtype=kept)
    x = torch.randn(rows, WIDTH, device="cuda", dtype=kept, requires_grad=True)
    target = torch.randint(vocabulary, (rows,), device="cuda")
    target[::7] = -100
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before_bytes = torch.cuda.memory_allocated()
    with torch.autocast("cuda", dtype, enabled=is_autocast):
        logits = 4.0 * head(x)
        loss = cross_entropy(
            logits.float() if way == "upcast" else logits, target, reduction=reduction
        )
    assert loss.grad_fn is not None
    node = loss.grad_fn.name()
    (3.0 * loss).backward()
    peak_bytes = torch.cuda.max_memory_allocated() - before_bytes
    assert x.grad is not None
    assert head.weight.grad is not None
    return Result([loss.detach(), x.grad, head.weight.grad], node, peak_bytes)


def compare(losses: SlicedLosses, *options: object) -> tuple[Result, Result]:
    stock = run(*options)  # type: ignore[arg-type]
    losses.slice()
    sliced = run(*options)  # type: ignore[arg-type]
    assert sliced.node == "_SlicedCrossEntropyBackward" != stock.node
    for one, other in zip(sliced.tensors, stock.tensors, strict=True):
        assert one.dtype == other.dtype
        assert torch.equal(one.view(-1).view(torch.uint8), other.view(-1).view(torch.uint8))
    return stock, sliced


@pytest.mark.parametrize("way", ["plain", "upcast", "autocast"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize(
    ("rows", "vocabulary"),
    [(601, 128_256), (1111, 32_000), (1111, 32_001), (1037, 50_257), (999, 151_643)],
)
def test_bits_of_large_vocabularies(
    losses: SlicedLosses, rows: int, vocabulary: int, dtype: torch.dtype, way: str
) -> None:
    if dtype is torch.float32 and way != "plain":
        pytest.skip("no cast")
    losses.slice_bytes = 1 << 25
    compare(losses, rows, vocabulary, dtype, way)


@pytest.mark.parametrize("vocabulary", [2, 7, 255, 1000, 1023, 1024, 1025, 4096, 12_289])
@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("way", ["plain", "upcast"])
def test_bits_of_other_kernels(
    losses: SlicedLosses, way: str, reduction: str, vocabulary: int
) -> None:
    """torch has others for short rows, and for rows that fit shared memory."""
    losses.slice_bytes = 4 * vocabulary * 64
    compare(losses, 777, vocabulary, torch.bfloat16, way, reduction)


@pytest.mark.parametrize("way", ["upcast", "autocast"])
def test_the_loss_takes_a_part_of_the_memory(losses: SlicedLosses, way: str) -> None:
    losses.slice_bytes = 1 << 24
    rows, vocabulary = 2048, 128_256
    stock, sliced = compare(losses, rows, vocabulary, torch.bfloat16, way)
    # The logits, what the product with 4.0 is made from, their gradient, and slices.
    assert sliced.peak_bytes < 8 * rows * vocabulary + (1 << 28)
    assert stock.peak_bytes > 11 * rows * vocabulary


def test_uses_of_the_float32_copy_on_other_streams(losses: SlicedLosses) -> None:
    def program() -> list[torch.Tensor]:
        torch.manual_seed(0)
        x = torch.randn(512, 1003, device="cuda", dtype=torch.bfloat16, requires_grad=True)
        logits = 2.0 * x
        copy = logits.float()
        begun = torch.cuda.Event()
        begun.record()
        sums = []
        for stream in (torch.cuda.Stream(), torch.cuda.Stream()):
            stream.wait_event(begun)
            with torch.cuda.stream(stream):
                sums.append(copy.detach().sum())
            torch.cuda.current_stream().wait_stream(stream)
        loss = cross_entropy(copy, torch.zeros(512, device="cuda", dtype=torch.int64))
        loss.backward()
        assert x.grad is not None
        return [*sums, loss.detach(), x.grad]

    stock = program()
    losses.slice()
    assert all(map(torch.equal, program(), stock))


SHARE = 0.6


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["dropout", "accumulated"])
def test_a_training_within_a_part_of_stocks_peak_has_its_bits(mode: str, start: Start) -> None:
    words: tuple[str, ...] = ("large_vocabulary.py", mode, "12")
    stock = start(*words, **SIDE_BY_SIDE).facts()
    budget_bytes = int(SHARE * stock["peak_bytes"])
    found = start(*words, **SIDE_BY_SIDE, **under("sft", budget_bytes)).facts()
    print(mode, stock["step_ms"], found["step_ms"], stock["peak_bytes"], found["tuning"])
    for name in ("losses", "weights", "random"):
        assert found[name] == stock[name], name
    (tuning,) = found["tuning"]
    assert (tuning["slices"], tuning["overflow"]) == (True, 0)
