"""The start of the command ``umem``, which is ``python -m umem`` too."""

from __future__ import annotations

import sys

__all__ = ["main"]


def main() -> None:
    """Run the command; Ctrl-C ends it in one line from here on, also while it is imported."""
    try:
        from umem.cli import main as run

        run()
    except KeyboardInterrupt:
        print("umem: interrupted", file=sys.stderr)
        sys.exit(130)  # as a shell reports it: 128 + SIGINT


if __name__ == "__main__":
    main()
