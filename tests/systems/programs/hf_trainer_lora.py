"""LoRA adapters of PEFT on a frozen bfloat16 model, with the Trainer of transformers."""

from __future__ import annotations

import torch
from peft import LoraConfig, get_peft_model
from shared import Program
from usual_loops import train_by_trainer

program = Program("transformers", "accelerate", "peft")
model = get_peft_model(
    program.llama().to(torch.bfloat16),
    LoraConfig(r=16, lora_alpha=32, target_modules="all-linear", task_type="CAUSAL_LM"),
)
train_by_trainer(program, model)
