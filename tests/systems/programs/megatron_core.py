"""Pretraining with Megatron-core: its GPT of local layers, its DDP, its distributed optimizer.

By its own schedules, for torchrun. Ranks divide the batch, each layer's weights or the layers.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.distributed import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.module import Float16Module
from shared import LEARNING_RATE, MAX_NORM, SEED, Program
from torch import distributed

MICROBATCHES = 4
"""Of a batch under pipeline parallelism, whose stages work on several at a time."""

own = argparse.ArgumentParser(add_help=False)
own.add_argument("--parallel", choices=("tensor", "pipeline"), help="by all ranks; else the data")
program = Program("megatron-core", own=own)
shape = program.shape
distributed.init_process_group("nccl")
parallel = {}
if program.options.parallel is not None:
    name = f"{program.options.parallel}_model_parallel_size"
    parallel[name] = distributed.get_world_size()
parallel_state.initialize_model_parallel(**parallel)
program.data_rank = parallel_state.get_data_parallel_rank()
model_parallel_cuda_manual_seed(SEED)
recompute = {
    "recompute_granularity": "full",
    "recompute_method": "uniform",
    "recompute_num_layers": 1,
}
config = TransformerConfig(
    num_layers=shape.layers,
    hidden_size=shape.hidden,
    ffn_hidden_size=shape.intermediate,
    num_attention_heads=shape.heads,
    add_bias_linear=False,
    gated_linear_unit=True,
    activation_func=torch.nn.functional.silu,
    hidden_dropout=0.0,
    attention_dropout=0.0,
    bf16=True,
    params_dtype=torch.bfloat16,
    pipeline_dtype=torch.bfloat16,
    finalize_model_grads_func=finalize_model_grads,
    **parallel,
    **(recompute if shape.checkpoints else {}),
)
model = GPTModel(
    config=config,
    transformer_layer_spec=get_gpt_layer_local_spec(),
    vocab_size=shape.vocabulary,
    max_sequence_length=shape.tokens,
    position_embedding_type="rope",
    pre_process=parallel_state.is_pipeline_first_stage(),
    post_process=parallel_state.is_pipeline_last_stage(),
    share_embeddings_and_output_weights=False,
)
model = DistributedDataParallel(
    config,
    DistributedDataParallelConfig(use_distributed_optimizer=True, grad_reduce_in_fp32=True),
    Float16Module(config, model.to(program.device)),
)
optimizer = get_megatron_optimizer(
    OptimizerConfig(
        lr=LEARNING_RATE,
        bf16=True,
        params_dtype=torch.bfloat16,
        use_distributed_optimizer=True,
        clip_grad=MAX_NORM,
    ),
    [model],
)
stages = parallel_state.get_pipeline_model_parallel_world_size()
microbatches = min(MICROBATCHES, shape.batch) if stages > 1 else 1
rows = shape.batch // microbatches
positions = torch.arange(shape.tokens, device=program.device).expand(rows, -1)


def forward(batches: Iterator[torch.Tensor], model: Any) -> Any:
    """What Megatron's schedules call for each microbatch."""
    tokens = next(batches)

    def mean(losses: torch.Tensor) -> Any:
        loss = losses.mean()
        return loss, loss.detach().clone()  # the schedule divides the first one in place

    return model(tokens, positions, None, labels=tokens.roll(-1, dims=1)), mean


for batch in program.batches():
    model.zero_grad_buffer()
    optimizer.zero_grad()
    losses = get_forward_backward_func()(
        forward_step_func=forward,
        data_iterator=iter(batch["input_ids"].to(program.device).split(rows)),
        model=[model],
        num_microbatches=microbatches,
        seq_length=shape.tokens,
        micro_batch_size=rows,
        forward_only=False,
    )
    optimizer.step()
    # The last stage has the losses. NCCL sends them without a wait of the host.
    loss = torch.stack(losses).mean() if losses else torch.empty((), device=program.device)
    if stages > 1:
        distributed.broadcast(
            loss,
            parallel_state.get_pipeline_model_parallel_last_rank(),
            parallel_state.get_pipeline_model_parallel_group(),
        )
    program.end_step(loss)
program.write(model)
distributed.destroy_process_group()
