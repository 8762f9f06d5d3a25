"""Moves what a program keeps of a forward pass to host memory, while the pass goes on.

A program may keep the outputs of a model's modules: a cache of activations, all hidden states. What
the device has no room for would be made in host memory, and kernels would read and write it there,
over the link and many times over. So outputs are made on the device, as many of them as there is
room for stay there, and the others are copied once no module of the pass needs them any more. Their
tensors stay what they are: only the memory behind their storage is another one.

Which outputs a program keeps is learned from one pass, by their place in the order of all outputs.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from enum import Enum, auto
from functools import partial
from typing import Any, Protocol

import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

from umem.capture.live import Block
from umem.core.classes import TensorClass
from umem.core.units import format_bytes
from umem.runtime.held_memory import is_held
from umem.runtime.model_parts import buffers_of, plain_tensors, tensors_in
from umem.runtime.torch_hooks.modules import Undo, hook_calls
from umem.runtime.torch_hooks.passes import running_pass
from umem.streaming.stage.device_room import DeviceRoom
from umem.streaming.stage.lanes import Copy, Lane, Lanes, Moment
from umem.torch_compat import (
    storage_key,
    storage_use_count,
    version_counter,
)

__all__ = ["KeptMemory", "KeptOutputs"]

_LOG = logging.getLogger("umem")

_BLOCKS_IN_FLIGHT = 2
"""Blocks whose outputs are on their way before the pass waits for the oldest of them."""

_MARGIN = 1.1
"""More leaves than had no room: copies take a while, and memory comes in whole segments."""


class KeptMemory(Protocol):
    """Host memory for outputs."""

    def reserve(self, size_bytes: int) -> int | None:
        """The address of new host memory; None if there is no more."""

    def give_back(self, address: int) -> None:
        """Free it."""

    def move(self, storage: torch.UntypedStorage, address: int) -> None:
        """Have a storage own this memory, which has its contents, in place of its own."""


class _Mode(Enum):
    OFF = auto()
    """Look only whether the device has room."""
    LEARN = auto()
    MOVE = auto()


@dataclass
class _Leaving:
    """An output on its way."""

    probe: torch.Tensor | None
    """Shares the version counter of the output and of whatever else sees its storage."""
    version: int
    from_address: int
    to_address: int
    """0 once it has another owner. An interrupt may come between any two calls: it may leave memory
    without an owner, but never with two."""


@dataclass
class _Block:
    """The outputs of a block that are on their way."""

    outputs: list[_Leaving]
    asked: Moment
    """When they were made, on the stream that owns their memory and that of the copies."""
    moment: Moment | None = None
    """None before the copies are queued."""


@dataclass(frozen=True)
class _Seen:
    reference: StorageWeakRef
    size_bytes: int
    is_inference: bool
    """Whether no version counter tells of its changes: it cannot move."""


class KeptOutputs:
    """Moves what a program keeps of a model's outputs, where it has no room.

    :meth:`begin_call` and :meth:`end_call` are to be called at both ends of each of its calls.

    Only forward passes without gradients count, and tensors that have a version counter: not those
    of ``torch.inference_mode``. An output that is changed while it is copied stays where it is.

    Parameters
    ----------
    model
        The module that the program calls.
    blocks
        Its blocks. What is made outside of them stays.
    device
        Where its outputs are.
    lanes
        Where copies run.
    memory
        Where outputs go.
    room
        Tells how much had no room on the device.
    min_bytes
        Smaller storages stay.
    """

    def __init__(
        self,
        model: nn.Module,
        blocks: Iterable[Block],
        device: torch.device,
        lanes: Lanes,
        memory: KeptMemory,
        room: DeviceRoom,
        *,
        min_bytes: int,
    ) -> None:
        self.moved = 0
        """Outputs so far whose memory is the host's."""
        self._device, self._lanes, self._memory, self._room = device, lanes, memory, room
        self._min_bytes = min_bytes
        self._blocks = list(blocks)
        self._is_closed = False
        self._mode: _Mode | None = None
        """None outside of a pass."""
        self._next_mode = _Mode.OFF
        self._count = 0
        """Of the outputs in this pass."""
        self._last_block = self._next_block = 0
        """The numbers of the first outputs of the block that has ended last, and of the next."""
        self._seen: list[_Seen | None] = []
        self._kept: dict[int, int] = {}
        """Bytes by number among a pass's outputs."""
        self._share = 0.0
        """Of their bytes that leaves."""
        self._kept_bytes = self._leaving_bytes = 0
        """In this pass so far."""
        self._made: list[torch.Tensor] = []
        """Outputs of the present block that are kept."""
        self._leaving: deque[_Block] = deque()
        self._spilled_bytes = 0
        """When the pass began."""
        self._must_trim = False
        self._has_warned = False
        self._stream_key = 0
        """The model's stream."""
        self._undo_outputs: list[Undo] = []
        self._weights = {
            storage_key(part.untyped_storage())
            for it in (*model.parameters(), *buffers_of(model))
            for part in plain_tensors(it)
        }

    def close(self) -> None:
        """Move nothing any more. What was moved stays in host memory."""
        self._undo_hooks_of_outputs()
        self._is_closed = True
        self._mode = None
        self._drop()

    def _stream_waits(self, stream_key: int) -> None:
        """A stream waits for another one: it may read outputs from now on.

        Only the model's own stream may, for a stream that nobody knows of is not waited for when
        the memory of an output is freed.
        """
        if stream_key != self._stream_key:
            _LOG.info(
                "umem: outputs of the model that the program keeps are not moved to the host any "
                "more: another stream may read them"
            )
            self.close()

    def _fail(self, error: Exception) -> None:
        """An error must not end the program."""
        _LOG.warning(
            "umem: outputs of the model that the program keeps are not moved to the host any more: "
            "%s: %s",
            type(error).__name__,
            error,
            exc_info=_LOG.isEnabledFor(logging.DEBUG),
        )
        self.close()

    # ------------------------------------------------------------------ passes

    def begin_call(self) -> None:
        """The model is called."""
        self._drop()  # of a call that an interrupt has ended without its hooks
        self._mode = None
        if (
            self._is_closed
            or torch.is_grad_enabled()
            or not running_pass().is_forward
            or self._lanes.is_capturing()
        ):
            return
        if self._must_trim:
            self._must_trim = False
            self._room.trim()
        self._spilled_bytes = self._room.spilled_bytes()
        self._mode = self._next_mode
        self._stream_key = self._lanes.stream_key()
        self._count = self._last_block = self._next_block = 0
        self._kept_bytes = self._leaving_bytes = 0
        self._seen = []

    def end_call(self, *, failed: bool) -> None:
        """The call has ended, or failed with an exception."""
        mode, self._mode = self._mode, None
        if mode is None:
            return
        if failed:
            self._drop()
            return
        self._made.clear()
        while self._leaving:
            self._arrive()
        spilled_bytes = self._room.spilled_bytes()
        more_bytes = spilled_bytes - self._spilled_bytes
        if mode is _Mode.OFF and more_bytes > 0:
            self._next_mode = _Mode.LEARN
            self._hook_outputs()
        elif mode is _Mode.LEARN:
            self._learn(spilled_bytes)
        elif mode is _Mode.MOVE and more_bytes > 0:
            self._move_more(more_bytes)

    def _learn(self, spilled_bytes: int) -> None:
        self._kept = {}
        known: set[int] = set()
        staying_bytes = 0
        # An output that a later block hands on is moved behind that one. What the last block makes
        # stays: no block hides the copy, and it is what the program asked for.
        for number, seen in reversed(list(enumerate(self._seen))):
            if seen is None or seen.reference.expired():
                continue
            key = seen.reference.cdata
            if key not in known and key not in self._weights:
                known.add(key)
                if seen.is_inference:
                    staying_bytes += seen.size_bytes
                elif number < self._last_block:
                    self._kept[number] = seen.size_bytes
        self._seen = []
        if staying_bytes and not self._has_warned:
            self._has_warned = True
            _LOG.warning(
                "umem: %s of outputs that the program keeps of a call stay where they were made, "
                "and the device lacked room for %s, which is used in host memory and is slow: "
                "under torch.inference_mode() nothing tells whether they are changed. Under "
                "torch.no_grad() they are copied to the host meanwhile",
                format_bytes(staying_bytes),
                format_bytes(spilled_bytes),
            )
        self._next_mode = _Mode.MOVE if self._kept else _Mode.OFF
        if self._kept:
            self._share = 0.0
            self._move_more(spilled_bytes)
        else:
            self._undo_hooks_of_outputs()

    def _move_more(self, missing_bytes: int) -> None:
        all_bytes = sum(self._kept.values())
        share = min(1.0, self._share + _MARGIN * missing_bytes / all_bytes)
        if share == self._share:
            return
        self._share, self._must_trim = share, True
        _LOG.info(
            "umem: of %s of outputs that the program keeps of each call, %s have no room on the "
            "device: so much is copied to the host meanwhile",
            format_bytes(all_bytes),
            format_bytes(int(share * all_bytes)),
        )

    def _drop(self) -> None:
        """Forget what is on its way: it stays where it is."""
        self._made.clear()
        while self._leaving:
            block = self._leaving[0]
            # An interrupt may have come between the copies and the note of their moment.
            moment = block.moment or self._lanes.run(Lane.COPY_OUT, _ignore)
            self._lanes.wait(moment)
            self._lanes.wait_on_stream_of(block.asked, moment)
            for it in block.outputs:
                self._give_back(it)
            self._leaving.popleft()

    def _give_back(self, output: _Leaving) -> None:
        address, output.to_address = output.to_address, 0
        if address:
            self._memory.give_back(address)

    # ------------------------------------------------------------------ outputs

    def _hook_outputs(self) -> None:
        for block in self._blocks:
            outermost = block.module
            for module in outermost.modules():
                is_block = module is outermost
                leave: Callable[..., None] = self._block_ends if is_block else self._output
                self._undo_outputs += hook_calls(module, _ignore, leave, self._fail)
        self._undo_outputs.append(self._lanes.on_wait(self._stream_waits))

    def _undo_hooks_of_outputs(self) -> None:
        for undo in self._undo_outputs:
            undo()
        self._undo_outputs = []

    def _output(self, output: Any, failed: bool) -> None:
        """A module within a block has returned."""
        mode = self._mode
        if mode is None or failed:
            return
        for tensor in (output,) if type(output) is torch.Tensor else tensors_in(output):
            number = self._count
            self._count += 1
            if mode is _Mode.MOVE:
                may_move = self._is_movable(tensor) and not tensor.is_inference()
                if number in self._kept and may_move:
                    self._made.append(tensor.detach())
            elif self._is_movable(tensor):
                storage = tensor.untyped_storage()
                reference, is_inference = StorageWeakRef(storage), tensor.is_inference()
                self._seen.append(_Seen(reference, storage.nbytes(), is_inference))
            else:
                self._seen.append(None)

    def _is_movable(self, tensor: torch.Tensor) -> bool:
        return (
            type(tensor) is torch.Tensor
            and tensor.device == self._device
            and tensor.layout is torch.strided
            and tensor.untyped_storage().resizable()
            and tensor.untyped_storage().nbytes() >= self._min_bytes
        )

    def _block_ends(self, output: Any, failed: bool) -> None:
        """Send a part of what the block has made, so that the copies go on all through the pass."""
        self._output(output, failed)
        self._last_block, self._next_block = self._next_block, self._count
        if self._mode is not _Mode.MOVE:
            return
        block = _Block([], self._lanes.mark())
        self._leaving.append(block)
        copies = []
        for probe in self._made:
            storage = probe.untyped_storage()
            size_bytes = storage.nbytes()
            self._kept_bytes += size_bytes
            if self._leaving_bytes + size_bytes > self._share * self._kept_bytes:
                continue
            address = self._memory.reserve(size_bytes)
            if address is None:
                break
            self._leaving_bytes += size_bytes
            leaving = _Leaving(probe, version_counter(probe), storage.data_ptr(), address)
            block.outputs.append(leaving)
            copies.append(Copy(address, leaving.from_address, size_bytes))
        self._made.clear()
        work = partial(self._lanes.copy, Lane.COPY_OUT, copies, TensorClass.ACTIVATIONS)
        block.moment = self._lanes.run(Lane.COPY_OUT, work, after=[block.asked])
        if len(self._leaving) > _BLOCKS_IN_FLIGHT:
            self._arrive()

    def _arrive(self) -> None:
        """Have what is still in use and unchanged of the oldest block own the copies."""
        block = self._leaving[0]
        self._lanes.wait(block.moment)
        self._lanes.wait_on_stream_of(block.asked, block.moment)
        for it in block.outputs:
            if it.probe is None:
                continue
            storage = it.probe.untyped_storage()
            is_unchanged = version_counter(it.probe) == it.version
            is_in_place = storage.data_ptr() == it.from_address
            may_move = is_unchanged and is_in_place and not is_held(it.probe)
            it.probe = None
            if may_move and storage_use_count(storage_key(storage)) > 1:
                address, it.to_address = it.to_address, 0
                self._memory.move(storage, address)
                self.moved += 1
            else:
                self._give_back(it)
        self._leaving.popleft()


def _ignore(*_: object) -> None:
    pass
