"""Full fine-tuning with DeepSpeed's ZeRO, second stage."""

from __future__ import annotations

from typing import Any

import deepspeed
import torch
from shared import LEARNING_RATE, MAX_NORM, Program


def configuration(program: Program, stage: int) -> dict[str, Any]:
    """DeepSpeed's own configuration file, as an object."""
    return {
        "train_micro_batch_size_per_gpu": program.shape.batch,
        "bf16": {"enabled": True},
        "gradient_clipping": MAX_NORM,
        "zero_optimization": {"stage": stage},
    }


def train(program: Program, model: Any, stage: int) -> None:
    # torch's optimizer: DeepSpeed's own would be compiled on each machine first.
    engine, _, _, _ = deepspeed.initialize(
        model=model,
        optimizer=torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE),
        config=configuration(program, stage),
    )
    for batch in program.batches():
        tokens = batch["input_ids"].to(engine.device)
        loss = engine(input_ids=tokens, labels=tokens).loss
        engine.backward(loss)
        engine.step()
        program.end_step(loss)
    program.write(model)
    engine.destroy()


if __name__ == "__main__":
    asked = Program("transformers", "deepspeed")
    train(asked, asked.llama(), stage=2)
