"""What an operator does: the memory that it touches, by its schema, and its arithmetic."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.flop_counter import flop_registry

from umem.torch_compat import operator_schema
from umem.trace import Access, PhaseKind, Precision

__all__ = [
    "Operator",
    "Uses",
    "describe_operator",
    "operator_flops",
    "operator_precision",
    "phase_kind",
    "split_launches",
]

Uses = list[tuple[torch.Tensor, Access]]

# In-place operators that do not read the tensor that they write.
_OVERWRITES = frozenset(
    (
        *("_foreach_copy_", "_foreach_zero_", "bernoulli_", "cauchy_", "copy_", "exponential_"),
        *("fill_", "geometric_", "log_normal_", "normal_", "random_", "uniform_", "zero_"),
    )
)
# These hand out memory and do not touch it.
_ALLOCATES = frozenset(
    ["empty", "empty_like", "empty_permuted", "empty_strided", "new_empty", "new_empty_strided"]
)
# These read only as many elements of their first argument as they return.
_GATHERS = frozenset(["embedding", "gather", "index", "index_select", "take"])
# These update running statistics, which their schemas do not say.
_BATCH_NORMS = frozenset(["cudnn_batch_norm", "miopen_batch_norm", "native_batch_norm"])

_COPIES = frozenset(["_to_copy", "clone", "copy_"])
_ZEROS = frozenset(["new_zeros", "zero_", "zeros", "zeros_like"])
_FILLS = frozenset(["fill", "fill_", "full", "full_like", "new_full"])

# Elements per block and blocks per launch of aten/src/ATen/native/cuda/MultiTensorApply.cuh.
_BLOCK_ELEMENTS = 65_536
_LAUNCH_BLOCKS = 320


@dataclass(frozen=True)
class Operator:
    """The properties that all calls of an operator share."""

    name: str
    """Such as ``aten.mm``."""
    base: str
    """Such as ``mm``."""
    arguments: tuple[tuple[str, Access], ...]
    """Names of the arguments, in order, and how each is used if it is a tensor."""
    is_data_op: bool
    """Does more than to allocate memory or to change a tensor's shape."""
    is_split: bool
    """Works on lists of tensors, position by position."""

    def groups(self, args: Sequence[Any], kwargs: dict[str, Any]) -> Iterator[tuple[Any, Access]]:
        """The arguments of a call that hold tensors, and how each is used."""
        for position, (name, access) in enumerate(self.arguments):
            value = args[position] if position < len(args) else kwargs.get(name)
            if isinstance(value, torch.Tensor | list | tuple):
                yield value, self._access(name, access, args, kwargs)

    def touched_bytes(
        self, position: int, tensor: torch.Tensor, results: Sequence[torch.Tensor]
    ) -> int:
        """Bytes that a call reads or writes of the tensor at a position among its uses."""
        nbytes = tensor.numel() * tensor.itemsize
        if position == 0 and self.base in _GATHERS:
            return min(nbytes, sum(result.numel() * result.itemsize for result in results))
        return nbytes

    def _access(
        self, name: str, access: Access, args: Sequence[Any], kwargs: dict[str, Any]
    ) -> Access:
        if name == "grads" and kwargs.get("grad_scale") is None:
            # Fused optimizers write gradients only to undo a scaling, whatever they declare.
            return Access.READ
        if self.base in _BATCH_NORMS and name.startswith("running_"):
            position = [argument for argument, _ in self.arguments].index("training")
            return Access.READ | Access.WRITE if args[position] else Access.READ
        return access


@functools.cache
def describe_operator(func: Any) -> Operator:
    """Read an operator's schema."""
    schema = operator_schema(func)
    if schema is None:
        # A higher-order operator has none. It is functional: it reads its arguments.
        operands = tuple((f"operand {position}", Access.READ) for position in range(64))
        return Operator(str(func), str(func), operands, is_data_op=True, is_split=False)
    base = schema.name.partition("::")[2]
    arguments: list[tuple[str, Access]] = []
    is_split = base.startswith("_foreach_")
    for argument in schema.arguments:
        access = Access.READ
        if argument.alias_info is not None and argument.alias_info.is_write:
            overwrites = argument.is_out or base in _OVERWRITES
            access = Access.WRITE if overwrites else Access.READ | Access.WRITE
            is_split |= isinstance(argument.type, torch.ListType)
        arguments.append((argument.name, access))
    return Operator(
        name=f"{func.namespace}.{base}",
        base=base,
        arguments=tuple(arguments),
        is_data_op=base not in _ALLOCATES and torch.Tag.inplace_view not in func.tags,
        is_split=is_split,
    )


def split_launches(
    groups: Sequence[tuple[Any, Access]], result: object
) -> Iterator[tuple[Uses, list[torch.Tensor]]]:
    """Split a call on lists of tensors into launches: uses and results of each.

    A launch has a limited number of blocks, so the lists need not be on the device as a whole.
    Positions share a launch while their blocks fit into it; a tensor with more blocks takes several
    launches, which are one here.
    """
    lists = [(value, access) for value, access in groups if isinstance(value, list | tuple)]
    shared = [(value, access) for value, access in groups if isinstance(value, torch.Tensor)]
    results = list(result) if isinstance(result, list | tuple) else []
    count = max((len(value) for value, _ in lists), default=0)
    start = blocks = 0
    for position in range(count + 1):
        more = 0
        if position < count:
            numel = max(value[position].numel() for value, _ in lists if position < len(value))
            more = -(-numel // _BLOCK_ELEMENTS)
        if position == count or (position > start and blocks + more > _LAUNCH_BLOCKS):
            uses = [(tensor, access) for value, access in lists for tensor in value[start:position]]
            if uses:
                yield uses + shared, results[start:position]
            start, blocks = position, 0
        blocks += more


def phase_kind(operator: Operator, args: Sequence[Any], result: object) -> PhaseKind:
    """The kind of work that an operator gives the device, as a profiler would name it."""
    if operator.base == "lift_fresh":  # a Python number or list that becomes a tensor
        return PhaseKind.MEMCPY
    if operator.base in _COPIES:
        source = args[1] if operator.base == "copy_" else args[0]
        if isinstance(result, torch.Tensor) and _same_layout(source, result):
            return PhaseKind.MEMCPY
    if operator.base in _ZEROS:
        return PhaseKind.MEMSET
    if operator.base in _FILLS and isinstance(args[1], int | float) and args[1] == 0:
        return PhaseKind.MEMSET
    return PhaseKind.KERNEL


def _same_layout(source: torch.Tensor, result: torch.Tensor) -> bool:
    """Whether both are the same run of bytes at two addresses."""
    if source.dtype != result.dtype or source.shape != result.shape:
        return False
    if source.stride() != result.stride():
        return False
    expected = 1
    for stride, size in sorted(zip(result.stride(), result.shape, strict=True)):
        if size != 1 and stride != expected:
            return False
        expected *= size
    return True


@functools.cache
def _formulas() -> dict[Any, Callable[..., Any]]:
    from umem.torch_compat import (
        flash_attention,
        flash_attention_backward,
        flash_attention_cpu,
        flash_attention_cpu_backward,
        grouped_matmul,
    )

    # torch counts the attention kernels of GPUs; the one for the CPU takes the same leading
    # arguments.
    return {
        **flop_registry,
        flash_attention_cpu: flop_registry[flash_attention],
        flash_attention_cpu_backward: flop_registry[flash_attention_backward],
        grouped_matmul: _grouped_matmul_flops,
    }


def _grouped_matmul_flops(first: torch.Tensor, second: torch.Tensor, *_: Any, **__: Any) -> int:
    """Operations of one matrix product for each group, such as the tokens of an expert.

    Where only one matrix has a dimension for the groups, they share the rows or columns of the
    other one. How many each group has is data, and makes no difference to the sum.
    """
    if (first.dim(), second.dim()) == (3, 2):
        return 2 * second.numel() * first.shape[-2]
    return 2 * first.numel() * second.shape[-1]


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
    element-wise ones, count 0: memory bounds their time. Causal attention counts half of torch's
    number, because its kernels skip the blocks above the diagonal.
    """
    packet = getattr(func, "overloadpacket", func)
    formula = _formulas().get(packet)
    if formula is None:
        return 0.0
    flops = float(formula(*args, **kwargs, out_val=result))
    return flops / 2 if _is_causal(func, args, kwargs) else flops


def _is_causal(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> bool:
    schema = operator_schema(func)
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
