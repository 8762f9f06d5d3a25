"""A tiny Llama, trained on random tokens by the Trainer of transformers; nothing is downloaded.

python trainer.py                    # torch's own allocator, on CPU or GPU
umem run trainer.py                  # under umem, unchanged
"""

from __future__ import annotations

import tempfile

import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

__all__ = ["main"]


def main(steps: int = 4) -> float:
    """Train, and return the mean loss."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=256,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
    )
    rows = [
        {"input_ids": tokens, "labels": tokens}
        for tokens in torch.randint(config.vocab_size, (2 * steps, 32))
    ]
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            output_dir=folder,
            max_steps=steps,
            per_device_train_batch_size=2,
            logging_steps=1,
            save_strategy="no",
            report_to="none",
        )
        trainer = Trainer(LlamaForCausalLM(config), arguments, train_dataset=rows)
        return trainer.train().training_loss


if __name__ == "__main__":
    main()
