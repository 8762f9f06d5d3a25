"""A forward pass of TransformerLens that keeps every activation."""

from __future__ import annotations

import torch
from lens import hooked_transformer, lens_program, sequences
from shared import checksum

program = lens_program()
model = hooked_transformer(program)
for batch in program.batches():
    tokens = batch["input_ids"][: sequences(program)].to(program.device)
    with torch.no_grad():
        logits, cache = model.run_with_cache(tokens)
    program.end_step(checksum(logits, *cache.values()))
    del logits, cache
program.write(model)
