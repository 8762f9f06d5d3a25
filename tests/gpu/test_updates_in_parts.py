"""On a GPU too, an optimizer's step in parts gives the bits of the whole step."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch
from torch import nn

from umem.streaming.stage import find_spans
from umem.streaming.step import PER_PARAMETER_OPTIMIZERS, is_elementwise

DEVICE = "cuda"
SHAPES = [(1000, 257), (33, 1024), (4096,), (7,), (256, 256), (1_000_003,)]
SPAN_BYTES = 1024 * 77 * 4
STEPS = 4


def ways(kind: Any) -> list[dict[str, Any]]:
    """Arguments for each implementation that an optimizer has."""
    known = kind.__init__.__code__.co_varnames
    momentum = {"momentum": 0.9} if "momentum" in known else {}
    chosen = [{}, *({name: True} for name in ("foreach", "fused") if name in known)]
    return [{"lr": 1e-2, "weight_decay": 0.1, **momentum, **some} for some in chosen]


CASES = [
    pytest.param(kind, way, dtype, id="-".join((kind.__name__, *list(way)[2:], str(dtype)[6:])))
    for kind in PER_PARAMETER_OPTIMIZERS
    if kind.__name__ not in ("Rprop", "SparseAdam")  # the first takes no weight_decay
    for way in ways(kind)
    if kind is not torch.optim.Adagrad or "fused" not in way  # for CPUs only in some versions
    for dtype in (torch.float32, torch.bfloat16)
]


@cache
def numbers(shape: tuple[int, ...], seed: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def values(shape: tuple[int, ...], dtype: torch.dtype, seed: int) -> torch.Tensor:
    return numbers(shape, seed).to(DEVICE, dtype)


def train(kind: Any, way: dict[str, Any], parts: list[list[nn.Parameter]], grads: Any) -> None:
    """Steps of an optimizer for each part."""
    optimizers = [kind(part, **way) for part in parts]
    for step in range(STEPS):
        for part in parts:
            for parameter in part:
                parameter.grad = grads(parameter, step)
        for optimizer in optimizers:
            optimizer.step()


def bits(tensors: list[Any]) -> list[bytes]:
    return [it.detach().cpu().view(torch.uint8).numpy().tobytes() for it in tensors]


@pytest.mark.parametrize(("kind", "way", "dtype"), CASES)
def test_parameters_by_themselves(kind: Any, way: dict[str, Any], dtype: torch.dtype) -> None:
    shapes = [it for it in SHAPES if len(it) == 2 or kind.__name__ != "Muon"]
    found = []
    for size in (len(shapes), 2, 1):
        weights = [nn.Parameter(values(it, dtype, n)) for n, it in enumerate(shapes)]
        place = {id(it): number for number, it in enumerate(weights)}
        train(
            kind,
            way,
            [weights[begin : begin + size] for begin in range(0, len(weights), size)],
            lambda it, step, place=place: values(it.shape, dtype, 100 * (step + 1) + place[id(it)]),
        )
        found.append(bits(weights))
    assert found[0] == found[1] == found[2]


@pytest.mark.parametrize(("kind", "way", "dtype"), CASES)
def test_spans_of_a_flat_parameter(kind: Any, way: dict[str, Any], dtype: torch.dtype) -> None:
    if not is_elementwise(kind([nn.Parameter(values((2, 2), dtype, 0))], **way)):
        pytest.skip("its state stays whole")
    elements = 1_000_004  # the last span is not as long as the others
    found = []
    for span_bytes in (None, SPAN_BYTES):
        flat = values((elements,), dtype, 0)
        spans = [(0, elements)]
        if span_bytes is not None:
            spans = find_spans(flat, {"state": flat}, [flat], span_bytes)
            assert len(spans) > 1
        pieces = [nn.Parameter(flat[begin:end]) for begin, end in spans]
        place = {id(it): slice(*span) for it, span in zip(pieces, spans, strict=True)}
        train(
            kind,
            way,
            [[it] for it in pieces],
            lambda it, step, place=place: values((elements,), dtype, step + 1)[place[id(it)]],
        )
        found.append(bits([flat]))
    assert found[0] == found[1]
