"""Full fine-tuning with FSDP2 (fully_shard), for torchrun."""

from __future__ import annotations

import torch
from shared import LEARNING_RATE, MAX_NORM, Program
from torch import distributed
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.utils import clip_grad_norm_

program = Program("transformers")
distributed.init_process_group("nccl" if program.on_gpu else "gloo")
model = program.llama().to(program.device)
policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
mesh = init_device_mesh(program.device.type, (distributed.get_world_size(),))
for layer in model.model.layers:
    fully_shard(layer, mesh=mesh, mp_policy=policy)
fully_shard(model, mesh=mesh, mp_policy=policy)
optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE)
for batch in program.batches():
    tokens = batch["input_ids"].to(program.device)
    loss = model(input_ids=tokens, labels=tokens).loss
    loss.backward()
    clip_grad_norm_(model.parameters(), MAX_NORM)
    optimizer.step()
    optimizer.zero_grad()
    program.end_step(loss)
program.write(model)
distributed.destroy_process_group()
