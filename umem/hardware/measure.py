"""Measuring the machine at hand, as a hardware profile of the user's.

Figures of the driver's work are those of the nearest profile, marked as assumptions.
"""

from __future__ import annotations

import ctypes
import os
import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from datetime import date
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
import yaml
from torch.nn import functional

from umem.core.errors import HardwareError
from umem.core.units import parse_bytes
from umem.cuda import Location, Range, bindings, prefetch
from umem.hardware.capabilities import Capabilities
from umem.hardware.host_memory import host_memory
from umem.hardware.load import describe_machine, measured_profile, nearest_card
from umem.hardware.model import Hardware, figures, quantity_of
from umem.hardware.profile import load_profile
from umem.io.files import write_file

__all__ = ["Measured", "host_update", "measure", "profile_text", "save_profile"]

_MIB = 1 << 20

_MANAGED_BYTES = 512 * _MIB
"""Managed memory that is measured with, at most: a card that is oversubscribed with it can hang."""

_LEAST_MANAGED_BYTES = 16 * _MIB

_HOST_PART = 16
"""Host memory that one measurement takes is at most this part of what is available."""

_ADAMW_BYTES = 28
"""Of host memory for a parameter in float32: weight, gradient and two moments are read, and all
but the gradient are written."""


class Measured(NamedTuple):
    """A figure that was measured."""

    figure: str
    value: float
    how: str


Progress = Callable[[str], None]


@contextmanager
def _on_device(device: int) -> Iterator[None]:
    before = torch.cuda.current_device()
    torch.cuda.set_device(device)
    try:
        yield
    finally:
        torch.cuda.set_device(before)


def measure(
    machine: Capabilities, progress: Progress, *, short: bool = False
) -> Iterator[Measured]:
    """Measure a GPU of this machine and its host, one group of figures after the other.

    Parameters
    ----------
    machine
        The GPU, from :func:`umem.hardware.capabilities.detect`.
    progress
        Is called with what is measured next.
    short
        Measure with less data and for a shorter time: seconds in place of two minutes, in which a
        card does not come down to the clock that its power allows.

    Raises
    ------
    HardwareError
        Without a torch that can use the GPU.
    """
    if not torch.cuda.is_available():
        raise HardwareError(
            f"torch {torch.__version__} cannot use the GPU: install a build of torch with CUDA"
        )
    bench = _Bench(machine, short)
    with _on_device(machine.device_index):
        for title, group in bench.groups():
            progress(f"Measuring {title}")
            yield from group()
            torch.cuda.empty_cache()


def _seconds(call: Callable[[], Any], for_s: float) -> float:
    """Mean time of a call on the device, of as many as take `for_s` together."""
    call()
    torch.cuda.synchronize()
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    count, repeats, total_s = 0, 1, 0.0
    while total_s < for_s:
        begin.record()
        for _ in range(repeats):
            call()
        end.record()
        end.synchronize()
        total_s += begin.elapsed_time(end) / 1e3
        count += repeats
        repeats = min(2 * repeats, 1000)
    return total_s / count


class _Bench:
    """The measurements of one GPU and its host."""

    def __init__(self, machine: Capabilities, short: bool) -> None:
        self._machine = machine
        self._base = describe_machine(machine, None, measured=False)
        self._short = short
        self._for_s = 0.1 if short else 4.0
        self._width = 2048 if short else 8192  # of matrices
        host = host_memory()
        self._host_bytes = 0 if host is None else host.available_bytes // _HOST_PART
        # Attention in bfloat16 needs tensor cores that have it.
        has_bf16 = machine.compute_capability >= (8, 0)
        self._half = torch.bfloat16 if has_bf16 else torch.float16

    def groups(self) -> Iterator[tuple[str, Callable[[], Iterator[Measured]]]]:
        """What is measured, in words, and how."""
        for name, dtype, precision in (
            ("fp32", torch.float32, "highest"),
            ("tf32", torch.float32, "high"),
            ("fp16", torch.float16, "highest"),
            ("bf16", torch.bfloat16, "highest"),
        ):
            yield f"matrix products in {name}", partial(self._product, name, dtype, precision)
        if self._machine.compute_capability >= (8, 9) and hasattr(functional, "scaled_mm"):
            yield "matrix products in fp8", self._fp8_product
        yield "attention", self._attention
        yield "device memory", self._memory
        yield "kernels that torch does not vectorise", self._unvectorised
        yield "launches", self._launches
        yield "copies", self._copies
        yield "AdamW on the host", partial(host_update, self._host_bytes, self._for_s)
        managed_bytes = self._managed_bytes()
        if managed_bytes:
            yield "managed memory", partial(self._pages, managed_bytes)

    def _size(self, size_bytes: int) -> int:
        """Bytes of a tensor on the device: less on a small card, and in a short form."""
        return min(size_bytes // (8 if self._short else 1), self._free_bytes() // 8)

    def _free_bytes(self) -> int:
        # Of one pool CUDA does not count what the kernel can reclaim.
        if self._machine.integrated and self._machine.free_bytes is not None:
            return self._machine.free_bytes
        return torch.cuda.mem_get_info()[0]

    # Computation.

    def _product(self, name: str, dtype: torch.dtype, precision: str) -> Iterator[Measured]:
        before = torch.get_float32_matmul_precision()
        torch.set_float32_matmul_precision(precision)
        width = self._width
        try:
            left, right = (torch.randn(width, width, device="cuda").to(dtype) for _ in range(2))
            time_s = _seconds(lambda: left @ right, self._for_s)
        finally:
            torch.set_float32_matmul_precision(before)
        how = f"product of {width} x {width} matrices of random numbers, for {self._for_s:g} s"
        yield Measured(f"flops_per_s.{name}", 2 * width**3 / time_s, how)

    def _fp8_product(self) -> Iterator[Measured]:
        width = self._width
        left, right = (
            torch.randn(width, width, device="cuda").to(torch.float8_e4m3fn) for _ in range(2)
        )
        one = torch.ones((), device="cuda")
        scaling = functional.ScalingType.TensorWise
        try:
            time_s = _seconds(
                lambda: functional.scaled_mm(left, right.t(), one, scaling, one, scaling),
                self._for_s,
            )
        except (NotImplementedError, RuntimeError, ValueError):  # not on every card, nor CUDA
            return
        how = f"product of {width} x {width} matrices with one scale each, for {self._for_s:g} s"
        yield Measured("flops_per_s.fp8", 2 * width**3 / time_s, how)

    def _attention(self) -> Iterator[Measured]:
        batch, heads, tokens, head_width = 1, 32, 1024 if self._short else 4096, 128
        query, key, value = (
            torch.randn(
                batch, heads, tokens, head_width, device="cuda", dtype=self._half
            ).requires_grad_()
            for _ in range(3)
        )

        def attend() -> torch.Tensor:
            return functional.scaled_dot_product_attention(query, key, value, is_causal=True)

        made = attend()
        gradient = torch.randn_like(made)
        forward_s = _seconds(attend, self._for_s)
        backward_s = _seconds(
            lambda: torch.autograd.grad(made, (query, key, value), gradient, retain_graph=True),
            self._for_s,
        )
        flops = 2 * batch * heads * tokens * tokens * head_width
        how = f"what torch chooses for {tokens} tokens, {heads} heads of {head_width}, causal"
        yield Measured("attention_flops_per_s", flops / forward_s, how)
        yield Measured("attention_backward_flops_per_s", 2.5 * flops / backward_s, how)

    def _launches(self) -> Iterator[Measured]:
        one = torch.zeros(1, device="cuda")
        one.add_(1)
        torch.cuda.synchronize()
        count = 3_000 if self._short else 30_000
        began_s = time.perf_counter()
        for _ in range(count):
            one.add_(1)
        torch.cuda.synchronize()
        launch_s = (time.perf_counter() - began_s) / count
        yield Measured("launch_s", launch_s, f"{count:,} tiny kernels of torch")

    # Memory.

    def _memory(self) -> Iterator[Measured]:
        size_bytes = self._size(1 << 30)
        left, right, total = (torch.ones(size_bytes // 4, device="cuda") for _ in range(3))
        time_s = _seconds(lambda: torch.add(left, right, out=total), self._for_s)
        yield Measured(
            "memory_bytes_per_s",
            3 * size_bytes / time_s,
            "sum of two fp32 vectors into a third, reads and writes together",
        )

    def _unvectorised(self) -> Iterator[Measured]:
        rows = 1024 if self._short else 8192
        wide = torch.randn(rows, 4096, device="cuda")
        narrow, row = wide.to(self._half), wide[0].clone()
        kernels: tuple[tuple[int, Callable[[], Any]], ...] = (
            (6, narrow.float),
            (8, lambda: wide * row),
            (4, lambda: torch.cat((narrow[:, 2048:], narrow[:, :2048]), 1)),
        )
        rates = [
            bytes_each * wide.numel() / _seconds(call, self._for_s / 4)
            for bytes_each, call in kernels
        ]
        yield Measured(
            "unvectorised_bytes_per_s",
            statistics.median(rates),
            "median of a cast to float32, a product with a row and a concatenation",
        )

    def _copies(self) -> Iterator[Measured]:
        size_bytes = min(self._size(256 * _MIB), max(self._host_bytes // 2, _MIB))
        homes = [
            torch.empty(size_bytes, dtype=torch.uint8, pin_memory=True).fill_(1) for _ in range(2)
        ]
        there = [torch.empty(size_bytes, dtype=torch.uint8, device="cuda") for _ in range(2)]
        torch.cuda.synchronize()

        def to_device() -> None:
            there[0].copy_(homes[0], non_blocking=True)

        def to_host() -> None:
            homes[1].copy_(there[1], non_blocking=True)

        how = f"page-locked memory, copies of {size_bytes // _MIB} MiB"
        to_device_s, to_host_s = (_seconds(call, self._for_s) for call in (to_device, to_host))
        streams = [torch.cuda.Stream() for _ in range(2)]
        count = max(1, int(self._for_s / to_device_s))
        began_s = time.perf_counter()
        for _ in range(count):
            for stream, call in zip(streams, (to_device, to_host), strict=True):
                with torch.cuda.stream(stream):
                    call()
        torch.cuda.synchronize()
        both = 2 * count * size_bytes / (time.perf_counter() - began_s)
        rates = {"to_device": size_bytes / to_device_s, "to_host": size_bytes / to_host_s}
        for name, rate in rates.items():
            yield Measured(f"copy_{name}_bytes_per_s", rate, how)
        # Noise may put the sum of both below the faster of them.
        yield Measured("copy_link_bytes_per_s", max(both, *rates.values()), f"{how}, both ways")

    # Pages of managed memory.

    def _managed_bytes(self) -> int:
        """Managed memory to measure with; 0 where it is not safe or moves nothing."""
        if not self._machine.concurrent_managed_access or self._machine.integrated:
            return 0
        limits = [self._size(_MANAGED_BYTES), self._host_bytes]
        if text := os.environ.get("UMEM_MANAGED_LIMIT"):
            try:
                limits.append(parse_bytes(text))
            except ValueError as error:
                raise HardwareError(f"environment variable UMEM_MANAGED_LIMIT: {error}") from None
        size_bytes = min(limits) // (2 * _MIB) * (2 * _MIB)
        return size_bytes if size_bytes >= _LEAST_MANAGED_BYTES else 0

    def _pages(self, size_bytes: int) -> Iterator[Measured]:
        address = bindings.allocate_managed(size_bytes)
        try:
            yield from self._moves(Range(address, size_bytes))
        finally:
            torch.cuda.synchronize()
            bindings.free(address)

    def _moves(self, pages: Range) -> Iterator[Measured]:
        stream = torch.cuda.current_stream()
        device = Location.device(torch.cuda.current_device())

        def timed(call: Callable[[], Any]) -> float:
            torch.cuda.synchronize()
            began_s = time.perf_counter()
            call()
            torch.cuda.synchronize()
            return pages.size_bytes / (time.perf_counter() - began_s)

        view = torch.as_tensor(_Managed(pages), device="cuda")
        view.sum()  # loads its kernel
        rates: dict[str, list[float]] = {"to_device": [], "to_host": [], "faults": []}
        for _ in range(1 if self._short else 5):
            ctypes.memset(pages.address, 1, pages.size_bytes)  # its pages are on the host
            rates["to_device"].append(timed(lambda: prefetch(pages, device, stream=stream)))
            rates["to_host"].append(timed(lambda: prefetch(pages, Location.host(), stream=stream)))
            ctypes.memset(pages.address, 1, pages.size_bytes)
            rates["faults"].append(timed(view.sum))
        medians = {name: statistics.median(found) for name, found in rates.items()}
        how = f"{pages.size_bytes // _MIB} MiB of managed memory"
        for name in ("to_device", "to_host"):
            yield Measured(f"{name}_bytes_per_s", medians[name], f"prefetch of {how} in one call")
        yield Measured(
            "fault_service_s",
            _fault_service_s(self._base, medians["faults"], medians["to_device"]),
            f"a kernel reads {how} on the host, at {medians['faults'] / 1e9:.3g} GB/s",
        )


class _Managed:
    """Managed memory as an array that torch takes."""

    def __init__(self, pages: Range) -> None:
        self.__cuda_array_interface__ = {
            "shape": (pages.size_bytes // 4,),
            "typestr": "<i4",
            "data": (pages.address, False),
            "version": 3,
        }


def host_update(host_bytes: int, for_s: float) -> Iterator[Measured]:
    """Measure AdamW on the host's cores, which host memory bounds; nothing without `host_bytes`."""
    # A parameter takes 16 bytes: weight, gradient and two moments.
    count = min(64 * _MIB, host_bytes // 16)
    if count < 1:
        return
    weight = torch.zeros(count, requires_grad=True)
    weight.grad = torch.full((count,), 1e-3)
    optimizer = torch.optim.AdamW([weight], fused=True)
    optimizer.step()  # makes its state
    steps, began_s = 0, time.perf_counter()
    while (passed_s := time.perf_counter() - began_s) < for_s or not steps:
        optimizer.step()
        steps += 1
    how = f"torch's fused AdamW on {count:,} parameters, {torch.get_num_threads()} threads"
    yield Measured("host_update_bytes_per_s", _ADAMW_BYTES * count * steps / passed_s, how)


# The profile.


def profile_text(machine: Capabilities, measured: Mapping[str, Measured]) -> str:
    """The profile of a machine as a YAML file: what was measured, and the rest as assumptions."""
    host = host_memory()
    nearest = nearest_card(machine)
    base = describe_machine(machine, None if host is None else host.total_bytes, measured=False)
    values = _values(base, measured)
    about = (
        f"one {machine.device_name}, driver {machine.driver_release}, torch {torch.__version__}, "
        f"{date.today()}"
    )
    data: dict[str, Any] = {
        "extends": nearest,
        "name": machine.device_name,
        "description": f"measured on {about}",
        "flops_per_s": {},
    }
    for name, value in figures(base).items():
        outer, _, inner = name.partition(".")
        below = data[outer] if inner else data
        source = base.sources[name]
        if name in measured:
            where = {"source": f"measured on {about}: {measured[name].how}"}
        elif name in values:
            where = {"assumption": "not measured: in proportion to what was measured of the link"}
        elif source.mark == "measured" and source.text == "detected":
            where = {"source": source.text}
        else:
            where = {"assumption": f"not measured: {source.text}"}
        shown = quantity_of(name).format(values.get(name, value))
        exact = isinstance(value, bool | int)
        below[inner or outer] = {"value": value if exact else shown, **where}
    load_profile(data)  # which checks it
    return yaml.safe_dump(data, sort_keys=False, width=100, allow_unicode=True)


def save_profile(text: str, path: Path | None, device_name: str) -> Path:
    """Write a profile where ``detect`` finds it, or to another file; return its path."""
    target = measured_profile(device_name) if path is None else path
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        reason = (error.strerror or str(error)).lower()
        raise HardwareError(
            f"{target.parent}: cannot be made ({reason}): give another place with --output"
        ) from error
    write_file(target, text.encode(), HardwareError)
    return target


def _values(base: Hardware, measured: Mapping[str, Measured]) -> dict[str, float]:
    """Figures that were measured, and those that follow from them."""
    values = {name: it.value for name, it in measured.items()}
    to_device = values.get("copy_to_device_bytes_per_s")
    if to_device is None:
        return values
    factor = to_device / base.copy_to_device_bytes_per_s
    for name in ("mapped_read", "mapped_write", "mapped", "link", "to_device", "to_host"):
        figure = f"{name}_bytes_per_s"
        values.setdefault(figure, getattr(base, figure) * factor)
    directions = values["to_device_bytes_per_s"], values["to_host_bytes_per_s"]
    values["link_bytes_per_s"] = max(values["link_bytes_per_s"], *directions)
    return values


def _fault_service_s(base: Hardware, faults: float, to_device: float) -> float:
    """The driver's work for a faulting page, by the bytes per second of faults and prefetches."""
    pages = base.block_bytes // base.page_bytes
    faulting = int(base.speculation_threshold * pages) + 1
    blocks = max(1, base.faults_per_batch // faulting)
    moved = blocks * base.block_bytes
    others_s = moved / to_device + base.fault_batch_s
    return max(0.0, moved / faults - others_s) / (blocks * faulting)
