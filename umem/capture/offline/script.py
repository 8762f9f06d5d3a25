"""Traces of a user's own training step, from a function in a Python file."""

from __future__ import annotations

import difflib
import importlib.util
import inspect
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from umem.core.errors import TraceError
from umem.trace import Trace

if TYPE_CHECKING:
    from umem.capture.offline.record import Progress

__all__ = ["DEFAULT_FUNCTION", "script_trace"]

DEFAULT_FUNCTION = "make_step"

_FORM = f"give a Python file and a function in it, such as train.py:{DEFAULT_FUNCTION}"


def script_trace(spec: str, *, progress: Progress | None = None) -> Trace:
    """Record one step of a training script.

    The file is imported as a module: it runs, but not what it keeps for ``__main__``. Modules
    beside it can be imported, as when it is run. Then :func:`record_step` records the step that its
    function makes.

    Parameters
    ----------
    spec
        Path of a Python file, a colon and the name of a function in it, of no arguments, that
        returns the step, as for :func:`record_step`. The colon and the name can be left out:
        ``make_step``.
    progress
        As for :func:`record_step`.

    Returns
    -------
    Trace
        Named after the file.

    Raises
    ------
    TraceError
        If there is no such file or function, if the file cannot be imported, or for what
        :func:`record_step` raises it for. The message names the file, and the line where there is
        one.
    """
    path, function = _parse(spec)
    # Before the recording, so that no tensor made on import is part of it.
    import torch

    from umem.capture.offline.record import explained, record_step

    name = path.stem if function == DEFAULT_FUNCTION else f"{path.stem}-{function}"
    with _importable_folder(path.resolve().parent), _module_of(path) as (module, load):
        with explained(str(path), "importing it"):
            load()
        return record_step(
            _function(module, path, function),
            name=name,
            source=f"recorded with torch {torch.__version__} from {path.name}:{function}",
            metadata={"script": path.name, "function": function},
            progress=progress,
        )


def _parse(spec: str) -> tuple[Path, str]:
    file, colon, function = spec.rpartition(":")
    if not colon:
        file, function = spec, DEFAULT_FUNCTION
    path = Path(file)
    if path.suffix != ".py" or not function.isidentifier():
        raise TraceError(f"{spec!r} is not a script and a function: {_FORM}")
    if not path.is_file():
        raise TraceError(f"{file}: no such file: {_FORM}")
    return path, function


@contextmanager
def _importable_folder(folder: Path) -> Iterator[None]:
    """Let modules in a folder be imported, as Python does for a script that is run."""
    sys.path.insert(0, str(folder))
    try:
        yield
    finally:
        # The script may have put others before it.
        if str(folder) in sys.path:
            sys.path.remove(str(folder))


@contextmanager
def _module_of(path: Path) -> Iterator[tuple[ModuleType, Callable[[], None]]]:
    """An empty module for a file, and what fills it; known to Python inside the block only.

    Its name is no other module's, and not ``__main__``.
    """
    name = f"_umem_script_{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    loader = spec.loader
    # Dataclasses and torch's own tools look a class's module up.
    sys.modules[name] = module
    try:
        yield module, lambda: loader.exec_module(module)
    finally:
        sys.modules.pop(name, None)


def _function(module: ModuleType, path: Path, name: str) -> Callable[[], Any]:
    function = getattr(module, name, None)
    if function is None:
        defined = [
            word
            for word, value in vars(module).items()
            if inspect.isfunction(value) and value.__module__ == module.__name__
        ]
        near = difflib.get_close_matches(name, defined, n=1)
        hint = f", did you mean {near[0]}?" if near else "."
        raise TraceError(
            f"{path}: there is no function {name}{hint} Define it to make the model and return a "
            "function of no arguments that runs one training step"
        )
    if not callable(function):
        raise TraceError(f"{path}: {name} is a {type(function).__name__}, not a function")
    try:
        inspect.signature(function).bind()
    except TypeError as error:
        raise TraceError(
            f"{path}: {name} must take no arguments ({error}): give them defaults, or wrap it"
        ) from None
    callable_function: Callable[[], Any] = function
    return callable_function
