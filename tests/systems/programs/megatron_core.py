"""Pretraining with Megatron-core: its GPT of local layers, its DDP, its distributed optimizer."""

from __future__ import annotations

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
from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.module import Float16Module
from shared import LEARNING_RATE, MAX_NORM, SEED, Program
from torch import distributed

program = Program("megatron-core")
shape = program.shape
distributed.init_process_group("nccl")
parallel_state.initialize_model_parallel()
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
    **(recompute if shape.checkpoints else {}),
)
model = GPTModel(
    config=config,
    transformer_layer_spec=get_gpt_layer_local_spec(),
    vocab_size=shape.vocabulary,
    max_sequence_length=shape.tokens,
    position_embedding_type="rope",
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
positions = torch.arange(shape.tokens, device=program.device).expand(shape.batch, -1)
for batch in program.batches():
    tokens = batch["input_ids"].to(program.device)
    model.zero_grad_buffer()
    optimizer.zero_grad()
    loss = model(tokens, positions, None, labels=tokens.roll(-1, dims=1)).mean()
    loss.backward()
    finalize_model_grads([model])
    optimizer.step()
    program.end_step(loss)
program.write(model)
distributed.destroy_process_group()
