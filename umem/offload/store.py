"""What an activation store has done."""

from __future__ import annotations

import threading
import weakref
from collections import deque
from collections.abc import Callable, Container, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from umem.core.errors import OffloadError
from umem.offload.movers import CudaMover, HostBuffer, HostMover, HostPool, Mover
from umem.runtime.torch_hooks import saved_tensors as saved_tensor_hooks
from umem.runtime.torch_hooks.saved_tensors import (
    Hooks,
    Kept,
    check_version,
    keep,
    may_leave,
    unpack_kept,
)
from umem.torch_compat import current_graph_task_id, storage_key, version_counter

if TYPE_CHECKING:
    from umem.offload.movers import HostBuffer, HostPool

__all__ = [
    "MIN_BYTES",
    "ActivationStatistics",
    "ActivationStore",
    "Entry",
    "in_backward_or_compiler",
]


@dataclass(frozen=True)
class ActivationStatistics:
    """Sums since the store was made. A tensor here is a storage: its views count once."""

    bytes_out: int
    tensors_out: int
    """Whose copy to the host was asked for."""
    bytes_in: int
    tensors_in: int
    """Whose copy to the device was asked for; the late ones are among them."""
    late_fetches: int
    """Tensors that the backward pass asked for before anybody had fetched them."""
    kept_for_lack_of_host_bytes: int
    kept_for_lack_of_host_tensors: int
    """Chosen to leave, but still on the device: the host had no room."""
    pinned_bytes: int
    """Host memory that the store holds now, in use or ready for the next step."""
    peak_pinned_bytes: int


# What one call of a block saves for the backward pass.


class Group:
    """The saved tensors of one call, by their ordinals.

    Held by the handles of its tensors, so it is gone when the graph is.

    Parameters
    ----------
    chosen
        Ordinals of the tensors that may leave; None for all.
    stream
        What the call's work is ordered by.
    admit
        Gives the handle of a tensor that may leave, and None for one that stays.
    """

    def __init__(
        self,
        chosen: Container[int] | None,
        stream: Any,
        admit: Callable[[Group, torch.Tensor], Handle | None],
    ) -> None:
        self.stream = stream
        self.reference = weakref.ref(self)
        self._chosen = chosen
        self._admit = admit
        self._count = 0
        # Weak: each entry goes with its last handle, while the block's backward pass goes on.
        self._entries: dict[int, weakref.ref[Entry]] = {}

    def pack(self, tensor: torch.Tensor) -> Handle | Kept:
        """Autograd saves a tensor."""
        ordinal = self._count
        self._count = ordinal + 1
        # Parameters are subclasses, and so is all that does more than hold numbers.
        if type(tensor) is torch.Tensor and (self._chosen is None or ordinal in self._chosen):
            handle = self._admit(self, tensor)
            if handle is not None:
                self._entries[ordinal] = weakref.ref(handle.entry)
                return handle
        return keep(tensor)

    def entries(self, ordinals: Iterable[int] | None) -> Iterator[Entry]:
        """The storages that are still held, each once, in the order in which they were saved."""
        seen = set()
        for ordinal in sorted(self._entries if ordinals is None else ordinals):
            reference = self._entries.get(ordinal)
            entry = None if reference is None else reference()
            if entry is not None and entry not in seen:
                seen.add(entry)
                yield entry


# One storage that may wait in host memory, and the tensors that autograd saved of it.

Retired = tuple[torch.UntypedStorage, Any, Any]
"""Device memory that a copy was still at work on when its entry ended, the copy's mark, and the
stream that the memory belongs to."""


class Entry:
    """A storage: on the device, in a host buffer, or in both.

    It lives as long as the handles that autograd holds, and then gives everything back. That may
    happen in any thread and at any moment, so it takes no lock and makes no call to the device.

    Attributes
    ----------
    storage
        The device's copy; None after its release.
    size_bytes
        Bytes of the storage.
    version
        The newest version of the storage that was saved.
    stream
        What the device's copy belongs to.
    buffer
        The host's copy, once it was asked for.
    mark
        The last copy that the device's memory is part of.
    sent_with
        All marks of the copies that left together with it, in order; None where the last copy is
        one to the device.
    is_arriving
        Whether the last copy is one to the device.
    is_settled
        Whether `stream` has waited for the mark.
    is_kept
        Whether it stays because the host had no room.
    wanted_by
        The groups that have not released it. Weak: those of a graph that is gone do not count.
    """

    __slots__ = (
        "__weakref__",
        "_gone",
        "_pool",
        "_retired",
        "buffer",
        "is_arriving",
        "is_kept",
        "is_settled",
        "mark",
        "sent_with",
        "size_bytes",
        "storage",
        "stream",
        "version",
        "wanted_by",
    )

    def __init__(
        self,
        storage: torch.UntypedStorage,
        version: int,
        stream: Any,
        pool: HostPool,
        retired: deque[Retired],
    ) -> None:
        self.storage: torch.UntypedStorage | None = storage
        self.size_bytes = storage.nbytes()
        self.version = version
        self.stream = stream
        self.buffer: HostBuffer | None = None
        self.mark: Any = None
        self.sent_with: Sequence[Any] | None = None
        self.is_arriving = False
        self.is_settled = True
        self.is_kept = False
        self.wanted_by: set[weakref.ref[Group]] = set()
        self._gone: weakref.ref[torch.UntypedStorage] | None = None
        self._pool = pool
        self._retired = retired

    def is_wanted(self) -> bool:
        """Whether a group that is still there has not released it."""
        return any(group() is not None for group in self.wanted_by)

    def leaves(self, mark: Any, sent_with: Sequence[Any]) -> None:
        """A copy to the host was asked for."""
        self.mark, self.sent_with = mark, sent_with
        self.is_arriving, self.is_settled = False, mark is None

    def arrives(self, mark: Any) -> None:
        """A copy to the device was asked for."""
        self.mark, self.sent_with = mark, None
        self.is_arriving, self.is_settled = True, mark is None

    def let_go(self) -> None:
        """Hold the device's copy no more."""
        assert self.storage is not None
        self._gone = weakref.ref(self.storage)
        self.storage = None

    def find_again(self) -> bool:
        """Hold the device's copy again, if somebody else has held it all the time.

        It is as it was for its stream. Had it been modified, the saved tensors could not be used.
        """
        storage = None if self._gone is None else self._gone()
        if storage is None or storage.nbytes() != self.size_bytes:
            return False
        self.storage = storage
        return True

    def __del__(self) -> None:
        if self.storage is not None and not self.is_settled:
            self._retired.append((self.storage, self.mark, self.stream))
        if self.buffer is not None:
            self._pool.give_back(self.buffer)


class Handle:
    """What autograd keeps in place of a saved tensor: where it is, and how it looks."""

    __slots__ = ("_dtype", "_offset", "_probe", "_size", "_stride", "_version", "entry", "group")

    def __init__(self, tensor: torch.Tensor, entry: Entry, group: Group) -> None:
        self.entry = entry
        self.group = group
        self._dtype = tensor.dtype
        self._offset = tensor.storage_offset()
        self._size = tensor.size()
        self._stride = tensor.stride()
        self._version = version_counter(tensor)
        # Shares the counter of in-place modifications with the tensor, but none of its memory.
        self._probe = tensor.detach()
        self._probe.data = torch.empty(0, dtype=tensor.dtype, device=tensor.device)

    def check(self) -> None:
        """Raise autograd's error if the tensor was modified in place since it was saved."""
        check_version(self._probe, self._version, self._size)

    def rebuild(self, storage: torch.UntypedStorage) -> torch.Tensor:
        """The tensor over a storage."""
        tensor = torch.empty(0, dtype=self._dtype, device=storage.device)
        return tensor.set_(storage, self._offset, self._size, self._stride)


# Saved-tensor hooks of this thread, without getting into the way of anybody else's.


class HookStack(threading.local):
    """Pairs of hooks that are in place in this thread, the innermost last.

    Each `push` or `stay_out` is undone by one `pop`.
    """

    def __init__(self) -> None:
        self._pushed: list[Hooks | None] = []
        # Of pairs that are undone but could not be taken away, as others are on top of them.
        self._left: list[Hooks] = []

    def may_push(self) -> bool:
        """Whether hooks pushed now see what autograd saves, and take nothing from other hooks."""
        self._take_left()
        if (
            in_backward_or_compiler()
            or not torch.is_grad_enabled()
            or not saved_tensor_hooks.are_allowed()
        ):
            return False
        top = saved_tensor_hooks.innermost()
        own = self._pushed[-1] if self._pushed else None
        return top is None or (own is not None and top[0] is own[0])

    def push(self, hooks: Hooks) -> None:
        """Put a pair in place."""
        saved_tensor_hooks.push(hooks)
        self._pushed.append(hooks)

    def stay_out(self) -> None:
        """Put nothing in place."""
        self._pushed.append(None)

    def pop(self) -> None:
        """Undo the last one.

        Raises
        ------
        OffloadError
            If there is none.
        """
        if not self._pushed:
            raise OffloadError("close_group without an open_group before it in this thread")
        hooks = self._pushed.pop()
        if hooks is not None:
            self._left.append(hooks)
            self._take_left()

    def _take_left(self) -> None:
        while self._left and saved_tensor_hooks.pop_if_innermost(self._left[-1]):
            self._left.pop()


def in_backward_or_compiler() -> bool:
    """Whether a compiler traces, or a backward pass runs: a checkpoint's second forward pass."""
    return torch.compiler.is_compiling() or current_graph_task_id() != -1


# Saved tensors of one device, and the copies that make room for others.

MIN_BYTES = 1 << 20
"""Smaller storages stay: 1 MiB takes 20 us to copy, which is about what asking for it takes."""


class ActivationStore:
    """Keeps what autograd saves, on the device or in host memory.

    A *group* is what one call of a block saves. Around the call, `open_group` and `close_group` put
    torch's saved-tensor hooks in place. What the group saved can then leave: `send` starts copies
    to pinned host memory, `release` lets go of the device's, `fetch` starts copies back. None of
    them waits for the device; the group's stream does. What the backward pass asks for and nobody
    has fetched is fetched then.

    Parameters
    ----------
    device
        Tensors of other devices stay where they are.
    mover
        Who copies; by default the one that suits the device.
    min_bytes
        Storages of fewer bytes stay.
    host_limit_bytes
        Most bytes of host memory to hold at a time. By default only the host's own memory limits
        it, of which a sixteenth, and 2 GiB at least, stays available.

    Raises
    ------
    OffloadError
        For a device that is neither a GPU nor the CPU, or a limit below 0.
    """

    def __init__(
        self,
        device: torch.device | str,
        mover: Mover | None = None,
        *,
        min_bytes: int = MIN_BYTES,
        host_limit_bytes: int | None = None,
    ) -> None:
        for name, value in (("min_bytes", min_bytes), ("host_limit_bytes", host_limit_bytes)):
            if value is not None and value < 0:
                raise OffloadError(f"{name} is {value}: give bytes, 0 or more")
        self.device = torch.empty(0, device=device).device  # with its number
        self._mover = _mover_of(self.device) if mover is None else mover
        self._min_bytes = min_bytes
        self._pool = HostPool(self._mover, host_limit_bytes)
        self._retired: deque[Retired] = deque()
        self._lock = threading.RLock()
        # Addresses of storages: those of this step, and those of every step.
        self._stays: frozenset[int] = frozenset()
        self._always_stays: frozenset[int] = frozenset()
        self._groups: weakref.WeakValueDictionary[Hashable, Group] = weakref.WeakValueDictionary()
        # By address of the storage, which an entry holds for as long as it is in here.
        self._resident: weakref.WeakValueDictionary[int, Entry] = weakref.WeakValueDictionary()
        self._hooks = HookStack()
        self._out, self._in, self._kept = _Sum(), _Sum(), _Sum()
        self._late = 0

    def keep(self, tensors: Iterable[torch.Tensor], *, for_good: bool = False) -> None:
        """Let the storages of these tensors stay, in place of those given before.

        For buffers, and for what else lives longer than a step. Parameters and their views stay
        anyway, unless they are detached.

        Parameters
        ----------
        tensors
            Their storages are looked up now.
        for_good
            Whether these stay beside those of other calls, and only another such call replaces
            them.
        """
        addresses = frozenset(
            storage_key(tensor.untyped_storage())
            for tensor in tensors
            if tensor.layout is torch.strided
            and type(tensor).__torch_dispatch__ is torch.Tensor.__torch_dispatch__
        )
        if for_good:
            self._always_stays = addresses
        else:
            self._stays = addresses

    # ------------------------------------------------------------------ groups

    def open_group(self, key: Hashable, chosen: Container[int] | None = None) -> bool:
        """See what autograd saves in this thread from now on, as one group.

        Parameters
        ----------
        key
            Names the group from now on. An older group of this name is the graph's alone.
        chosen
            Ordinals of the tensors that may leave, counted from 0 over all that are saved; None for
            all. One that is not chosen holds its storage: choose all of a storage, or none.

        Returns
        -------
        bool
            False where the store stays out: where somebody else's hooks are innermost, as a
            checkpoint's are, where no gradients are wanted, in a backward pass, and where a graph
            is compiled or captured. `close_group` is called all the same.
        """
        if not self._hooks.may_push() or not self._mover.is_ready():
            self._hooks.stay_out()
            return False
        group = Group(chosen, self._mover.stream(), self._admit)
        self._hooks.push((group.pack, self._unpack))
        self._groups[key] = group
        return True

    def close_group(self) -> None:
        """End what the last `open_group` of this thread began.

        Raises
        ------
        OffloadError
            If none is open.
        """
        self._hooks.pop()

    def _admit(self, group: Group, tensor: torch.Tensor) -> Handle | None:
        if tensor.device != self.device or not may_leave(tensor):
            return None
        storage = tensor.untyped_storage()
        address = storage_key(storage)
        if storage.nbytes() < max(self._min_bytes, 1):  # an empty one holds no memory
            return None
        if address in self._stays or address in self._always_stays:
            return None
        if self._mover.stream() != group.stream:
            return None  # neither the copy nor the memory's next user would wait for this stream
        with self._lock:
            entry = self._resident.get(address)
            # What was copied before it was modified is not what is saved now.
            if (
                entry is None
                or entry.stream != group.stream
                or (entry.buffer is not None and entry.version != version_counter(tensor))
            ):
                entry = Entry(
                    storage, version_counter(tensor), group.stream, self._pool, self._retired
                )
                self._resident[address] = entry
            entry.version = version_counter(tensor)
            entry.wanted_by.add(group.reference)
        return Handle(tensor, entry, group)

    def _unpack(self, packed: Handle | Kept) -> torch.Tensor:
        if type(packed) is tuple:
            return unpack_kept(packed)
        assert isinstance(packed, Handle)
        packed.check()
        entry = packed.entry
        with self._lock:
            stream = self._mover.stream()
            if entry.storage is None:
                entry.wanted_by.add(packed.group.reference)
                if not entry.find_again():
                    self._late += 1
                    self._bring([entry], stream)
            storage = entry.storage
            assert storage is not None
            if entry.is_arriving and stream == entry.stream:
                self._settle(entry)
            elif entry.is_arriving:
                self._mover.wait(stream, entry.mark)
                self._mover.use(storage, stream)
        return packed.rebuild(storage)

    # ------------------------------------------------------------------ verbs

    def send(self, key: Hashable, ordinals: Iterable[int] | None = None) -> int:
        """Start copying a group to the host, behind what its stream holds now.

        Parameters
        ----------
        key
            The group; one that is not there, or saved nothing that may leave, is no error.
        ordinals
            Of it, only these tensors; None for all.

        Returns
        -------
        int
            Bytes that are on their way now and were not before.
        """
        with self._lock:
            self._sweep()
            group = self._groups.get(key)
            if group is None:
                return 0
            leaving: list[tuple[Entry, torch.UntypedStorage, HostBuffer]] = []
            try:
                self._find_buffers(group.entries(ordinals), leaving)
                pairs = [(storage, buffer) for _, storage, buffer in leaving]
                marks = self._mover.copy_out(pairs, group.stream) if pairs else ()
            except BaseException:  # everything stays
                for _, _, buffer in leaving:
                    self._pool.give_back(buffer)
                raise
            for (entry, _, buffer), mark in zip(leaving, marks, strict=True):
                entry.buffer = buffer
                entry.leaves(mark, marks)
                self._out.add(entry.size_bytes)
            return sum(entry.size_bytes for entry, _, _ in leaving)

    def _find_buffers(
        self,
        entries: Iterable[Entry],
        leaving: list[tuple[Entry, torch.UntypedStorage, HostBuffer]],
    ) -> None:
        """Add the entries that leave to a list, which has what was taken if this raises."""
        for entry in entries:
            storage = entry.storage
            # One that was resized since is not what was saved.
            if storage is None or entry.buffer is not None or storage.nbytes() != entry.size_bytes:
                continue
            buffer = self._pool.take(entry.size_bytes)
            if buffer is not None:
                leaving.append((entry, storage, buffer))
            elif not entry.is_kept:
                entry.is_kept = True
                self._kept.add(entry.size_bytes)

    def release(self, key: Hashable, ordinals: Iterable[int] | None = None) -> int:
        """Let go of the device's memory of what was sent; its stream waits for the copies.

        A storage that other groups saved too goes with the last of them. Parameters as for `send`.

        Returns
        -------
        int
            Bytes that the store does not hold on the device any more.
        """
        released = 0
        with self._lock:
            self._sweep()
            group = self._groups.get(key)
            if group is None:
                return 0
            waited: Any = None
            for entry in reversed(list(group.entries(ordinals))):
                entry.wanted_by.discard(group.reference)
                if entry.storage is None or entry.buffer is None or entry.is_wanted():
                    continue
                if entry.sent_with is None or entry.sent_with is not waited:
                    self._settle(entry)
                    waited = entry.sent_with
                entry.is_settled = True  # what was sent with a later one has left before it
                self._resident.pop(storage_key(entry.storage), None)
                entry.let_go()
                released += entry.size_bytes
        return released

    def fetch(self, key: Hashable, ordinals: Iterable[int] | None = None) -> int:
        """Start copying back what was released, the last saved first. Parameters as for `send`.

        Returns
        -------
        int
            Bytes that are on their way now and were not before.
        """
        with self._lock:
            self._sweep()
            group = self._groups.get(key)
            if group is None:
                return 0
            coming = []
            for entry in group.entries(ordinals):
                entry.wanted_by.add(group.reference)
                if entry.storage is None and not entry.find_again():
                    coming.append(entry)
            coming.reverse()
            if coming:
                self._bring(coming, group.stream)
            return sum(entry.size_bytes for entry in coming)

    def _bring(self, entries: list[Entry], stream: Any) -> None:
        buffers = []
        for entry in entries:
            assert entry.buffer is not None
            buffers.append((entry.buffer, entry.size_bytes))
        moved = self._mover.copy_in(buffers, stream)
        for entry, (storage, mark) in zip(entries, moved, strict=True):
            entry.storage = storage
            entry.stream = stream
            entry.arrives(mark)
            self._in.add(entry.size_bytes)

    def _settle(self, entry: Entry) -> None:
        """Let the entry's stream wait for the copy that the device's memory is part of."""
        if not entry.is_settled:
            self._mover.wait(entry.stream, entry.mark)
            entry.is_settled = True

    def _sweep(self) -> None:
        """Let go of memory that copies were at work on when the graph went."""
        while self._retired:
            _, mark, stream = self._retired.popleft()
            self._mover.wait(stream, mark)

    # ------------------------------------------------------------------ books

    @property
    def statistics(self) -> ActivationStatistics:
        """What has been done so far."""
        with self._lock:
            return ActivationStatistics(
                bytes_out=self._out.size_bytes,
                tensors_out=self._out.tensors,
                bytes_in=self._in.size_bytes,
                tensors_in=self._in.tensors,
                late_fetches=self._late,
                kept_for_lack_of_host_bytes=self._kept.size_bytes,
                kept_for_lack_of_host_tensors=self._kept.tensors,
                pinned_bytes=self._pool.held_bytes,
                peak_pinned_bytes=self._pool.peak_bytes,
            )

    def close(self) -> None:
        """Give host memory back.

        Graphs that are alive go on working, and give theirs back when they go.
        """
        with self._lock:
            self._sweep()
            self._pool.close()


@dataclass(slots=True)
class _Sum:
    size_bytes: int = 0
    tensors: int = 0

    def add(self, size_bytes: int) -> None:
        self.size_bytes += size_bytes
        self.tensors += 1


def _mover_of(device: torch.device) -> Mover:
    if device.type == "cuda":
        return CudaMover(device)
    if device.type == "cpu":
        return HostMover()
    raise OffloadError(f"activations of a device of type {device.type!r}: umem knows cuda and cpu")
