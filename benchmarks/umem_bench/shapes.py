"""Shapes of published models, by their `config.json`. Batches are the benchmarks' own.

`meta-llama/Llama-2-{7b,13b}-hf`, `meta-llama/Meta-Llama-3-8B`, `codellama/CodeLlama-34b-hf`,
`TinyLlama/TinyLlama-1.1B`, `Qwen/Qwen2.5-32B` without its biases, and `Qwen/Qwen3-30B-A3B`.
"""

from __future__ import annotations

from umem_bench.results import LlamaShape

__all__ = [
    "CODE_LLAMA_34B",
    "LLAMA_1_7B",
    "LLAMA_2_7B",
    "LLAMA_2_13B",
    "LLAMA_3_8B",
    "QWEN2_5_32B",
    "QWEN3_30B_A3B",
    "SYSTEMS",
    "TINYLLAMA_1B",
]

LLAMA_2_7B = LlamaShape(hidden=4096, intermediate=11_008, layers=32, heads=32)

LLAMA_2_13B = LlamaShape(hidden=5120, intermediate=13_824, layers=40, heads=40)

LLAMA_3_8B = LlamaShape(
    hidden=4096, intermediate=14_336, layers=32, heads=32, key_value_heads=8, vocabulary=128_256
)

QWEN2_5_32B = LlamaShape(
    hidden=5120, intermediate=27_648, layers=64, heads=40, key_value_heads=8, vocabulary=152_064
)

CODE_LLAMA_34B = LlamaShape(
    hidden=8192, intermediate=22_016, layers=48, heads=64, key_value_heads=8
)

LLAMA_1_7B = LlamaShape(hidden=2560, intermediate=6912, layers=19, heads=20)
"""As `umem simulate --params 1.7b` has it."""

TINYLLAMA_1B = LlamaShape(hidden=2048, intermediate=5632, layers=22, heads=32, key_value_heads=4)

QWEN3_30B_A3B = LlamaShape(
    hidden=2048,
    intermediate=768,
    layers=48,
    heads=32,
    key_value_heads=4,
    head_dim=128,
    vocabulary=151_936,
    experts=128,
    experts_per_token=8,
)

SYSTEMS = {
    "large": LlamaShape(weights="float32", batch=4, tokens=2048),
    "xlarge": LlamaShape(
        hidden=2048,
        intermediate=5504,
        layers=24,
        heads=16,
        weights="float32",
        batch=8,
        tokens=2048,
    ),
}
"""The Llamas of ``tests/systems/programs/shared.py``, by size."""
