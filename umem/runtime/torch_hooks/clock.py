"""The clock of a model's passes: listeners hear, in one order, where they are.

A module has one pre-hook and one hook of umem at most, however many listeners hear of it, and for
whichever model.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from enum import IntEnum
from typing import Any, NamedTuple

from torch import nn

from umem.runtime.model_parts import tensors_in
from umem.runtime.torch_hooks.backward import nodes_of
from umem.runtime.torch_hooks.hidden import Undo
from umem.runtime.torch_hooks.modules import hook_calls
from umem.runtime.torch_hooks.passes import Pass, running_pass
from umem.torch_compat import compiled_call

__all__ = ["Hearing", "Listener", "Order"]


class Order(IntEnum):
    """The order in which the listeners of a moment hear of it."""

    STEP = 0
    """A step under a plan for managed memory begins, ahead of FSDP's hooks, which replace the
    optimizer's parameters by gathered ones."""
    STATE = 1
    """Updates of parameters are waited for."""
    WEIGHTS = 2
    """The model's weights are placed, from homes that are up to date then."""
    STAGED_WEIGHTS = 3
    """Weights of a block come, by that plan."""
    ACTIVATIONS = 4
    """What a block saves leaves."""
    TEMPORARY = 5
    """The memory that activations have left is used, and given back before they need it."""
    SHAPES = 6
    """What a call is like decides whether its step is recorded."""
    METER = 7
    """A block's time begins when its weights and its memory are there."""


class Listener:
    """Hears of a model's passes. By default nothing is done.

    An exception is this listener's alone: its `on_error` gets it, and the others hear all the same.
    An interrupt ends a call without a moment for its end.
    """

    def pass_begins(self, now: Pass, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """The model is called."""

    def block_begins(
        self, name: str, now: Pass, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        """A block is called: by the model, by a checkpoint or by the program itself."""

    def block_ends(self, name: str, now: Pass, output: Any, *, failed: bool) -> None:
        """A block's call returns, or an exception has ended it."""

    def block_reached(self, name: str) -> None:
        """The backward pass comes to the end of a block."""

    def pass_ends(self, now: Pass, output: Any, *, failed: bool) -> None:
        """The model's call returns, or an exception has ended it."""


class Hearing:
    """What one listener hears, until it is closed.

    Hooks hold the listener, and this holds neither: a listener that holds it goes with the modules.

    Parameters
    ----------
    listener
        The listener.
    order
        Its place among others. Of several with the same place, the first comes first.
    on_error
        Called with an exception of the listener; what it raises reaches the program.
    model
        The module whose calls are passes; None to hear of blocks only.
    blocks
        Modules by the listener's names of them.
    """

    def __init__(
        self,
        listener: Listener,
        order: Order,
        on_error: Callable[[Exception], None],
        model: nn.Module | None,
        blocks: Mapping[str, nn.Module] | None = None,
    ) -> None:
        entry = _Entry(listener, order, on_error)
        self._entry = weakref.ref(entry)
        self._model: weakref.ref[_Calls] | None = None
        self._blocks: list[weakref.ref[_Calls]] = []
        try:
            if model is not None:
                self._model = _Calls.hear(model, entry, None)
            self.set_blocks(blocks or {})
        except BaseException:
            self.close()
            raise

    def set_blocks(self, blocks: Mapping[str, nn.Module]) -> None:
        """Hear of these blocks, and of no others. Not without a model or any block before."""
        entry = self._entry()
        before, self._blocks = self._blocks, []
        for calls in _alive(before):
            calls.remove(entry, is_block=True)
        for name, module in blocks.items():
            if entry is not None:
                self._blocks.append(_Calls.hear(module, entry, name))

    def hook_anew(self) -> None:
        """Set the hooks of the model once more: the way that it is called has changed."""
        for calls in _alive([self._model]):
            calls.hook_anew()

    def hook_compiled(self) -> None:
        """Hook the blocks anew that were compiled in place since: hooks go around that."""
        for calls in _alive(self._blocks):
            if calls.is_compiled_since():
                calls.hook_anew()

    def close(self) -> None:
        """Hear nothing any more, at any moment."""
        entry = self._entry()
        if entry is not None:
            entry.is_on = False
        self.set_blocks({})
        for calls in _alive([self._model]):
            calls.remove(entry, is_block=False)


class _Entry:
    """A listener, as modules know it."""

    __slots__ = (
        *("__weakref__", "hears_backward", "hears_block_ends", "hears_pass_ends"),
        *("is_on", "listener", "on_error", "order"),
    )

    def __init__(
        self, listener: Listener, order: Order, on_error: Callable[[Exception], None]
    ) -> None:
        self.listener = listener
        self.order = order
        self.on_error = on_error
        kind = type(listener)
        self.hears_backward = kind.block_reached is not Listener.block_reached
        self.hears_pass_ends = kind.pass_ends is not Listener.pass_ends
        self.hears_block_ends = self.hears_backward or kind.block_ends is not Listener.block_ends
        self.is_on = True
        """Not any more for one that another listener has closed in the same moment."""


class _Heard(NamedTuple):
    entry: _Entry
    name: str | None
    """The name of the block; None where the module is the model."""

    @property
    def hears_ends(self) -> bool:
        entry = self.entry
        return entry.hears_pass_ends if self.name is None else entry.hears_block_ends


class _Calls:
    """The hooks on one module, and who hears of its calls."""

    def __init__(self, module: nn.Module) -> None:
        self._module = weakref.ref(module)
        self._heard: tuple[_Heard, ...] = ()
        """In their order. Replaced by a new one, never changed."""
        self._compiled: object = None
        """What the module was compiled to in place when it was hooked."""
        self._hears_ends = False
        """Whether there is a hook behind the call, too."""
        self._undo: list[Undo] = []

    @classmethod
    def hear(cls, module: nn.Module, entry: _Entry, name: str | None) -> weakref.ref[_Calls]:
        """Let a listener hear of a module's calls. The module's hooks hold the result."""
        reference = _known.get(module)
        calls = None if reference is None else reference()
        if calls is None:
            calls = cls(module)
            _known[module] = weakref.ref(calls)
        calls.add(entry, name)
        return weakref.ref(calls)

    def add(self, entry: _Entry, name: str | None) -> None:
        heard = (*self._heard, _Heard(entry, name))
        self._hear(sorted(heard, key=lambda it: it.entry.order))

    def remove(self, entry: _Entry | None, *, is_block: bool) -> None:
        self._hear(
            it for it in self._heard if it.entry is not entry or (it.name is not None) != is_block
        )

    def _hear(self, heard: Iterable[_Heard]) -> None:
        self._heard = tuple(heard)
        hears_ends = any(it.hears_ends for it in self._heard)
        if not self._undo or not self._heard or hears_ends != self._hears_ends:
            self._hears_ends = hears_ends
            self.hook_anew()

    def hook_anew(self) -> None:
        self._unhook()
        self._hook()

    def is_compiled_since(self) -> bool:
        module = self._module()
        return module is not None and compiled_call(module) is not self._compiled

    def _hook(self) -> None:
        module = self._module()
        if module is not None and self._heard:
            ends = self._ends if self._hears_ends else None
            # Ahead of the program's own hooks, which may use parameters.
            self._undo = hook_calls(module, self._begins, ends, place="first")
            self._compiled = compiled_call(module)

    def _unhook(self) -> None:
        while self._undo:
            self._undo.pop()()

    # ------------------------------------------------------------------ moments

    def _begins(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        now = running_pass()
        for entry, name in self._heard:
            if entry.is_on:
                try:
                    if name is None:
                        entry.listener.pass_begins(now, args, kwargs)
                    else:
                        entry.listener.block_begins(name, now, args, kwargs)
                except Exception as error:
                    entry.on_error(error)

    def _ends(self, output: Any, *, failed: bool) -> None:
        now = running_pass()
        hears_backward = False
        for entry, name in self._heard:
            if entry.is_on:
                try:
                    if name is None:
                        entry.listener.pass_ends(now, output, failed=failed)
                    else:
                        hears_backward |= entry.hears_backward
                        entry.listener.block_ends(name, now, output, failed=failed)
                except Exception as error:
                    entry.on_error(error)
        if hears_backward and now.is_training and not failed:
            for node in nodes_of(tensors_in(output)):
                node.register_prehook(self._reached)

    def _reached(self, _gradients: object) -> None:
        for entry, name in self._heard:
            if name is not None and entry.is_on and entry.hears_backward:
                try:
                    entry.listener.block_reached(name)
                except Exception as error:
                    entry.on_error(error)


def _alive(references: Iterable[weakref.ref[_Calls] | None]) -> Iterator[_Calls]:
    for reference in references:
        calls = None if reference is None else reference()
        if calls is not None:
            yield calls


_known: weakref.WeakKeyDictionary[nn.Module, weakref.ref[_Calls]] = weakref.WeakKeyDictionary()
"""Weak both ways: a module's hooks hold its calls."""
