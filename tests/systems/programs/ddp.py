"""Full fine-tuning with DistributedDataParallel, for torchrun."""

from __future__ import annotations

from shared import Program
from torch import distributed
from torch.nn.parallel import DistributedDataParallel
from usual_loops import train_by_own_loop

program = Program("transformers")
distributed.init_process_group("nccl" if program.on_gpu else "gloo")
model = DistributedDataParallel(program.llama().to(program.device))
train_by_own_loop(program, model)
distributed.destroy_process_group()
