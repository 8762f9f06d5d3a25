"""Group-relative policy optimization: the policy writes texts, and is trained twice on their
rewards, beside a frozen reference."""

from __future__ import annotations

import copy
from typing import Any

import torch
from shared import LEARNING_RATE, MAX_NORM, Program, Shape
from torch.nn.functional import cross_entropy
from torch.nn.utils import clip_grad_norm_

SHAPES = {
    "tiny": Shape(16, 32, layers=3, heads=2, vocabulary=64, batch=4, tokens=8),
    "small": Shape(256, 704, layers=6, heads=4, vocabulary=4096, batch=32, tokens=128),
    "large": Shape(768, 2048, layers=12, heads=12, vocabulary=32_000, batch=12, tokens=384),
}
NEW_TOKENS = 4
GROUP = 4
"""Texts for each prompt."""
BETA, CLIP = 0.04, 0.2

program = Program("transformers", shapes=SHAPES)
shape = program.shape
policy: Any = program.llama().to(program.device)
reference: Any = copy.deepcopy(policy).eval().requires_grad_(False)
optimizer = torch.optim.AdamW(policy.parameters(), LEARNING_RATE)


def log_probabilities(model: Any, tokens: torch.Tensor) -> torch.Tensor:
    """Of each word, given those before it."""
    logits = model(input_ids=tokens).logits[:, :-1]
    lost = cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten(), reduction="none")
    return -lost.view(len(tokens), -1)


for _ in range(program.steps):
    prompts = program.numbers(shape.vocabulary, shape.batch // GROUP, shape.tokens - NEW_TOKENS)
    policy.eval()
    texts = policy.generate(
        prompts.repeat_interleave(GROUP, 0),
        attention_mask=prompts.new_ones(shape.batch, prompts.shape[1]),
        max_new_tokens=NEW_TOKENS,
        min_new_tokens=NEW_TOKENS,
        do_sample=True,
        use_cache=True,
        pad_token_id=0,
    )
    policy.train()
    rewards = (texts[:, -NEW_TOKENS:] % 7).double().mean(1).view(-1, GROUP)
    advantages = (rewards - rewards.mean(1, keepdim=True)).float().view(-1, 1)
    with torch.no_grad():
        before, expected = (log_probabilities(it, texts) for it in (policy, reference))
    for _ in range(2):
        now = log_probabilities(policy, texts)
        ratio, apart = (now - before).exp(), expected - now
        gain = torch.minimum(
            ratio * advantages, ratio.clamp(1 - CLIP, 1 + CLIP) * advantages
        ) - BETA * (apart.exp() - apart - 1)
        loss = -gain[:, -NEW_TOKENS:].mean()
        loss.backward()
        clip_grad_norm_(policy.parameters(), MAX_NORM)
        optimizer.step()
        optimizer.zero_grad()
    program.end_step(loss)
program.write(policy)
