"""Full fine-tuning with TRL's SFTTrainer, on rows that are tokens already."""

from __future__ import annotations

import tempfile
from typing import Any

from datasets import Dataset
from shared import LEARNING_RATE, Program
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import PreTrainedTokenizerFast
from trl import SFTConfig, SFTTrainer

program = Program("transformers", "accelerate", "datasets", "trl")


class RecordedTrainer(SFTTrainer):  # type: ignore[misc, unused-ignore]
    def training_step(self, *arguments: Any, **named: Any) -> Any:
        loss = super().training_step(*arguments, **named)
        program.end_step(loss)
        return loss


words = {f"w{number}": number for number in range(program.shape.vocabulary)}
tokenizer = PreTrainedTokenizerFast(  # type: ignore[no-untyped-call, unused-ignore]
    tokenizer_object=Tokenizer(WordLevel(words, unk_token="w0")), eos_token="w0", pad_token="w0"
)
with tempfile.TemporaryDirectory() as folder:
    trainer = RecordedTrainer(
        program.llama(),
        SFTConfig(
            output_dir=folder,
            max_steps=program.steps,
            max_length=program.shape.tokens,
            per_device_train_batch_size=program.shape.batch,
            gradient_checkpointing=program.shape.checkpoints,
            learning_rate=LEARNING_RATE,
            bf16=program.on_gpu,
            logging_steps=5,
            save_strategy="no",
            report_to="none",
        ),
        train_dataset=Dataset.from_list(
            [{"input_ids": row["input_ids"].tolist()} for row in program.rows()]
        ),
        processing_class=tokenizer,
    )
    trainer.train()
program.write(trainer.model)
