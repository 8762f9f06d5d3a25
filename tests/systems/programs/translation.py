"""Translation by an encoder and a decoder, with sources that the model translates back itself."""

from __future__ import annotations

from typing import Any

import torch
from shared import LEARNING_RATE, MAX_NORM, Program, Shape
from torch.nn.utils import clip_grad_norm_
from transformers import T5Config, T5ForConditionalGeneration

SHAPES = {
    "tiny": Shape(16, 32, layers=3, heads=2, vocabulary=64, batch=2, tokens=8),
    "small": Shape(256, 1024, layers=4, heads=4, vocabulary=8192, batch=32, tokens=128),
    "large": Shape(512, 2048, layers=6, heads=8, vocabulary=32_128, batch=16, tokens=256),
}
NEW_TOKENS = 8
EVERY = 4
"""Steps from one translation back to the next."""

program = Program("transformers", shapes=SHAPES)
shape = program.shape
config: Any = T5Config(
    d_model=shape.hidden,
    d_ff=shape.intermediate,
    num_layers=shape.layers,
    num_heads=shape.heads,
    d_kv=shape.hidden // shape.heads,
    vocab_size=shape.vocabulary,
)
config.decoder_start_token_id = 0
model: Any = program.trainable(T5ForConditionalGeneration(config)).to(program.device)
optimizer = torch.optim.AdamW(model.parameters(), LEARNING_RATE)
for step in range(program.steps):
    source, target = (
        2 + program.numbers(shape.vocabulary - 2, shape.batch, shape.tokens) for _ in range(2)
    )
    if step % EVERY == EVERY - 1:
        model.eval()
        source = model.generate(target, max_new_tokens=NEW_TOKENS, do_sample=True)
        model.train()
    loss = model(input_ids=source, labels=target).loss
    loss.backward()
    clip_grad_norm_(model.parameters(), MAX_NORM)
    optimizer.step()
    optimizer.zero_grad()
    program.end_step(loss)
program.write(model)
