"""Errors that come at any moment of a ``with`` block: memory that is refused, and Ctrl-C."""

from __future__ import annotations

import inspect
import signal
import sys
import time
import traceback
from abc import ABC, abstractmethod
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

import torch
from torch.utils import checkpoint
from torch.utils._python_dispatch import TorchDispatchMode

import umem

_UMEM = str(Path(umem.__file__).parent)
_autograd: Any = torch._C._autograd
_OPTIMIZERS = str(Path(torch.optim.__file__).parent)


def let_out(error: Exception) -> None:
    """Raise an error of umem's that would else be logged."""
    raise error


def came_in_update(error: BaseException) -> bool:
    """Whether an optimizer of torch's was updating parameters where an error came.

    It may have come in umem's code all the same: a gradient that umem holds is used there.
    """
    codes = (frame.f_code for frame, _ in traceback.walk_tb(error.__traceback__))
    return any(it.co_name == "step" and it.co_filename.startswith(_OPTIMIZERS) for it in codes)


def mend_torch_modes() -> None:
    """Leave grad mode, autocast and hooks of checkpoints as they are outside of all blocks.

    As without umem: a signal may have come within the begin or end of a block of torch's own, which
    then stays entered, for the tests behind this one too.
    """
    torch.set_grad_enabled(True)
    for _ in range(torch.autocast_increment_nesting()):
        torch.autocast_decrement_nesting()
    torch.clear_autocast_cache()
    torch.set_autocast_enabled("cpu", False)
    while (hooks := _autograd._top_saved_tensors_default_hooks(True)) and (
        hooks[0].__module__ == checkpoint.__name__
    ):
        _autograd._pop_saved_tensors_default_hooks()


class Fault(ABC):
    """Counts moments of a ``with`` block, and raises at one of them.

    Parameters
    ----------
    at
        Number of the moment.
    """

    error: type[BaseException]
    may_come_late = False
    """Whether it may come when all of a step is done, and the program does not know."""

    def __init__(self, at: int) -> None:
        self._at = at
        self.moments = 0
        self.came_in: list[str] = []
        """The calls that it has come in, the innermost first. Python may drop what it has raised
        there, as in a weak reference's callback."""

    def passes(self) -> None:
        """A moment."""
        self.moments += 1
        if self.moments - 1 == self._at:
            self._come("moment")

    def _come(self, unit: str) -> NoReturn:
        self.came_in = [
            f"{Path(it.filename).name}:{it.lineno} {it.name}"
            for it in reversed(traceback.extract_stack()[:-2])
        ]
        raise self.error(f"of {unit} {self._at}")

    @abstractmethod
    def __enter__(self) -> Fault: ...

    @abstractmethod
    def __exit__(self, *error: object) -> None: ...


class OutOfMemory(Fault):
    """Each operator that makes a tensor finds memory but one, whoever has called it."""

    error = torch.OutOfMemoryError

    def __enter__(self) -> Fault:
        fault = self

        class Mode(TorchDispatchMode):
            def __torch_dispatch__(
                self, func: Any, types: Any, args: Any = (), kwargs: Any = None
            ) -> Any:
                if any(it.alias_info is None for it in func._schema.returns):
                    fault.passes()
                return func(*args, **(kwargs or {}))

        mode: Any = Mode  # untyped in torch
        self._mode = mode()
        self._mode.__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        self._mode.__exit__(*error)


class Interrupt(Fault):
    """Ctrl-C where a function of umem begins or returns, as Python looks for signals there.

    It looks for none between lines without a call, nor behind ``__enter__``: not to enter a block
    whose ``__exit__`` would not be called.
    """

    error = KeyboardInterrupt
    may_come_late = True

    def __enter__(self) -> Fault:
        self._before = sys.gettrace()
        sys.settrace(self._called)
        return self

    def __exit__(self, *_: object) -> None:
        sys.settrace(self._before)

    def _called(self, frame: FrameType, _event: str, _value: Any) -> Callable[..., Any] | None:
        code = frame.f_code
        if not code.co_filename.startswith(_UMEM):
            return None
        # Where an object is dropped, Python only prints what its end raises.
        before = frame.f_back
        is_end = "__del__" in (code.co_name, before.f_code.co_name if before else "")
        if is_end or code.co_flags & inspect.CO_GENERATOR:
            return None
        frame.f_trace_lines = False
        self.passes()
        return self._returned

    def _returned(self, frame: FrameType, event: str, _value: Any) -> Callable[..., Any]:
        if event == "return" and frame.f_code.co_name != "__enter__":
            self.passes()
        return self._returned


class Signal(Fault):
    """Ctrl-C by a signal, which Python sees wherever it looks; a moment is a microsecond.

    It comes as the alarm of a timer, since another thread would have to wait for this one.
    """

    error = KeyboardInterrupt
    may_come_late = True
    _LONGEST_S = 3600.0

    def __enter__(self) -> Fault:
        self._before = signal.signal(signal.SIGALRM, self._came)
        self._began_s = time.monotonic()
        self._is_over = False
        self._timer = signal.setitimer(
            signal.ITIMER_REAL, min(max(self._at, 1) / 1e6, self._LONGEST_S)
        )
        return self

    def __exit__(self, *_: object) -> None:
        self._is_over = True
        signal.setitimer(signal.ITIMER_REAL, *self._timer)
        signal.signal(signal.SIGALRM, self._before)
        self.moments = round(1e6 * (time.monotonic() - self._began_s))

    def _came(self, *_: object) -> None:
        if not self._is_over:
            self._come("microsecond")


def interrupt_forward_passes(program: Any, x: Any, places: int = 1) -> int:
    """Interrupt the pass behind each step, so many places later each time, until one ends.

    Returns the place behind the last one.
    """
    number = 0
    while True:
        program.step()
        try:
            with Interrupt(number):
                program.model(x)
        except KeyboardInterrupt:
            number += places
        else:
            return number
