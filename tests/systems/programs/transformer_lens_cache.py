"""A forward pass of TransformerLens that keeps every activation."""

from __future__ import annotations

import torch
from shared import SEED, Program, checksum
from transformer_lens import HookedTransformer, HookedTransformerConfig

program = Program("transformer-lens")
shape = program.shape
model = HookedTransformer(
    HookedTransformerConfig(
        n_layers=shape.layers,
        d_model=shape.hidden,
        d_mlp=shape.intermediate,
        d_head=shape.hidden // shape.heads,
        n_heads=shape.heads,
        d_vocab=shape.vocabulary,
        n_ctx=shape.tokens,
        act_fn="silu",
        gated_mlp=True,
        normalization_type="RMS",
        positional_embedding_type="rotary",
        dtype=torch.bfloat16,
        device=str(program.device),
        seed=SEED,
    )
)
sequences = max(1, shape.batch // 4)  # their attention scores are kept, too
for batch in program.batches():
    with torch.no_grad():
        logits, cache = model.run_with_cache(batch["input_ids"][:sequences].to(program.device))
    program.end_step(checksum(logits, *cache.values()))
    del logits, cache
program.write(model)
