"""Families of decoders whose layers the estimate knows, as transformers builds them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

__all__ = ["FAMILIES", "WRAPPED", "Family"]


@dataclass(frozen=True)
class Family:
    """What a layer has beside the four matrices of attention and a gated MLP.

    Where a field is a key, the configuration's value of that key decides.
    """

    defaults: Mapping[str, int]
    """What transformers takes where a configuration lacks a key."""
    norms: int = 2
    """Norms over the hidden width in a layer."""
    weighs_norms: bool = True
    """Whether they and the last norm have weights."""
    norm_biases: bool = False
    head_norms: Literal["", "head", "all"] = ""
    """Whether queries and keys are normalised, each head alone or all heads together."""
    head_norms_key: str = ""
    qkv_biases: bool | str = False
    output_biases: bool | str = False
    """Of the matrix at attention's end."""
    mlp_biases: bool | str = False
    fuses_attention: bool = False
    """Whether queries, keys and values come of one matrix."""
    fuses_mlp: bool = False
    """Whether the gate and what it weighs come of one matrix."""
    windows: Literal["", "all", "late"] | int = ""
    """Layers that attend within ``sliding_window``: all; from ``max_window_layers`` on, where
    ``use_sliding_window`` is set; for a number, all but each so many-th."""
    sparse: Literal["", "all", "step", "first"] = ""
    """Layers with experts: none; all; by ``decoder_sparse_step`` and ``mlp_only_layers``; from
    ``first_k_dense_replace`` on."""
    shared: str = ""
    """Key of the width of what every token uses beside its experts, or of their number."""
    gates_shared: bool = False
    """Whether a gate weighs that."""
    is_clamped: bool = False
    """Whether experts have biases and the activation of GPT-OSS, and attention has sinks."""
    refused: tuple[str, ...] = ()
    """Keys that make another layer of it, which the estimate does not know."""


def _of(
    vocabulary: int,
    inner: int,
    heads: int,
    key_value_heads: int | None = None,
    head: int | None = None,
    **others: int,
) -> dict[str, int]:
    found = {
        "vocab_size": vocabulary,
        "intermediate_size": inner,
        "num_attention_heads": heads,
        "num_key_value_heads": key_value_heads,
        "head_dim": head,
        **others,
    }
    return {key: value for key, value in found.items() if value is not None}


_TIED = {"tie_word_embeddings": True}
_BIASES: dict[str, Any] = {"qkv_biases": "attention_bias", "output_biases": "attention_bias"}
_LATENT = {
    "kv_lora_rank": 512,
    "q_lora_rank": 1536,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
}

# From the configuration classes of transformers 5.23, and the modules that it makes of them.
FAMILIES: Mapping[str, Family] = {
    "deepseek_v2": Family(
        _of(102_400, 11_008, 32, **_LATENT, n_shared_experts=2),
        mlp_biases="mlp_bias",
        sparse="first",
        shared="n_shared_experts",
        **_BIASES,
    ),
    "deepseek_v3": Family(
        _of(129_280, 18_432, 128, 128, **_LATENT, n_shared_experts=1, first_k_dense_replace=3),
        sparse="first",
        shared="n_shared_experts",
        **_BIASES,
    ),
    "dots1": Family(
        _of(152_064, 10_944, 32, 32, sliding_window=4096, max_window_layers=62),
        head_norms="head",
        sparse="first",
        shared="n_shared_experts",
        **_BIASES,
    ),
    "ernie4_5": Family(_of(103_424, 3072, 16, 2, 128, **_TIED), refused=("use_bias",)),
    "exaone4": Family(
        _of(102_400, 16_384, 32, 32, sliding_window=4096), head_norms="head", windows=4
    ),
    "gemma": Family(_of(256_000, 24_576, 16, 16, 256, **_TIED), **_BIASES),
    "gemma2": Family(
        _of(256_000, 9216, 8, 4, 256, sliding_window=4096, **_TIED), norms=4, windows=2, **_BIASES
    ),
    "gemma3_text": Family(
        _of(262_208, 9216, 8, 4, 256, sliding_window=4096, **_TIED),
        norms=4,
        head_norms="head",
        windows=6,
        **_BIASES,
    ),
    "glm": Family(
        _of(151_552, 13_696, 32, 2, 128, attention_bias=True),
        qkv_biases="attention_bias",
        fuses_mlp=True,
    ),
    "glm4": Family(
        _of(151_552, 13_696, 32, 2, 128, attention_bias=True),
        norms=4,
        qkv_biases="attention_bias",
        fuses_mlp=True,
    ),
    "glm4_moe": Family(
        _of(151_552, 10_944, 96, 8, first_k_dense_replace=1, n_shared_experts=1),
        head_norms="head",
        head_norms_key="use_qk_norm",
        qkv_biases="attention_bias",
        sparse="first",
        shared="n_shared_experts",
    ),
    "gpt_oss": Family(
        _of(201_088, 2880, 64, 8, 64, sliding_window=128, attention_bias=True),
        windows=2,
        sparse="all",
        is_clamped=True,
        **_BIASES,
    ),
    "granite": Family(_of(32_000, 11_008, 32), mlp_biases="mlp_bias", **_BIASES),
    "granitemoe": Family(_of(32_000, 11_008, 32), sparse="all", **_BIASES),
    "granitemoeshared": Family(
        _of(32_000, 11_008, 32), sparse="all", shared="shared_intermediate_size", **_BIASES
    ),
    "hunyuan_v1_dense": Family(_of(290_943, 11_008, 32), head_norms="head", **_BIASES),
    "llama": Family(_of(32_000, 11_008, 32), mlp_biases="mlp_bias", **_BIASES),
    "minimax_m2": Family(_of(200_064, 1536, 48, 8, 128), head_norms="all", sparse="all"),
    "ministral3": Family(_of(131_072, 14_336, 32, 8, 128), windows="all"),
    "mistral": Family(_of(32_000, 14_336, 32, 8, sliding_window=4096), windows="all"),
    "mixtral": Family(_of(32_000, 14_336, 32, 8), windows="all", sparse="all"),
    "olmo": Family(_of(50_304, 11_008, 32), weighs_norms=False, **_BIASES),
    "olmo2": Family(_of(50_304, 11_008, 32), head_norms="all", **_BIASES),
    "olmo3": Family(
        _of(50_304, 11_008, 32, sliding_window=4096), head_norms="all", windows=4, **_BIASES
    ),
    "olmoe": Family(_of(50_304, 2048, 16), head_norms="all", sparse="all", **_BIASES),
    "phi3": Family(_of(32_064, 8192, 32), fuses_attention=True, fuses_mlp=True, windows="all"),
    "phimoe": Family(
        _of(32_064, 6400, 32, 8),
        norm_biases=True,
        windows="all",
        sparse="all",
        refused=("lm_head_bias",),
        **_BIASES,
    ),
    "qwen2": Family(
        _of(151_936, 22_016, 32, 32, sliding_window=4096, max_window_layers=28),
        qkv_biases=True,
        windows="late",
    ),
    "qwen2_moe": Family(
        _of(
            151_936,
            5632,
            16,
            16,
            sliding_window=4096,
            max_window_layers=28,
            qkv_bias=True,
            shared_expert_intermediate_size=5632,
        ),
        qkv_biases="qkv_bias",
        windows="late",
        sparse="step",
        shared="shared_expert_intermediate_size",
        gates_shared=True,
    ),
    "qwen3": Family(
        _of(151_936, 22_016, 32, 32, 128, sliding_window=4096, max_window_layers=28),
        head_norms="head",
        windows="late",
        **_BIASES,
    ),
    "qwen3_moe": Family(_of(151_936, 6144, 32, 4), head_norms="head", sparse="step", **_BIASES),
    "seed_oss": Family(
        _of(155_136, 27_648, 80, 8, 128, attention_bias=True),
        qkv_biases="attention_bias",
        output_biases="attention_out_bias",
        mlp_biases="mlp_bias",
    ),
    "smollm3": Family(_of(128_256, 11_008, 16, 4, **_TIED), mlp_biases="mlp_bias", **_BIASES),
    "stablelm": Family(
        _of(50_304, 6912, 32, 32),
        norm_biases=True,
        qkv_biases="use_qkv_bias",
        refused=("qk_layernorm", "use_parallel_residual"),
    ),
}
"""Others are refused: a layer with parallel branches, no gate or a state in place of attention
would be counted wrong."""

WRAPPED = {"gemma3": "gemma3_text", "llava": "llama", "mistral3": "mistral"}
"""Families with pictures, and that of the ``text_config`` that names none."""
