"""Trainings beside processes that are forked or spawned from them."""

from __future__ import annotations

import hashlib
import os
import random
from collections.abc import Iterator
from typing import Any

import torch
from random_training import Pair, RandomProgram, Step, values
from streamed_programs import WIDTH
from torch import nn
from torch.utils.data import DataLoader, Dataset

_ROWS = 4


class _Rows(Dataset[torch.Tensor]):
    """Batches that a weight has a part in, if there is one: as it was when workers began."""

    def __init__(self, scale: nn.Parameter | None, count: int) -> None:
        self._scale, self._count = scale, count

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index: int) -> torch.Tensor:
        made = torch.randn(_ROWS, WIDTH, generator=torch.Generator().manual_seed(index))
        return made if self._scale is None else made * self._scale.detach()


def train_beside_forks(seed: int, forks: int) -> None:
    """Fork a training with updates under way: the child trains on, and so does the parent."""
    pair = Pair(seed)
    for _ in range(forks):
        pair.train(pair.chance.randint(1, 3))
        pair.stock.plan = pair.streamed.plan = pair.next_step()
        for it in pair.programs:
            it.step()
        found, expected = (_in_child(it) for it in (pair.streamed, pair.stock))
        assert found == expected, "the child's values differ from those of stock's"
        pair.check()


def _in_child(program: RandomProgram) -> str:
    """A checksum of all that a forked child has behind another step."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            program.step()
            digest = hashlib.sha256(repr(values(program)).encode()).hexdigest()
            os.write(writer, digest.encode())
        finally:
            os._exit(0)
    os.close(writer)
    with os.fdopen(reader) as answer:
        said = answer.read()
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert said, "the child has failed"
    return said


def train_beside_loaders(seed: int, method: str) -> None:
    """Train on the batches of a DataLoader with workers, made while updates are under way."""
    pair = Pair(seed)
    pair.train(random.Random(seed).randint(1, 3))
    loaders = [_loader(it, method) for it in pair.programs]
    for batches in zip(*loaders, strict=True):
        for it, batch in zip(pair.programs, batches, strict=True):
            it.optimizer.zero_grad()
            loss = it.model(batch).square().mean()
            it.seen.append(loss.detach())
            loss.backward()
            it.optimizer.step()
    pair.check()


def _loader(program: RandomProgram, method: str) -> Iterator[Any]:
    program.plan = Step()
    program.step()
    if method == "fork":
        rows, workers = _Rows(program.model.scale, 6), 2
    else:
        # A spawned worker would get the weight's memory itself, and see it change. Each one imports
        # torch, and stock's would send the same batches.
        rows, workers = _Rows(None, 6), 0 if program.is_stock else 1
    context = method if workers else None
    return iter(DataLoader(rows, None, num_workers=workers, multiprocessing_context=context))
