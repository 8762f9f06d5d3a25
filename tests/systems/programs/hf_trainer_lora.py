"""LoRA adapters of PEFT on a frozen bfloat16 model, with the Trainer of transformers."""

from __future__ import annotations

import tempfile
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from shared import LEARNING_RATE, Program
from transformers import Trainer, TrainingArguments

program = Program("transformers", "accelerate", "peft")


class RecordedTrainer(Trainer):
    def training_step(self, *arguments: Any, **named: Any) -> Any:
        loss = super().training_step(*arguments, **named)
        program.end_step(loss)
        return loss


model = get_peft_model(
    program.llama().to(torch.bfloat16),
    LoraConfig(r=16, lora_alpha=32, target_modules="all-linear", task_type="CAUSAL_LM"),
)
with tempfile.TemporaryDirectory() as folder:
    trainer = RecordedTrainer(
        model,
        TrainingArguments(
            output_dir=folder,
            max_steps=program.steps,
            per_device_train_batch_size=program.shape.batch,
            learning_rate=LEARNING_RATE,
            bf16=program.on_gpu,
            logging_steps=5,
            save_strategy="no",
            report_to="none",
        ),
        train_dataset=program.rows(),
    )
    trainer.train()
program.write(model)
