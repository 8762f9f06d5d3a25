"""The activation store: saved tensors of one device, and their copies in host memory."""

from __future__ import annotations

import functools
import logging
import threading
import weakref
from collections import deque
from collections.abc import Callable, Container, Hashable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch

from umem.core.errors import OffloadError
from umem.offloading.movers import CudaMover, HostBuffer, HostPool, Mover
from umem.runtime.held_memory import is_storage_held
from umem.runtime.torch_hooks import saved_tensors as saved_tensor_hooks
from umem.runtime.torch_hooks.memory_access import original_storage
from umem.runtime.torch_hooks.passes import is_forward_pass
from umem.runtime.torch_hooks.saved_tensors import (
    Hooks,
    Kept,
    check_version,
    is_lent,
    keep,
    let_go_of_memory,
    may_leave,
    probe_of,
    unpack_kept,
)
from umem.runtime.unguarded import Unguarded
from umem.torch_compat import (
    push_saved_tensor_hooks,
    saved_tensor_hooks_enabled,
    storage_address,
    storage_key,
    storage_use_count,
    version_counter,
)

__all__ = [
    "MIN_BYTES",
    "ActivationStatistics",
    "ActivationStore",
    "BeforeSave",
    "SavedHandle",
    "Stored",
    "warn_once",
]

_LOG = logging.getLogger("umem")

MIN_BYTES = 1 << 20
"""Smaller storages stay: 1 MiB takes 20 us to copy, about as long as starting the copy takes."""

BeforeSave = Callable[[], Callable[[], None] | None]
"""Called before a tensor is saved; returns what is called before it is used."""

_Unfinished = tuple[torch.UntypedStorage, Any, Any]
"""Device memory whose graph ended during a copy, the copy's event, and the memory's stream."""


@dataclass
class ActivationStatistics:
    """Sums since the store was made. Each storage counts as one tensor, whatever views it has."""

    bytes_out: int = 0
    tensors_out: int = 0
    """Copies to the host that were started."""
    bytes_in: int = 0
    tensors_in: int = 0
    """Copies to the device that were started, late ones included."""
    late_fetches: int = 0
    """Tensors that the backward pass asked for before `fetch` was called."""
    kept_for_lack_of_host_bytes: int = 0
    kept_for_lack_of_host_tensors: int = 0
    """Tensors that stayed on the device because the host had no room."""
    pinned_bytes: int = 0
    """Host memory that the store holds now, in use or ready for the next step."""
    peak_pinned_bytes: int = 0


@dataclass(slots=True, weakref_slot=True, eq=False)
class Stored:
    """A storage that autograd saved: on the device, in a host buffer, or in both.

    It lives as long as the handles that autograd holds, and then gives everything back. That may
    happen in any thread at any moment, so `__del__` takes no lock and calls nothing on the device.
    """

    storage: torch.UntypedStorage | None
    """The device's copy; None after its release."""
    size_bytes: int
    version: int
    """The newest version of the storage that was saved."""
    stream: Any
    """The stream of the device's copy."""
    pool: HostPool
    unfinished: deque[_Unfinished]
    buffer: HostBuffer | None = None
    """The host's copy, once it was started."""
    event: Any = None
    """The end of the last copy from or to the device's memory."""
    sent_with: Sequence[Any] | None = None
    """The events of all copies of the same `send`, in order; None after a copy to the device."""
    is_arriving: bool = False
    """Whether the last copy is one to the device."""
    is_settled: bool = True
    """Whether the stream has waited for the event."""
    lacked_host_memory: bool = False
    wanted_by: set[weakref.ref[_Group]] = field(default_factory=set)
    """The groups that have not released it. Groups of a graph that is gone do not count."""
    released: weakref.ref[torch.UntypedStorage] | None = None
    """The device's copy before its release, for as long as somebody else holds it."""

    def is_wanted(self) -> bool:
        """Whether a living group has not released the storage."""
        return any(group() is not None for group in self.wanted_by)

    def is_kept(self) -> bool:
        """Whether something else holds the device's copy."""
        if self.storage is None:
            return self.released is not None and self.released() is not None
        return storage_use_count(storage_key(self.storage)) > 1

    def started(self, event: Any, sent_with: Sequence[Any] | None = None) -> None:
        """Note a new copy: to the host if `sent_with` is given, else to the device."""
        self.event, self.sent_with = event, sent_with
        self.is_arriving, self.is_settled = sent_with is None, event is None

    def find_on_device(self) -> bool:
        """Hold the device's copy again if somebody else has held it since its release.

        Its stream needs no wait: the contents never left. If they were modified, autograd's check
        refuses the saved tensors.
        """
        storage = None if self.released is None else self.released()
        if storage is None or storage.nbytes() != self.size_bytes:
            return False
        self.storage = storage
        return True

    def __del__(self) -> None:
        if not hasattr(self, "released"):  # the last field: an interrupt has ended its making
            return
        if self.storage is not None and not self.is_settled:
            self.unfinished.append((self.storage, self.event, self.stream))
        if self.buffer is not None:
            self.pool.give_back(self.buffer)


class _Group:
    """The saved tensors of one call, numbered in the order in which autograd saved them.

    The handles of the tensors hold the group, so it is gone when the graph is.

    Parameters
    ----------
    chosen
        Ordinals of the tensors that may leave; None for all.
    stream
        The stream of the call's work.
    admit
        Returns the handle of a tensor that may leave, and None for one that stays.
    moves
        Whether it may be sent.
    """

    def __init__(
        self,
        chosen: Container[int] | None,
        stream: Any,
        admit: Callable[[_Group, torch.Tensor], SavedHandle | None],
        *,
        moves: bool = True,
    ) -> None:
        self.stream, self.moves = stream, moves
        self.born = 0
        """How many updates there were before."""
        self.reference = weakref.ref(self)
        self.follower: _Group | None = None
        """The group of what this one's hooks see from now on, since it was split."""
        self._chosen = chosen
        self._admit = admit
        self._count = 0
        # Weak: each storage goes with its last handle, while the block's backward pass goes on.
        self._stored: dict[int, weakref.ref[Stored]] = {}

    def pack(self, tensor: torch.Tensor) -> SavedHandle | Kept:
        """Replace a tensor that autograd saves."""
        ordinal = self._count
        self._count = ordinal + 1
        # Subclasses, parameters among them, may be more than their bytes.
        if type(tensor) is torch.Tensor and (self._chosen is None or ordinal in self._chosen):
            try:
                handle = self._admit(self, tensor)
            except Exception as error:  # not into the forward pass: the tensor stays
                warn_once("activations stay on the device", f"{type(error).__name__}: {error}")
                return keep(tensor)
            if handle is not None:
                if handle.stored is not None:
                    self._stored[ordinal] = weakref.ref(handle.stored)
                return handle
        return keep(tensor)

    def pack_in_turn(self, before_save: BeforeSave, tensor: torch.Tensor) -> SavedHandle | Kept:
        """The same, where the group may be split before."""
        before_use = before_save()
        packed = (self.follower or self).pack(tensor)
        if isinstance(packed, SavedHandle):
            packed.before_use = before_use
        return packed

    @property
    def count(self) -> int:
        """How many tensors were saved so far."""
        return self._count

    def sizes(self, ordinals: Container[int] | None, seen: set[object]) -> dict[int, int]:
        """Bytes by ordinal, without storages seen before."""
        found: dict[int, int] = {}
        for ordinal, reference in self._stored.items():
            stored = reference() if ordinals is None or ordinal in ordinals else None
            if stored is not None and stored not in seen:
                seen.add(stored)
                found[ordinal] = stored.size_bytes
        return found

    def stored(self, ordinals: Iterable[int] | None) -> list[Stored]:
        """The storages that autograd still holds, each once, in the order of saving."""
        if ordinals is None:
            references = list(self._stored.values())
        else:
            found = map(self._stored.get, sorted(ordinals))
            references = [it for it in found if it is not None]
        return list(dict.fromkeys(it for of in references if (it := of()) is not None))


@functools.cache
def warn_once(what: str, error: str) -> None:
    """Log an error that must not end a pass, once."""
    _LOG.warning("umem: %s: %s", what, error)


class SavedHandle:
    """Stands for a saved tensor: its storage, and its shape within the storage.

    Without a storage, the tensor itself stays.
    """

    __slots__ = (
        *("_dtype", "_layout", "_own", "version", "before_use", "group", "key", "remake"),
        "stored",
    )

    def __init__(
        self, tensor: torch.Tensor, stored: Stored | None, group: _Group, key: int
    ) -> None:
        self.stored = stored
        self.group, self.key = group, key
        """Of the storage, while it is alive."""
        self.remake: Callable[[], torch.UntypedStorage] | None = None
        """Makes the contents again, for the current stream: they are not stored then."""
        self.before_use: Callable[[], None] | None = None
        self._dtype = tensor.dtype
        self._layout = tensor.storage_offset(), tensor.size(), tensor.stride()
        self.version = version_counter(tensor)
        self._own = tensor.detach() if stored is None else probe_of(tensor)

    def is_of(self, key: int, version: int) -> bool:
        """Whether it is of a storage, with the contents that it had at a version."""
        return self.key == key and self.version == version

    def remake_by(self, remake: Callable[[], torch.UntypedStorage]) -> None:
        """Store the contents no longer: they will be made again."""
        if (kept := self.kept()) is not None:
            let_go_of_memory(kept)
        self.remake, self.stored = remake, None

    def check(self) -> None:
        """Raise autograd's error if the tensor was modified in place since it was saved."""
        check_version(self._own, self.version, self._layout[1])

    def kept(self) -> torch.Tensor | None:
        """The tensor, if it stays."""
        return self._own if self.remake is None and self.stored is None else None

    def rebuild(self, storage: torch.UntypedStorage) -> torch.Tensor:
        """The saved tensor, as a view of a storage."""
        tensor = torch.empty(0, dtype=self._dtype, device=storage.device)
        return tensor.set_(storage, *self._layout)


class _HookStack(threading.local):
    """The saved-tensor hooks of this thread's open groups, beside hooks of other code."""

    def __init__(self) -> None:
        self._pushed: list[Hooks | None] = []
        # Hooks of closed groups that could not be removed yet, as others are on top of them.
        self._left: list[Hooks] = []

    def may_push(self) -> bool:
        """Whether hooks pushed now see what autograd saves, and hide it from no other hooks."""
        self._remove_left()
        if not is_forward_pass() or not torch.is_grad_enabled() or not saved_tensor_hooks_enabled():
            return False
        top, own = saved_tensor_hooks.innermost(), self._pushed[-1] if self._pushed else None
        return top is None or (own is not None and top[0] is own[0])

    # An interrupt may come between any two calls: hooks that are installed are always on a list.

    @property
    def depth(self) -> int:
        """How often `push` was called more than `pop`."""
        return len(self._pushed)

    def push(self, hooks: Hooks | None) -> None:
        """Install hooks until the next `pop`; None installs nothing."""
        saved_tensor_hooks.give_way_to_transforms()
        self._pushed.append(hooks)
        if hooks is not None:
            push_saved_tensor_hooks(*hooks)

    def pop(self) -> None:
        """Undo the last `push`."""
        if not self._pushed:
            raise OffloadError("close_group without an open_group before it in this thread")
        self.pop_to(len(self._pushed) - 1)

    def pop_to(self, depth: int) -> None:
        """Undo what was pushed last, until `depth` is so much."""
        while len(self._pushed) > depth:
            hooks = self._pushed[-1]
            if hooks is not None:
                self._left.append(hooks)
            self._pushed.pop()
            self._remove_left()
        self._remove_left()

    def _remove_left(self) -> None:
        if not self._left:
            return
        for hooks in self._left[::-1]:
            saved_tensor_hooks.pop_if_innermost(hooks, partial(self._left.remove, hooks))
        if self._left and saved_tensor_hooks.innermost() is None:
            self._left.clear()  # an interrupt came before they were installed


class ActivationStore:
    """Keeps what autograd saves, on the device or in host memory.

    A *group* is what one call of a block saves. Around the call, `open_group` and `close_group`
    install torch's saved-tensor hooks. Then the group can leave: `send` starts copies to pinned
    host memory, `release` lets go of the device's memory, and `fetch` starts copies back. None of
    them waits for the device; the group's stream does. The backward pass fetches by itself what
    was released and not fetched.

    Parameters
    ----------
    device
        Tensors of other devices stay where they are.
    mover
        Makes the copies; by default the mover for the device.
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
        self.device = torch.empty(0, device=device).device  # with its index
        self._mover = _default_mover(self.device) if mover is None else mover
        self._min_bytes = max(min_bytes, 1)  # an empty storage holds no memory
        self._pool = HostPool(self._mover, host_limit_bytes)
        self._unfinished: deque[_Unfinished] = deque()
        self._lock = threading.RLock()
        # Addresses of storages that stay: in this step, and in every step.
        self._stays: frozenset[int] = frozenset()
        self._always_stays: frozenset[int] = frozenset()
        self._groups: weakref.WeakValueDictionary[Hashable, _Group] = weakref.WeakValueDictionary()
        # By the address of a storage that is on the device, or was and may be still.
        self._on_device: weakref.WeakValueDictionary[int, Stored] = weakref.WeakValueDictionary()
        self._hooks = _HookStack()
        self._totals = ActivationStatistics()
        self.updates = 0
        """Updates of weights, as its user counts them."""
        self.is_used_late = False
        """Whether a backward pass has asked for something that was saved before an update."""
        self.on_save: Callable[[SavedHandle, torch.Tensor], None] | None = None
        """Called for each tensor that may leave; it may have the contents made again."""

    def keep(self, tensors: Iterable[torch.Tensor], *, permanent: bool = False) -> None:
        """Let the storages of these tensors stay, instead of those of the call before.

        For buffers, and other tensors that live longer than a step. Parameters and their views
        stay anyway, unless they are detached.

        Parameters
        ----------
        tensors
            Their storages are looked up now.
        permanent
            Keep these beside the tensors of other calls; only another permanent call replaces them.
        """
        with Unguarded():  # no memory is read: updates may be under way
            addresses = frozenset(
                storage_address(tensor)
                for tensor in tensors
                if tensor.layout is torch.strided
                and type(tensor).__torch_dispatch__ is torch.Tensor.__torch_dispatch__
            )
        if permanent:
            self._always_stays = addresses
        else:
            self._stays = addresses

    def is_large(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor has memory that may leave, by its size."""
        return (
            tensor.layout is torch.strided and original_storage(tensor).nbytes() >= self._min_bytes
        )

    def current_stream(self) -> Any:
        """The stream of this thread's work on the device."""
        return self._mover.stream()

    def may_open_group(self) -> bool:
        """Whether :meth:`open_group` would install hooks now, in this thread."""
        return self._hooks.may_push() and self._mover.is_ready()

    def open_group(
        self,
        key: Hashable,
        chosen: Container[int] | None = None,
        before_save: BeforeSave | None = None,
        *,
        moves: bool = True,
    ) -> bool:
        """Treat what autograd saves in this thread from now on as one group.

        Parameters
        ----------
        key
            The group's name. An older group of this name can no longer be moved.
        chosen
            Ordinals of the tensors that may leave, counted from 0 over all that are saved; None for
            all. One that is not chosen holds its storage: choose all of a storage, or none.
        before_save
            Called before each tensor is saved. What it returns is called in the backward pass
            before one that may leave is used. Neither may raise.
        moves
            Whether the group may be moved. If not, `on_save` alone sees what it gets, which takes
            less time.

        Returns
        -------
        bool
            False where the store installs no hooks: where other code's hooks are innermost, as a
            checkpoint's are, where no gradients are wanted, in a backward pass, and where a graph
            is compiled or captured. Call `close_group` all the same.
        """
        if not self.may_open_group():
            self._hooks.push(None)
            return False
        group = _Group(chosen, self._mover.stream(), self._admit, moves=moves)
        group.born = self.updates
        pack = group.pack if before_save is None else partial(group.pack_in_turn, before_save)
        self._hooks.push((pack, self._unpack))
        self._groups[key] = group
        return True

    def split_group(self, key: Hashable, new_key: Hashable, *, moves: bool = True) -> None:
        """Have what an open group would get from now on be another group, which may move apart.

        Parameters
        ----------
        key
            The group that was opened.
        new_key
            The name of what it gets from now on.
        moves
            As of `open_group`.
        """
        group = self._groups[key]
        new = _Group(None, group.stream, self._admit, moves=moves)
        new.born = group.born
        group.follower = self._groups[new_key] = new

    def close_group(self) -> None:
        """End the last `open_group` of this thread.

        Raises
        ------
        OffloadError
            If none is open.
        """
        self._hooks.pop()

    @property
    def open_groups(self) -> int:
        """How many groups this thread has open."""
        return self._hooks.depth

    def close_groups(self, left_open: int = 0) -> None:
        """End the groups that this thread has open, but for the first ones.

        Those too whose `close_group` was never called, or cut short, because of an interrupt.

        Parameters
        ----------
        left_open
            How many stay open.
        """
        self._hooks.pop_to(left_open)

    def _admit(self, group: _Group, tensor: torch.Tensor) -> SavedHandle | None:
        # Most of those that stay are small.
        if tensor.device != self.device or tensor.layout is not torch.strided:
            return None
        storage = original_storage(tensor)
        if storage.nbytes() < self._min_bytes or not may_leave(tensor) or is_lent(tensor):
            return None
        address = storage_key(storage)
        if address in self._stays or address in self._always_stays:
            return None
        stream = self._mover.stream()
        if stream is not group.stream and stream != group.stream:  # to compare takes longer
            return None  # neither the copy nor the memory's next user would wait for this stream
        stored = self._stored_of(group, tensor, storage, address) if group.moves else None
        handle = SavedHandle(tensor, stored, group, address)
        if self.on_save is not None:
            self.on_save(handle, tensor)
        return handle

    def _stored_of(
        self, group: _Group, tensor: torch.Tensor, storage: torch.UntypedStorage, address: int
    ) -> Stored:
        version = version_counter(tensor)
        with self._lock:
            stored = self._on_device.get(address)
            # A copy made before a modification is not what is saved now.
            if (
                stored is None
                or stored.stream != group.stream
                or (stored.buffer is not None and stored.version != version)
                or (stored.storage is None and not stored.find_on_device())
                or stored.storage is not storage
            ):
                stored = Stored(
                    storage, storage.nbytes(), version, group.stream, self._pool, self._unfinished
                )
                self._on_device[address] = stored
            stored.version = version
            stored.wanted_by.add(group.reference)
        return stored

    def _unpack(self, packed: SavedHandle | Kept) -> torch.Tensor:
        if not isinstance(packed, SavedHandle):
            return unpack_kept(packed)
        packed.check()
        self.is_used_late |= packed.group.born != self.updates
        if packed.before_use is not None:
            packed.before_use()
        kept = packed.kept()
        return packed.rebuild(self.storage_of(packed)) if kept is None else kept

    def storage_of(self, saved: SavedHandle) -> torch.UntypedStorage:
        """The contents that a handle stands for, for the current stream."""
        if saved.remake is not None:
            return saved.remake()
        stored = saved.stored
        if stored is None:
            kept = saved.kept()
            assert kept is not None
            return kept.untyped_storage()
        with self._lock:
            if stored.storage is None:
                stored.wanted_by.add(saved.group.reference)
                if not stored.find_on_device():
                    self._totals.late_fetches += 1
                    self._copy_in([stored], self._mover.stream())
            storage = stored.storage
            assert storage is not None
            if stored.is_arriving:
                stream = self._mover.stream()
                if stream is stored.stream or stream == stored.stream:
                    self._settle(stored)
                else:
                    self._mover.wait(stream, stored.event)
                    self._mover.record_use(storage, stream)
        return storage

    def saved_count(self, key: Hashable) -> int:
        """How many tensors a group has so far, which is the ordinal of its next one."""
        group = self._groups.get(key)
        return 0 if group is None else group.count

    def saved_sizes(
        self, key: Hashable, ordinals: Container[int] | None, seen: set[object]
    ) -> dict[int, int]:
        """Bytes of a group that may leave, by ordinal.

        Each storage counts where it was saved first: what was seen is added to `seen`. Other
        parameters as for `send`.
        """
        with self._lock:
            group = self._find(key)
            return {} if group is None else group.sizes(ordinals, seen)

    def stored(self, key: Hashable, ordinals: Iterable[int] | None = None) -> list[Stored]:
        """The storages of a group that autograd holds, in the order of saving."""
        with self._lock:
            group = self._find(key)
            return [] if group is None else group.stored(ordinals)

    def send(
        self,
        key: Hashable,
        ordinals: Iterable[int] | None = None,
        stays: Container[int] = frozenset(),
    ) -> int:
        """Start copying a group to the host, after the work that its stream holds now.

        Parameters
        ----------
        key
            The group. It is no error if there is none, or nothing of it may leave.
        ordinals
            Only these tensors of it; None for all.
        stays
            Places in the list that `stored` returns, of what is not copied.

        Returns
        -------
        int
            Bytes of the copies that were started.
        """
        sent: list[tuple[Stored, torch.UntypedStorage, HostBuffer]] = []
        with self._lock:
            group = self._find(key)
            if group is None:
                return 0
            try:
                for place, stored in enumerate(group.stored(ordinals)):
                    if place in stays:
                        continue
                    storage, size_bytes = stored.storage, stored.size_bytes
                    # A storage that was resized since is not what was saved.
                    if storage is None or stored.buffer or storage.nbytes() != size_bytes:
                        continue
                    if not self._mover.is_on_device(storage):  # nothing to gain
                        continue
                    if is_storage_held(storage):
                        continue
                    buffer = self._pool.take(size_bytes)
                    if buffer is not None:
                        sent.append((stored, storage, buffer))
                    elif not stored.lacked_host_memory:
                        stored.lacked_host_memory = True
                        self._totals.kept_for_lack_of_host_bytes += size_bytes
                        self._totals.kept_for_lack_of_host_tensors += 1
                pairs = [(storage, buffer) for _, storage, buffer in sent]
                events = self._mover.copy_out(pairs, group.stream) if pairs else ()
            except BaseException:  # everything stays
                for _, _, buffer in sent:
                    self._pool.give_back(buffer)
                raise
            for (stored, _, buffer), event in zip(sent, events, strict=True):
                stored.buffer = buffer
                stored.started(event, events)
            sent_bytes = sum(stored.size_bytes for stored, _, _ in sent)
            self._totals.bytes_out += sent_bytes
            self._totals.tensors_out += len(sent)
        return sent_bytes

    def release(self, key: Hashable, ordinals: Iterable[int] | None = None) -> int:
        """Let go of the device's memory of what was sent; its stream waits for the copies.

        A storage that several groups saved goes with the last of them. Parameters as for `send`.

        Returns
        -------
        int
            Bytes that the store held on the device and holds no more.
        """
        released = 0
        with self._lock:
            group = self._find(key)
            if group is None:
                return 0
            waited: Any = None
            for stored in reversed(group.stored(ordinals)):
                stored.wanted_by.discard(group.reference)
                if stored.storage is None or stored.buffer is None or stored.is_wanted():
                    continue
                if is_storage_held(stored.storage):  # since its copy began
                    continue
                if stored.sent_with is None or stored.sent_with is not waited:
                    self._settle(stored)
                    waited = stored.sent_with
                stored.is_settled = True  # copies of one `send` are over in their order
                stored.released = weakref.ref(stored.storage)
                stored.storage = None
                released += stored.size_bytes
        return released

    def leave_to_others(self, key: Hashable, ordinals: Iterable[int] | None = None) -> None:
        """Have a group hold nothing that others have saved, too, and release.

        It comes back with them, or when it is needed. Parameters as for `send`.
        """
        with self._lock:
            if (group := self._find(key)) is not None:
                for stored in group.stored(ordinals):
                    stored.wanted_by.discard(group.reference)

    def fetch(self, key: Hashable, ordinals: Iterable[int] | None = None) -> int:
        """Start copying back what was released, the last saved first. Parameters as for `send`.

        Returns
        -------
        int
            Bytes of the copies that were started.
        """
        with self._lock:
            group = self._find(key)
            if group is None:
                return 0
            coming = []
            for stored in group.stored(ordinals):
                stored.wanted_by.add(group.reference)
                if stored.storage is None and not stored.find_on_device():
                    coming.append(stored)
            coming.reverse()
            if coming:
                self._copy_in(coming, group.stream)
            return sum(stored.size_bytes for stored in coming)

    def _find(self, key: Hashable) -> _Group | None:
        self._free_unfinished()
        return self._groups.get(key)

    def _copy_in(self, coming: list[Stored], stream: Any) -> None:
        buffers = []
        for stored in coming:
            assert stored.buffer is not None
            buffers.append((stored.buffer, stored.size_bytes))
        moved = self._mover.copy_in(buffers, stream)
        for stored, (storage, event) in zip(coming, moved, strict=True):
            stored.storage = storage
            stored.stream = stream
            stored.started(event)
            self._totals.bytes_in += stored.size_bytes
        self._totals.tensors_in += len(coming)

    def _settle(self, stored: Stored) -> None:
        """Let the storage's stream wait for the last copy from or to its memory."""
        if not stored.is_settled:
            self._mover.wait(stored.stream, stored.event)
            stored.is_settled = True

    def _free_unfinished(self) -> None:
        """Let go of memory whose graph ended during a copy; its stream waits for the copy."""
        while self._unfinished:
            _, event, stream = self._unfinished.popleft()
            self._mover.wait(stream, event)

    @property
    def statistics(self) -> ActivationStatistics:
        """Copies so far, and host memory held now."""
        with self._lock:
            return replace(
                self._totals,
                pinned_bytes=self._pool.held_bytes,
                peak_pinned_bytes=self._pool.peak_bytes,
            )

    def trim(self) -> None:
        """Give host memory back that nothing uses now."""
        with self._lock:
            self._free_unfinished()
            self._pool.trim()

    def close(self) -> None:
        """Give host memory back.

        Graphs that are alive keep working, and give their memory back when they go.
        """
        with self._lock:
            self._free_unfinished()
            self._pool.close()


def _default_mover(device: torch.device) -> Mover:
    if device.type == "cuda":
        return CudaMover(device)
    if device.type == "cpu":
        return Mover()
    raise OffloadError(f"activations of a device of type {device.type!r}: umem knows cuda and cpu")
