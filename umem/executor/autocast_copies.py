"""Frees the copies of weights that autocast keeps, behind the blocks of a model.

``torch.autocast`` keeps a weight's copy in lower precision until its outermost context ends, for
further uses. Where activations are checkpointed nothing else needs it. So at the loss, where a step
is fullest, the copies of all weights are there: half as many bytes as weights in float32.

A later use would make a copy of the same bits. But the gradients of all uses of one copy are added
in lower precision, and those of two copies in float32. So copies are freed only where the forward
passes that were watched have used no weight on both sides, and a guard looks out for other uses.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NoReturn

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.nn import functional

from umem.capture.live import Block
from umem.core.errors import PlanError
from umem.executor.copied_activations import is_compiled
from umem.executor.optimizer.access_guard import UseGuard, can_guard
from umem.executor.optimizer.lanes import Lanes
from umem.runtime.torch_hooks.backward import hook_backward
from umem.runtime.torch_hooks.modules import Undo, hook_calls
from umem.torch_compat import current_graph_task_id

__all__ = ["AutocastCopies"]

_LOG = logging.getLogger("umem")

_NO_COPY: frozenset[Any] = frozenset((functional.embedding, torch.embedding))
"""Functions of weights that autocast leaves in their precision."""


class AutocastCopies:
    """Watches how a model's blocks use their weights under autocast, and frees the copies.

    Parameters
    ----------
    model
        The module that the training loop calls. Only a weak reference is kept.
    blocks
        Its blocks.
    lanes
        Tell streams of the program.
    early_uses
        Counts the uses of weights that another guard has seen before their block was called.
    """

    def __init__(
        self,
        model: nn.Module,
        blocks: Sequence[Block],
        lanes: Lanes,
        early_uses: Callable[[], int],
    ) -> None:
        self._model = weakref.ref(model)
        # Autocast leaves embeddings in their precision. The head may have the same weight.
        self._blocks = [it for it in blocks if not isinstance(it.module, nn.Embedding)]
        self._lanes = lanes
        self._early_uses = early_uses
        self._is_freeing = False
        self._has_watched = self._has_failed = False
        self._undo: list[Undo] = []
        self._parts: list[_Part] = []
        self._context: _Context
        self._stream_key = 0
        """The model's stream."""
        self._has_gradients = False
        """Whether gradients were wanted when the model was called last."""
        self._is_known = False
        """Whether the present call of the model has been found to be in `_context`."""
        self._ends: list[_Part] = []
        """The blocks that have ended in the context and may free copies, in this order."""
        self._used: dict[int, int] = {}
        """How many of them had ended when each weight was used last, by ``id``."""
        self._is_kept = False
        """Whether copies stay until the context ends."""
        self._early_before = 0
        self._is_blind = False
        """Whether another guard has taken a weight whose block has ended."""

    @property
    def may_free(self) -> bool:
        """Whether copies may be freed behind a block, by the forward passes that were watched."""
        is_new = self._has_watched and not self._is_freeing
        return is_new and any(it.may_free for it in self._parts)

    @property
    def most_bytes(self) -> int:
        """Copies of the blocks behind which they may be freed, if all weights stay trained."""
        parts = [it for it in self._parts if it.may_free]
        return sum(it.nbytes for part in parts for it in part.weights if it.requires_grad) // 2

    def watch(self) -> None:
        """Watch the model's calls, until :meth:`free` or :meth:`stop`."""
        if self._undo or self._has_failed or (model := self._model()) is None:
            return
        self._has_watched = False
        self._parts = self._find_parts(model)
        weights = [it for part in self._parts for it in part.weights]
        if not weights:
            return
        self._context = _Context(weights[0].device)
        self._undo += hook_calls(model, self._model_begins, self._model_ends, self._failed)
        for block, part in zip(self._blocks, self._parts, strict=False):
            begins, ends = partial(self._block_begins, part), partial(self._block_ends, part)
            self._undo += hook_calls(block.module, begins, ends, self._failed)
        self._undo.append(hook_backward(lambda _: self.release(), lambda _: None))
        self._undo.append(self._lanes.on_wait(self._stream_waits))

    def free(self) -> None:
        """Free the copies behind each block from now on, where :attr:`may_free`."""
        self._is_freeing = self.may_free

    def stop(self) -> None:
        """Watch no more, unless copies are freed."""
        if not self._is_freeing:
            self.close()

    def close(self) -> None:
        """Remove all hooks."""
        self._is_freeing = False
        self.release()
        while self._undo:
            self._undo.pop()()
        self._parts = []

    def release(self) -> None:
        """Guard no weights any more: the forward pass is over."""
        for part in self._parts:
            part.release()

    def _find_parts(self, model: nn.Module) -> list[_Part]:
        """The float32 weights of each block, and last those that are in none.

        None at all if copies are to stay.
        """
        every = list(model.parameters())
        if is_compiled(model) or not all(map(can_guard, every)):
            return []
        held = [list(it.module.parameters()) for it in self._blocks]
        ids = {id(it) for weights in held for it in weights}
        held.append([it for it in every if id(it) not in ids])
        copied = ([it for it in weights if it.dtype is torch.float32] for weights in held)
        return [_Part(weights, self._seen, self._taken) for weights in copied]

    # ------------------------------------------------------------------ hooks

    def _model_begins(self, _args: object, _kwargs: object) -> None:
        if current_graph_task_id() != -1:
            return
        self._is_known, self._has_gradients = False, torch.is_grad_enabled()
        if not self._has_gradients:
            return
        self._stream_key = self._lanes.stream_key()
        for part in self._parts:
            part.hold()

    def _model_ends(self, _output: object, *, failed: bool) -> None:
        if not self._is_in_context():  # it was the model's own
            self.release()
        self._has_watched |= bool(self._used) and not (failed or self._is_kept)

    def _block_begins(self, part: _Part, _args: object, _kwargs: object) -> None:
        part.was_held = part.is_held
        part.release()
        # A checkpoint may call a block without gradients.
        if self._has_gradients and self._is_in_context():
            self._use(part.weights)

    def _block_ends(self, part: _Part, _output: object, *, failed: bool) -> None:
        if not self._is_in_context():
            return
        if part.was_held or self._has_gradients:
            part.hold()
        if failed or not self._has_gradients:
            return
        if self._early_uses() != self._early_before:
            # Perhaps of a block's that comes later, which then is to find the copy.
            self._is_kept = True
            if self._is_freeing and self._is_blind:
                self._refuse("A weight")
        if self._is_kept or not part.may_free:
            return
        self._ends.append(part)
        if self._is_freeing:
            torch.clear_autocast_cache()
            self._context.mark()

    def _stream_waits(self, stream_key: int) -> None:
        """Another stream of the program may use copies that its own one frees."""
        self._is_kept |= stream_key != self._stream_key

    def _seen(self, weight: torch.Tensor) -> None:
        """The program uses a weight outside of its block."""
        if not torch.is_grad_enabled() or not self._is_in_context():
            return
        is_early = id(weight) not in self._used and id(weight) not in self._parts[-1].ids
        if self._is_freeing and is_early:
            self._is_kept = True  # its block, which comes later, is to find the copy
        try:
            self._use([weight])
        except Exception as error:
            self._failed(error)

    def _taken(self, weight: torch.Tensor) -> None:
        """Another guard takes a weight, and will see its uses in this one's place."""
        self._is_blind |= id(weight) in self._used

    def _is_in_context(self) -> bool:
        # torch calls hooks that were removed since the call began.
        return (
            bool(self._undo)
            and torch.is_autocast_enabled(self._context.device_type)
            and torch.is_autocast_cache_enabled()
            and current_graph_task_id() == -1
        )

    def _use(self, weights: Sequence[torch.Tensor]) -> None:
        if not self._is_known:
            self._is_known = True
            if not self._context.is_same():
                self._begin_context()
        for weight in weights:
            now = len(self._ends)
            before = self._used.setdefault(id(weight), now)
            if before == now:
                continue
            if not self._context.is_same():
                self._begin_context()
                self._use(weights)
                return
            if self._is_freeing:
                self._refuse(f"A weight of {' x '.join(map(str, weight.shape))}")
            for part in self._ends[before:]:
                part.may_free = False
            self._used[id(weight)] = now

    def _begin_context(self) -> None:
        self._used.clear()
        self._ends.clear()
        self._is_kept = self._is_blind = False
        self._early_before = self._early_uses()
        self._context.mark()

    def _failed(self, error: Exception) -> None:
        """Only what would change values may end the training."""
        if isinstance(error, PlanError):
            raise error
        self.close()
        self._has_failed = True
        _LOG.warning(
            "umem: autocast's copies of weights are not freed any more: %s: %s",
            type(error).__name__,
            str(error),
        )

    def _refuse(self, subject: str) -> NoReturn:
        """A weight has uses on both sides of a block's end that has freed its copy."""
        raise PlanError(
            f"{subject} is used again where no measured step has done so, under the autocast "
            "whose copy of it umem has freed: gradients would be rounded in another way than "
            "without umem. Use it so in the first steps, too, or give torch.autocast "
            "cache_enabled=False"
        )


def _itself(tensor: torch.Tensor) -> torch.Tensor:
    return tensor


class _Context:
    """Recognises an autocast context: what autocast keeps is gone when it ends."""

    def __init__(self, device: torch.device) -> None:
        self.device_type = device.type
        self._weight = nn.Parameter(torch.empty(1, 0, device=device))
        self._input = torch.empty(0, 0, device=device)
        self._copied: Any = None

    def mark(self) -> None:
        """Remember the present context."""
        self._copied = self._copy()

    def is_same(self) -> bool:
        """Whether nothing has ended the context that was marked last, or cleared its copies."""
        return self._copy() is self._copied

    def _copy(self) -> Any:
        """The node of the graph that has made autocast's copy of a weight without elements."""
        # A checkpoint around the block would count what is saved here.
        with torch.enable_grad(), saved_tensors_hooks(_itself, _itself):
            node = functional.linear(self._input, self._weight).grad_fn
        while node is not None:
            sources = [it for it, _ in node.next_functions if it is not None]
            if not sources or hasattr(sources[0], "variable"):
                break
            node = sources[0]
        return node


class _Part:
    """The weights of a block, or those that no block has."""

    def __init__(
        self,
        weights: Sequence[torch.Tensor],
        seen: Callable[[torch.Tensor], None],
        taken: Callable[[torch.Tensor], None],
    ) -> None:
        self.weights = weights
        self.ids = frozenset(map(id, self.weights))
        self.may_free = bool(self.weights)
        """Whether no weight was used on both sides of this block's end."""
        self.was_held = False
        """Whether they were guarded when the block was called."""
        self._guard = UseGuard(seen, taken, _NO_COPY)

    @property
    def is_held(self) -> bool:
        """Whether they are guarded."""
        return self._guard.is_on

    def hold(self) -> None:
        """Guard those that no other guard has."""
        self._guard.release()
        self._guard.hold(it for it in self.weights if type(it) is nn.Parameter)

    def release(self) -> None:
        """Guard none."""
        self._guard.release()
