"""A short, deterministic training run: ``frameworks.py FRAMEWORK stock|umem``; facts as JSON.

Without a GPU the stock run uses the CPU.
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Callable
from typing import Any

import torch
import transformers
from torch.utils.data import DataLoader

import umem

STEPS, ROWS, LENGTH, VOCABULARY = 4, 32, 64, 1024
LEARNING_RATE = 1e-3

CLASSES: list[str] = []
"""The class of the logits in every forward pass."""


def llama() -> Any:
    torch.manual_seed(0)
    config: Any = transformers.LlamaConfig(  # type: ignore[call-arg, unused-ignore]
        vocab_size=VOCABULARY,
        hidden_size=256,
        intermediate_size=1024,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=LENGTH,
        attn_implementation="eager",
    )
    model: Any = transformers.LlamaForCausalLM(config)
    if umem.is_enabled():
        model.register_forward_hook(note_class)
    return model


def note_class(_module: object, _inputs: object, output: Any) -> None:
    address = output.logits.untyped_storage().data_ptr()
    known = {block.address: str(block.tensor_class) for block in umem.tensors()}
    CLASSES.append(known.get(address, "unknown"))


def rows() -> list[dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(1)
    data = torch.randint(0, VOCABULARY, (ROWS, LENGTH), generator=generator)
    return [{"input_ids": row, "labels": row} for row in data]


def trainer() -> tuple[Any, dict[str, Any]]:
    """Hugging Face's Trainer, with its own memory metrics."""
    model = llama()
    with tempfile.TemporaryDirectory() as folder:
        arguments = transformers.TrainingArguments(
            output_dir=folder,
            max_steps=STEPS,
            per_device_train_batch_size=4,
            gradient_accumulation_steps=2,
            learning_rate=LEARNING_RATE,
            bf16=torch.cuda.is_available(),
            logging_steps=1,
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
            skip_memory_metrics=False,
            seed=0,
        )
        run: Any = transformers.Trainer(model=model, args=arguments, train_dataset=rows())
        metrics = run.train().metrics
        losses = [entry["loss"] for entry in run.state.log_history if "loss" in entry]
    memory = {name: value for name, value in metrics.items() if "_mem_gpu_" in name}
    return model, {"losses": losses, "memory_metrics": memory}


def lightning() -> tuple[Any, dict[str, Any]]:
    """Lightning, which runs forward and backward inside the optimizer's step."""
    import lightning.pytorch as pl

    losses: list[float] = []

    class Module(pl.LightningModule):  # type: ignore[misc, unused-ignore]
        def __init__(self) -> None:
            super().__init__()
            self.model = llama()

        def training_step(self, batch: dict[str, torch.Tensor], _number: int) -> torch.Tensor:
            loss: torch.Tensor = self.model(**batch).loss
            losses.append(loss.item())
            return loss

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.AdamW(self.parameters(), lr=LEARNING_RATE)

    module = Module()
    run = pl.Trainer(
        accelerator="auto",
        devices=1,
        max_steps=STEPS,
        precision="bf16-mixed",
        deterministic=True,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    run.fit(module, DataLoader(rows(), batch_size=4))  # type: ignore[arg-type]
    # Lightning moves the module back to the CPU when it has finished.
    return None, {"losses": losses}


def accelerate() -> tuple[Any, dict[str, Any]]:
    """accelerate, with mixed precision, accumulation and clipping."""
    from accelerate import Accelerator

    accelerator = Accelerator(mixed_precision="bf16", gradient_accumulation_steps=2)
    plain = llama()
    model, optimizer, loader = accelerator.prepare(
        plain,
        torch.optim.AdamW(plain.parameters(), lr=LEARNING_RATE),
        DataLoader(rows(), batch_size=4),  # type: ignore[arg-type]
    )
    losses = []
    for batch in loader:
        with accelerator.accumulate(model):
            loss = model(**batch).loss
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
        losses.append(loss.item())
    return model, {"losses": losses}


FRAMEWORKS: dict[str, Callable[[], tuple[Any, dict[str, Any]]]] = {
    "trainer": trainer,
    "lightning": lightning,
    "accelerate": accelerate,
}

if __name__ == "__main__":
    framework, allocator = sys.argv[1:]
    if allocator == "umem":
        umem.enable("sft")
    torch.use_deterministic_algorithms(True)
    model, facts = FRAMEWORKS[framework]()
    if umem.is_enabled():
        facts["logits"] = CLASSES
        if model is not None:
            held = umem.memory_by_class()[umem.TensorClass.WEIGHTS].requested_bytes
            facts["weights"] = [held, sum(p.nbytes for p in model.parameters())]
    print()
    print(json.dumps(facts))
