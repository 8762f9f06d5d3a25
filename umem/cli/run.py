"""`umem run`: run a program as Python would, with the allocator already swapped."""

from __future__ import annotations

import builtins
import importlib.util
import io
import logging
import os
import pkgutil
import runpy
import sys
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.machinery import BuiltinImporter, SourceFileLoader, SourcelessFileLoader
from pathlib import Path
from types import CodeType, ModuleType, TracebackType
from typing import Annotated, Any, Literal, NoReturn

import typer

import umem
from umem.cli import INTERRUPTED_STATUS, options, output
from umem.core.errors import UmemError
from umem.core.log import LOG_VARIABLE, is_first_rank, parse_log_level, show_log

__all__ = ["app", "launch"]

Kind = Literal["file", "module", "code"]
"""How a program is named: as for ``python``, ``python -m`` or ``python -c``."""

POLICY_VARIABLE = "UMEM_POLICY"
"""The environment variable that names the policy; `launch` sets it for child processes."""

# Frames of the launcher, which a program's traceback does not show.
_OWN_FILES = frozenset({__file__, runpy.__file__, "<frozen runpy>"})

app = output.make_app()

# The first word that is no option of umem starts the program's own command line.
_CONTEXT = {"allow_interspersed_args": False}


@app.command(context_settings=_CONTEXT, no_args_is_help=True)
def run(
    program: Annotated[
        str, typer.Argument(metavar="SCRIPT", help="A Python script; - reads it from a pipe.")
    ],
    arguments: Annotated[
        list[str] | None,
        typer.Argument(metavar="ARGS", help="The script's own arguments and options."),
    ] = None,
    policy: Annotated[
        str,
        typer.Option(
            envvar=POLICY_VARIABLE, help="A preset's name (see `umem policy list`) or a YAML file."
        ),
    ] = "sft",
    module: Annotated[
        bool, typer.Option("-m", help="SCRIPT is the name of a module, as in `python -m`.")
    ] = False,
    code: Annotated[
        bool, typer.Option("-c", help="SCRIPT is the program itself, as in `python -c`.")
    ] = False,
    fallback: Annotated[
        bool,
        typer.Option(
            "--fallback", help="Where umem cannot take over, warn and keep torch's own allocator."
        ),
    ] = False,
) -> None:
    """Run a Python program under umem, without changing it.

    Exits with the program's status. Options of umem stand before the script.

    A launcher of several processes needs the swap in each of them:
    `torchrun --nproc-per-node 2 --no-python umem run --policy sft train.py`.
    """
    if module and code:
        raise UmemError("-m and -c: give one of them")
    kind: Kind = "module" if module else "code" if code else "file"
    launch(program, arguments or (), kind=kind, policy=policy, fallback=fallback)


def launch(
    program: str,
    arguments: Sequence[str] = (),
    *,
    kind: Kind = "file",
    policy: str = "sft",
    fallback: bool = False,
) -> NoReturn:
    """Swap the allocator, run `program` as ``__main__`` in this process, and exit as it does.

    The program sees ``sys.argv``, ``sys.path[0]`` and the attributes of ``__main__`` as under
    ``python program``, so that `multiprocessing` can start workers that import it again; those
    workers keep torch's own allocator. ``UMEM_POLICY`` is set for child processes that run ``umem
    run`` themselves. An exception is reported by ``sys.excepthook``, from the program's first frame
    on, and ends in status 1; Ctrl-C in 130. The first rank of a host logs plans on standard error,
    as ``UMEM_LOG`` says, and at the end what was managed.

    `program` is the path of a script, which may be a pipe, or of a folder or archive with a
    ``__main__.py``, or ``-`` for standard input; by `kind` a module's name, or the program itself.
    Raises ``UmemError`` before it has started, if there is no such program or `umem.enable`
    refuses; otherwise ``SystemExit`` with its status.
    """
    # Before the program, which may change what can be imported, and after `--help`.
    from umem.cli.run_end import end_lines

    if kind == "module":
        folder = _module_folder(program)
    elif kind == "code" or program == "-":
        folder = ""
    else:
        folder = _script_folder(program)
    is_first = is_first_rank()
    if is_first:
        show_log("info")
    level = parse_log_level(os.environ.get(LOG_VARIABLE) or "info")
    has_end_lines = is_first and level <= logging.INFO
    with _own_warnings_in_one_line():
        umem.enable(policy, fallback=fallback)
    os.environ[POLICY_VARIABLE] = options.absolute_policy(policy)
    if not sys.flags.safe_path:
        # Until now, the folder of the `umem` command.
        sys.path[0] = folder
    sys.argv = [{"module": "-m", "code": "-c"}.get(kind, program), *arguments]
    # Typer's hook would show the program's errors in its style.
    sys.excepthook = sys.__excepthook__
    try:
        _execute(program, kind)
    except SystemExit:
        raise
    except BaseException as error:
        error.__traceback__ = _program_frames(error.__traceback__)
        sys.excepthook(type(error), error, error.__traceback__)
        status = INTERRUPTED_STATUS if isinstance(error, KeyboardInterrupt) else 1
        raise SystemExit(status) from None
    finally:
        if has_end_lines:
            for line in end_lines():
                print(f"umem: {line}", file=sys.stderr)
    raise SystemExit(0)


def _execute(program: str, kind: Kind) -> None:
    """Execute a program in a new ``__main__``, which stays, as threads and exit handlers expect."""
    main = ModuleType("__main__")
    names = vars(main)
    names["__builtins__"] = builtins
    names["__annotations__"] = {}
    sys.modules["__main__"] = main
    if kind == "module":
        _run_as_main(program)
        return
    # Like Python, without normalising: ./train.py is /folder/./train.py.
    path = os.path.join(os.getcwd(), program)
    if kind == "code":
        main.__loader__ = BuiltinImporter
        code = _compiled(program.encode("utf-8", "surrogateescape"), "<string>")
    elif program == "-":
        main.__loader__, main.__file__ = BuiltinImporter, "<stdin>"
        names["__cached__"] = None
        code = _compiled(sys.stdin.buffer.read(), "<stdin>")
    elif pkgutil.get_importer(path) is not None:  # a folder or an archive
        sys.path[: 0 if sys.flags.safe_path else 1] = [path]
        _run_as_main("__main__", alter_argv=False)
        return
    else:
        # Read once: a pipe has its bytes no second time.
        source = Path(path).read_bytes()
        compiled = pkgutil.read_code(io.BytesIO(source))
        loader = SourceFileLoader if compiled is None else SourcelessFileLoader
        main.__loader__, main.__file__ = loader("__main__", path), path
        names["__cached__"] = None
        code = compiled or _compiled(source, path)
    exec(code, names)


_run_as_main: Any = runpy._run_module_as_main  # type: ignore[attr-defined]
"""What ``python -m`` calls, and what ``python folder`` does."""


def _compiled(source: bytes, name: str) -> CodeType:
    return compile(source, name, "exec", dont_inherit=True)


@contextmanager
def _own_warnings_in_one_line() -> Iterator[None]:
    """Show what `umem.enable` warns of without this file's name and line, which help nobody."""
    caught: Sequence[warnings.WarningMessage] = ()
    try:
        with warnings.catch_warnings(record=True) as caught:
            yield
    finally:
        for it in caught:
            if it.filename == __file__:
                print(f"umem: {str(it.message).removeprefix('umem is ')}", file=sys.stderr)
            else:
                warnings.showwarning(it.message, it.category, it.filename, it.lineno)


def _script_folder(program: str) -> str:
    """The folder that Python puts first in ``sys.path`` for a script; checks the script."""
    path = Path(program)
    if not path.exists():
        raise UmemError(
            f"there is no script {program!r} in {Path.cwd()}: give the path of a Python file, "
            "or -m before the name of a module"
        )
    if path.is_dir() and not any((path / f"__main__.{it}").is_file() for it in ("py", "pyc")):
        raise UmemError(f"{program!r} is a folder without a __main__.py: give a Python file")
    if not os.access(path, os.R_OK):
        raise UmemError(f"{program!r} cannot be read: check its permissions")
    try:
        return os.path.dirname(os.path.realpath(program, strict=True))
    except OSError:  # a pipe of the shell, whose link leads to no file
        return os.path.dirname(os.path.join(os.path.dirname(program), os.readlink(program)))


def _module_folder(program: str) -> str:
    """The folder that Python puts first in ``sys.path`` for a module; checks its package.

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
        raise UmemError(
            f"there is no module {program!r}: install it, or run from the folder that holds it"
        )
    return folder


def _program_frames(traceback: TracebackType | None) -> TracebackType | None:
    while traceback is not None and traceback.tb_frame.f_code.co_filename in _OWN_FILES:
        traceback = traceback.tb_next
    return traceback
