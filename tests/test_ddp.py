"""DistributedDataParallel on the CPU with two ranks: state is streamed, and all bits are stock's.

Gradients may be views of the buckets that ranks exchange, and some batches may not be exchanged.
"""

from __future__ import annotations

import json
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from found_trainings import Streams, streaming
from rank_processes import result_file, run_ranks
from streamed_programs import WIDTH, Net
from torch import distributed, nn
from torch.nn.parallel import DistributedDataParallel

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

RANKS, STEPS, BATCHES = 2, 8, 2
LEAST_STREAMED_BYTES = 64

OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "views of buckets": {"gradient_as_bucket_view": True},
}


def train(options: dict[str, Any], streams: Streams | None) -> dict[str, Any]:
    """Accumulate without an exchange, clip, step, and load what was saved."""
    with pytest.MonkeyPatch.context() as patch, streaming(streams, patch):
        torch.manual_seed(0)
        model: Any = DistributedDataParallel(Net(), **options)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        rank, seen = distributed.get_rank(), []
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
            optimizer.step()
            optimizer.zero_grad()
            if step == STEPS // 2:
                optimizer.load_state_dict(optimizer.state_dict())
        found: dict[str, Any] = {
            "seen": seen,
            "weights": [it.tolist() for it in model.parameters()],
        }
        if streams is not None:
            (training,) = streams.trainings
            status = training.status()
            found |= {"streamed": status.counts.streamed, "state_bytes": status.state_bytes}
    return found


def run_rank(rank: int, folder: Path) -> None:
    """The main function of a rank's process: all runs, one after the other."""
    meeting = (folder / "meeting").as_uri()
    distributed.init_process_group("gloo", meeting, rank=rank, world_size=RANKS)
    found = {
        name: [train(options, streams) for streams in (None, Streams())]
        for name, options in OPTIONS.items()
    }
    result_file(folder, rank).write_text(json.dumps(found))
    distributed.destroy_process_group()


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, list[dict[str, Any]]]]:
    """Results of each rank by options: stock, and all state streamed."""
    return run_ranks(run_rank, tmp_path_factory.mktemp("ddp"), RANKS)


@pytest.mark.parametrize("name", OPTIONS)
def test_all_bits_are_stocks(name: str, ranks: list[dict[str, list[dict[str, Any]]]]) -> None:
    for runs in ranks:
        stock, streamed = runs[name]
        assert streamed["seen"] == stock["seen"]
        assert streamed["weights"] == stock["weights"]
        sizes = [it.nbytes for it in Net().parameters()]
        assert streamed["state_bytes"] == 2 * sum(it for it in sizes if it >= LEAST_STREAMED_BYTES)
        assert streamed["streamed"] == STEPS - 1
    assert ranks[0][name][0]["weights"] == ranks[1][name][0]["weights"]
    assert ranks[0][name][0]["seen"] != ranks[1][name][0]["seen"]
