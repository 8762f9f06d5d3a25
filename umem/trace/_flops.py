"""Arithmetic of one operator: how many floating-point operations, and in which precision."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.utils.flop_counter import flop_registry

from umem.trace._model import Precision

__all__ = ["operator_flops", "operator_precision"]

_aten = torch.ops.aten

# torch counts the attention kernels of GPUs; the one for the CPU takes the same leading arguments.
_FORMULAS: dict[Any, Callable[..., Any]] = {
    **flop_registry,
    _aten._scaled_dot_product_flash_attention_for_cpu: flop_registry[
        _aten._scaled_dot_product_flash_attention
    ],
    _aten._scaled_dot_product_flash_attention_for_cpu_backward: flop_registry[
        _aten._scaled_dot_product_flash_attention_backward
    ],
}

_PRECISION = {
    torch.float16: Precision.FP16,
    torch.bfloat16: Precision.BF16,
    torch.float8_e4m3fn: Precision.FP8,
    torch.float8_e4m3fnuz: Precision.FP8,
    torch.float8_e5m2: Precision.FP8,
    torch.float8_e5m2fnuz: Precision.FP8,
}


def operator_flops(func: Any, args: Sequence[Any], kwargs: dict[str, Any], result: object) -> float:
    """Count the floating-point operations of one call, as :mod:`torch.utils.flop_counter` does.

    An addition and a multiplication count separately. Operators without a formula there, such as
    element-wise ones, count 0: their time is that of memory. Causal attention counts half of what
    torch says, because its kernels skip the blocks above the diagonal.
    """
    packet = getattr(func, "overloadpacket", func)
    formula = _FORMULAS.get(packet)
    if formula is None:
        return 0.0
    flops = float(formula(*args, **kwargs, out_val=result))
    return flops / 2 if _is_causal(func, args, kwargs) else flops


def _is_causal(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> bool:
    schema = getattr(func, "_schema", None)
    if schema is None:
        return False
    for position, argument in enumerate(schema.arguments):
        if argument.name == "is_causal":
            return bool(args[position] if position < len(args) else kwargs.get("is_causal"))
    return False


def operator_precision(dtype: torch.dtype) -> Precision:
    """The precision of an operator whose first floating-point tensor has this type.

    float32 runs in TF32 where :func:`torch.set_float32_matmul_precision` allows it.
    """
    if dtype == torch.float32 and torch.get_float32_matmul_precision() != "highest":
        return Precision.TF32
    return _PRECISION.get(dtype, Precision.FP32)
