"""Text generation with transformers, greedy, with a cache of keys and values."""

from __future__ import annotations

from typing import Any

import torch
from shared import Program, checksum
from transformers import LlamaForCausalLM

NEW_TOKENS = 16

program = Program("transformers")
model: Any = LlamaForCausalLM(program.config())
model = model.to(program.device, torch.bfloat16).eval()
for batch in program.batches():
    prompt = batch["input_ids"][:, :-NEW_TOKENS].to(program.device)
    made = model.generate(
        prompt,
        attention_mask=torch.ones_like(prompt),
        max_new_tokens=NEW_TOKENS,
        do_sample=False,
        pad_token_id=0,
        return_dict_in_generate=True,
        output_logits=True,
    )
    program.end_step(checksum(made.sequences, *made.logits))
program.write(model)
