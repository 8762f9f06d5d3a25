"""LoRA adapters of PEFT on weights in 4 bits of bitsandbytes, with the Trainer of transformers."""

from __future__ import annotations

import tempfile
from typing import Any

import torch
from peft import LoraConfig, get_peft_model, prepare_model_for_kbit_training
from shared import Program
from transformers import BitsAndBytesConfig, LlamaForCausalLM
from usual_loops import train_by_trainer

program = Program("transformers", "accelerate", "peft", "bitsandbytes")


# They have no types in these libraries.
load: Any = LlamaForCausalLM.from_pretrained
make_config: Any = BitsAndBytesConfig
prepare: Any = prepare_model_for_kbit_training

with tempfile.TemporaryDirectory() as folder:
    full: Any = LlamaForCausalLM(program.config(use_cache=False))
    full.to(torch.bfloat16).save_pretrained(folder)
    del full
    quantised = load(
        folder,
        device_map={"": program.device},
        dtype=torch.bfloat16,
        quantization_config=make_config(
            load_in_4bit=True,
            bnb_4bit_quant_type="nf4",
            bnb_4bit_use_double_quant=True,
            bnb_4bit_compute_dtype=torch.bfloat16,
        ),
    )
model = get_peft_model(
    prepare(
        quantised,
        use_gradient_checkpointing=program.shape.checkpoints,
        gradient_checkpointing_kwargs={"use_reentrant": False},
    ),
    LoraConfig(r=16, lora_alpha=32, target_modules="all-linear", task_type="CAUSAL_LM"),
)
train_by_trainer(program, model)
