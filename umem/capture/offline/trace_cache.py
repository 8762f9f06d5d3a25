"""Traces of known models, kept in the user's cache folder: recording one takes many seconds."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from importlib import metadata
from pathlib import Path

from umem._version import __version__
from umem.core.errors import TraceError
from umem.io.cache import cached_file, keep_newest, private_folder
from umem.trace import TRACE_FORMAT, Trace, load_trace, save_trace

__all__ = ["cache_trace", "cached_trace", "sources_digest"]

_MOST_TRACES = 64
"""Those of the largest models take under a megabyte each."""

_PACKAGE = Path(__file__).parents[2]
_RECORDING = ("capture", "trace", "core")

Arguments = Mapping[str, str | int]
"""Those of :func:`umem.capture.offline.model_trace` that say what is recorded."""


def cached_trace(arguments: Arguments) -> Trace | None:
    """Find the trace that :func:`cache_trace` kept; None if there is no valid one."""
    folder = private_folder("traces")
    path = folder and cached_file(folder, _name(arguments))
    if not path:
        return None
    try:
        trace = load_trace(path)
    except TraceError:  # damaged: it is recorded again, and replaced
        return None
    return trace if arguments.items() <= trace.metadata.items() else None


def cache_trace(trace: Trace, arguments: Arguments) -> None:
    """Keep the trace of a known model, readable by the user alone, if there is a place for it."""
    folder = private_folder("traces")
    if folder is None:
        return
    path = folder / _name(arguments)
    try:
        save_trace(trace, path)
        path.chmod(0o600)
    except (TraceError, OSError):  # a full disk: the next process records again
        return
    keep_newest(folder, _MOST_TRACES)


def _name(arguments: Arguments) -> str:
    """Name of a file: a hash of all that a recording depends on.

    Those are the arguments, the libraries that define the model and its operators, and umem's own
    sources, which change in a checkout while the version stays.
    """
    depends_on = {
        "format": TRACE_FORMAT,
        "arguments": dict(arguments),
        "umem": __version__,
        "sources": sources_digest(_RECORDING),
        **{name: _version(name) for name in ("torch", "transformers", "peft")},
    }
    return hashlib.sha256(json.dumps(depends_on, sort_keys=True).encode()).hexdigest() + ".npz"


def _version(package: str) -> str | None:
    """Version of a package, which is not imported: that alone would take seconds."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def sources_digest(rooms: Sequence[str]) -> str:
    """Hash of umem's own sources in some of its rooms, which change while the version stays."""
    digest = hashlib.sha256()
    for folder in rooms:
        for path in sorted(_PACKAGE.joinpath(folder).rglob("*.*")):
            if path.suffix in (".py", ".json"):  # known models are one file of JSON
                digest.update(path.read_bytes())
    return digest.hexdigest()
