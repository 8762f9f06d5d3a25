"""From a policy's rules to how each tensor is held, and which tensors the planner may move."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from umem.core.classes import TensorClass
from umem.core.errors import PlanError
from umem.core.schedule import ResidencyMode
from umem.hardware import Hardware
from umem.policy import ClassRule, ResolvedPolicy
from umem.trace import Trace, written_tensors

__all__ = ["MECHANISMS", "TensorRules", "apply_policy", "open_classes"]

MECHANISMS = ("migrate", "copy", "map")
"""What the planner chooses from for a class whose mechanism is left to it."""


@dataclass(frozen=True, eq=False)
class TensorRules:
    """How the tensors of a trace are held.

    Parameters
    ----------
    residency : uint8[T]
        :class:`ResidencyMode`.
    movable : bool[T]
        The planner may send the tensor away by hint.
    copied : bool[T]
        By explicit copies and not by page migration.
    kept_copy : bool[T]
        A copy stays on the host, so that what was not written since leaves without moving.
    first : bool[T]
        To be sent away before all others.
    """

    residency: npt.NDArray[np.uint8]
    movable: npt.NDArray[np.bool_]
    copied: npt.NDArray[np.bool_]
    kept_copy: npt.NDArray[np.bool_]
    first: npt.NDArray[np.bool_]


def open_classes(policy: ResolvedPolicy) -> tuple[TensorClass, ...]:
    """Classes that live in managed memory and whose mechanism the policy leaves to the planner."""
    return tuple(
        tensor_class
        for tensor_class, rule in zip(TensorClass, policy.rules, strict=True)
        if rule.kind == "managed"
        and rule.mechanism == "auto"
        and rule.placement != "host"
        and rule.eviction != "never"  # used in place it would be off the device, too
    )


def apply_policy(
    trace: Trace,
    hardware: Hardware,
    policy: ResolvedPolicy,
    mechanisms: Mapping[TensorClass, str],
    fixed: npt.NDArray[np.int8] | None = None,
    *,
    keeps_copies: bool = False,
) -> TensorRules:
    """Apply a policy's rules to a trace; ``PlanError`` if it asks for what the machine lacks.

    `mechanisms` are for classes of :func:`open_classes`, ``migrate`` for others. `fixed`, int8[T],
    is the :class:`ResidencyMode` of tensors that are held so in any case, -1 for the others. With
    `keeps_copies`, pages of open classes keep a copy on the host until they are written; otherwise
    those of unwritten tensors do.
    """
    written = written_tensors(trace)
    columns = TensorRules(
        residency=np.full(trace.tensor_count, ResidencyMode.MIGRATE, np.uint8),
        movable=np.zeros(trace.tensor_count, np.bool_),
        copied=np.zeros(trace.tensor_count, np.bool_),
        kept_copy=np.zeros(trace.tensor_count, np.bool_),
        first=np.zeros(trace.tensor_count, np.bool_),
    )
    for tensor_class, rule in zip(TensorClass, policy.rules, strict=True):
        if rule.mechanism == "auto" and tensor_class in mechanisms:
            rule = rule.model_copy(update={"mechanism": mechanisms[tensor_class]})
        here = trace.tensor_class == tensor_class.number
        if here.any():
            moves_out = written & (rule.mechanism != "auto" or not keeps_copies)
            _apply(columns, here, rule, hardware, trace, moves_out, tensor_class)
    if fixed is not None:
        is_fixed = fixed >= 0
        columns.residency[is_fixed] = fixed[is_fixed]
        for column in (columns.movable, columns.copied, columns.kept_copy, columns.first):
            column[is_fixed] = False
    return columns


def _apply(
    columns: TensorRules,
    here: npt.NDArray[np.bool_],
    rule: ClassRule,
    hardware: Hardware,
    trace: Trace,
    moves_out: npt.NDArray[np.bool_],
    tensor_class: TensorClass,
) -> None:
    if rule.kind == "system" and not hardware.ats:
        raise PlanError(
            f"policy: classes.{tensor_class}.kind: system memory needs a device that reaches the "
            f"host's page tables (ATS), and {hardware.name} does not: use kind managed"
        )
    if rule.kind == "system":
        columns.residency[here] = ResidencyMode.SYSTEM
        return
    on_host = rule.kind == "pinned" or rule.mechanism == "map" or rule.placement == "host"
    if on_host:
        columns.residency[here] = ResidencyMode.MAP
    # Tensors below min_bytes are in plain device memory whatever the rest of the rule says.
    stays = rule.kind == "device" or rule.mechanism == "keep" or rule.eviction == "never"
    small = here & (trace.tensor_bytes < rule.min_bytes)
    columns.residency[here if stays and not on_host else small] = ResidencyMode.KEEP
    moves = here & (columns.residency == ResidencyMode.MIGRATE)
    if rule.mechanism == "duplicate" or (rule.read_mostly and rule.mechanism != "copy"):
        columns.residency[moves] = ResidencyMode.DUPLICATE
    elif rule.mechanism in ("auto", "migrate"):
        # A copy on the host costs nothing where the contents never change.
        columns.residency[moves & ~moves_out] = ResidencyMode.DUPLICATE
    columns.copied[moves] = rule.mechanism == "copy"
    columns.kept_copy[moves] = columns.copied[moves] | (
        columns.residency[moves] == ResidencyMode.DUPLICATE
    )
    columns.first[moves] = rule.eviction == "first"
    # Least recently used is what the driver evicts by itself; the rest is demand paging.
    asked = rule.mechanism not in ("fault", "discard") and rule.eviction != "lru"
    columns.movable[moves] = asked
