"""Full fine-tuning in an own loop, each layer compiled."""

from __future__ import annotations

from shared import Program
from usual_loops import train_by_own_loop

program = Program("transformers")
model = program.llama().to(program.device)
for layer in model.model.layers:
    layer.compile()
train_by_own_loop(program, model)
