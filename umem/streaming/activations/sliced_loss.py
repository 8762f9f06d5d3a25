"""Cross entropy in slices of rows, with the bits of torch's own, where a plan has no room for it.

torch has three or four tensors of the logits' size in float32: the logits that the program casts,
their logarithms, and the gradients of both. A row of each depends on this row of the logits alone,
and torch's kernels for rows choose their way by the length of a row and its alignment, not by the
number of rows. So log-probabilities and gradients are made for a slice at a time, forward and once
more backward, by the operators that torch's own loss calls. The sum over rows needs one
log-probability of each row: it runs whole. What remains are the logits and their gradient, each
once and in their own type. The matrix products of the head stay whole: their bits depend on the
number of rows.

Note [The upcast]
A program that casts its logits to float32 gets a tensor without memory, which is filled before any
use but a view and the loss: a guard tells of each. The cast's gradient would come from the loss in
float32, and be cast back. The loss gives a tensor without memory in its place, from which the node
of the cast, :class:`_Upcast`, knows how to make it in the logits' own type, slice by slice. A hook
of the program, which has it before, fills it as any use does: the node casts it then, as torch
does. If the float32 logits were filled, the loss gives the gradient in float32 at once.

Note [The logits]
The backward pass computes from the logits, which torch's loss does not keep: a program may change
them in place meanwhile. A guard has them copied before any use.
"""

from __future__ import annotations

import logging
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from functools import cache, wraps
from typing import Any, NamedTuple

import torch
from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import saved_tensors_hooks
from torch.compiler import is_compiling

from umem import patches
from umem.runtime.aliases import are_all_on_memory
from umem.runtime.guard import Guard, are_plain, guard_of, has_guard
from umem.runtime.torch_hooks.memory_access import original_storage
from umem.runtime.torch_hooks.passes import running_pass
from umem.runtime.torch_hooks.saved_tensors import check_version, innermost
from umem.runtime.unfilled_memory import unfilled
from umem.runtime.unguarded import Unguarded, allowed
from umem.streaming.plan.loss_memory import (
    LEAST_LOSS_BYTES,
    LOSS_REMEDY,
    LOSS_SLICE_BYTES,
    is_large_loss,
    logits_text,
    loss_slice_bytes,
)
from umem.torch_compat import (
    InferenceMode,
    dispatch_modes,
    forward_class,
    function_modes,
    has_kernel,
    is_own,
    log_softmax_backward,
    register_scripted,
    reinterpret_tensor,
    tracing_state,
    version_counter,
    view_base,
)

__all__ = ["SeenLoss", "SlicedLosses"]

_LOG = logging.getLogger("umem")

_ALIGNMENT, _ALIGNED_ROWS = 16, 8
"""Kernels read so many bytes at a time, and sum a row in another order where it begins elsewhere in
them. So slices begin at a multiple of so many rows."""

_LOW_PRECISION = (torch.float16, torch.bfloat16)
_MEAN, _SUM = 1, 2
"""Reductions, as torch numbers them."""

_DIFFERENTIATED = "its gradient is differentiated again"
_BATCHED = "a program asks for several gradients at once"
_OTHER_KERNELS = "this torch has kernels whose bits depend on the number of rows"
_TRIED_ROWS = 256

_ARGUMENTS = 6
"""Of torch's operator, as ``torch.nn.functional.cross_entropy`` gives them: by position."""

_IGNORED = -100
_aten = torch.ops.aten


class SeenLoss(NamedTuple):
    """A cross entropy that the program has computed."""

    rows: int
    vocabulary: int
    obstacle: str = ""
    """Why torch has to compute it; "" where it can be sliced."""

    @property
    def size_bytes(self) -> int:
        """Bytes of its logits in float32."""
        return 4 * self.rows * self.vocabulary


class SlicedLosses:
    """The cross entropies of a training, which are computed in slices once `is_on` is set.

    That is by a plan, or at once for a loss that would take much of the budget: the first steps,
    from which a plan is made, might have too little host memory for what has no room.

    Parameters
    ----------
    device_type
        Such as ``"cuda"``. Losses elsewhere are left alone.
    budget_bytes
        Device memory of the training; None to wait for a plan.
    vocabulary
        Classes of a loss that may come; those of losses so far are known.
    least_bytes
        Logits that take less in float32 are left alone, too.
    slice_bytes
        Of a slice in float32.
    """

    def __init__(
        self,
        device_type: str,
        *,
        budget_bytes: int | None = None,
        vocabulary: int = 0,
        least_bytes: int = LEAST_LOSS_BYTES,
        slice_bytes: int = LOSS_SLICE_BYTES,
    ) -> None:
        self.is_on = False
        self.are_differentiated = False
        """Whether the program has taken gradients of a loss's gradient."""
        self.largest: SeenLoss | None = None
        """The largest loss so far."""
        self.device_type = device_type
        self.least_bytes, self.slice_bytes = least_bytes, slice_bytes
        self._budget_bytes = budget_bytes
        self._vocabularies = {vocabulary}
        _listeners.add(self)
        patches.wrap("cross_entropy_loss", _with_slices)
        patches.wrap("upcast", _with_upcast)

    @property
    def could_slice(self) -> bool:
        """Whether the largest loss can be sliced, and is not yet."""
        return not self.is_on and self.largest is not None and not self.largest.obstacle

    @property
    def size_text(self) -> str:
        """What the logits of the largest loss take, in words; "" before there was one."""
        return "" if self.largest is None else logits_text(*self.largest[:2])

    @property
    def remedy(self) -> str:
        """What to change in the program, for the end of a message; "" before there was a loss."""
        if self.largest is None:
            return ""
        obstacle = self.largest.obstacle
        why = f" torch computes their loss whole, as {obstacle}." if obstacle else ""
        return f". {self.size_text[0].upper()}{self.size_text[1:]}.{why} {LOSS_REMEDY}"

    def slice(self) -> None:
        """Compute losses in slices from now on."""
        if self.is_on:
            return
        self.is_on = True
        _LOG.info("umem: losses are computed in slices of rows where they are large")

    def end(self) -> None:
        """Leave all losses to torch from now on."""
        self.is_on = False
        _listeners.discard(self)

    def may_take(self, logits: torch.Tensor) -> bool:
        """Whether logits are large enough, and on the training's device."""
        size_bytes = 4 * logits.numel()
        return logits.device.type == self.device_type and size_bytes >= self.least_bytes

    def knows(self, logits: torch.Tensor) -> bool:
        """Whether these may be what a loss that can be sliced will be computed of."""
        is_known = logits.dim() > 1 and logits.size(-1) in self._vocabularies
        has_obstacle = self.largest is not None and self.largest.obstacle
        return is_known and not has_obstacle and self.may_take(logits)

    def wants(self, logits: torch.Tensor) -> bool:
        """Whether a loss of these is computed in slices."""
        budget_bytes = self._budget_bytes
        if budget_bytes is not None and is_large_loss(logits.numel(), budget_bytes):
            self.slice()
        return self.is_on

    def note(self, loss: SeenLoss) -> None:
        """Note a loss."""
        self._vocabularies.add(loss.vocabulary)
        if self.largest is None or loss.size_bytes >= self.largest.size_bytes:
            self.largest = loss


_listeners: weakref.WeakSet[SlicedLosses] = weakref.WeakSet()


# ---------------------------------------------------------------------- the logits


class _How(NamedTuple):
    """How a loss is computed."""

    reduction: int
    ignore_index: int
    dtype: torch.dtype
    """Of the log-probabilities."""
    summed_dtype: torch.dtype
    """In which they are summed."""
    slice_bytes: int

    def rows_of_slice(self, rows: int, vocabulary: int) -> int:
        slice_bytes = min(self.slice_bytes, loss_slice_bytes(4 * rows * vocabulary))
        count = slice_bytes // (4 * vocabulary) // _ALIGNED_ROWS * _ALIGNED_ROWS
        return min(rows, max(_ALIGNED_ROWS, count))


class _Slices:
    """The slices of logits, one at a time in the same memory.

    Where a budget leaves little free, to put memory together for each would take long.
    """

    def __init__(self, logits: torch.Tensor, how: _How) -> None:
        self._logits = logits
        self._count = how.rows_of_slice(*logits.shape)
        self._cast = self.room(how.dtype)
        self._known = self.room(how.dtype)

    def room(self, dtype: torch.dtype) -> torch.Tensor:
        """Memory for numbers of a slice."""
        return unfilled((self._count, self._logits.size(1)), dtype, self._logits.device)

    def __iter__(self) -> Iterator[tuple[slice, torch.Tensor, torch.Tensor]]:
        """Of each slice its rows, their log-probabilities, and memory of the same size."""
        total = len(self._logits)
        for begin in range(0, total, self._count):
            rows = slice(begin, min(begin + self._count, total))
            cast, known = (it[: rows.stop - begin] for it in (self._cast, self._known))
            logits = self._logits[rows]
            if logits.dtype != cast.dtype:
                logits = cast.copy_(logits)
            torch.log_softmax(logits, 1, out=known)
            yield rows, known, cast


def _nothing() -> None:
    """Have no more to do before a use."""


class _KeptLogits(Guard):
    """Logits that a backward pass computes from. Note [The logits]."""

    def __init__(self, logits: torch.Tensor) -> None:
        super().__init__(_nothing)
        known = [logits] if (base := view_base(logits)) is None else [logits, base]
        self._lock = threading.RLock()
        self.stream = torch.cuda.current_stream(logits.device) if logits.is_cuda else None
        """Where the logits were made, and the backward pass will run."""
        with Unguarded():
            self._is_shared = are_plain(known) and are_all_on_memory(known)
            kept = logits.detach().flatten(0, -2)
            self.logits = kept if self._is_shared else kept.clone()
        if self._is_shared:
            self.watch(known)

    def use(self, tensor: torch.Tensor) -> None:
        """Have a copy of our own, before another use."""
        with self._lock:
            if self._is_shared:
                with torch.no_grad(), Unguarded(), self.on_stream():
                    self.logits = self.logits.clone()
                if self.stream is not None:
                    torch.cuda.current_stream(tensor.device).wait_stream(self.stream)
                self._is_shared = False
        self.release()

    def on_stream(self) -> AbstractContextManager[Any]:
        """Work where the logits were made: memory belongs to a stream."""
        return nullcontext() if self.stream is None else torch.cuda.stream(self.stream)

    def __del__(self) -> None:
        self.release()


class _Saved:
    """What a loss saves."""

    def __init__(self, kept: _KeptLogits, size: torch.Size, how: _How) -> None:
        self.kept, self.size, self.how = kept, size, how

    def have_target(self, target: torch.Tensor, total_weight: torch.Tensor) -> None:
        self.target, self.total_weight = target, total_weight
        self._version = version_counter(target)

    def whole(self, dtype: torch.dtype) -> torch.Tensor:
        """The loss's own argument."""
        return self.kept.logits.view(self.size).to(dtype, copy=True)

    def gradient(self, of_loss: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """The gradient of the logits, in a type that torch casts it to."""
        check_version(self.target, self._version)
        logits, how = self.kept.logits, self.how
        made = unfilled(self.size, dtype, logits.device)
        slices = _Slices(logits, how)
        summed = slices.room(how.summed_dtype)
        for rows, known, free in slices:
            gradient = _aten.nll_loss_backward(
                of_loss,
                known.to(how.summed_dtype),
                self.target[rows],
                None,
                how.reduction,
                how.ignore_index,
                self.total_weight,
                grad_input=summed[: len(known)],
            )
            is_cast = dtype != how.dtype
            out = free if is_cast else made[rows]
            log_softmax_backward(gradient.to(how.dtype), known, 1, how.dtype, out=out)
            if is_cast:
                made[rows].copy_(out)
        return made


# ---------------------------------------------------------------------- the float32 copy

_VIEWS: dict[str, Callable[..., torch.Tensor]] = {
    "aten::view": torch.Tensor.view,
    "aten::reshape": torch.Tensor.reshape,
    "aten::flatten": torch.Tensor.flatten,
}


class _FloatLogits(Guard):
    """Fills a float32 copy of logits before a use by anything but one loss. Note [The upcast].

    With what a loss has saved, and its gradient, that of the copy instead.
    """

    functions = tuple(_VIEWS)

    def __init__(
        self, kept: _KeptLogits, of_loss: tuple[_Saved, torch.Tensor] | None = None
    ) -> None:
        super().__init__(_nothing)
        self.kept: _KeptLogits | None = kept
        self.of_loss = of_loss
        self.filled = threading.Event()
        """Outlives this object, which lives as long as the copy."""
        self._lock = threading.RLock()

    def use(self, tensor: torch.Tensor) -> None:
        """Give the copy, of which this is a view, memory and its values."""
        with self._lock:
            if self.kept is not None:
                logits, stream = self.kept.logits, self.kept.stream
                with (
                    InferenceMode(False),
                    torch.no_grad(),
                    Unguarded(),
                    allowed([tensor]),
                    self.kept.on_stream(),
                ):
                    storage = original_storage(tensor)
                    storage.resize_(torch.float32.itemsize * logits.numel())
                    whole = torch.empty(0, dtype=torch.float32, device=logits.device)
                    values = logits
                    if self.of_loss is not None:
                        values = _gradient(self.of_loss, torch.float32)
                    # With its own counter of modifications.
                    whole.set_(storage).copy_(values.flatten())
                if stream is not None:  # others have waited for the cast, and not for this
                    stream.synchronize()
                self.kept = None
                self.filled.set()
        self.release()

    def run(self, function: str, args: list[Any]) -> Any:
        """Make a view, and watch it."""
        kind = int if function == "aten::flatten" else list  # a number may tell a type of views
        if not all(isinstance(it, kind) for it in args[1:]) or len(args) < 2:
            return NotImplemented
        view = _VIEWS[function](*args)
        self.watch([view], has_memory=False)
        return view


def _gradient(of_loss: tuple[_Saved, torch.Tensor], dtype: torch.dtype) -> torch.Tensor:
    saved, gradient = of_loss
    return saved.gradient(gradient, dtype)


class _Upcast(torch.autograd.Function):
    """``Tensor.float``, whose backward pass makes the gradient that a loss has left to it."""

    @staticmethod
    def forward(ctx: Any, logits: torch.Tensor) -> torch.Tensor:
        ctx.set_materialize_grads(False)
        ctx.dtype, ctx.size = logits.dtype, logits.size()
        kept = guard_of(logits)
        guard = _FloatLogits(kept if isinstance(kept, _KeptLogits) else _KeptLogits(logits))
        ctx.float_logits, ctx.was_filled = weakref.ref(guard), guard.filled.is_set
        ctx.has_loss = False
        return _without_memory(logits.size(), logits.device, guard)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor | None) -> Any:
        if gradient is None:
            return None
        guard = guard_of(gradient)
        if isinstance(guard, _FloatLogits) and guard.kept is not None and guard.of_loss is not None:
            return _gradient(guard.of_loss, ctx.dtype).view(ctx.size)
        return gradient.to(ctx.dtype)


def _without_memory(size: torch.Size, device: torch.device, guard: Guard) -> torch.Tensor:
    """A contiguous tensor whose storage has no bytes, and has to be resized before a use."""
    nothing = torch.empty(0, dtype=torch.float32, device=device)
    made = reinterpret_tensor(nothing, size, torch.empty(size, device="meta").stride())
    # The guard lives as long as the tensor, and its views, which hold it.
    weakref.finalize(made, guard.release).atexit = False
    return made


def _upcast_of(logits: torch.Tensor) -> Any:
    """The node of a cast that logits without memory are from, all of them; None for others."""
    base = view_base(logits)
    whole = logits if base is None else base
    node: Any = whole.grad_fn
    is_cast = isinstance(node, BackwardCFunction) and forward_class(node) is _Upcast
    is_whole = whole.numel() == logits.numel()
    return node if is_cast and is_whole and not node.was_filled() else None


# ---------------------------------------------------------------------- the loss


class _SlicedCrossEntropy(torch.autograd.Function):
    """Cross entropy of logits by rows, as `_Saved` says."""

    @staticmethod
    def forward(
        ctx: Any,
        logits: torch.Tensor,
        target: torch.Tensor,
        saved: _Saved,
        node: Any,
        original: Callable[..., torch.Tensor],
    ) -> torch.Tensor:
        how = saved.how
        ignored = target == how.ignore_index
        index = target.masked_fill(ignored, 0).unsqueeze(1)
        picked = unfilled(index.shape, how.dtype, logits.device)
        for rows, known, _ in _Slices(saved.kept.logits, how):
            torch.gather(known, 1, index[rows], out=picked[rows])
        # One class is left of each row: the sum over rows is torch's own.
        loss, total_weight = _aten.nll_loss_forward(
            picked.to(how.summed_dtype),
            torch.zeros_like(target).masked_fill(ignored, _IGNORED),
            None,
            how.reduction,
            _IGNORED,
        )
        saved.have_target(target, total_weight)
        # What a backward pass frees, with the saved tensor that stands for the logits.
        ctx.saved = weakref.ref(saved)
        ctx.dtype, ctx.node, ctx.original = logits.dtype, node, original
        ctx.save_for_backward(logits)
        return loss

    @staticmethod
    def backward(ctx: Any, of_loss: torch.Tensor) -> Any:
        nothing = None, None, None, None
        saved = ctx.saved()
        again = torch.is_grad_enabled()
        if saved is None or again or _is_batched(of_loss):
            # torch's error of a second backward pass; or the gradient will be differentiated, and
            # sums of further gradients may have another order; or there are several at once.
            (logits,) = ctx.saved_tensors
            _fail(_DIFFERENTIATED if again else _BATCHED)
            how = saved.how
            with torch.enable_grad():
                loss = ctx.original(
                    logits.to(how.dtype), saved.target, None, how.reduction, how.ignore_index, 0.0
                )
            (gradient,) = torch.autograd.grad(loss, logits, of_loss, create_graph=again)
            return gradient, *nothing
        node = ctx.node
        is_left = node is not None and node.float_logits() is None and not node.was_filled()
        # The program may ask for the gradient of a float32 copy that it has still. In inference
        # mode a view would not hold what it is of.
        if is_left and not torch.is_inference_mode_enabled():
            guard = _FloatLogits(saved.kept, (saved, of_loss))
            made = _without_memory(saved.size, saved.kept.logits.device, guard)
            guard.watch([made], has_memory=False)
            return made, *nothing
        return saved.gradient(of_loss, ctx.dtype), *nothing


# ---------------------------------------------------------------------- what the program calls


def _may_act(logits: Any) -> bool:
    """Whether a tensor is of a forward pass that nothing but autograd records."""
    if type(logits) is not torch.Tensor or not (logits.requires_grad and logits.is_contiguous()):
        return False
    if not running_pass().is_training or function_modes() or dispatch_modes():
        return False
    hooks = innermost()
    return (
        (hooks is None or is_own(hooks[0]))  # a checkpoint may run this again
        and tracing_state() is None
        and not (logits.is_cuda and torch.cuda.is_current_stream_capturing())
    )


def _with_upcast(original: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    @wraps(original)
    def float(logits: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        if is_compiling() or args or kwargs or logits.dtype not in _LOW_PRECISION:
            return original(logits, *args, **kwargs)
        some = [it for it in tuple(_listeners) if it.knows(logits)]
        may_act = bool(some) and has_guard() and _may_act(logits)
        if not may_act or not any(it.wants(logits) for it in some):
            return original(logits)
        with Unguarded():
            made: torch.Tensor = _apply(_Upcast, logits)
        guard = made.grad_fn.float_logits()  # type: ignore[union-attr]
        guard.watch([made], has_memory=False)
        return made

    return float


def _with_slices(original: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """The operator that ``torch.nn.functional.cross_entropy`` calls, or slices."""

    @wraps(original)
    def cross_entropy(*args: Any, **kwargs: Any) -> torch.Tensor:
        some: list[SlicedLosses] = []
        loss = None
        if not is_compiling() and _listeners and not kwargs and len(args) == _ARGUMENTS:
            try:
                some = _listeners_of(args[0])
                loss = _sliced(original, some, *args) if some else None
            except Exception as error:  # also those of the program's arguments, which torch tells
                _fail(f"{type(error).__name__}: {error}")
        if loss is not None:
            return loss
        loss = original(*args, **kwargs)
        if some and (node := loss.grad_fn) is not None:
            node.register_prehook(_see_gradient)
        return loss

    register_scripted(cross_entropy, "aten::cross_entropy_loss")
    return cross_entropy


def _fail(why: str) -> None:
    """Go on with torch's own losses, where some are in slices."""
    for it in tuple(_listeners):
        if it.is_on:
            _LOG.warning("umem: losses are not computed in slices any more: %s", why)
            it.end()


def _see_gradient(_gradients: object) -> None:
    """Leave losses to torch whose gradients a program differentiates again."""
    if torch.is_grad_enabled():
        for it in tuple(_listeners):
            it.are_differentiated = True


def _listeners_of(logits: Any) -> list[SlicedLosses]:
    """Trainings that a loss of these logits may belong to."""
    if type(logits) is not torch.Tensor or not logits.requires_grad or logits.dim() < 2:
        return []
    found = [it for it in tuple(_listeners) if it.may_take(logits)]
    return found if found and running_pass().is_training else []


def _sliced(
    original: Callable[..., torch.Tensor],
    listeners: list[SlicedLosses],
    logits: torch.Tensor,
    target: torch.Tensor,
    weight: object,
    reduction: int,
    ignore_index: int,
    smoothing: float,
) -> torch.Tensor | None:
    """The loss in slices; None where torch has to compute it."""
    obstacle = _obstacle(logits, target, weight, reduction, smoothing)
    if any(it.are_differentiated for it in listeners):
        obstacle = obstacle or _DIFFERENTIATED
    for it in listeners:
        it.note(SeenLoss(logits.numel() // logits.size(1), logits.size(1), obstacle))
    if obstacle or not any(it.wants(logits) for it in listeners) or not _may_act(logits):
        return None
    if _depends_on_rows(logits.size(1), logits.dtype, logits.device):
        for it in listeners:
            it.note(SeenLoss(logits.numel() // logits.size(1), logits.size(1), _OTHER_KERNELS))
            it.end()
        return None
    how = _how(logits, reduction, ignore_index, min(it.slice_bytes for it in listeners))
    node = _upcast_of(logits)
    guard = None if node is None else node.float_logits()
    if guard is not None and not node.has_loss:
        kept, node.has_loss = guard.kept, True
    elif guard_of(logits) is not None:
        return None  # a second loss of the same logits
    else:
        kept, node = _KeptLogits(logits), None
    saved, dtype = _Saved(kept, logits.size(), how), logits.dtype
    # Autograd drops these functions, and what they hold, with the saved tensor.
    with Unguarded(), saved_tensors_hooks(lambda _: saved, lambda it: it.whole(dtype)):
        loss: torch.Tensor = _apply(_SlicedCrossEntropy, logits, target, saved, node, original)
    return loss


@cache
def _depends_on_rows(vocabulary: int, dtype: torch.dtype, device: torch.device) -> bool:
    """Whether torch's kernels have other bits for a few rows than for many, unlike those known."""
    numbers = torch.Generator(device).manual_seed(0)
    with torch.no_grad(), InferenceMode(False), Unguarded():
        logits = torch.randn(_TRIED_ROWS, vocabulary, generator=numbers, device=device).to(dtype)
        gradient = torch.randn(logits.shape, generator=numbers, device=device).to(dtype)
        known = torch.log_softmax(logits, 1, dtype)
        back = log_softmax_backward(gradient, known, 1, dtype)
        for count in (_ALIGNED_ROWS, _TRIED_ROWS // 2):
            few = torch.log_softmax(logits[:count], 1, dtype)
            few_back = log_softmax_backward(gradient[:count], few, 1, dtype)
            if not (torch.equal(few, known[:count]) and torch.equal(few_back, back[:count])):
                return True
    return False


def _obstacle(
    logits: torch.Tensor, target: torch.Tensor, weight: object, reduction: int, smoothing: float
) -> str:
    """Why torch has to compute a loss."""
    if not has_guard():
        return "umem has no guard of tensors for this torch"
    if type(target) is not torch.Tensor:
        return "its targets are of a class of their own"
    if logits.dim() != 2 or target.dim() != 1 or logits.size(0) != target.size(0):
        return "its logits are not one row for each target"
    if target.dtype != torch.int64 or target.device != logits.device:
        return "its targets are no int64 on the same device"
    if weight is not None or smoothing:
        return "it has weights of classes or smooths labels"
    if reduction not in (_MEAN, _SUM):
        return "it has no reduction"
    offset_bytes = logits.storage_offset() * logits.element_size()
    if not logits.is_contiguous() or offset_bytes % _ALIGNMENT:
        return "its logits are a part of other ones"
    return ""


def _how(logits: torch.Tensor, reduction: int, ignore_index: int, slice_bytes: int) -> _How:
    """How torch computes a loss: under autocast, sums are in float32, or the logits already."""
    device_type, dtype = logits.device.type, logits.dtype
    summed = dtype
    if torch.is_autocast_enabled(device_type) and dtype in _LOW_PRECISION:
        summed = torch.float32
        if has_kernel("aten::cross_entropy_loss", f"Autocast{device_type.upper()}"):
            dtype = torch.float32
    return _How(reduction, ignore_index, dtype, summed, slice_bytes)


def _is_batched(gradient: torch.Tensor) -> bool:
    """Whether a gradient stands for several, as of ``is_grads_batched``: it has no storage."""
    try:
        gradient.untyped_storage()
    except NotImplementedError:
        return True
    return False


def _apply(function: type[torch.autograd.Function], *args: Any) -> Any:
    return function.apply(*args)
