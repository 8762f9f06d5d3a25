"""Combinations of a rule's keys that cannot work, with the remedy for each."""

from __future__ import annotations

from typing import NamedTuple

from pydantic_core import PydanticCustomError

from umem.policy._choices import Eviction, Mechanism, MemoryKind, Placement

__all__ = ["CONFLICT", "Conflict", "raise_conflicts", "rule_conflicts"]

CONFLICT = "rule_conflict"
"""Code of the validation error that carries conflicts."""


class Conflict(NamedTuple):
    """A combination that cannot work."""

    keys: tuple[str, ...]
    """The keys of the rule that are involved; the first is the one to change."""
    message: str
    """What is wrong; the remedy."""
    tensor_class: str | None = None
    """Whose rule it is, where the conflict is not one of the rule by itself."""


def rule_conflicts(
    *,
    kind: MemoryKind,
    placement: Placement,
    accessed_by_device: bool,
    read_mostly: bool,
    mechanism: Mechanism,
    eviction: Eviction,
) -> list[Conflict]:
    """What cannot work in a rule, whatever its class."""
    moves = kind in ("managed", "system")
    fixed_place = {"device": "device", "pinned": "host"}.get(kind, placement)
    fixed_access = {"device": False, "pinned": True}.get(kind, accessed_by_device)
    stay = "keep or map" if kind == "pinned" else "keep"
    # The condition; the key to change and the other keys involved; what is wrong; the remedy.
    table = [
        (
            placement != fixed_place,
            ("placement", "kind"),
            f"placement {placement} with kind {kind}: such memory never leaves the {fixed_place}",
            f"set placement: {fixed_place}, or kind: managed",
        ),
        (
            placement == fixed_place and accessed_by_device != fixed_access,
            ("accessed_by_device", "kind"),
            f"accessed_by_device {str(accessed_by_device).lower()} with kind {kind}: "
            + ("no host pages to map" if kind == "device" else "such memory is always mapped"),
            f"set accessed_by_device: {str(fixed_access).lower()}, or kind: managed",
        ),
        (
            not moves and read_mostly,
            ("read_mostly", "kind"),
            f"read_mostly with kind {kind}: only pages that move can be duplicated",
            "set read_mostly: false, or kind: managed",
        ),
        (
            not moves
            and mechanism not in ("auto", "keep")
            and (kind, mechanism) != ("pinned", "map"),
            ("mechanism", "kind"),
            f"mechanism {mechanism} with kind {kind}: such memory does not move",
            f"set mechanism: {stay}, or kind: managed",
        ),
        (
            not moves and eviction in ("lru", "first"),
            ("eviction", "kind"),
            f"eviction {eviction} with kind {kind}: such memory does not move",
            "set eviction: never, or kind: managed",
        ),
        (
            moves and mechanism == "map" and placement != "host",
            ("mechanism", "placement"),
            f"mechanism map with placement {placement}: mapped pages live on the host",
            "set placement: host, or mechanism: migrate",
        ),
        (
            moves and mechanism == "map" and placement == "host" and not accessed_by_device,
            ("mechanism", "accessed_by_device"),
            "mechanism map with accessed_by_device false: the device would fault on every page",
            "set accessed_by_device: true, or mechanism: fault",
        ),
        (
            moves and mechanism == "duplicate" and not read_mostly,
            ("mechanism", "read_mostly"),
            "mechanism duplicate without read_mostly: pages would move and leave no copy behind",
            "set read_mostly: true, or mechanism: migrate",
        ),
        (
            moves and mechanism in ("migrate", "map", "copy") and read_mostly,
            ("mechanism", "read_mostly"),
            f"mechanism {mechanism} with read_mostly: a read duplicates such pages",
            "set mechanism: duplicate, or read_mostly: false",
        ),
        (
            moves and mechanism == "copy" and placement == "host",
            ("mechanism", "placement"),
            "mechanism copy with placement host: there is nothing on the device to copy out",
            "set placement: device, or mechanism: map",
        ),
        (
            moves and mechanism == "fault" and accessed_by_device,
            ("mechanism", "accessed_by_device", "placement"),
            "mechanism fault with accessed_by_device true: mapped pages do not fault",
            "set mechanism: map, or accessed_by_device: false",
        ),
        (
            moves and mechanism in ("map", "keep") and eviction in ("lru", "first"),
            ("eviction", "mechanism"),
            f"eviction {eviction} with mechanism {mechanism}: the class stays where it is",
            "set eviction: auto, or mechanism: migrate",
        ),
    ]
    return [Conflict(keys, f"{wrong}; {remedy}") for holds, keys, wrong, remedy in table if holds]


def raise_conflicts(conflicts: list[Conflict]) -> None:
    """Fail the validation that found conflicts, in the form that pydantic reports with others.

    Raises
    ------
    PydanticCustomError
        With code :data:`CONFLICT` and the conflicts as its context's ``conflicts``; not if there
        are none.
    """
    if conflicts:
        raise PydanticCustomError(
            CONFLICT,
            "{summary}",
            {"summary": "; ".join(c.message for c in conflicts), "conflicts": conflicts},
        )
