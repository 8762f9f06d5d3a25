"""Forward passes of TransformerLens, with a hook that edits what a layer makes."""

from __future__ import annotations

from typing import Any

import torch
from lens import hooked_transformer, lens_program, sequences
from shared import checksum

program = lens_program()
model = hooked_transformer(program)


def half(value: torch.Tensor, hook: Any) -> torch.Tensor:
    """Edit an activation."""
    del hook
    return value * 0.5


for batch in program.batches():
    tokens = batch["input_ids"][: sequences(program)].to(program.device)
    with torch.no_grad():
        logits = model.run_with_hooks(tokens, fwd_hooks=[("blocks.1.hook_resid_post", half)])
    program.end_step(checksum(logits))
program.write(model)
