"""Offload the activations of a model's first layers, and compare the device memory held.

    python examples/offload_activations.py
    python examples/offload_activations.py --layers 12 --offload 8 --batch 16
    python examples/offload_activations.py --policy sft             # under umem's allocator

The essential lines are `context, sync = offload(...)`, `with context:` around each layer's call,
and `sync` after it. Without a GPU the same copies are made within host memory: that saves
nothing, but the gradients are equal all the same.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import nn

import umem
from umem.offloading import offload

__all__ = ["Run", "main", "parse_arguments", "run"]


@dataclass(frozen=True)
class Run:
    """One forward and backward pass."""

    held_bytes: int | None
    """Device bytes allocated by the forward pass and still held after it; None on the CPU."""
    gradients: list[torch.Tensor]


def parse_arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description="Offload the activations of the first layers.")
    parser.add_argument("--layers", type=int, default=6, help="layers of the model")
    parser.add_argument("--offload", type=int, help="how many to offload (default: all but one)")
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--seq", type=int, default=512)
    parser.add_argument("--width", type=int, default=512, help="a multiple of 64")
    parser.add_argument("--policy", help="a policy of umem's allocator (default: torch's own)")
    arguments = parser.parse_args(argv)
    if arguments.layers < 2 or arguments.width % 64:
        parser.error("--layers must be 2 or more, and --width a multiple of 64")
    if arguments.offload is None:
        arguments.offload = arguments.layers - 1
    if not 1 <= arguments.offload <= arguments.layers:
        parser.error("--offload must be from 1 to --layers")
    return arguments


def run(layers: Sequence[nn.Module], inputs: torch.Tensor, num_layers: int) -> Run:
    """Train one step, with the activations of the first layers offloaded; 0 for none."""
    context, sync = offload(max(num_layers, 1), len(layers), enabled=num_layers > 0)
    before = torch.cuda.memory_allocated() if inputs.is_cuda else None
    hidden = inputs
    for layer in layers:
        with context:
            hidden = layer(hidden)
        hidden = sync(hidden)
    held = None if before is None else torch.cuda.memory_allocated() - before
    parameters = [parameter for layer in layers for parameter in layer.parameters()]
    return Run(held, list(torch.autograd.grad(hidden.square().mean(), parameters)))


def main(argv: Sequence[str] | None = None) -> None:
    """Run the same step twice and compare."""
    arguments = parse_arguments(argv)
    if arguments.policy:
        umem.enable(arguments.policy, fallback=True)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(0)
    width, heads = arguments.width, arguments.width // 64
    layers = [
        nn.TransformerEncoderLayer(width, heads, 4 * width, dropout=0, batch_first=True).to(device)
        for _ in range(arguments.layers)
    ]
    inputs = torch.randn(arguments.batch, arguments.seq, width, device=device)
    plain = run(layers, inputs, 0)
    offloaded = run(layers, inputs, arguments.offload)
    for name, done in (("everything stays", plain), ("offloaded", offloaded)):
        if done.held_bytes is not None:
            print(f"{name:>16}: {done.held_bytes / 2**20:8.1f} MiB held after the forward pass")
    pairs = zip(plain.gradients, offloaded.gradients, strict=True)
    equal = all(torch.equal(one, other) for one, other in pairs)
    print(f"gradients of {arguments.layers} layers on {device} are equal to the bit: {equal}")


if __name__ == "__main__":
    main()
