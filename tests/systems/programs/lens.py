"""The decoder for TransformerLens."""

from __future__ import annotations

import torch
from shared import SEED, Program
from transformer_lens import HookedTransformer, HookedTransformerConfig


def hooked_transformer(program: Program) -> HookedTransformer:
    """A decoder of the program's shape with random weights in bfloat16."""
    shape = program.shape
    return HookedTransformer(
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


def sequences(program: Program) -> int:
    """A quarter of the batch: attention scores are whole tensors in TransformerLens."""
    return max(1, program.shape.batch // 4)
