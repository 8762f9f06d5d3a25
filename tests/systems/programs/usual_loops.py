"""Loops that several programs train by: the Trainer of transformers, and an own one."""

from __future__ import annotations

import tempfile
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from shared import LEARNING_RATE, MAX_NORM, Program
from torch.nn.utils import clip_grad_norm_


def train_by_trainer(program: Program, model: Any) -> None:
    """Train with the Trainer of transformers, and write what came of it."""
    from transformers import Trainer, TrainingArguments

    class RecordedTrainer(Trainer):
        def training_step(self, *arguments: Any, **named: Any) -> Any:
            loss = super().training_step(*arguments, **named)
            program.end_step(loss)
            return loss

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
    program.write(trainer.model)


def train_by_own_loop(program: Program, model: Any, *, autocasts: bool = True) -> None:
    """Train with AdamW and clipped gradients, and write what came of it."""

    def precision() -> AbstractContextManager[Any]:
        return torch.autocast(program.device.type, torch.bfloat16) if autocasts else nullcontext()

    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE)
    for batch in program.batches():
        tokens = batch["input_ids"].to(program.device)
        with precision():
            loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        clip_grad_norm_(model.parameters(), MAX_NORM)
        optimizer.step()
        optimizer.zero_grad()
        program.end_step(loss)
    program.write(model)
