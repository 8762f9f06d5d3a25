"""Full fine-tuning with the Trainer of transformers."""

from __future__ import annotations

from shared import Program
from usual_loops import train_by_trainer

program = Program("transformers", "accelerate")
train_by_trainer(program, program.llama())
