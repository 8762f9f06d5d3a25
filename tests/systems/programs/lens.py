"""The decoder for TransformerLens."""

from __future__ import annotations

import argparse

import torch
from shared import SEED, Program
from transformer_lens import HookedTransformer, HookedTransformerConfig
from transformer_lens.utilities.multi_gpu import get_device_for_block_index

own = argparse.ArgumentParser(add_help=False)
own.add_argument("--devices", type=int, default=1, help="GPUs that the model is divided among")


def lens_program() -> Program:
    """A program for TransformerLens."""
    return Program("transformer-lens", own=own)


def hooked_transformer(program: Program) -> HookedTransformer:
    """A decoder of the program's shape with random weights in bfloat16."""
    shape = program.shape
    devices: int = program.options.devices
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
            n_devices=devices,
            seed=SEED,
        ),
        move_to_device=devices == 1,
    )
    if devices > 1:
        divide(model)
    return model


def divide(model: HookedTransformer) -> None:
    """Move each block to the GPU where `forward` sends its input.

    TransformerLens 3.9 moves each to the GPU with the most free memory, which is another one for
    every second block; it copies the inputs of some operations there, and gated MLPs fail.
    """
    first, *_, last = places = [
        get_device_for_block_index(number, model.cfg) for number in range(model.cfg.n_layers)
    ]
    for block, place in zip(model.blocks, places, strict=True):
        block.to(place)
    model.embed.to(first)
    model.ln_final.to(last)
    model.unembed.to(last)


def sequences(program: Program) -> int:
    """A quarter of the batch: attention scores are whole tensors in TransformerLens."""
    return max(1, program.shape.batch // 4)
