"""The figures of a machine's memory system, and the durations of a trace's phases on it."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Annotated, Any, Literal, NamedTuple, get_args, get_type_hints

import numpy as np
import numpy.typing as npt
from pydantic import GetCoreSchemaHandler, StrictBool
from pydantic_core import CoreSchema, core_schema

from umem.core.errors import HardwareError
from umem.core.units import MAX_TEXT, NUMBER_PATTERN, format_bytes, parse_bytes, parse_percent
from umem.io.problems import did_you_mean, shown
from umem.trace import Access, Precision, Trace, phase_of_access

__all__ = [
    "FIGURES",
    "PRECISIONS",
    "RATES",
    "Hardware",
    "Source",
    "explain_hardware",
    "figures",
    "quantity_of",
    "rates_of",
    "with_durations",
]

# Kinds of figures: how each is written with its unit, checked and shown.


@dataclass(frozen=True)
class Quantity:
    """A kind of figure. As an annotation of a type, it tells pydantic how to read one."""

    example: str
    """A value in the accepted form."""
    format: Callable[[Any], str] = str
    """The value for a person to read; `parse` reads it back to six digits."""
    parse: Callable[[Any], Any] | None = None
    """Value in the units of :class:`umem.hardware.Hardware`; raises ValueError with a message that
    says what is accepted. None where pydantic's check of the type is enough."""

    def __get_pydantic_core_schema__(
        self, source: Any, handler: GetCoreSchemaHandler
    ) -> CoreSchema:
        if self.parse is None:
            return handler(source)
        return core_schema.no_info_plain_validator_function(self.parse)


_MEASURE = re.compile(rf"\s*({NUMBER_PATTERN})\s*([^\s0-9][^\s]*)\s*")


def _measure(
    example: str, units: Mapping[str, Fraction], low: str, high: str, shown_in: tuple[str, ...]
) -> Quantity:
    """A number with one of these units, from `low` to `high`.

    It is shown in one of `shown_in`, which are ordered from the largest unit to the smallest.
    """

    def read(value: Any) -> Fraction:
        form = f": give one such as '{example}'"
        is_short_text = isinstance(value, str) and len(value) <= MAX_TEXT
        match = _MEASURE.fullmatch(value) if is_short_text else None
        if match is None:
            raise ValueError(f"{shown(value)} is not a number and a unit{form}")
        number, unit = match.groups()
        if unit not in units:
            hint = did_you_mean(unit, units) or form
            raise ValueError(f"{shown(value)} has an unknown unit {unit!r}{hint}")
        return Fraction(number.replace("_", "")) * units[unit]

    def parse(value: Any) -> float:
        quantity = read(value)
        if not lowest <= quantity <= highest:
            raise ValueError(f"{shown(value)} is out of range: give {low} to {high}")
        return float(quantity)

    def show(value: float) -> str:
        fitting = (unit for unit in shown_in if value >= units[unit])
        unit = next(fitting, shown_in[-1] if value else shown_in[0])
        return f"{_digits(value / units[unit])} {unit}"

    lowest, highest = read(low), read(high)
    return Quantity(example, show, parse)


def _digits(value: float) -> str:
    """At most six significant digits, without an exponent."""
    text = f"{value:.6g}"
    return f"{value:.12f}".rstrip("0").rstrip(".") if "e" in text else text


_SECONDS = {unit: Fraction(1, 1000**power) for power, unit in enumerate(("s", "ms", "us", "ns"))}
_BYTES = {
    unit: Fraction(parse_bytes(f"1 {unit}"))
    for unit in ("kB", "MB", "GB", "TB", "KiB", "MiB", "GiB", "TiB")
}
_BYTE_RATES = {f"{unit}/s": size for unit, size in _BYTES.items()}
_SLOWDOWNS = {
    f"{time}/{unit}": seconds / size
    for (time, seconds), (unit, size) in itertools.product(_SECONDS.items(), _BYTES.items())
}
_FLOP_RATES = {
    f"{prefix}FLOP/s": Fraction(10**power) for power, prefix in ((15, "P"), (12, "T"), (9, "G"))
}

Seconds = Annotated[float, _measure("45 us", _SECONDS, "0 s", "1 s", tuple(_SECONDS))]
BytesPerSecond = Annotated[
    float, _measure("51 GB/s", _BYTE_RATES, "1 MB/s", "1000 TB/s", ("TB/s", "GB/s", "MB/s"))
]
SecondsPerByte = Annotated[
    float, _measure("5 ms/GiB", _SLOWDOWNS, "0 s/GiB", "1 s/GiB", ("ms/GiB",))
]
FlopsPerSecond = Annotated[
    float, _measure("700 TFLOP/s", _FLOP_RATES, "1 GFLOP/s", "1000 PFLOP/s", tuple(_FLOP_RATES))
]


def _size(example: str, low: str, high: str, *, power_of_two: bool = False) -> Quantity:
    def parse(value: Any) -> int:
        size = parse_bytes(value)
        if not parse_bytes(low) <= size <= parse_bytes(high):
            raise ValueError(f"{shown(value)} is out of range: give {low} to {high}")
        if power_of_two and size.bit_count() != 1:
            raise ValueError(f"{shown(value)} is not a power of two: give such as '{example}'")
        return size

    return Quantity(example, _show_size, parse)


def _show_size(size: int) -> str:
    """In binary units, or in decimal ones where only those give a short number."""
    for power, unit in ((12, "TB"), (9, "GB"), (6, "MB")):
        if size % 10 ** (power - 1) == 0 and size >= 10**power:
            return f"{_digits(size / 10**power)} {unit}"
    return format_bytes(size)


Capacity = Annotated[int, _size("80 GiB", "1 MiB", "1024 TiB")]
HostCapacity = Annotated[int, _size("256 GiB", "0 B", "1024 TiB")]
BlockSize = Annotated[int, _size("2 MiB", "4 KiB", "1 GiB", power_of_two=True)]
RangeSize = Annotated[int, _size("128 MiB", "4 KiB", "1 TiB")]


def _parse_count(value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= 65535:
        raise ValueError(f"{shown(value)} is not a whole number from 1 to 65535")
    return value


Count = Annotated[int, Quantity("256", parse=_parse_count)]
Share = Annotated[
    float,
    Quantity(
        "51%", lambda share: f"{_digits(100 * share)}%", lambda text: float(parse_percent(text))
    ),
]
"""Above 0 and at most 1, written as a percentage."""
Flag = Annotated[StrictBool, Quantity("true", shown)]


# A machine.

EvictionOrder = Literal["access", "migration"]
"""The event that counts as a block's last use: the device's last access, or the driver's last
migration or mapping of the block."""

FaultEviction = Literal["serial", "overlapped"]
"""Whether a fault waits for the eviction that makes room for it, or both run at once."""

PRECISIONS = tuple(precision.name.lower() for precision in Precision)
"""Keys of ``flops_per_s``; the number of a precision is its index."""


Mark = Literal["measured", "published", "assumed", "unknown"]
"""What a figure rests on, best first. The rates of a card without a profile are unknown."""


@dataclass(frozen=True)
class Source:
    """Where a figure comes from."""

    text: str
    assumption: bool
    """True where the figure is neither measured nor published."""

    @property
    def mark(self) -> Mark:
        """What the figure rests on; a text begins with its word if the figure is measured."""
        if self.assumption:
            return "assumed"
        is_measured = self.text.startswith(("measured", "detected", "derived"))
        return "measured" if is_measured else "published"


@dataclass(frozen=True)
class Hardware:
    """A device, its host and the link between them.

    Sizes are in bytes, times in seconds, bandwidths in bytes per second. To add a figure, add a
    line here; a profile then needs it, with its source.
    """

    name: str
    description: str
    device_bytes: Capacity
    """Device memory that tensors can use."""
    host_bytes: HostCapacity
    """Host memory that tensors can use, besides `device_bytes`; 0 with `one_pool`."""
    block_bytes: BlockSize
    """Unit in which the driver evicts and the simulator tracks residency: 2 MiB."""
    page_bytes: BlockSize
    """Bytes that one fault brings in: 64 KiB on x86."""
    flops_per_s: Mapping[str, FlopsPerSecond]
    """Sustained matrix throughput by precision: ``fp32 tf32 fp16 bf16 fp8``."""
    memory_bytes_per_s: BytesPerSecond
    """Sustained bandwidth of device memory, reads and writes together."""
    unvectorised_bytes_per_s: BytesPerSecond
    """The same, of kernels that torch does not vectorise, because their tensors differ in type or
    shape: broadcasts, casts to a wider type, concatenations, products with a thin float32 matrix.
    """
    attention_flops_per_s: FlopsPerSecond
    """Sustained throughput of fused attention in 16 bits, causal, in the forward pass."""
    attention_backward_flops_per_s: FlopsPerSecond
    """The same in the backward pass."""
    launch_s: Seconds
    """Shortest duration of a phase: a bare launch of a kernel, of which the processor needs several
    for each kernel of a program (:mod:`umem.fit`)."""
    to_device_bytes_per_s: BytesPerSecond
    """Prefetch of pages to the device in large calls, alone."""
    to_host_bytes_per_s: BytesPerSecond
    """Prefetch of pages to the host in large calls, alone."""
    link_bytes_per_s: BytesPerSecond
    """Both directions together."""
    call_s: Seconds
    """Fixed cost of one prefetch call, during which its direction moves nothing."""
    call_bytes: RangeSize
    """Long ranges are split into calls of this size."""
    copy_to_device_bytes_per_s: BytesPerSecond
    """Explicit copies from a host block, alone."""
    copy_to_host_bytes_per_s: BytesPerSecond
    """Explicit copies to a host block, alone."""
    copy_link_bytes_per_s: BytesPerSecond
    """Explicit copies in both directions at once, the sum of both."""
    copy_slowdown_s_per_byte: SecondsPerByte
    """Time that each copied byte adds to the computation beside the copy."""
    page_slowdown_s_per_byte: SecondsPerByte
    """Time that each byte of migrating pages adds to the computation beside them."""
    mapped_read_bytes_per_s: BytesPerSecond
    """Host memory read in place by kernels, alone."""
    mapped_write_bytes_per_s: BytesPerSecond
    """Host memory written in place by kernels, alone."""
    mapped_bytes_per_s: BytesPerSecond
    """Host memory used in place by kernels, reads and writes together."""
    mapped_slowdown_s_per_byte: SecondsPerByte
    """Time that each byte used in place adds to the computation beside it."""
    host_update_bytes_per_s: BytesPerSecond
    """Host memory that AdamW in float32 reads and writes on all cores, 28 bytes a parameter."""
    fault_batch_s: Seconds
    """Latency of one batch of faults, from the first fault to the start of its transfers."""
    faults_per_batch: Count
    """Most faults that the driver takes at once."""
    fault_service_s: Seconds
    """The driver's work for one faulting page, besides the transfer."""
    speculation_threshold: Share
    """Share of a block's pages above which the driver fetches the rest unasked; 1 for never."""
    fault_eviction: Annotated[FaultEviction, Quantity("serial")]
    eviction_order: Annotated[EvictionOrder, Quantity("migration")]
    ats: Flag
    """The device reaches the host's own memory through the host's page tables, so that memory of
    kind ``system`` is used in place and moved by access counters."""
    one_pool: Flag
    """Device and host share one memory, which `device_bytes` counts: nothing is moved between
    them, and no plan copies that memory onto itself."""
    access_counter_threshold: Count
    """Uses of a block in place, in phases, after which the driver moves it to the device; only
    with `ats`."""
    sources: Mapping[str, Source]
    """By figure; ``flops_per_s.bf16`` for one precision."""
    rates: Mark = "assumed"
    """What predictions for the machine rest on: the worst mark of its :data:`RATES`."""


RATES = (
    "flops_per_s.bf16",
    "memory_bytes_per_s",
    "attention_flops_per_s",
    "copy_to_device_bytes_per_s",
    "copy_to_host_bytes_per_s",
    "copy_link_bytes_per_s",
)
"""Figures that bound the steps of most models."""


def rates_of(sources: Mapping[str, Source]) -> Mark:
    """The worst mark of the rates."""
    return max((sources[name].mark for name in RATES if name in sources), key=_MARKS.index)


_MARKS = get_args(Mark)

FIGURES: Mapping[str, Any] = {
    name: hint
    for name, hint in get_type_hints(Hardware, include_extras=True).items()
    if name not in ("name", "description", "sources", "rates")
}
"""Type of each figure, with its :class:`~Quantity`, in order."""


def quantity_of(figure: str) -> Quantity:
    """How a figure is written and shown, such as ``call_s`` or ``flops_per_s.bf16``."""
    hint = FIGURES[figure.partition(".")[0]]
    if not hasattr(hint, "__metadata__"):  # a mapping, such as of precisions
        hint = hint.__args__[1]
    quantity: Quantity = hint.__metadata__[-1]
    return quantity


def figures(hardware: Hardware) -> dict[str, Any]:
    """Values of a machine by figure, with one entry for each precision."""
    values: dict[str, Any] = {}
    for name in FIGURES:
        value = getattr(hardware, name)
        if isinstance(value, Mapping):
            values |= {f"{name}.{key}": value[key] for key in PRECISIONS if key in value}
        else:
            values[name] = value
    return values


class HardwareRow(NamedTuple):
    """One figure of a machine, as a row of a table."""

    field: str
    """Such as ``call_s``, or ``flops_per_s.bf16`` for one precision."""
    value: str
    """With its unit, such as ``45 us``."""
    source: Source | None
    """None where a machine made in Python states none."""


def explain_hardware(hardware: Hardware) -> list[HardwareRow]:
    """Every figure of a machine with its source."""
    return [
        HardwareRow(name, quantity_of(name).format(value), hardware.sources.get(name))
        for name, value in figures(hardware).items()
    ]


def with_durations(trace: Trace, hardware: Hardware) -> Trace:
    """Give the phases of a trace the durations of a machine's roofline.

    A phase takes the longest of three times: its arithmetic at the sustained throughput of its
    precision, for attention at attention's where that is lower; its traffic at the bandwidth of
    device memory, for unvectorised kernels at theirs; and a launch. A trace that has durations is
    returned as it is.

    Raises ``HardwareError`` if a phase computes in a precision that the machine has no throughput
    for.
    """
    if trace.duration_s is not None:
        return trace
    flops_per_s = np.array([hardware.flops_per_s.get(name, np.nan) for name in PRECISIONS])
    computes = trace.flops > 0
    used = np.unique(trace.phase_precision[computes])
    missing = used[np.isnan(flops_per_s[used])]
    if len(missing):
        name = PRECISIONS[missing[0]]
        raise HardwareError(
            f"{hardware.name} has no throughput for {name}, in which the trace {trace.name!r} "
            f"computes: add flops_per_s.{name} to the profile, or choose another one"
        )
    throughput = np.minimum(flops_per_s[trace.phase_precision], _attention_limit(trace, hardware))
    compute_s = np.zeros(trace.phase_count)
    compute_s[computes] = trace.flops[computes] / throughput[computes]
    bandwidth = np.where(
        _is_unvectorised(trace), hardware.unvectorised_bytes_per_s, hardware.memory_bytes_per_s
    )
    memory_s = trace.memory_bytes / bandwidth
    duration_s = np.maximum(np.maximum(compute_s, memory_s), hardware.launch_s)
    return replace(trace, duration_s=duration_s)


def _attention_limit(trace: Trace, hardware: Hardware) -> npt.NDArray[np.float64]:
    """Throughput that attention bounds a phase to, float64[P]; infinite in other phases."""

    def limit(operator: str) -> float:
        if "attention" not in operator:
            return np.inf
        if operator.endswith("_backward"):
            return hardware.attention_backward_flops_per_s
        return hardware.attention_flops_per_s

    return np.array([limit(name.partition(": ")[2]) for name in trace.phase_names])


def _is_unvectorised(trace: Trace) -> npt.NDArray[np.bool_]:
    """Phases whose kernels torch does not vectorise, bool[P].

    They write one tensor that is larger than one that they read. Other products than those in
    float32 run in the tensor cores, where a thin matrix costs no bandwidth.
    """
    phase, size = phase_of_access(trace), trace.tensor_bytes[trace.access_tensor]
    writes, reads = ((trace.access_mode & access) > 0 for access in (Access.WRITE, Access.READ))
    written = np.zeros(trace.phase_count, np.int64)
    np.add.at(written, phase[writes], size[writes])
    reads_less = np.zeros(trace.phase_count, bool)
    reads_less[phase[reads & (size < written[phase])]] = True
    writes_one = np.bincount(phase[writes], minlength=trace.phase_count) == 1
    is_product = trace.flops > 0
    in_fp32 = trace.phase_precision == Precision.FP32
    return np.where(is_product, in_fp32, writes_one & reads_less)
