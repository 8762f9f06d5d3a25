"""`umem demo`: start the demonstration, which is among the examples."""

from __future__ import annotations

import sys
from importlib import import_module
from pathlib import Path

import typer

import umem
from umem.cli import output
from umem.core.errors import UnsupportedError

__all__ = ["app", "examples_folder"]


app = output.make_app()


@app.command()
def demo() -> None:
    """Fine-tune a small Llama under umem on the GPU; without one, show what umem does.

    Without a GPU: the doctor's findings; whether Llama-2-7B fits a GPU with 80 GB, and a predicted
    step of its training there.
    """
    sys.path.insert(0, str(examples_folder()))
    raise typer.Exit(import_module("demo").main())


def examples_folder() -> Path:
    """Folder of the examples: inside the installed package, else beside it in a checkout.

    Raises ``UnsupportedError`` if neither exists.
    """
    package = Path(umem.__file__).parent
    for folder in (package / "examples", package.parent / "examples"):
        if (folder / "demo.py").is_file():
            return folder
    raise UnsupportedError(f"the examples are missing beside {package}: reinstall umem")
