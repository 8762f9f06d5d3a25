"""Provenance: the machine, the versions and the commit that a benchmark ran with."""

from __future__ import annotations

import os
import platform
import re
import subprocess
from collections.abc import Mapping
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

import umem
from umem import PolicyError, UmemError
from umem_bench.results import Header, Machine

__all__ = ["git_commit", "header", "managed_limit_bytes"]

_PACKAGES = (
    *("torch", "numpy", "numba", "transformers", "peft", "bitsandbytes", "torchao", "deepspeed"),
    *("rmm-cu13", "rmm-cu12"),
)
_CUDA_SUFFIX = re.compile(r"-cu\d+$")
"""RMM's wheels name their CUDA release; it is told apart, and both count as ``rmm``."""

_HASH_DIGITS = 12
_HASH = re.compile(r"[0-9a-f]{7,64}")


def header(benchmark: Any, settings: Any, *more_packages: str) -> Header:
    """Provenance of a run of a benchmark with these settings on this machine.

    Versions of `more_packages` are in it, too, if they are installed.
    """
    from umem.doctor import collect

    environment = collect()
    device = environment.devices[0] if environment.devices else None
    return Header(
        benchmark=benchmark,
        date=datetime.now(UTC).isoformat(timespec="seconds"),
        commit=git_commit(),
        umem=umem.__version__,
        machine=Machine(
            gpu=device.device_name if device else None,
            driver=device.driver_release if device else None,
            cuda=environment.torch.cuda if environment.torch else None,
            cpu=environment.host.cpu_model,
            cpu_count=environment.host.cpu_count,
            system=environment.host.system,
            python=platform.python_version(),
        ),
        packages={
            _CUDA_SUFFIX.sub("", name): version
            for name in (*_PACKAGES, *more_packages)
            if (version := _version(name))
        },
        settings=settings,
    )


def git_commit(environ: Mapping[str, str] = os.environ) -> str | None:
    """The commit of this checkout; outside of a checkout UMEM_COMMIT, or None."""
    if _git("ls-files", "--error-unmatch", Path(__file__).name) is None:
        told = environ.get("UMEM_COMMIT")
        if told is not None and _HASH.fullmatch(told) is None:
            raise UmemError(
                f"UMEM_COMMIT is {told!r}: give what `git rev-parse HEAD` prints, 7 to 64 "
                "hexadecimal digits"
            )
        return told and told[:_HASH_DIGITS]
    commit = _git("rev-parse", f"--short={_HASH_DIGITS}", "HEAD")
    changes = _git("status", "--porcelain", "--untracked-files=no")
    return f"{commit}, changed" if commit and changes else commit


def managed_limit_bytes(most_bytes: int, environ: Mapping[str, str] = os.environ) -> int:
    """Managed memory that a worker may hold: UMEM_MANAGED_LIMIT, and at most `most_bytes`."""
    from umem.core.units import parse_bytes

    try:
        return min(parse_bytes(environ.get("UMEM_MANAGED_LIMIT", most_bytes)), most_bytes)
    except ValueError as error:
        raise PolicyError(f"UMEM_MANAGED_LIMIT: {error}") from error


def _git(*arguments: str) -> str | None:
    folder = str(Path(__file__).resolve().parent)
    try:
        done = subprocess.run(
            ["git", "-C", folder, *arguments], capture_output=True, text=True, check=False
        )
    except FileNotFoundError:  # git is not installed
        return None
    return done.stdout.strip() if done.returncode == 0 else None


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None
