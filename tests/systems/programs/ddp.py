"""Full fine-tuning with DistributedDataParallel, for torchrun."""

from __future__ import annotations

import torch
from shared import LEARNING_RATE, MAX_NORM, Program
from torch import distributed
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import clip_grad_norm_

program = Program("transformers")
distributed.init_process_group("nccl" if program.on_gpu else "gloo")
model = DistributedDataParallel(program.llama().to(program.device))
optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE)
for batch in program.batches():
    tokens = batch["input_ids"].to(program.device)
    with torch.autocast(program.device.type, torch.bfloat16):
        loss = model(input_ids=tokens, labels=tokens).loss
    loss.backward()
    clip_grad_norm_(model.parameters(), MAX_NORM)
    optimizer.step()
    optimizer.zero_grad()
    program.end_step(loss)
program.write(model)
distributed.destroy_process_group()
