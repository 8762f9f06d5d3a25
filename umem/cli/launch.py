"""Run a program as Python would, with the allocator already swapped."""

from __future__ import annotations

import importlib.util
import os
import runpy
import sys
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import NoReturn

import umem
from umem.core.errors import UmemError

__all__ = ["INTERRUPTED_STATUS", "POLICY_VARIABLE", "NoProgramError", "launch"]

POLICY_VARIABLE = "UMEM_POLICY"
"""The environment variable that names the policy; `launch` sets it for child processes."""

INTERRUPTED_STATUS = 130
"""Exit status after Ctrl-C, as a shell reports it: 128 + SIGINT."""

_POLICY_FILE_ENDINGS = (".yaml", ".yml")
# Frames of the launcher itself, which a program's traceback does not show.
_OWN_FILES = frozenset({__file__, runpy.__file__, "<frozen runpy>"})


class NoProgramError(UmemError):
    """There is no such script or module to run."""


def launch(
    program: str,
    arguments: Sequence[str] = (),
    *,
    module: bool = False,
    policy: str = "sft",
    fallback: bool = False,
) -> NoReturn:
    """Swap the allocator, run `program` as ``__main__`` in this process, and exit as it does.

    The program sees ``sys.argv``, ``sys.path[0]``, ``__file__`` and ``__spec__`` as under
    ``python program``, so that `multiprocessing` can start workers that import it again; those
    workers keep torch's own allocator. ``UMEM_POLICY`` is set for child processes that run
    ``umem run`` themselves. An exception is reported by ``sys.excepthook``, from the program's
    first frame on, and ends in status 1; Ctrl-C likewise, in status 130.

    Parameters
    ----------
    program
        The path of a script, or of a folder or archive with a ``__main__.py``; with `module` the
        name of a module, as for ``python -m``.
    arguments
        What the program finds in ``sys.argv[1:]``.
    module
        Whether `program` names a module.
    policy
        A preset's name or a policy file, for `umem.enable`.
    fallback
        Keep torch's own allocator, with a warning, where umem cannot take over.

    Raises
    ------
    NoProgramError
        There is no such script or module. Nothing has been swapped.
    UmemError
        `umem.enable` refused; the program has not been started.
    SystemExit
        Always, once the program has run: with its exit status.
    """
    folder = _module_folder(program) if module else _script_folder(program)
    umem.enable(policy, fallback=fallback)
    os.environ[POLICY_VARIABLE] = _absolute_policy(policy)
    if not sys.flags.safe_path:
        # What is there now is the folder of the `umem` command.
        sys.path[0] = folder
    sys.argv = [program, *arguments]
    # The command line's own hook would show the program's errors in its style.
    sys.excepthook = sys.__excepthook__
    try:
        if module:
            runpy.run_module(program, run_name="__main__", alter_sys=True)
        else:
            runpy.run_path(program, run_name="__main__")
    except SystemExit:
        raise
    except BaseException as error:
        error.__traceback__ = _program_frames(error.__traceback__)
        sys.excepthook(type(error), error, error.__traceback__)
        status = INTERRUPTED_STATUS if isinstance(error, KeyboardInterrupt) else 1
        raise SystemExit(status) from None
    raise SystemExit(0)


def _script_folder(program: str) -> str:
    """What Python puts first in ``sys.path`` for a script; checks that the script is there."""
    path = Path(program)
    if not path.exists():
        raise NoProgramError(
            f"there is no script {program!r} in {Path.cwd()}: give the path of a Python file, "
            "or -m before the name of a module"
        )
    if path.is_dir() and not (path / "__main__.py").is_file():
        raise NoProgramError(f"{program!r} is a folder without a __main__.py: give a Python file")
    if path.is_file() and not os.access(path, os.R_OK):
        raise NoProgramError(f"{program!r} cannot be read: check its permissions")
    return str(path.resolve().parent)


def _module_folder(program: str) -> str:
    """What Python puts first in ``sys.path`` for a module; checks that its package is there.

    Only the top-level package: looking further would import it, and that must wait for the swap.
    """
    folder = str(Path.cwd())
    package = program.partition(".")[0]
    sys.path.insert(0, folder)
    try:
        found = bool(package) and importlib.util.find_spec(package) is not None
    finally:
        sys.path.remove(folder)
    if not found:
        raise NoProgramError(
            f"there is no module {program!r}: install {package or 'one'!r}, or run from the folder "
            "that holds it"
        )
    return folder


def _absolute_policy(policy: str) -> str:
    """A policy as a child process finds it, whatever folder it starts in."""
    is_file = os.sep in policy or policy.endswith(_POLICY_FILE_ENDINGS)
    return str(Path(policy).resolve()) if is_file else policy


def _program_frames(traceback: TracebackType | None) -> TracebackType | None:
    while traceback is not None and traceback.tb_frame.f_code.co_filename in _OWN_FILES:
        traceback = traceback.tb_next
    return traceback
