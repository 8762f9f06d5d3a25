"""Direct preference optimization: a policy beside a frozen reference, on chosen and rejected."""

from __future__ import annotations

import copy
from typing import Any

import torch
from shared import LEARNING_RATE, MAX_NORM, Program, Shape
from torch.nn.functional import cross_entropy, logsigmoid
from torch.nn.utils import clip_grad_norm_

SHAPES = {
    "tiny": Shape(16, 32, layers=3, heads=2, vocabulary=64, batch=2, tokens=8),
    "small": Shape(256, 704, layers=6, heads=4, vocabulary=4096, batch=8, tokens=256),
    "large": Shape(768, 2048, layers=12, heads=12, vocabulary=32_000, batch=4, tokens=512),
}
BETA = 0.1

program = Program("transformers", shapes=SHAPES)
shape = program.shape
policy: Any = program.llama().to(program.device)
reference: Any = copy.deepcopy(policy).eval().requires_grad_(False)
optimizer = torch.optim.AdamW(policy.parameters(), LEARNING_RATE)


def log_probability(model: Any, tokens: torch.Tensor) -> torch.Tensor:
    """Of each text as a whole."""
    logits = model(input_ids=tokens).logits[:, :-1]
    lost = cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten(), reduction="none")
    return -lost.view(len(tokens), -1).sum(1)


for _ in range(program.steps):
    tokens = program.numbers(shape.vocabulary, 2 * shape.batch, shape.tokens)
    with torch.no_grad():
        expected = log_probability(reference, tokens)
    chosen, rejected = (log_probability(policy, tokens) - expected).chunk(2)
    loss = -logsigmoid(BETA * (chosen - rejected)).mean()
    loss.backward()
    clip_grad_norm_(policy.parameters(), MAX_NORM)
    optimizer.step()
    optimizer.zero_grad()
    program.end_step(loss)
program.write(policy)
