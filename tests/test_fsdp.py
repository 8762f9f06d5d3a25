"""FSDP2 on the CPU with two ranks: DTensors' state is streamed, and all bits are stock's.

Programs save and load with ``torch.distributed.checkpoint``. Under torchrun one fails, is started
again, and goes on from its checkpoint.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from found_trainings import Streams, streaming, three_ways, watching
from rank_processes import Runs, meeting, ranks_of, result_file
from torch import distributed, nn

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

RANKS, WIDTH, LAYERS, STEPS = 2, 64, 4, 6

SAVED, FAILS_AT, ALL = 3, 5, 9
"""Steps under torchrun: each third is saved, and in one the program fails."""

OPTIMIZERS: dict[str, Any] = {
    "AdamW": lambda ps: torch.optim.AdamW(ps, lr=1e-2),
    "AdamW, fused": lambda ps: torch.optim.AdamW(ps, lr=1e-2, fused=True),
    "SGD, foreach": lambda ps: torch.optim.SGD(ps, lr=1e-2, momentum=0.9, foreach=True),
}


class Net(nn.Module):
    """Layers, of which each has a weight and a bias."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = x + torch.tanh(layer(x))
        return x.float().square().mean()


class Training:
    """A program of FSDP2 with bf16, clipping and distributed checkpoints."""

    def __init__(self, name: str) -> None:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

        torch.manual_seed(0)
        self.model: Any = Net()
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        mesh = init_device_mesh("cpu", (RANKS,))
        for layer in self.model.layers:
            fully_shard(layer, mesh=mesh, mp_policy=policy)
        fully_shard(self.model, mesh=mesh, mp_policy=policy)
        self.optimizer = OPTIMIZERS[name](self.model.parameters())
        self.losses: list[str] = []

    def steps(self, first: int, last: int) -> None:
        for number in range(first, last):
            generator = torch.Generator().manual_seed(number * RANKS + distributed.get_rank())
            loss = self.model(torch.randn(8, WIDTH, generator=generator))
            loss.backward()
            norm: Any = nn.utils.clip_grad_norm_(self.model.parameters(), 0.5)
            self.optimizer.step()
            self.optimizer.zero_grad()
            self.losses += [loss.item().hex(), norm.full_tensor().item().hex()]

    def save(self, folder: Path) -> None:
        from torch.distributed.checkpoint import state_dict_saver
        from torch.distributed.checkpoint.state_dict import get_state_dict

        model, optimizer = get_state_dict(self.model, self.optimizer)
        state_dict_saver.save({"model": model, "optimizer": optimizer}, checkpoint_id=str(folder))

    def load(self, folder: Path) -> None:
        from torch.distributed.checkpoint import state_dict_loader
        from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

        model, optimizer = get_state_dict(self.model, self.optimizer)
        state: dict[str, Any] = {"model": model, "optimizer": optimizer}
        state_dict_loader.load(state, checkpoint_id=str(folder))
        set_state_dict(
            self.model,
            self.optimizer,
            model_state_dict=state["model"],
            optim_state_dict=state["optimizer"],
        )

    def weights(self) -> list[Any]:
        return [it.full_tensor().tolist() for it in self.model.parameters()]


def train(name: str, streams: Streams | None, folder: Path) -> dict[str, Any]:
    """Train, save, train on, load, and train again; then load into a new program."""
    with watching(streams) as found:
        training = Training(name)
        training.steps(0, STEPS)
        training.save(folder)
        training.steps(STEPS, 2 * STEPS)
        training.load(folder)
        training.steps(STEPS, 2 * STEPS)
        resumed = Training(name)
        resumed.load(folder)
        resumed.steps(STEPS, 2 * STEPS)
        return {
            "losses": training.losses,
            "resumed": resumed.losses,
            "weights": training.weights(),
            "resumed_weights": resumed.weights(),
            **found(),
        }


def train_whole_parameters(streams: Streams | None) -> dict[str, Any]:
    """Steps of Muon, which multiplies whole matrices."""
    with watching(streams) as found:
        training = Training("AdamW")
        weights = [it for it in training.model.parameters() if it.ndim == 2]
        training.optimizer = torch.optim.Muon(weights, lr=1e-2)
        training.steps(0, STEPS)
        return {"losses": training.losses, **found()}


def train_undisturbed() -> dict[str, Any]:
    """Stock's steps, with what a program saw that went on from its checkpoint."""
    training = Training("AdamW")
    training.steps(0, ALL)
    return {"losses": training.losses[2 * SAVED :], "weights": training.weights()}


def run_rank(rank: int, folder: Path) -> None:
    """The main function of a rank's process: all runs, one after the other."""
    with meeting(rank, folder, RANKS) as found:
        for name in OPTIMIZERS:
            found[name] = three_ways(train, name, folder / name)
        found["Muon"] = [train_whole_parameters(streams) for streams in (None, Streams())]
        found["undisturbed"] = [train_undisturbed()]


ranks = ranks_of(run_rank, RANKS)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_state_is_streamed_and_all_bits_are_stocks(name: str, ranks: list[Runs]) -> None:
    for runs in ranks:
        stock, streamed, resident = runs[name]
        assert len(set(stock["losses"])) > STEPS
        assert stock["resumed"] == stock["losses"][2 * STEPS : 4 * STEPS]
        for run in (streamed, resident):
            assert {what: run[what] for what in stock} == stock
            assert len(run["counts"]) == 2
        tensors = 1 if name.startswith("SGD") else 2
        state_bytes = tensors * LAYERS * (WIDTH + 1) * WIDTH * 4 // RANKS
        assert streamed["state_bytes"] == [state_bytes] * 2
        assert all(it["in_line"] == 0 for it in streamed["counts"])
        assert [it["streamed"] for it in streamed["counts"]] == [3 * STEPS - 1, STEPS - 1]
        assert all(it > 0 for it in streamed["plans"])
        assert resident["counts"][0]["resident"] > 0


def test_an_optimizer_of_whole_parameters_is_left_alone_with_a_warning(ranks: list[Runs]) -> None:
    for runs in ranks:
        stock, run = runs["Muon"]
        assert run["losses"] == stock["losses"]
        assert [it["in_line"] for it in run["counts"]] == [STEPS - 1]
        assert [it for it in run["warnings"] if "Muon looks at whole parameters" in it]


# ------------------------------------------------------------------ torchrun


def start_worker(folder: Path) -> None:
    """A rank's program under torchrun, whose state is streamed: it fails once."""
    attempt = os.environ["TORCHELASTIC_RESTART_COUNT"]
    # By the launcher's store, gloo may look for a rank of the attempt before.
    place = (folder / f"meeting-{attempt}").as_uri()
    rank = int(os.environ["RANK"])
    distributed.init_process_group("gloo", place, rank=rank, world_size=RANKS)
    patch = pytest.MonkeyPatch()
    with streaming(Streams(), patch):
        training, done = Training("AdamW"), 0
        saved = sorted(folder.glob("step-*"))
        if saved:
            training.load(saved[-1])
            done = int(saved[-1].name.removeprefix("step-"))
        for number in range(done, ALL):
            if number == FAILS_AT and attempt == "0":
                sys.exit(3)
            training.steps(number, number + 1)
            if (number + 1) % SAVED == 0:
                training.save(folder / f"step-{number + 1}")
    found = {"done": done, "losses": training.losses, "weights": training.weights()}
    result_file(folder, distributed.get_rank()).write_text(json.dumps(found))
    distributed.destroy_process_group()


def test_a_program_that_torchrun_starts_again_goes_on_with_the_same_bits(
    ranks: list[Runs], tmp_path: Path
) -> None:
    done = subprocess.run(
        [
            *(sys.executable, "-m", "torch.distributed.run", "--standalone"),
            *(f"--nproc-per-node={RANKS}", "--max-restarts=1", __file__, str(tmp_path)),
        ],
        env={
            **os.environ,
            "PYTHONPATH": str(Path(__file__).parent / "support"),
            "OMP_NUM_THREADS": "1",
        },
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    for rank, runs in enumerate(ranks):
        (stock,) = runs["undisturbed"]
        assert len(stock["losses"]) == 2 * (ALL - SAVED)
        assert json.loads(result_file(tmp_path, rank).read_text()) == {"done": SAVED} | stock


if __name__ == "__main__":
    start_worker(Path(sys.argv[1]))
