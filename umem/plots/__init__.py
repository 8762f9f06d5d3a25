"""Pictures of a prediction: where tensors are over a step, what the link does, what it amounts to.

They need matplotlib, which the extra ``plots`` installs. Nothing here touches pyplot or its global
state, so pictures can be made beside a program's own.
"""

from __future__ import annotations

from umem.plots._figure import FORMATS, require_matplotlib, save
from umem.plots._link import link_figure
from umem.plots._residency import residency_figure
from umem.plots._shares import shares_figure

__all__ = [
    "FORMATS",
    "link_figure",
    "require_matplotlib",
    "residency_figure",
    "save",
    "shares_figure",
]
