"""The start of the command ``umem``, which is ``python -m umem`` too."""

from __future__ import annotations

import sys
from typing import NoReturn

__all__ = ["main"]


def main() -> None:
    """Run the command; Ctrl-C ends it in one line from here on, also while it is imported."""
    try:
        from umem.cli import main as run

        run()
    except KeyboardInterrupt:
        _end_interrupted()
    except RuntimeError as error:
        # What Python 3.11 raises where the signal comes while an attribute of a class is named.
        if not isinstance(error.__cause__, KeyboardInterrupt):
            raise
        _end_interrupted()


def _end_interrupted() -> NoReturn:
    print("umem: interrupted", file=sys.stderr)
    sys.exit(130)  # as a shell reports it: 128 + SIGINT


if __name__ == "__main__":
    main()
