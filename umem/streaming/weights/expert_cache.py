"""Keeps the experts of a layer that were used last on the device, while their tables are at home.

A table stacks the experts of a layer in one parameter. A call with few tokens selects the rows of
the chosen experts, ``table[chosen]``, which copies them. The cache makes that copy in place of
torch: rows that it has come from the device, and the others over the link; those then take the
place of the rows that were used longest ago (LRU, as in https://arxiv.org/abs/2312.17238). All of
it runs on the stream that asks: nothing waits for the choice to be known on the host.
"""

from __future__ import annotations

import ctypes
import functools
import logging
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from importlib.resources import files
from typing import Any, ClassVar, NamedTuple

import torch
from torch import nn

from umem.core.errors import CudaError, NativeLibraryError
from umem.cuda import bindings
from umem.runtime.aliases import has_alias
from umem.runtime.cuda_streams import run_on
from umem.runtime.guard import Guard, are_plain
from umem.runtime.torch_hooks.passes import running_pass
from umem.streaming.stage.lanes import Lanes
from umem.torch_compat import (
    InferenceMode,
    version_counter,
)

__all__ = ["CachedExperts", "CachedTable", "ExpertUse", "make_cached_table"]

_LOG = logging.getLogger("umem")

_NONE = -1
"""No slot, and no expert."""

_ALIGNMENT = 16
"""Bytes that a thread of the GPU copies at once."""

_CHOOSE_THREADS, _GATHER_THREADS = 32, 256

_MOST_BLOCKS_PER_ROW = 64
"""A few rows keep all of a GPU's memory busy, and one row all of the link."""


class ExpertUse(NamedTuple):
    """How often chosen experts were in the cache."""

    hits: int
    misses: int

    @classmethod
    def total(cls, every: Iterable[ExpertUse]) -> ExpertUse:
        """The sum of several."""
        known = list(every)
        return cls(sum(it.hits for it in known), sum(it.misses for it in known))


class CachedTable(ABC):
    """The rows of a table that were used last.

    Parameters
    ----------
    table
        A contiguous parameter of experts x ... , at home in host memory.
    cache
        Memory on the device for some rows, slots x ... .
    """

    def __init__(self, table: torch.Tensor, cache: torch.Tensor) -> None:
        self.experts, self.slots = len(table), len(cache)
        self._cache = cache
        self._state = torch.zeros(
            self.experts + 2 * self.slots + 3, dtype=torch.int64, device=table.device
        )
        """By expert its slot, by slot its expert and the last call that used it, and counts."""
        self._contents = object()
        """Stands for what the table has; another object when it may have changed."""
        self._valid: tuple[object, int] | None = None
        """The contents and the table's version that the cache is of; None while it is changed."""

    @property
    def size_bytes(self) -> int:
        """Memory on the device."""
        return self._cache.nbytes

    @property
    def counts(self) -> ExpertUse:
        """So far, for which the device is waited for."""
        return ExpertUse(*self._state[-2:].tolist())

    def forget(self) -> None:
        """The table may have changed."""
        self._contents = object()

    def select(self, table: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor:
        """The rows ``table[chosen]``, in new memory.

        Parameters
        ----------
        table
            The table, under torch's own class, with its home's memory.
        chosen
            Numbers of experts on the device, fewer than there are experts.
        """
        now = self._contents, version_counter(table)
        is_valid = self._valid == now
        self._valid = None  # an interrupt may come between two launches
        if not is_valid:
            self._state[: self.experts + self.slots].fill_(_NONE)
        out = torch.empty((*chosen.shape, *table.shape[1:]), dtype=table.dtype, device=table.device)
        self._gather(table, chosen.reshape(-1).long().contiguous(), out)
        self._valid = now
        return out

    @abstractmethod
    def _gather(self, table: torch.Tensor, chosen: torch.Tensor, out: torch.Tensor) -> None:
        """Copy the rows, and keep them."""


class _HostTable(CachedTable):
    """The CPU's, in the same order as ``expert_cache.cu``."""

    def _gather(self, table: torch.Tensor, chosen: torch.Tensor, out: torch.Tensor) -> None:
        numbers = [it % self.experts for it in chosen.tolist()]
        slot_of, holder, used, counts = self._state.split([self.experts, self.slots, self.slots, 3])
        now = int(counts[0]) + 1
        known = [int(slot_of[it]) for it in numbers]
        for slot in known:
            if slot != _NONE:
                used[slot] = now
        misses = 0
        rows = out.view(len(numbers), *table.shape[1:])
        for place, (expert, slot) in enumerate(zip(numbers, known, strict=True)):
            filled = _NONE
            if slot == _NONE and int(slot_of[expert]) == _NONE:
                misses += 1
                free = [it for it in range(self.slots) if int(used[it]) < now]
                if free:
                    filled = min(free, key=lambda it: (int(used[it]), it))
                    if holder[filled] != _NONE:
                        slot_of[holder[filled]] = _NONE
                    holder[filled], slot_of[expert], used[filled] = expert, filled, now
            rows[place] = table[expert] if slot == _NONE else self._cache[slot]
            if filled != _NONE:
                self._cache[filled] = rows[place]
        counts += torch.tensor([1, len(numbers) - misses, misses])


class _Kernels(NamedTuple):
    choose: Any
    gather: Any


@functools.cache
def _kernels(device: int) -> _Kernels:
    source = files("umem.streaming.weights").joinpath("expert_cache.cu").read_text("utf-8")
    names = ("choose", "gather")
    return _Kernels(*bindings.compile_kernels(source, "expert_cache.cu", device, names))


class _Parameters:
    """The parameters of a kernel, where the driver reads them at a launch."""

    def __init__(self, *kinds: tuple[str, Any]) -> None:
        class Values(ctypes.Structure):
            _fields_: ClassVar = list(kinds)

        self.values: Any = Values()
        first = ctypes.addressof(self.values)
        places = [first + getattr(Values, name).offset for name, _ in kinds]
        self._places = (ctypes.c_void_p * len(places))(*places)
        self.address = ctypes.addressof(self._places)


class _CudaTable(CachedTable):
    """A GPU's."""

    def __init__(self, table: torch.Tensor, cache: torch.Tensor) -> None:
        super().__init__(table, cache)
        self._device = table.device.index or 0
        stream = torch.cuda.current_stream(table.device)
        self._kernels = run_on(stream, functools.partial(_kernels, self._device))
        self._plan = torch.empty(2 * self.experts, dtype=torch.int64, device=table.device)
        self._words = table[0].nbytes // _ALIGNMENT
        self._blocks = min(-(-self._words // _GATHER_THREADS), _MOST_BLOCKS_PER_ROW)
        address, number, long = ctypes.c_void_p, ctypes.c_int, ctypes.c_longlong
        self._choose = _Parameters(
            *(("chosen", address), ("count", number), ("experts", number), ("slots", number)),
            *(("state", address), ("plan", address)),
        )
        self._copy = _Parameters(
            *(("chosen", address), ("count", number), ("experts", number), ("plan", address)),
            *(("home", address), ("cache", address), ("out", address), ("words", long)),
        )
        for values in (self._choose.values, self._copy.values):
            values.experts, values.plan = self.experts, self._plan.data_ptr()
        self._choose.values.slots, self._choose.values.state = self.slots, self._state.data_ptr()
        self._copy.values.cache, self._copy.values.words = cache.data_ptr(), self._words

    def _gather(self, table: torch.Tensor, chosen: torch.Tensor, out: torch.Tensor) -> None:
        count = len(chosen)
        if not count:
            return
        its, copy = self._choose.values, self._copy.values
        its.chosen = copy.chosen = chosen.data_ptr()
        its.count = copy.count = count
        copy.home, copy.out = table.data_ptr(), out.data_ptr()
        stream = torch.cuda.current_stream(table.device)
        if torch.cuda.current_device() == self._device:
            self._launch(stream.cuda_stream, count)
        else:
            run_on(stream, functools.partial(self._launch, stream.cuda_stream, count))

    def _launch(self, stream: int, count: int) -> None:
        (choose, gather), device = self._kernels, self._device
        grid = self._blocks, count
        bindings.launch(choose, (1, 1), _CHOOSE_THREADS, stream, self._choose.address, device)
        bindings.launch(gather, grid, _GATHER_THREADS, stream, self._copy.address, device)


def make_cached_table(
    table: torch.Tensor, slots: int, buffer: Callable[[int], torch.Tensor | None]
) -> CachedTable | None:
    """A cache for some experts of a table; None where there can be none.

    Parameters
    ----------
    table
        Experts x ... .
    slots
        Number of experts in the cache.
    buffer
        Makes memory of so many bytes on the device; None where it has no room.
    """
    row_bytes = table.nbytes // len(table)
    kind = type(table) is nn.Parameter and table.is_contiguous()
    if not (kind and 0 < slots < len(table) and row_bytes % _ALIGNMENT == 0):
        return None
    with InferenceMode(False):
        memory = buffer(slots * row_bytes)
        if memory is None:
            return None
        cache = memory.view(table.dtype).view(slots, *table.shape[1:])
        try:
            return (_CudaTable if table.is_cuda else _HostTable)(table, cache)
        except (CudaError, NativeLibraryError) as error:
            _warn_without_kernels(str(error))
            return None


@functools.cache
def _warn_without_kernels(why: str) -> None:
    _LOG.warning(
        "umem: experts are not cached on the device, and cross the link each time: %s", why
    )


class CachedExperts(Guard):
    """Serves the rows that a block selects from its tables, and sees every other use of them.

    Parameters
    ----------
    tables
        The caches, with their tables.
    lanes
        Tells streams, and captures.
    settle
        Called before a use that may change a table, or keep a view of it.
    """

    functions: ClassVar = ("aten::index",)

    def __init__(
        self,
        tables: Iterable[tuple[torch.Tensor, CachedTable]],
        lanes: Lanes,
        settle: Callable[[], None],
    ) -> None:
        super().__init__(self._changed)
        self._tables = [*tables]
        self._by_id = {id(table): cached for table, cached in self._tables}
        self._lanes = lanes
        self._lock = threading.Lock()
        self._on_change = settle
        self._has_failed = False
        self._stream = lanes.stream_key()
        """The only one whose work uses the caches."""

    @property
    def size_bytes(self) -> int:
        """Memory of the caches."""
        return sum(it.size_bytes for _, it in self._tables)

    @property
    def counts(self) -> ExpertUse:
        """Over all tables so far, for which the device is waited for."""
        return ExpertUse.total(it.counts for _, it in self._tables)

    def serve(self) -> None:
        """Answer what is selected from tables that are at home, from now on."""
        if not (self.is_on or self._has_failed):
            self.hold([table for table, _ in self._tables if are_plain((table,))])

    def forget(self) -> None:
        """Tables may have changed."""
        for _, cached in self._tables:
            cached.forget()

    def _changed(self) -> None:
        self.release()
        self.forget()
        self._on_change()

    def run(self, function: str, args: list[Any]) -> Any:
        """Select rows."""
        del function
        table, (chosen, *others) = args
        cached = self._by_id.get(id(table))
        if cached is None or others or not _copies_rows(chosen) or _makes_graph(table):
            return NotImplemented
        if (
            torch.compiler.is_compiling()
            or self._lanes.is_capturing()
            or running_pass().is_transform
            or self._lanes.stream_key() != self._stream
            or chosen.device != table.device
            or chosen.numel() > cached.experts
        ):
            return table[chosen]
        if has_alias((table,)):
            cached.forget()
            return table[chosen]
        try:
            with self._lock:
                return cached.select(table, chosen)
        except Exception as error:
            self._fail(error)
            return table[chosen]

    def _fail(self, error: Exception) -> None:
        """An error must not end a forward pass, which selects from the tables themselves."""
        _LOG.warning(
            "umem: experts are not cached on the device any more: %s: %s",
            type(error).__name__,
            str(error),
            exc_info=_LOG.isEnabledFor(logging.DEBUG),
        )
        self._has_failed = True
        self._changed()


def _copies_rows(index: object) -> bool:
    """Whether rows that are indexed so are copies: a single number gives a view."""
    return (
        isinstance(index, torch.Tensor)
        and index.ndim > 0
        and index.dtype in (torch.int64, torch.int32)
    )


def _makes_graph(table: torch.Tensor) -> bool:
    return torch.is_grad_enabled() and table.requires_grad
