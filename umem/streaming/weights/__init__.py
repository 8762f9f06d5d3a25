"""Weights that the device has no room for: staged block by block ahead of their use."""

from __future__ import annotations

from typing import TYPE_CHECKING

from umem.core.lazy_names import lazy_names

if TYPE_CHECKING:
    from umem.streaming.weights.expert_cache import CachedExperts, CachedTable, make_cached_table
    from umem.streaming.weights.experts import find_experts
    from umem.streaming.weights.managed_models import weights_of
    from umem.streaming.weights.model_weights import ModelWeights
    from umem.streaming.weights.staged_weights import is_movable_weight
    from umem.streaming.weights.streamed_weights import (
        StreamedBlock,
        StreamedWeights,
        WeightCounts,
    )

__all__ = [
    "CachedExperts",
    "CachedTable",
    "ModelWeights",
    "StreamedBlock",
    "StreamedWeights",
    "WeightCounts",
    "find_experts",
    "is_movable_weight",
    "make_cached_table",
    "weights_of",
]

__getattr__ = lazy_names(
    __name__,
    {
        "expert_cache": "CachedExperts CachedTable make_cached_table",
        "experts": "find_experts",
        "managed_models": "weights_of",
        "model_weights": "ModelWeights",
        "staged_weights": "is_movable_weight",
        "streamed_weights": "StreamedBlock StreamedWeights WeightCounts",
    },
)
