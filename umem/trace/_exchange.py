"""The exchange format: traces in plain words, as published ones come."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np

from umem.classes import TensorClass
from umem.documents import Document, items, refuse, require_keys, shown, text
from umem.trace._check import (
    MAX_ACCESSES,
    MAX_METADATA,
    MAX_PHASE_S,
    MAX_PHASES,
    MAX_TENSOR_BYTES,
    MAX_TENSORS,
)
from umem.trace._model import Access, PhaseKind, Precision, Trace, ranges

__all__ = [
    "EXCHANGE_FORMAT",
    "EXCHANGE_KEYS",
    "EXCHANGE_PHASE_KEYS",
    "EXCHANGE_TENSOR_KEYS",
    "trace_of_exchange",
]

EXCHANGE_FORMAT = "umem-trace/1"

_REQUIRED_KEYS = ("format", "tensors", "phases")
EXCHANGE_KEYS = (*_REQUIRED_KEYS, "name", "source", "published")
EXCHANGE_TENSOR_KEYS = ("id", "bytes", "class", "persistent")
EXCHANGE_PHASE_KEYS = ("name", "duration_us", "reads", "writes")

_CLASSES = [str(member) for member in TensorClass]
_US_PER_S = 1e6


def trace_of_exchange(document: Document) -> Trace:
    """Make a trace of a document in the exchange format.

    A tensor that is not persistent lives from the first phase that uses it to the last one; one
    that no phase uses takes no memory and is dropped; ``dropped_tensors`` in the metadata says how
    many were. What a phase only writes, it overwrites as a whole. All phases are kernels, with no
    FLOPs and the bytes of the tensors that they touch, each counted once. ``published`` goes to the
    metadata as ``published_<key>``, with numbers in the unit that it names.

    Parameters
    ----------
    document
        With the keys of :data:`EXCHANGE_KEYS`; durations are microseconds.

    Raises
    ------
    TraceError
        If the document does not hold such a trace; the message names place and remedy.
    """
    # Other tools may write more beside these keys.
    require_keys(document, "", document.data, _REQUIRED_KEYS, document.data)
    tensors = items(document, "tensors", MAX_TENSORS)
    phases = items(document, "phases", MAX_PHASES)
    numbers = _tensor_numbers(document, tensors)
    accesses = [
        _accesses(document, f"phases[{index}]", phase, numbers)
        for index, phase in enumerate(phases)
    ]
    counts = np.array([len(uses) for uses in accesses], dtype=np.int64)
    start = ranges(counts)
    if start[-1] > MAX_ACCESSES:
        refuse(document, "phases", f"{start[-1]} accesses: at most {MAX_ACCESSES} are read")
    used = np.array([number for uses in accesses for number in uses], dtype=np.int32)
    mode = np.array([mode for uses in accesses for mode in uses.values()], dtype=np.uint8)

    # From here on over the tensors that stay, in their order.
    persistent = np.array([tensor["persistent"] for tensor in tensors], dtype=np.bool_)
    stays = persistent.copy()
    stays[used] = True
    sizes = np.array([tensor["bytes"] for tensor in tensors], dtype=np.int64)
    phase_of = np.repeat(np.arange(len(phases), dtype=np.int32), counts)
    first = np.zeros(len(tensors), dtype=np.int32)
    last = np.full(len(tensors), len(phases) - 1, dtype=np.int32)
    # The accesses are in the order of the phases: the last assignment to a tensor wins.
    first[used[::-1]] = phase_of[::-1]
    last[used] = phase_of
    first[persistent] = 0
    last[persistent] = len(phases) - 1
    # If this overflows, so does the total size, which is refused.
    touched = ranges(sizes[used])
    return Trace(
        name=_text_or(document, "name", Path(document.place).name.split(".")[0]),
        source=_text_or(document, "source", EXCHANGE_FORMAT),
        tensor_names=tuple(
            f"tensor {tensor['id']}" for tensor, keep in zip(tensors, stays, strict=True) if keep
        ),
        tensor_bytes=sizes[stays],
        tensor_class=np.array(
            [TensorClass(tensor["class"]).number for tensor in tensors], dtype=np.uint8
        )[stays],
        persistent=persistent[stays],
        first_phase=first[stays],
        last_phase=last[stays],
        phase_names=tuple(phase["name"] for phase in phases),
        phase_kind=np.full(len(phases), PhaseKind.KERNEL, dtype=np.uint8),
        phase_precision=np.full(len(phases), Precision.FP32, dtype=np.uint8),
        flops=np.zeros(len(phases)),
        memory_bytes=np.diff(touched[start]),
        duration_s=np.array([phase["duration_us"] for phase in phases], dtype=np.float64)
        / _US_PER_S,
        access_start=start,
        access_tensor=(np.cumsum(stays, dtype=np.int32) - np.int32(1))[used],
        access_mode=mode,
        metadata=_metadata(document, dropped=int((~stays).sum())),
    )


def _tensor_numbers(document: Document, tensors: list[Any]) -> dict[int, int]:
    """Index of each tensor by its id, after checking every tensor."""
    numbers: dict[int, int] = {}
    for index, tensor in enumerate(tensors):
        where = f"tensors[{index}]"
        require_keys(document, where, tensor, EXCHANGE_TENSOR_KEYS)
        own_id, size_bytes = tensor["id"], tensor["bytes"]
        if type(own_id) is not int or not -(2**63) <= own_id < 2**63:
            refuse(document, f"{where}.id", f"{shown(own_id)} is not an integer of 64 bits")
        if own_id in numbers:
            refuse(
                document,
                f"{where}.id",
                f"{own_id} is also the id of tensors[{numbers[own_id]}]: give each its own",
            )
        if type(size_bytes) is not int or not 0 < size_bytes <= MAX_TENSOR_BYTES:
            refuse(
                document,
                f"{where}.bytes",
                f"{shown(size_bytes)} is not a size: give an integer from 1 to 2**50",
            )
        if tensor["class"] not in _CLASSES:
            refuse(
                document,
                f"{where}.class",
                f"{shown(tensor['class'])} is no class: give one of {', '.join(_CLASSES)}",
            )
        if not isinstance(tensor["persistent"], bool):
            refuse(
                document,
                f"{where}.persistent",
                f"{shown(tensor['persistent'])} is neither true nor false",
            )
        numbers[own_id] = index
    return numbers


def _accesses(
    document: Document, where: str, phase: Any, numbers: dict[int, int]
) -> dict[int, int]:
    """Mode by tensor of one phase, after checking it."""
    require_keys(document, where, phase, EXCHANGE_PHASE_KEYS)
    if not isinstance(phase["name"], str):
        refuse(document, f"{where}.name", f"{shown(phase['name'])} is not text")
    duration_us = phase["duration_us"]
    # NaN cannot be written in JSON; 1e999 is infinity.
    if type(duration_us) not in (int, float) or not 0 <= duration_us < MAX_PHASE_S * _US_PER_S:
        refuse(
            document,
            f"{where}.duration_us",
            f"{shown(duration_us)} is not a duration: give microseconds from 0 to below 1e12",
        )
    uses: dict[int, int] = {}
    for key, mode in (("reads", Access.READ), ("writes", Access.WRITE)):
        if not isinstance(phase[key], list):
            refuse(document, f"{where}.{key}", f"{shown(phase[key])} is not a list of tensor ids")
        for index, own_id in enumerate(phase[key]):
            # By exact type: true and 1.0 would find tensor 1.
            number = numbers.get(own_id) if type(own_id) is int else None
            if number is None:
                refuse(
                    document,
                    f"{where}.{key}[{index}]",
                    f"tensor {shown(own_id)} is not among the tensors: add it there, or remove it "
                    "here",
                )
            # A kernel may name an argument twice, as x * x does.
            uses[number] = uses.get(number, 0) | int(mode)
    return uses


def _text_or(document: Document, key: str, otherwise: str) -> str:
    return text(document, key) if key in document.data else otherwise


def _metadata(document: Document, dropped: int) -> dict[str, str | int | float]:
    published = document.data.get("published", {})
    if not isinstance(published, dict):
        refuse(document, "published", f"{shown(published)} is not an object of names and numbers")
    if len(published) >= MAX_METADATA:
        refuse(document, "published", f"{len(published)} keys: at most {MAX_METADATA - 1} are read")
    for key, value in published.items():
        if type(value) not in (str, int, float) or value in (math.inf, -math.inf):
            refuse(
                document,
                "published",
                f"{shown(key)} is {shown(value)}: give text or a finite number",
            )
    metadata = {f"published_{key}": value for key, value in published.items()}
    return metadata | ({"dropped_tensors": dropped} if dropped else {})
