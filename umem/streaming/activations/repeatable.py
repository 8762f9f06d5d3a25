"""Proves, by one call, that a block may run twice: the same bits again, and no other effect.

A block whose call is run again in the backward pass need not keep what autograd saves. Only the
program knows what its forward functions do besides: count calls, average statistics, draw random
numbers. So all that the block's modules, their classes, their forward functions and its arguments
hold is looked at before a call and after it. Where nothing but a few buffers has changed, such as
averages of BatchNorm, the block runs once more at once, with the buffers as they were: all that it
saves, returns and leaves in them must have the same bits. Where the program has checkpoints in
or around the call, the block also runs twice without them. Nothing shows a change of other objects.
The call itself runs as ever: under a mode of torch's dispatcher compiled functions in it would not.
With several processes there is no proof, as a second collective would wait for ever.
"""

from __future__ import annotations

import logging
import random
from collections import OrderedDict
from collections.abc import Iterable
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.autograd.forward_ad import unpack_dual

from umem.adapters import is_filled
from umem.capture.live.saved_tensors import SavedTensorHooks
from umem.runtime.model_parts import lies_in_memory, parts_of, tensors_in
from umem.runtime.torch_hooks.backward import nodes_of
from umem.runtime.torch_hooks.memory_access import original_data
from umem.runtime.torch_hooks.saved_tensors import is_lent, may_leave
from umem.streaming.activations.arguments import Arguments, told_of_filled
from umem.streaming.activations.buffer_values import BufferValues, have_equal_bits
from umem.streaming.activations.program_checkpoints import ProgramCheckpoint, leaving_out, noting
from umem.streaming.activations.random_states import RandomStates
from umem.streaming.activations.reachable import Reachable
from umem.torch_compat import (
    every_call_is_seen,
    is_distributed,
    storage_key,
    version_counter,
)

__all__ = ["CallProof", "WatchedCall", "call_signature", "drops_between_cells", "is_plain", "watch"]

_LOG = logging.getLogger("umem")

_PLAIN = (type(None), bool, int, float, str, torch.dtype, torch.device, torch.Size)
_MOST_BUFFER_BYTES = 1 << 20
"""Buffers that a call or the program may change: they are kept once more for each call."""
_MOST_SEEDS = 2
"""Numbers of 64 bits in which attention notes where its dropout begins."""
_Saved = tuple[torch.Tensor, bool]
"""A tensor that autograd saves, and whether it stays in any case."""
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


@dataclass(frozen=True)
class CallProof:
    """What a watched call has shown of a block that may run twice."""

    signature: tuple[Any, ...]
    """Of the block: another one proves nothing."""
    freed_bytes: int
    """What need not be kept of the call from its end to the backward pass."""
    checkpointed_bytes: int = 0
    """What is kept more where the program's checkpoints of the call are left out; 0 without any."""
    buffers: tuple[str, ...] = ()
    """Names of the block's buffers that are kept for a second call, which leaves them alone."""


def call_signature(module: nn.Module, arguments: object = ()) -> tuple[Any, ...] | None:
    """Modes and hooks of a block's modules; None where the program's would run twice.

    With the arguments that a call is to have, also what there is in those that it fills.
    """
    if every_call_is_seen():
        return None
    found: list[object] = [told_of_filled(arguments, []) if arguments else ()]
    for part in parts_of(module):
        attributes = vars(part)
        # umem's own hooks are beside the entries.
        hooks = map(OrderedDict.__len__, map(attributes.__getitem__, _HOOKS))
        if "forward" in attributes or any(hooks):
            return None
        found.append(part.training)
    return tuple(found)


def is_plain(value: object, depth: int = 4) -> bool:
    """Whether an argument is a tensor of torch's own, a number or so, or what a call fills.

    Or a container of these. Not so a tensor with a tangent: what is saved of it has none.
    """
    if type(value) in (torch.Tensor, nn.Parameter):
        return unpack_dual(value).tangent is None
    if isinstance(value, _PLAIN):
        return True
    if depth and type(value) in (tuple, list):
        return all(is_plain(it, depth - 1) for it in value)  # type: ignore[attr-defined]
    if depth and type(value) is dict:
        return all(is_plain(it, depth - 1) for it in value.values())
    return is_filled(value)


def drops_between_cells(module: nn.Module) -> bool:
    """Whether a module has layers of cuDNN with dropout, from a state that nothing puts back."""
    return isinstance(module, nn.RNNBase) and module.dropout > 0.0


def watch(
    module: nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    around: ProgramCheckpoint | None = None,
) -> WatchedCall | None:
    """Begin to watch a call of a block; None where it can prove nothing."""
    if is_distributed() or call_signature(module) is None or not is_plain((args, kwargs)):
        return None
    if any(map(drops_between_cells, module.modules())):
        return None
    try:
        return WatchedCall(module, args, kwargs, around)
    except Exception:
        _LOG.debug("umem: a block's call cannot be watched", exc_info=True)
        return None


class WatchedCall:
    """A call of a block, between whose ends autograd's saved tensors are seen.

    Parameters
    ----------
    module
        The block.
    args, kwargs
        Its arguments.
    around
        The program's checkpoint of this call.
    """

    def __init__(
        self,
        module: nn.Module,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        around: ProgramCheckpoint | None = None,
    ) -> None:
        self._module, self._args, self._kwargs = module, args, kwargs
        self._given = Arguments(args, kwargs)
        self._tensors = self._given.take_tensors()
        self._signature = call_signature(module, (args, kwargs))
        self._held = self._look()
        self._buffers = {name: (it, it.detach().clone()) for name, it in module.named_buffers()}
        self._versions = {name: version_counter(it) for name, it in module.named_buffers()}
        self._random = RandomStates(self._arguments())
        self._around = around
        self._saved: list[_Saved] = []
        self._copies: set[int] = set()
        """Storages of the buffers' copies that the second call has had."""
        self._until_end = ExitStack()
        self._within = self._until_end.enter_context(noting())
        # What a checkpoint around the call would compute again need not be held.
        if around is None:
            self._until_end.callback(_see(self._saved).close)

    def abandon(self) -> None:
        """End it without a proof."""
        self._until_end.close()

    def end(self, output: object) -> CallProof | None:
        """End it, and run the block once more; None where it may not run twice."""
        self.abandon()
        try:
            is_watched = is_plain(output) and not _has_recurrence(output, self._arguments())
            if not is_watched or self._held != self._look():
                return None
            return self._prove(output)
        except Exception:  # such as lack of memory for a second set of what is saved
            _LOG.debug("umem: a block's call cannot be run again", exc_info=True)
            return None

    def _prove(self, output: object) -> CallProof | None:
        """Run the block again, and compare."""
        # Of a change that is counted, autograd would tell the program, in the backward pass.
        counted = {
            _storage(it)
            for name, (it, _) in self._buffers.items()
            if version_counter(it) != self._versions[name]
        }
        if any(_storage(it) in counted for it, _ in self._saved):
            return None
        # Some kernels change statistics without a count of changes.
        changed = {name: pair for name, pair in self._buffers.items() if not have_equal_bits(*pair)}
        if sum(it.nbytes for it, _ in changed.values()) > _MOST_BUFFER_BYTES:
            return None
        # Another call may change others, and so may the program, between both.
        small = {
            name: pair
            for name, pair in self._buffers.items()
            if lies_in_memory(it := pair[0]) and it.is_contiguous() and not it.is_inference()
        }
        kept = {**changed, **small}
        if sum(it.nbytes for it, _ in kept.values()) > _MOST_BUFFER_BYTES:
            kept = changed
        pairs = kept.values()
        self._before = BufferValues([it for it, _ in pairs], [value for _, value in pairs])
        is_random = RandomStates(self._arguments()) != self._random
        freed_bytes = checkpointed_bytes = 0
        if self._around is None:
            if not self._is_repeated(self._saved, output, is_random=is_random):
                return None
            freed_bytes = self._freed_bytes(self._saved, output)
        checkpoints = [*self._within, *filter(None, [self._around])]
        if changed or any(
            it.has_contexts or (is_random and not it.restores_random) for it in checkpoints
        ):
            checkpoints = []  # a second call would change the buffers once more
        if checkpoints:
            with leaving_out():
                saved, again = self._run_again()
                if (
                    self._is_repeated(saved, output, is_random=is_random)
                    and _are_all_alike(output, again)
                    # The program may change a result in place that a checkpoint does not save.
                    and _saved_results(saved, again) <= _saved_results(self._saved, output)
                ):
                    checkpointed_bytes = self._freed_bytes(saved, output) - freed_bytes
        if self._around is not None and checkpointed_bytes <= 0:
            return None
        assert self._signature is not None
        return CallProof(self._signature, freed_bytes, max(0, checkpointed_bytes), tuple(kept))

    def _is_repeated(self, saved: list[_Saved], output: object, *, is_random: bool) -> bool:
        """Whether another run saves and returns the same."""
        others, again = self._run_again()
        return (
            len(saved) == len(others)
            and _are_all_alike(output, again)
            and all(
                stays == stays_too
                and (
                    _are_alike(tensor, other, anywhere=_storage(other) in self._copies)
                    or _are_unset(tensor, other, is_random=is_random)
                )
                for (tensor, stays), (other, stays_too) in zip(saved, others, strict=True)
            )
        )

    def _arguments(self) -> list[torch.Tensor]:
        return [*tensors_in((self._args, self._kwargs))]

    def _look(self) -> tuple[object, ...]:
        """What would tell of a change."""
        reachable = Reachable([self._module, *self._arguments()], but=self._module.buffers())
        return _python_states(), call_signature(self._module), reachable

    def _run_again(self) -> tuple[list[_Saved], object]:
        """Call the block with the random numbers of the first time, past its hooks."""
        saved: list[_Saved] = []
        buffers = self._before.buffers
        after = [it.detach().clone() for it in buffers]
        hooks = _see(saved, alone=True)
        try:
            with self._random.put_back(), self._before.in_place_of_buffers(self._module) as copies:
                # As in the backward pass, whose tensors are other objects.
                args, kwargs = self._given.with_tensors([it.view_as(it) for it in self._tensors])
                output = self._module.forward(*args, **kwargs)
                self._copies = set(map(_storage, copies))
                if not all(map(have_equal_bits, copies, after)):
                    raise ValueError("a second call leaves other values in buffers")
                return saved, output
        finally:
            hooks.close()
            for buffer, value in zip(buffers, after, strict=True):
                if not have_equal_bits(buffer, value):  # the program holds it elsewhere, too
                    original_data.__get__(buffer).copy_(value)

    def _freed_bytes(self, saved: list[_Saved], output: object) -> int:
        """Bytes of the storages that nothing but autograd holds from the end of the call on."""
        held = {*map(_storage, self._arguments()), *map(_storage, tensors_in(output))}
        held.update(map(_storage, (*self._module.parameters(), *self._module.buffers())))
        filled: list[torch.Tensor] = []
        told_of_filled((self._args, self._kwargs), filled)
        held.update(map(_storage, filled))
        sizes = {
            _storage(tensor): tensor.untyped_storage().nbytes()
            for tensor, stays in saved
            if not stays
        }
        return sum(size_bytes for key, size_bytes in sizes.items() if key not in held)


def _has_recurrence(output: object, arguments: Iterable[torch.Tensor]) -> bool:
    """Whether cuDNN's recurrent layers are in a call's graph, by modules or functions."""
    known, queue = set(nodes_of(arguments)), nodes_of(tensors_in(output))
    while queue:
        node = queue.pop()
        if node in known:
            continue
        if node.name().startswith("CudnnRnn"):
            return True
        known.add(node)
        queue += [it for it, _ in node.next_functions if it is not None]
    return False


def _see(saved: list[_Saved], *, alone: bool = False) -> SavedTensorHooks:
    """Note what autograd saves in this thread, until the result is closed.

    Others see it too, unless it is `alone`.
    """

    def note(tensor: torch.Tensor) -> None:
        is_weight = is_lent(tensor)
        # Staged weights are the same in both calls, and need their memory for the next block's.
        its = _layout_of(tensor) if is_weight else tensor.detach()
        saved.append((its, is_weight or not may_leave(tensor)))

    hooks = SavedTensorHooks(note, lambda _: None)
    (hooks.push_alone if alone else hooks.push_before_others)()
    return hooks


def _layout_of(tensor: torch.Tensor) -> torch.Tensor:
    return torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype, device="meta")


def _saved_results(saved: Iterable[_Saved], results: object) -> set[int]:
    """Which of the results are on memory that autograd saves."""
    storages = {_storage(it) for it, _ in saved}
    return {number for number, it in enumerate(tensors_in(results)) if _storage(it) in storages}


def _storage(tensor: torch.Tensor) -> int:
    return storage_key(tensor.untyped_storage())


def _python_states() -> tuple[Any, ...]:
    numpys: Any = np.random.get_state()
    return random.getstate(), numpys[0], bytes(numpys[1]), numpys[2:]


def _are_unset(tensor: torch.Tensor, other: torch.Tensor, *, is_random: bool) -> bool:
    """Whether two tensors may be memory that attention saves as it finds it.

    Without dropout these are the numbers that tell what it was drawn from. With dropout these are
    set, but for one that flash attention no longer uses.
    """
    some = tensor, other
    if is_random:
        return all(it.dtype is torch.uint64 and it.dim() == 0 for it in some)
    kinds = torch.int64, torch.uint64
    return all(it.dtype in kinds and it.numel() <= _MOST_SEEDS for it in some)


def _are_alike(tensor: torch.Tensor, other: torch.Tensor, *, anywhere: bool = False) -> bool:
    """Whether two tensors have the same layout and bits, `anywhere` in their storages or not."""
    one, two = ((it.dtype, it.size(), it.stride()) for it in (tensor, other))
    if tensor.is_meta or other.is_meta:  # weights, of which the other call may have had no copy
        return one == two
    if anywhere:
        return one == two and have_equal_bits(tensor, other)
    place, its = ((it.device, it.storage_offset()) for it in (tensor, other))
    return (one, place) == (two, its) and have_equal_bits(tensor, other)


def _are_all_alike(output: object, other: object) -> bool:
    pairs = zip(tensors_in(output), tensors_in(other), strict=True)
    return all(_are_alike(*pair) for pair in pairs)
