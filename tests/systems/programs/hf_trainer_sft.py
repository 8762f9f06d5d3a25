"""Full fine-tuning with the Trainer of transformers."""

from __future__ import annotations

import tempfile
from typing import Any

from shared import LEARNING_RATE, Program
from transformers import Trainer, TrainingArguments

program = Program("transformers", "accelerate")


class RecordedTrainer(Trainer):
    def training_step(self, *arguments: Any, **named: Any) -> Any:
        loss = super().training_step(*arguments, **named)
        program.end_step(loss)
        return loss


with tempfile.TemporaryDirectory() as folder:
    trainer = RecordedTrainer(
        program.llama(),
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
program.write(trainer.model)
