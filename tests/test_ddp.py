"""DistributedDataParallel on the CPU with two ranks: state is streamed, and all bits are stock's.

Gradients may be views of the buckets that ranks exchange, some batches may not be exchanged, and
programs exchange weights and gradients behind a step whose updates are under way.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from found_trainings import Streams, streaming
from rank_processes import meeting, run_ranks_once
from streamed_programs import WIDTH, Branches, Net
from torch import distributed, nn
from torch.nn.parallel import DistributedDataParallel

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

RANKS, STEPS, BATCHES = 2, 14, 2
LEAST_STREAMED_BYTES = 64

OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "views of buckets": {"gradient_as_bucket_view": True},
    "blocks that are not called": {"find_unused_parameters": True},
    "a partition that no module holds": {"partition": True},
}
DEFERRED = ("plain", "blocks that are not called", "a partition that no module holds")
"""Gradients that are views would be used by others while an update reads them."""


def world() -> Any:
    return distributed.group.WORLD


def average(weight: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        distributed.all_reduce(weight)
        return weight.div_(RANKS).sum()


def average_by_the_group(weight: torch.Tensor) -> torch.Tensor:
    """As ``torch.distributed`` does it, which in some versions asks torch's dispatch first."""
    with torch.no_grad():
        world().allreduce([weight]).wait()
        return weight.div_(RANKS).sum()


def average_by_the_backend(weight: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        world()._get_backend(weight.device).allreduce([weight]).wait()
        return weight.div_(RANKS).sum()


def gather(weight: torch.Tensor) -> torch.Tensor:
    gathered = [torch.empty(weight.shape) for _ in range(RANKS)]
    world().allgather([gathered], [weight]).wait()
    return torch.stack(gathered).sum()


def send(weight: torch.Tensor) -> torch.Tensor:
    received = torch.empty(weight.shape)
    rank = distributed.get_rank()
    works = [world().send([weight], 1 - rank, rank), world().recv([received], 1 - rank, 1 - rank)]
    for work in works:
        work.wait()
    return received.sum()


def add_gradients(weight: torch.Tensor) -> torch.Tensor:
    assert weight.grad is not None
    world().allreduce([weight.grad]).wait()
    return weight.grad.sum()


USES: list[Callable[[torch.Tensor], torch.Tensor]] = [
    *(average, average_by_the_group, average_by_the_backend, gather, send, add_gradients)
]
"""What a program does with a weight behind a step."""


def train(options: dict[str, Any], streams: Streams | None) -> dict[str, Any]:
    """Accumulate without an exchange, clip, step, and load what was saved."""
    with pytest.MonkeyPatch.context() as patch, streaming(streams, patch):
        torch.manual_seed(0)
        kind = Branches if "find_unused_parameters" in options else Net
        model: Any = DistributedDataParallel(
            kind(), **{name: it for name, it in options.items() if name != "partition"}
        )
        partition = nn.Parameter(torch.ones(8 * WIDTH))
        others = [partition] if "partition" in options else []
        optimizer = torch.optim.AdamW([*model.parameters(), *others], lr=1e-2)
        rank, seen = distributed.get_rank(), []
        model.module.calls = rank  # which blocks are called
        for step in range(STEPS):
            for batch in range(BATCHES):
                generator = torch.Generator().manual_seed(RANKS * (BATCHES * step + batch) + rank)
                x = torch.randn(8, WIDTH, generator=generator)
                with model.no_sync() if batch < BATCHES - 1 else nullcontext():
                    loss = model(x).square().mean()
                    loss.backward()
                seen.append(loss.item().hex())
            norm: Any = nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            seen.append(norm.item().hex())
            partition.grad = torch.full_like(partition, float(norm))
            optimizer.step()
            seen.append(float(partition.sum()).hex())
            use = USES[step % len(USES)]
            seen += [float(use(it.weight)).hex() for it in (model.module.stem, model.module.head)]
            if step % 3:  # the next step has this one's gradients too
                optimizer.zero_grad()
            if step == STEPS // 2:
                optimizer.load_state_dict(optimizer.state_dict())
        found: dict[str, Any] = {
            "seen": seen,
            "weights": [it.tolist() for it in model.parameters()],
            "state_bytes": sum(
                it.nbytes
                for values in optimizer.state.values()
                for it in values.values()
                if it.nbytes >= LEAST_STREAMED_BYTES
            ),
        }
        if streams is not None:
            (training,) = streams.trainings
            status = training.status()
            found |= dataclasses.asdict(status.counts) | {"state_bytes": status.state_bytes}
    return found


def run_rank(rank: int, folder: Path) -> None:
    """The main function of a rank's process: all runs, one after the other."""
    with meeting(rank, folder, RANKS) as found:
        for name, options in OPTIONS.items():
            found[name] = [train(options, streams) for streams in (None, Streams())]


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, list[dict[str, Any]]]]:
    """Results of each rank by options: stock, and all state streamed."""
    return run_ranks_once(run_rank, tmp_path_factory, RANKS)


@pytest.mark.parametrize("name", OPTIONS)
def test_all_bits_are_stocks(name: str, ranks: list[dict[str, list[dict[str, Any]]]]) -> None:
    for runs in ranks:
        stock, streamed = runs[name]
        assert streamed["seen"] == stock["seen"]
        assert streamed["weights"] == stock["weights"]
        assert streamed["state_bytes"] == stock["state_bytes"]
        assert streamed["streamed"] == STEPS - 1
        if name in DEFERRED:
            assert streamed["waited"] < 3 * STEPS, "only steps that are measured wait"
            assert streamed["early"] > 0
        else:
            assert streamed["waited"] > 5 * STEPS
            assert streamed["early"] == 0
    assert ranks[0][name][0]["weights"] == ranks[1][name][0]["weights"]
    assert ranks[0][name][0]["seen"] != ranks[1][name][0]["seen"]


def test_a_partition_is_waited_for_in_the_step(
    ranks: list[dict[str, list[dict[str, Any]]]],
) -> None:
    waited = {name: streamed["waited"] for name, (_, streamed) in ranks[0].items()}
    assert waited["a partition that no module holds"] > waited["plain"] + STEPS // 2
