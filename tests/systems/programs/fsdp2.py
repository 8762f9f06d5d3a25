"""Full fine-tuning with FSDP2 (fully_shard), for torchrun."""

from __future__ import annotations

import torch
from shared import Program
from torch import distributed
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from usual_loops import train_by_own_loop

program = Program("transformers")
distributed.init_process_group("nccl" if program.on_gpu else "gloo")
model = program.llama().to(program.device)
policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
mesh = init_device_mesh(program.device.type, (distributed.get_world_size(),))
for layer in model.model.layers:
    fully_shard(layer, mesh=mesh, mp_policy=policy)
fully_shard(model, mesh=mesh, mp_policy=policy)
train_by_own_loop(program, model, autocasts=False)
distributed.destroy_process_group()
