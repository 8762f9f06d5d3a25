"""Full fine-tuning in an own loop, each layer compiled."""

from __future__ import annotations

import torch
from shared import LEARNING_RATE, MAX_NORM, Program
from torch.nn.utils import clip_grad_norm_

program = Program("transformers")
model = program.llama().to(program.device)
for layer in model.model.layers:
    layer.compile()
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
