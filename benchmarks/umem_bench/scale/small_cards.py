"""Trainings that stand for small cards: their cases, and their rows, most telling ones first.

A budget of a large card's memory stands for a small one. It holds for every variant but the floor,
which is forward and backward pass alone, without a budget.
"""

from __future__ import annotations

from typing import NamedTuple

from umem_bench.results import LlamaShape, Method, ScaleCase, ScaleSettings, ScaleVariant
from umem_bench.rows import rows_named
from umem_bench.scale.run import Row
from umem_bench.shapes import LLAMA_2_7B, LLAMA_3_8B, QWEN2_5_32B

__all__ = ["CASES", "GOALS", "Case", "Goal", "parse_rows", "small_cards_settings"]


class Case(NamedTuple):
    """A model, its batches, and the budget that stands for a card."""

    shape: LlamaShape
    budget_bytes: int
    accumulate: int = 1
    """Batches of a step."""
    method: Method = "sft"

    @property
    def step_tokens(self) -> int:
        """Tokens of a step."""
        return self.shape.batch * self.shape.tokens * self.accumulate


_GIB = 1 << 30
_8B, _7B, _32B = (
    shape.model_copy(update={"batch": 4, "tokens": 2048, "weights": weights})
    for shape, weights in (
        (LLAMA_3_8B, "bfloat16"),
        (LLAMA_2_7B, "float32"),
        (QWEN2_5_32B, "bfloat16"),
    )
)

CASES: dict[ScaleCase, Case] = {
    **{
        f"llama-3-8b-{gib}gib-{8 * batches}k": Case(_8B, gib * _GIB, batches)
        for gib in (16, 24, 76)
        for batches in (1, 2, 8)
    },
    "llama-2-7b-fp32-76gib": Case(_7B, 76 * _GIB),
    "llama-2-7b-fp32-76gib-batch-16": Case(_7B.model_copy(update={"batch": 16}), 76 * _GIB),
    "llama-2-7b-fp32-76gib-4-batches": Case(_7B, 76 * _GIB, 4),
    "llama-2-7b-fp32-40gib": Case(_7B, 40 * _GIB),
    "llama-2-7b-fp32-40gib-8-batches": Case(_7B, 40 * _GIB, 8),
    "llama-2-7b-fp32-24gib": Case(_7B, 24 * _GIB),
    "qwen2.5-32b-lora-24gib": Case(_32B, 24 * _GIB, method="lora"),
    "qwen2.5-32b-24gib": Case(_32B, 24 * _GIB),
}
"""Batches of 4 x 2,048 tokens, but for ``batch-16``."""


class Goal(NamedTuple):
    """The least speed of umem."""

    percent: int
    of: ScaleCase = ""
    """Of umem with this case, or of the floor."""


GOALS: dict[ScaleCase, Goal] = {
    "llama-2-7b-fp32-76gib": Goal(80),
    "llama-2-7b-fp32-76gib-batch-16": Goal(96),
    "llama-2-7b-fp32-76gib-4-batches": Goal(95),
    "llama-2-7b-fp32-40gib": Goal(55),
    "llama-2-7b-fp32-40gib-8-batches": Goal(85),
    "llama-3-8b-24gib-64k": Goal(85, "llama-3-8b-76gib-64k"),
}
"""What ``--check`` holds rows against."""

_ORDER = (
    "llama-3-8b-24gib-8k:umem,llama-3-8b-24gib-8k:floor,"
    "llama-2-7b-fp32-76gib:umem,llama-2-7b-fp32-76gib:floor,"
    "llama-3-8b-24gib-64k:umem,llama-3-8b-76gib-64k:umem,"
    "llama-3-8b-24gib-8k:fsdp-offload,"
    "qwen2.5-32b-lora-24gib:umem,qwen2.5-32b-lora-24gib:floor,"
    "llama-2-7b-fp32-40gib:umem,llama-3-8b-16gib-8k:umem,"
    "llama-2-7b-fp32-76gib-4-batches:umem,"
    "llama-2-7b-fp32-76gib-batch-16:umem,llama-2-7b-fp32-76gib-batch-16:floor,"
    "llama-3-8b-16gib-64k:umem,llama-3-8b-24gib-16k:umem,"
    "llama-3-8b-76gib-8k:umem,llama-3-8b-76gib-8k:torchao,"
    "llama-2-7b-fp32-24gib:umem,llama-2-7b-fp32-40gib-8-batches:umem,"
    "llama-3-8b-24gib-8k:torchao,llama-3-8b-24gib-64k:fsdp-offload,llama-3-8b-16gib-16k:umem,"
    "llama-2-7b-fp32-76gib:torchao,llama-2-7b-fp32-76gib:fsdp-offload,"
    "llama-3-8b-76gib-16k:umem,qwen2.5-32b-24gib:umem"
)
"""Of several steps that differ in the number of batches only, the floor is measured once."""


def parse_rows(text: str) -> list[Row]:
    """The rows that a text names; for an empty one the usual rows, in their order."""
    variants: dict[Method, tuple[ScaleVariant, ...]] = {
        "sft": ("umem", "floor", "torchao", "fsdp-offload"),
        "lora": ("umem", "floor"),
    }
    of_cases = {name: variants[it.method] for name, it in CASES.items()}
    return rows_named(text or _ORDER, of_cases, ("umem", "floor"))


def small_cards_settings(policy: str, steps: int) -> ScaleSettings:
    """What a run of these cases has."""
    return ScaleSettings(
        cases={name: it.shape for name, it in CASES.items()},
        policy=policy,
        budget_bytes=None,
        budgets_bytes={name: it.budget_bytes for name, it in CASES.items()},
        steps=steps,
        accumulate=1,
        accumulates={name: it.accumulate for name, it in CASES.items()},
        holds_all=True,
        clip=True,
        deterministic=False,
    )
