"""`umem run`: a program under umem, its source untouched."""

from __future__ import annotations

from typing import Annotated

import typer

__all__ = ["register"]

_CONTEXT = {
    # The first word that is no option of ours starts the program's own command line.
    "allow_interspersed_args": False,
}


def register(main: typer.Typer) -> None:
    """Add `run` to the commands of `main`."""
    main.command("run", context_settings=_CONTEXT, no_args_is_help=True)(_run)


def _run(
    program: Annotated[str, typer.Argument(metavar="SCRIPT", help="A Python script.")],
    arguments: Annotated[
        list[str] | None,
        typer.Argument(metavar="ARGS", help="The script's own arguments and options."),
    ] = None,
    policy: Annotated[
        str,
        typer.Option(
            envvar="UMEM_POLICY", help="A preset's name (see `umem policy list`) or a YAML file."
        ),
    ] = "sft",
    module: Annotated[
        bool, typer.Option("-m", help="SCRIPT is the name of a module, as in `python -m`.")
    ] = False,
    fallback: Annotated[
        bool,
        typer.Option(
            "--fallback", help="Where umem cannot take over, warn and keep torch's own allocator."
        ),
    ] = False,
) -> None:
    """Run a Python program under umem, without changing it.

    Exits as the program does. Options of umem stand before the script.

    A launcher of several processes needs the swap in each of them:
    `torchrun --nproc-per-node 2 --no-python umem run --policy sft train.py`.
    """
    from umem.cli.launch import launch

    launch(program, arguments or (), module=module, policy=policy, fallback=fallback)
