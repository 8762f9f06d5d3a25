"""The table of all small programs: each goes past a guard by the class of a tensor, or close to it.

They run stock and under umem, on a GPU or on the CPU's late lanes. Files are kinds of programs.
"""

from __future__ import annotations

import importlib

from small_trainings import PROGRAMS

__all__ = ["KINDS", "PROGRAMS"]

KINDS = ("loops", "scripts", "graphs", "arrays", "precision", "inference")
"""The files."""

for _kind in KINDS:
    importlib.import_module(_kind)
