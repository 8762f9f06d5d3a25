"""The engine of managed memory: a recorded step, planned, and each page moved ahead of its use.

`plan/` makes a schedule of hints from a trace, a machine and a policy, `simulate/` predicts what it
costs, and `run/` carries it out in every later step.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from umem.core.lazy_names import lazy_names

if TYPE_CHECKING:
    from umem.pages.run.manager import Manager
    from umem.pages.run.status import ManagerState, ManagerStatus

__all__ = ["Manager", "ManagerState", "ManagerStatus"]

__getattr__ = lazy_names(
    __name__, {"run.manager": "Manager", "run.status": "ManagerState ManagerStatus"}
)
