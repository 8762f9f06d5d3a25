"""Where a benchmark ran, and from which commit."""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Mapping
from pathlib import Path

from umem._version import __version__
from umem.core.errors import UmemError
from umem.doctor import collect
from umem_bench.results import Machine

__all__ = ["current_machine", "git_commit"]

_DIGITS = 12
_HASH = re.compile(r"[0-9a-f]{7,64}")


def current_machine() -> Machine:
    """What umem and the driver say of this machine; None for what is not there."""
    environment = collect()
    device = environment.devices[0] if environment.devices else None
    return Machine(
        gpu=device.device_name if device else None,
        driver=device.driver_release if device else None,
        cuda=environment.torch.cuda if environment.torch else None,
        torch=environment.torch.version if environment.torch else None,
        rmm=environment.packages["rmm"],
        umem=__version__,
        python=environment.python_version,
        system=environment.host.system,
        cpu=environment.host.cpu_model,
        cpu_count=environment.host.cpu_count,
    )


def git_commit(environ: Mapping[str, str] = os.environ) -> str | None:
    """The commit of the checkout that umem runs from; where it is in none, UMEM_COMMIT, or None.

    Raises
    ------
    UmemError
        If UMEM_COMMIT is asked, and is no commit's hash.
    """
    package = Path(__file__).resolve().parent
    if _git(package, "ls-files", "--error-unmatch", Path(__file__).name) is None:
        return _told_commit(environ)
    commit = _git(package, "rev-parse", f"--short={_DIGITS}", "HEAD")
    changes = _git(package, "status", "--porcelain", "--untracked-files=no")
    return f"{commit}, changed" if commit and changes else commit


def _told_commit(environ: Mapping[str, str]) -> str | None:
    told = environ.get("UMEM_COMMIT")
    if told is not None and _HASH.fullmatch(told) is None:
        raise UmemError(
            f"UMEM_COMMIT: {told!r} is no commit: give what `git rev-parse HEAD` prints"
        )
    return told and told[:_DIGITS]


def _git(folder: Path, *arguments: str) -> str | None:
    try:
        done = subprocess.run(
            ["git", "-C", str(folder), *arguments], capture_output=True, text=True, check=False
        )
    except FileNotFoundError:  # no git on this machine
        return None
    return done.stdout.strip() if done.returncode == 0 else None
