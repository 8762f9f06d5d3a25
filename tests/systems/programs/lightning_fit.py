"""Full fine-tuning with Lightning: automatic optimization, which steps with a closure."""

from __future__ import annotations

from typing import Any

import lightning
import torch
from shared import LEARNING_RATE, MAX_NORM, Program

program = Program("transformers", "lightning")


class Decoder(lightning.LightningModule):  # type: ignore[misc, unused-ignore]
    def __init__(self) -> None:
        super().__init__()
        self.model = program.llama()

    def training_step(self, batch: dict[str, torch.Tensor], _number: int) -> torch.Tensor:
        loss: torch.Tensor = self.model(**batch).loss
        program.end_step(loss)
        return loss

    def on_train_end(self) -> None:
        program.write(self)  # fit() then moves the module to the CPU

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=LEARNING_RATE)


trainer = lightning.Trainer(
    devices=1,
    max_steps=program.steps,
    precision="bf16-mixed",
    gradient_clip_val=MAX_NORM,
    logger=False,
    enable_checkpointing=False,
)
trainer.fit(Decoder(), program.batches())
