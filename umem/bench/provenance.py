"""Where a benchmark ran, and from which commit."""

from __future__ import annotations

import subprocess
from pathlib import Path

from umem import __version__
from umem.bench.results import Machine
from umem.doctor import collect

__all__ = ["current_machine", "git_commit"]


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


def git_commit() -> str | None:
    """The commit of the checkout that umem runs from, None where it is not in one."""
    package = Path(__file__).resolve().parent
    if _git(package, "ls-files", "--error-unmatch", Path(__file__).name) is None:
        return None
    commit = _git(package, "rev-parse", "--short=12", "HEAD")
    changes = _git(package, "status", "--porcelain", "--untracked-files=no")
    return f"{commit}, changed" if commit and changes else commit


def _git(folder: Path, *arguments: str) -> str | None:
    try:
        done = subprocess.run(
            ["git", "-C", str(folder), *arguments], capture_output=True, text=True, check=False
        )
    except FileNotFoundError:  # no git on this machine
        return None
    return done.stdout.strip() if done.returncode == 0 else None
