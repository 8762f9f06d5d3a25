"""Full fine-tuning in an own loop with accelerate."""

from __future__ import annotations

import torch
from accelerate import Accelerator
from shared import LEARNING_RATE, MAX_NORM, Program

program = Program("transformers", "accelerate")
accelerator = Accelerator(mixed_precision="bf16")
model = program.llama()
optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE)
model, optimizer, batches = accelerator.prepare(model, optimizer, program.batches())
for batch in batches:
    loss = model(**batch).loss
    accelerator.backward(loss)
    accelerator.clip_grad_norm_(model.parameters(), MAX_NORM)
    optimizer.step()
    optimizer.zero_grad()
    program.end_step(loss)
program.write(model)
