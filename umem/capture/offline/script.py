"""Traces of a user's own training step, from a function in a Python file."""

from __future__ import annotations

import importlib.util
import inspect
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, cast

from umem.core.arguments import check_argument
from umem.core.errors import TraceError
from umem.io.problems import did_you_mean
from umem.trace import Trace

if TYPE_CHECKING:
    from umem.capture.offline.record import Progress

__all__ = ["script_trace"]

DEFAULT_FUNCTION = "make_step"

_FORM = f"give a Python file and a function in it, such as train.py:{DEFAULT_FUNCTION}"


def script_trace(spec: str, *, progress: Progress | None = None) -> Trace:
    """Record one step of a training script with :func:`record_step`.

    The file is imported as a module, so its part for ``__main__`` does not run. It can import the
    modules beside it, as when it is run.

    Parameters
    ----------
    spec
        Path of a Python file, a colon and the name of a function in it that makes the step, as for
        :func:`record_step`. Without a colon and a name: ``make_step``.
    progress
        As for :func:`record_step`.

    Returns
    -------
    Trace
        Named after the file.

    Raises
    ------
    TraceError
        If there is no such file or function, if the file cannot be imported, or as for
        :func:`record_step`. The message names the file, and the line if there is one.
    """
    check_argument("spec", spec, str, _FORM)
    path, function = _parse(spec)
    # Before the recording, which would see the tensors that are made on import.
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
    """Make the modules in a folder importable, as Python does when it runs a script there."""
    sys.path.insert(0, str(folder))
    try:
        yield
    finally:
        # The script may have put other folders before it.
        if str(folder) in sys.path:
            sys.path.remove(str(folder))


@contextmanager
def _module_of(path: Path) -> Iterator[tuple[ModuleType, Callable[[], None]]]:
    """An empty module for a file, and a function that runs the file in it.

    Python knows the module inside the block only, by a name that is not ``__main__``.
    """
    name = f"_umem_script_{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    loader = spec.loader
    # Dataclasses and torch look up the module of a class.
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
        hint = did_you_mean(name, defined) or "."
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
    return cast(Callable[[], Any], function)
