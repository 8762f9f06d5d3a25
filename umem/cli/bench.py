"""`umem bench`: start the benchmarks, which are a package of their own beside umem."""

from __future__ import annotations

import importlib.util
import os
import sys
from importlib import import_module
from pathlib import Path

import typer

import umem
from umem.cli import output
from umem.core.errors import UmemError

__all__ = ["app", "find_benchmarks"]

app = output.make_app()

# Every word is the benchmarks' own, --help too.
_CONTEXT = {"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []}


@app.command(context_settings=_CONTEXT)
def bench(context: typer.Context) -> None:
    """Run the benchmarks: allocators, trainings and planners, each beside its alternatives.

    They are the package `umem_bench` in the folder `benchmarks` of a checkout.
    """
    find_benchmarks()
    import_module("umem_bench.commands").app(context.args, prog_name="umem bench")


def find_benchmarks() -> None:
    """Make the package of the benchmarks importable, here and in processes that this one starts.

    Raises ``UmemError`` where umem is neither in a checkout nor has the benchmarks beside it.
    """
    if importlib.util.find_spec("umem_bench") is None:
        folder = Path(umem.__file__).resolve().parents[1] / "benchmarks"
        if not (folder / "umem_bench").is_dir():
            raise UmemError(
                "the benchmarks are not part of the wheel: run this command in a checkout of "
                "umem's repository, or install its folder `benchmarks` with pip"
            )
        sys.path.insert(0, str(folder))
        # For the processes that it starts.
        paths = [str(folder), os.environ.get("PYTHONPATH", "")]
        os.environ["PYTHONPATH"] = os.pathsep.join(path for path in paths if path)
