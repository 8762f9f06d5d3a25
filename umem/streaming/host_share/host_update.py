"""Updates of an optimizer's state where it is at home, by the host's cores."""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch.optim.optimizer import Optimizer

from umem.hardware.capabilities import detect
from umem.hardware.host_share import local_ranks
from umem.runtime.native_library import native
from umem.streaming.host_share.forms import (
    Form,
    Hyperparameters,
    Powers,
    StepKind,
    constants,
    kind_of,
)
from umem.streaming.host_share.proof import (
    DeviceOptimizer,
    OptimizerDevice,
    prove,
    without_parameters,
)

__all__ = ["HostSpan", "HostUpdate", "near_cpus"]

_LOG = logging.getLogger("umem")


class HostSpan(NamedTuple):
    """Elements of one parameter, at home: addresses of host memory, and how many there are.

    All are of the parameter's type. `gradient` is read, and written if a ``GradScaler`` has scaled
    it. `second` is 0 for SGD.
    """

    weight: int
    gradient: int
    first: int
    second: int
    elements: int


class HostUpdate:
    """Updates with the bits of an optimizer's own kernels on a device.

    Parameters
    ----------
    optimizer
        The optimizer; :meth:`for_optimizer` also says whether there is a form for it.
    device
        Updates elements by the optimizer's own code, for proofs.
    threads
        How many update.
    cpus
        Those they run on.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        device: OptimizerDevice,
        threads: int,
        cpus: Sequence[int],
    ) -> None:
        self._optimizer = without_parameters(optimizer)
        self._device = device
        self._workers = native().HostWorkers(threads, list(cpus))
        self._powers = Powers(device.powers)
        self._forms: dict[StepKind, Form | None] = {}
        self._queue = ThreadPoolExecutor(1, thread_name_prefix="umem-host-update")

    @classmethod
    def for_optimizer(
        cls,
        optimizer: Optimizer,
        device: torch.device | OptimizerDevice,
        threads: int | None = None,
    ) -> HostUpdate | None:
        """Prove the forms of all groups; None where one has none.

        Waits for the device for about a tenth of a second. A step that comes later may be of
        another kind: ask :meth:`covers`.

        Parameters
        ----------
        optimizer
            Its hyperparameters count as they are now.
        device
            Where its kernels run.
        threads
            As many as this process has CPUs near the device, but one, where it is None.
        """
        node = None
        if isinstance(device, torch.device):
            if device.type == "cuda":
                node = detect(device.index or 0).host_numa_node
            device = DeviceOptimizer(optimizer, device)
        cpus = near_cpus(node)
        if threads is None:
            threads = max(1, len(cpus) // local_ranks()[0] - 1)
        found = cls(optimizer, device, threads, cpus)
        if all(found.covers(*it) for it in _groups_of(optimizer)):
            return found
        found.close()
        return None

    def covers(self, settings: Hyperparameters, dtype: torch.dtype) -> bool:
        """Whether there is a proved form; the first question about a kind of step proves it."""
        return self._form(kind_of(self._optimizer, settings, dtype), settings) is not None

    def _form(self, kind: StepKind | None, settings: Hyperparameters) -> Form | None:
        if kind is None:
            return None
        if kind not in self._forms:
            proof = prove(self._device, self._workers, kind, settings)
            if proof.form is None:
                _LOG.info("updates on the host: no form has the device's bits\n%s", proof.table())
            self._forms[kind] = proof.form
        return self._forms[kind]

    def update(
        self,
        spans: Sequence[HostSpan],
        settings: Hyperparameters | Callable[[], Hyperparameters],
        dtype: torch.dtype,
    ) -> Future[None]:
        """Queue an update; updates run one after the other.

        Parameters
        ----------
        spans
            They overlap nowhere, and nothing else uses them until the update has ended.
        settings
            Those of the spans' group; later changes of the group must not reach them. A function is
            called ahead of the update, in the thread that waits for it: it may first wait for
            copies, and for numbers that the device computes.
        dtype
            The type of all spans' elements.

        Returns
        -------
        Future
            Ends with the update. Raises ``ValueError`` where :meth:`covers` is false: then
            nothing has changed.
        """
        return self._queue.submit(self._run, spans, settings, dtype)

    def _run(
        self,
        spans: Sequence[HostSpan],
        given: Hyperparameters | Callable[[], Hyperparameters],
        dtype: torch.dtype,
    ) -> None:
        settings = given() if callable(given) else given
        kind = kind_of(self._optimizer, settings, dtype)
        form = self._form(kind, settings)
        if kind is None or form is None:
            raise ValueError(f"no form of {type(self._optimizer).__name__} has the device's bits")
        if settings.found_inf:
            return
        numbers = native().HostConstants(**constants(kind, settings, self._powers))
        self._workers.update(form.native(), numbers, kind.is_bfloat16, spans)

    def close(self) -> None:
        """End the threads, behind what is queued."""
        self._queue.shutdown()


def _groups_of(optimizer: Any) -> Iterator[tuple[Hyperparameters, torch.dtype]]:
    for group in optimizer.param_groups:
        for dtype in dict.fromkeys(it.dtype for it in group["params"]):
            yield Hyperparameters(group, 1), dtype


def near_cpus(node: int | None, root: Path = Path("/sys/devices/system/node")) -> list[int]:
    """List CPUs of a NUMA node that this process may use; all it may use if that is unknown."""
    own = os.sched_getaffinity(0)
    try:
        listed = (root / f"node{node}" / "cpulist").read_text()
    except OSError:
        return sorted(own)
    near: set[int] = set()
    for first, last in re.findall(r"(\d+)(?:-(\d+))?", listed):
        near.update(range(int(first), int(last or first) + 1))
    return sorted(near & own or own)
