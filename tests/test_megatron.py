"""Megatron-core itself, on the CPU with two ranks: its state is streamed, and all bits are stock's.

Its small GPT of local layers trains by Megatron's own schedules, is saved with
``dist_checkpointing``, trained on, loaded, and trained again. The ranks divide the batch, with the
distributed optimizer or Megatron's own DDP alone, the layers' weights, or the layers.
"""

from __future__ import annotations

import dataclasses
import logging
import os
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from cuda_names import cuda_means_cpu
from found_trainings import Streams, three_ways, watching
from rank_processes import Runs, meeting, ranks_of
from torch import distributed

# Only the ranks import it: it must be there after names of torch.cuda mean the CPU.
pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(600),
    pytest.mark.skipif(not find_spec("megatron"), reason="Megatron-core is not installed"),
]

RANKS, STEPS, MICROBATCHES = 2, 6, 2
LAYERS, HIDDEN, HEADS, VOCABULARY, TOKENS = 2, 12, 4, 100, 64
ROWS = 2
"""Of a microbatch."""

FULL_RECOMPUTE = {
    "recompute_granularity": "full",
    "recompute_method": "uniform",
    "recompute_num_layers": 1,
}

PROGRAMS: dict[str, dict[str, Any]] = {
    "distributed optimizer": {},
    "one step count": {"own_steps": False},
    "full recompute": {"config": FULL_RECOMPUTE},
    "float32 copies": {"use_distributed_optimizer": False},
    "tensor parallel": {"parallel": {"tensor_model_parallel_size": 2}},
    "pipeline parallel": {"parallel": {"pipeline_model_parallel_size": 2}},
}


@dataclasses.dataclass
class Training:
    """A GPT, as Megatron's own script makes it, and its optimizer."""

    model: Any
    optimizer: Any


def make_training(
    config: dict[str, Any], parallel: dict[str, int], use_distributed_optimizer: bool
) -> Training:
    from megatron.core import parallel_state
    from megatron.core.distributed import (
        DistributedDataParallel,
        DistributedDataParallelConfig,
        finalize_model_grads,
    )
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
    from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed
    from megatron.core.transformer import TransformerConfig
    from megatron.core.transformer.module import Float16Module

    torch.manual_seed(0)
    model_parallel_cuda_manual_seed(0, force_reset_rng=True)
    shape = TransformerConfig(
        num_layers=LAYERS,
        hidden_size=HIDDEN,
        num_attention_heads=HEADS,
        use_cpu_initialization=True,
        bf16=True,
        params_dtype=torch.bfloat16,
        pipeline_dtype=torch.bfloat16,
        finalize_model_grads_func=finalize_model_grads,
        **parallel,
        **config,
    )
    gpt = GPTModel(
        config=shape,
        transformer_layer_spec=get_gpt_layer_local_spec(),
        vocab_size=VOCABULARY,
        max_sequence_length=TOKENS,
        pre_process=parallel_state.is_pipeline_first_stage(),
        post_process=parallel_state.is_pipeline_last_stage(),
        share_embeddings_and_output_weights=False,
    )
    model = DistributedDataParallel(
        shape,
        DistributedDataParallelConfig(
            use_distributed_optimizer=use_distributed_optimizer, grad_reduce_in_fp32=True
        ),
        Float16Module(shape, gpt),
    )
    settings = OptimizerConfig(
        lr=1e-2,
        bf16=True,
        params_dtype=torch.bfloat16,
        use_distributed_optimizer=use_distributed_optimizer,
        clip_grad=0.5,
    )
    return Training(model, get_megatron_optimizer(settings, [model]))


def batches(seed: int) -> Iterator[torch.Tensor]:
    """The microbatches of this rank, as its part of the data is."""
    from megatron.core import parallel_state

    rank = parallel_state.get_data_parallel_rank()
    for number in range(MICROBATCHES):
        generator = torch.Generator().manual_seed(seed * 100 + number * 10 + rank)
        yield torch.randint(0, VOCABULARY, (ROWS, TOKENS), generator=generator)


def forward(batches: Iterator[torch.Tensor], model: Any) -> Any:
    tokens = next(batches)
    positions = torch.arange(TOKENS).expand(ROWS, -1)
    output = model(tokens, positions, None, labels=tokens.roll(-1, dims=1))

    def mean(losses: torch.Tensor) -> Any:
        loss = losses.float().mean()
        return loss, {"loss": loss.detach().clone()}

    return output, mean


def step(training: Training, seed: int) -> list[str]:
    """One step; the losses of its microbatches, on the ranks that have them."""
    from megatron.core.pipeline_parallel import get_forward_backward_func

    training.model.zero_grad_buffer()
    training.optimizer.zero_grad()
    losses = get_forward_backward_func()(
        forward_step_func=forward,
        data_iterator=batches(seed),
        model=[training.model],
        num_microbatches=MICROBATCHES,
        seq_length=TOKENS,
        micro_batch_size=ROWS,
        forward_only=False,
    )
    is_updated, norm, _ = training.optimizer.step()
    assert is_updated
    return [*(it["loss"].item().hex() for it in losses), float(norm).hex()]


def checkpoint(training: Training, *, is_loading: bool) -> dict[str, Any]:
    """What ``dist_checkpointing`` saves and loads, as Megatron's own script does."""
    # "fully_reshardable" cannot be loaded where TransformerEngine and Apex are not installed.
    metadata = {"distrib_optim_sharding_type": "dp_reshardable"}
    model = training.model.module.sharded_state_dict(metadata=metadata)
    optimizer = training.optimizer.sharded_state_dict(
        model, is_loading=is_loading, metadata=metadata
    )
    return {"model": model, "optimizer": optimizer}


def load(training: Training, folder: Path) -> None:
    from megatron.core import dist_checkpointing

    loaded = dist_checkpointing.load(checkpoint(training, is_loading=True), str(folder))
    training.model.module.load_state_dict(loaded["model"])
    training.optimizer.load_state_dict(loaded["optimizer"])


def train(program: dict[str, Any], streams: Streams | None, folder: Path) -> dict[str, Any]:
    """Train, save, train on, load, and train again."""
    from megatron.core import dist_checkpointing, parallel_state

    parallel = program.get("parallel", {})
    parallel_state.initialize_model_parallel(**parallel)
    training = make_training(
        program.get("config", {}), parallel, program.get("use_distributed_optimizer", True)
    )
    losses: list[str] = []

    def steps(seed: int) -> None:
        for number in range(STEPS):
            losses.extend(step(training, seed + number))

    inner = [it.optimizer for it in training.optimizer.chained_optimizers]
    updated = [p for it in inner for group in it.param_groups for p in group["params"]]
    if streams is not None:
        streams.also += updated
    with watching(streams) as found:
        steps(0)
        if distributed.get_rank() == 0:
            folder.mkdir()
        distributed.barrier()
        dist_checkpointing.save(checkpoint(training, is_loading=False), str(folder))
        steps(10)
        load(training, folder)
        # Without TransformerEngine and Apex, the distributed optimizer loads one step count for all
        # parameters, each of which then counts every update of the others as a step of its own.
        for values in (it for of in inner for it in of.state.values()):
            if program.get("own_steps", True):
                values["step"] = values["step"].clone()
        steps(20)
        result = {
            "losses": losses,
            "weights": [it.detach().float().tolist() for it in training.model.parameters()],
            "updated": [it.detach().tolist() for it in updated],
            "optimizers": len(inner),
            "expected_bytes": sum(2 * it.nbytes for it in updated if it.nbytes >= 64),
            **found(),
        }
    parallel_state.destroy_model_parallel()
    return result


def run_rank(rank: int, folder: Path) -> None:
    """The main function of a rank's process: all runs, one after the other."""
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(RANKS)}
    # It warns that the GPU's random numbers are the CPU's.
    logging.getLogger("megatron").setLevel(logging.ERROR)
    patch = pytest.MonkeyPatch()
    cuda_means_cpu(patch)
    with meeting(rank, folder, RANKS) as found:
        for name, program in PROGRAMS.items():
            found[name] = three_ways(train, program, folder / name)
    patch.undo()


ranks = ranks_of(run_rank, RANKS)


@pytest.mark.parametrize("name", PROGRAMS)
def test_state_is_streamed_and_all_bits_are_stocks(name: str, ranks: list[Runs]) -> None:
    for runs in ranks:
        stock, streamed, resident = runs[name]
        assert len(set(stock["losses"])) > STEPS
        for run in (streamed, resident):
            assert {what: run[what] for what in stock} == stock
            assert len(run["counts"]) == run["optimizers"]
            assert all(it > 0 for it in run["plans"])
            assert not any("is not managed" in line for line in run["warnings"])
        assert sum(streamed["state_bytes"]) == streamed["expected_bytes"]
        # Under one step count, steps with streamed state run as a whole, with a warning.
        whole_steps = STEPS if name == "one step count" else 0
        assert all(it["in_line"] == whole_steps for it in streamed["counts"])
        warned = any("have one tensor in their state" in line for line in streamed["warnings"])
        assert warned == (whole_steps > 0)
        assert all(it["in_line"] == 0 for it in resident["counts"])
        assert all(it["streamed"] + whole_steps > 2 * STEPS for it in streamed["counts"])
        assert all(it["resident"] > 0 for it in resident["counts"])
