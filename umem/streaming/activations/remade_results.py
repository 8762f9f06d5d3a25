"""Results of cheap modules, made again in the backward pass in place of being kept.

What a norm or an activation function returns is saved by what uses it, such as a convolution, and
is half of what many nets save. Its own argument is saved, too: so the result can be made again when
it is needed, in the time that its bytes take. Cheap are modules without others in them, without
matrices, and with one argument. A call proves one, as blocks are (`repeatable`): it runs again on
what it was given, without a change of all that it can reach, and its result has the same bits. In
the same pass whatever autograd saves of the result is compared, too.
"""

from __future__ import annotations

import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import nn

from umem.offloading.store import ActivationStore, SavedHandle
from umem.runtime.torch_hooks.clock import Hearing, Listener, Order
from umem.runtime.torch_hooks.passes import Pass
from umem.runtime.torch_hooks.saved_tensors import is_any_lent, is_lent
from umem.streaming.activations.buffer_values import have_equal_bits
from umem.streaming.activations.call_states import CallState
from umem.streaming.activations.known_functions import BATCH_NORMS, known_function
from umem.streaming.activations.random_states import RandomStates
from umem.streaming.activations.reachable import Reachable
from umem.streaming.activations.repeatable import call_signature
from umem.torch_compat import is_distributed, storage_address, version_counter

__all__ = ["RemadeResults"]


class _SecondCall:
    """A module's forward function, with all that decides what it does as it is now."""

    def __init__(self, module: nn.Module, x: torch.Tensor) -> None:
        self._function: Callable[[torch.Tensor], torch.Tensor] = module.forward
        self._state, self._random = CallState(module, but=[*module.buffers()]), RandomStates([x])

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        with self._state.put_back(), self._random.put_back():
            return self._function(x)


class _Call:
    """A call of a cheap module on one argument, and how to fill another storage with its result."""

    storage: weakref.ref[torch.UntypedStorage]
    """That of the result."""
    result_version: int
    find_argument: Callable[[], torch.UntypedStorage]
    """Finds the contents of the argument's storage."""

    def __init__(
        self, name: str, module: nn.Module, x: torch.Tensor, source: _Call | None, stream: object
    ) -> None:
        self.name, self.source, self.stream = name, source, stream
        self.before: tuple[torch.Tensor, object] | None = None
        """A copy of the argument and the state then, where the call is to prove the module."""
        self.is_tried = False
        """Whether it was to: what is saved of the result stays, and is compared."""
        self.saved: list[SavedHandle] = []
        self.key, self.version = storage_address(x), version_counter(x)
        self._dtype, self._layout = x.dtype, (x.storage_offset(), x.size(), x.stride())
        self._kind = kind = x.device.type
        self._autocast = torch.get_autocast_dtype(kind), torch.is_autocast_enabled(kind)
        self._function = known_function(module) or _SecondCall(module, x)
        self._made: torch.UntypedStorage | None = None

    def ends(self, output: torch.Tensor, store: ActivationStore, large_bytes: int) -> bool:
        """Note the result; whether it is one that can be made again.

        What the call itself has saved of its argument, autograd checks before the result is used. A
        large argument that is made again, too, is so for each use: it would be on the device beside
        the result and what is computed from that.
        """
        is_in_place = storage_address(output) == self.key
        saved = (it for it in self.saved if it.is_of(self.key, self.version))
        argument = None if is_in_place else next(saved, None)
        if self.source is not None:
            self.find_argument = self.source.make
            if argument is not None:
                is_large = output.untyped_storage().nbytes() >= large_bytes
                self.find_argument = self.source.lend if is_large else self.source.find
        elif argument is not None:
            self.find_argument = partial(store.storage_of, argument)
        else:
            return False
        self.storage = weakref.ref(output.untyped_storage())
        self.result_version = version_counter(output)
        self.saved, self.source = [], None
        return not is_in_place or self.result_version != self.version  # and no view

    def again(self, x: torch.Tensor) -> torch.Tensor:
        """Call the module's function once more."""
        is_as_noted = not (self._autocast[1] or torch.is_autocast_enabled(self._kind))
        if is_as_noted and not torch.is_grad_enabled():  # as in most backward passes
            return self._function(x)
        with torch.no_grad(), torch.autocast(self._kind, *self._autocast, cache_enabled=False):
            return self._function(x)

    def chain(self) -> Iterator[_Call]:
        """The calls that are still to make it: this one, that of its argument, and so on."""
        call: Any = self
        while isinstance(call, _Call) and call._made is None:
            yield call
            call = getattr(call.find_argument, "__self__", None)

    def make(self) -> torch.UntypedStorage:
        """The result in new memory, which is the caller's."""
        storage = self.find_argument()
        x = torch.empty(0, dtype=self._dtype, device=storage.device)
        return self.again(x.set_(storage, *self._layout)).untyped_storage()

    def lend(self) -> torch.UntypedStorage:
        """The result for one use, which does not change it."""
        return self.make() if self._made is None else self._made

    def find(self) -> torch.UntypedStorage:
        """The result in memory that all users share, for as long as one is to come."""
        if self._made is None:
            self._made = self.make()
        return self._made


class _Running(threading.local):
    call: _Call | None = None


class RemadeResults(Listener):
    """Has results of a model's cheap modules made again, from `begin` to `end`.

    Parameters
    ----------
    model
        The module that the training loop calls, of which no part is compiled.
    store
        Has what autograd saves.
    on_error
        Called with an exception of a hook, which does not reach the training.
    """

    def __init__(
        self, model: nn.Module, store: ActivationStore, on_error: Callable[[Exception], None]
    ) -> None:
        self.has_tried = False
        """Whether modules were proved in this step, which took time."""
        self._model, self._store, self._on_error = weakref.ref(model), store, on_error
        self._signatures: dict[str, object] = {}
        """By module that was tried, how it was called; None for one that is not made again."""
        self._results: dict[int, _Call] = {}
        """By the address of the result's storage, for the present pass."""
        self._to_come: weakref.WeakSet[_Call] = weakref.WeakSet()
        """Calls whose results autograd may ask for."""
        self._may_begin = True
        self._large_bytes = sys.maxsize
        self._running = _Running()
        self._modules: weakref.WeakValueDictionary[str, nn.Module] = weakref.WeakValueDictionary()
        self._hearing: Hearing | None = None

    @property
    def is_on(self) -> bool:
        """Whether results are made again."""
        return self._hearing is not None

    def begin(self, large_bytes: int = sys.maxsize) -> bool:
        """Begin, with the next pass; returns whether anything may come of it.

        Parameters
        ----------
        large_bytes
            A result of which other results are made is kept for all uses only if it takes less.
        """
        self._large_bytes = large_bytes
        model = self._model()
        if self.is_on or not self._may_begin or model is None or is_distributed():
            return False
        self._modules.update({n: it for n, it in model.named_modules() if _is_cheap(it)})
        if self._modules:
            modules = dict(self._modules)
            self._hearing = Hearing(self, Order.ACTIVATIONS, self._on_error, model, modules)
            self._store.on_save = self._saved
        return bool(self._modules)

    def end(self) -> None:
        """Keep results again; graphs that are alive keep working."""
        if self._hearing is not None:
            self._hearing.close()
        self._hearing = self._store.on_save = None
        self._results.clear()

    def end_for_good(self) -> None:
        """End, and never begin again."""
        self._may_begin = False
        self.end()

    def make_now(self) -> None:
        """Make all results that autograd may ask for: weights are about to change."""
        for call in list(self._to_come):
            call.find()

    def make_now_by(self, parameter: torch.Tensor) -> None:
        """Make those that are still to be made with a parameter: it may be about to change."""
        for call in list(self._to_come):
            if any(self._has(it.name, parameter) for it in call.chain()):
                call.find()

    def _has(self, name: str, parameter: torch.Tensor) -> bool:
        module = self._modules.get(name)
        return module is not None and any(it is parameter for it in module.parameters())

    def pass_begins(self, now: Pass, args: object, kwargs: object) -> None:
        """Forget what an interrupt has left."""
        if now.is_forward:
            self._results.clear()

    def pass_ends(self, now: Pass, output: object, *, failed: bool) -> None:
        """Hold nothing that the graph does not."""
        if now.is_forward:
            self._results.clear()

    def block_begins(
        self, name: str, now: Pass, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        """A cheap module is called."""
        self._running.call = None
        is_one = not kwargs and len(args) == 1 and type(args[0]) is torch.Tensor
        is_new, known = name not in self._signatures, self._signatures.get(name)
        if not (now.is_training and is_one and (is_new or known)):
            return
        module, x = self._modules[name], args[0]
        signature = call_signature(module)
        if signature is None or not (is_new or known == signature):
            return
        # Parameters may be away in the backward pass.
        if is_any_lent() and any(map(is_lent, module.parameters())):
            return
        stream = self._store.current_stream()
        source = self._find(storage_address(x), version_counter(x), stream)
        call = _Call(name, module, x, source, stream)
        if is_new:
            self._signatures[name], self.has_tried = None, True
            call.before, call.is_tried = (x.detach().clone(), _state(module, x)), True
        self._running.call = call

    def block_ends(self, name: str, now: Pass, output: Any, *, failed: bool) -> None:
        """Note what it has made, and have what it has saved of that made again."""
        call, self._running.call = self._running.call, None
        if call is None or failed or type(output) is not torch.Tensor:
            return
        before, call.before = call.before, None
        if before is not None:
            module = self._modules[name]
            if not _is_repeated(module, call, *before, output):
                return
            self._signatures[name] = call_signature(module)
        saved = call.saved
        if call.ends(output, self._store, self._large_bytes):
            self._results[key := storage_address(output)] = call
            for handle in saved:
                if handle.is_of(key, call.result_version):
                    self._remake(handle, call, output)

    def _find(self, key: int, version: int, stream: object) -> _Call | None:
        """What has made, for work of a stream, the contents that a storage has at a version."""
        found = self._results.get(key)
        if found is None or found.storage() is None:
            return None
        return found if (found.result_version, found.stream) == (version, stream) else None

    def _saved(self, handle: SavedHandle, tensor: torch.Tensor) -> None:
        if self._running.call is not None:
            self._running.call.saved.append(handle)
        call = self._find(handle.key, handle.version, handle.group.stream)
        if call is not None:
            self._remake(handle, call, tensor)

    def _remake(self, handle: SavedHandle, call: _Call, tensor: torch.Tensor) -> None:
        if not call.is_tried:
            handle.remake_by(call.find)
            self._to_come.add(call)
        elif not have_equal_bits(handle.rebuild(call.make()), tensor):
            self._signatures[call.name] = None  # something changes it past autograd


def _is_cheap(module: nn.Module) -> bool:
    """Whether what a module computes takes about as long as to read and to write it."""
    # One with buffers may change them: only BatchNorm's are known.
    has_buffers = any(True for _ in module.buffers()) and type(module) not in BATCH_NORMS
    has_matrices = any(it.dim() > 1 for it in module.parameters())
    return not (has_buffers or has_matrices or any(True for _ in module.children()))


def _state(module: nn.Module, x: torch.Tensor) -> object:
    return RandomStates([x]), Reachable([module], module.buffers())


def _is_repeated(
    module: nn.Module, call: _Call, x: torch.Tensor, before: Any, output: torch.Tensor
) -> bool:
    """Whether a call has changed nothing but its argument, and another one is the same."""
    if _state(module, x) != before:
        return False
    other = call.again(x)
    if _state(module, x) != before or type(other) is not torch.Tensor:
        return False
    layouts = {(it.dtype, it.storage_offset(), it.size(), it.stride()) for it in (output, other)}
    sizes = {it.untyped_storage().nbytes() for it in (output, other)}
    return len(layouts) == len(sizes) == 1 and have_equal_bits(other, output)
