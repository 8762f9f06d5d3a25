"""DeepSpeed itself, on the CPU with two ranks: its state is streamed, and all bits are stock's.

Its optimizers have no parameters of the model: ZeRO puts float32 partitions into them by turns.
tests/test_partitions_by_turns.py shows the same without DeepSpeed.
"""

from __future__ import annotations

import os
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from found_trainings import Streams, three_ways, watching
from rank_processes import Runs, meeting, ranks_of
from torch import distributed, nn

# DeepSpeed compiles an operator of its own first. It is imported by the ranks alone.
pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(300),
    pytest.mark.skipif(not find_spec("deepspeed"), reason="DeepSpeed is not installed"),
]

RANKS, WIDTH, LAYERS, STEPS = 2, 64, 4, 6
LAYER = WIDTH * WIDTH + WIDTH

PROGRAMS: dict[str, dict[str, Any]] = {
    "ZeRO-1": {"stage": 1},
    "ZeRO-2": {"stage": 2},
    "ZeRO-2, its own optimizer": {"stage": 2},
    "ZeRO-3, its own optimizer": {"stage": 3, "stage3_param_persistence_threshold": 0},
    "ZeRO-3, checkpointed": {"stage": 3, "stage3_param_persistence_threshold": 0},
    "ZeRO-3": {"stage": 3, "stage3_param_persistence_threshold": 0},
    "ZeRO-3, kept biases, sub-groups": {"stage": 3, "sub_group_size": LAYER},
}


class Net(nn.Module):
    """Layers, of which each has a weight and a bias.

    Parameters
    ----------
    is_checkpointed
        Whether DeepSpeed's activation checkpointing keeps each layer's input alone.
    """

    def __init__(self, is_checkpointed: bool) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS))
        self._is_checkpointed = is_checkpointed

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self._is_checkpointed:
            x = x.requires_grad_()  # as the output of an embedding; its checkpoints are reentrant
        for layer in self.layers:
            x = x + self._call(layer, x)
        return x.float().square().mean()

    def _call(self, layer: nn.Module, x: torch.Tensor) -> Any:
        def run(x: torch.Tensor) -> torch.Tensor:
            return torch.tanh(layer(x))

        if not self._is_checkpointed:
            return run(x)
        from deepspeed import checkpointing

        return checkpointing.checkpoint(run, x)


class Kernels:
    """DeepSpeed's kernel for Adam, in torch's operators: its own needs a GPU and a compiler."""

    @staticmethod
    def multi_tensor_adam(
        _chunk: int, _flag: Any, lists: Any, lr: float, b1: float, b2: float, eps: float,
        step: int, _decoupled: int, _corrects: int, decay: float,
    ) -> None:  # fmt: skip
        for gradient, weight, average, square in zip(*lists, strict=True):
            average.mul_(b1).add_(gradient, alpha=1 - b1)
            square.mul_(b2).addcmul_(gradient, gradient, value=1 - b2)
            update = (average / (1 - b1**step)) / ((square / (1 - b2**step)).sqrt() + eps)
            weight.sub_(lr * (update + decay * weight))


def make_engine(name: str) -> Any:
    import deepspeed
    from deepspeed.ops.op_builder import FusedAdamBuilder

    torch.manual_seed(0)
    model = Net("checkpointed" in name)
    config = {
        "train_micro_batch_size_per_gpu": 4,
        "bf16": {"enabled": True},
        "gradient_clipping": 0.5,
        "zero_optimization": PROGRAMS[name],
    }
    if "its own" in name:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(FusedAdamBuilder, "load", lambda *_, **__: Kernels)
            config["optimizer"] = {"type": "AdamW", "params": {"lr": 1e-2, "weight_decay": 0.1}}
            engine, *_ = deepspeed.initialize(
                model=model, model_parameters=list(model.parameters()), config=config
            )
        return engine
    named = list(model.named_parameters())
    groups = [
        {"params": [it for name, it in named if name.endswith("weight")], "weight_decay": 0.1},
        {"params": [it for name, it in named if name.endswith("bias")], "weight_decay": 0.0},
    ]
    engine, *_ = deepspeed.initialize(
        model=model, optimizer=torch.optim.AdamW(groups, lr=1e-2), config=config
    )
    return engine


def partitions(engine: Any) -> list[nn.Parameter]:
    """What the optimizer updates."""
    its = engine.optimizer
    found = getattr(its, "fp32_partitioned_groups_flat", None)
    return its.single_partition_of_fp32_groups if found is None else found


def train(name: str, streams: Streams | None, folder: Path) -> dict[str, Any]:
    """Train, save, train on, load, and train again."""
    from deepspeed.runtime.utils import see_memory_usage

    engine, losses = make_engine(name), []
    if streams is not None:
        streams.also += partitions(engine)

    def steps(seed: int) -> None:
        for number in range(STEPS):
            generator = torch.Generator().manual_seed(seed + number)
            batch = torch.randn(4 * RANKS, WIDTH, generator=generator).bfloat16()
            loss = engine(batch[distributed.get_rank() :: RANKS])
            losses.append(loss.item().hex())
            engine.backward(loss)
            engine.step()
        see_memory_usage("behind some steps", force=True)

    with watching(streams) as found:
        steps(0)
        engine.save_checkpoint(str(folder))
        steps(10)
        engine.load_checkpoint(str(folder))
        steps(20)
        result = {
            "losses": losses,
            "weights": [it.detach().tolist() for it in partitions(engine)],
            "bytes": [it.nbytes for it in partitions(engine)],
            **found(),
        }
    engine.destroy()
    return result


def run_rank(rank: int, folder: Path) -> None:
    """The main function of a rank's process: all runs, one after the other."""
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(RANKS)}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "LOCAL_SIZE": str(RANKS), "DS_ACCELERATOR": "cpu"}
    with meeting(rank, folder, RANKS) as found:
        for name in PROGRAMS:
            found[name] = three_ways(train, name, folder / name)


ranks = ranks_of(run_rank, RANKS)


@pytest.mark.parametrize("name", PROGRAMS)
def test_state_is_streamed_and_all_bits_are_stocks(name: str, ranks: list[Runs]) -> None:
    for runs in ranks:
        stock, streamed, resident = runs[name]
        assert len(set(stock["losses"])) > STEPS
        for run in (streamed, resident):
            assert {what: run[what] for what in stock} == stock
            assert [it["in_line"] for it in run["counts"]] == [0]
            assert all(run["plans"])
            assert run["state_bytes"] == [2 * sum(stock["bytes"])]
            assert not any("is not managed" in line for line in run["warnings"])
        assert streamed["counts"][0]["streamed"] >= 2 * STEPS * len(stock["bytes"])
        # DeepSpeed's checkpoints keep their inputs past autograd: these stay.
        assert (streamed["copied"][0] > 0) == ("checkpointed" not in name)
        # ZeRO-1 and ZeRO-2 link each parameter to its part of the state, which keeps its place.
        assert (resident["counts"][0]["resident"] > 0) == ("ZeRO-3" in name)
    assert ranks[0][name][0]["weights"] != ranks[1][name][0]["weights"]
