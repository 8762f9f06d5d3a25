"""Resolving a policy: its sizes in bytes on one device, with the environment applied."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TypeVar, cast, get_args

from umem.core.classes import TensorClass
from umem.core.errors import PolicyError
from umem.core.units import format_bytes, parse_budget
from umem.io.problems import did_you_mean
from umem.policy.models import (
    ClassRule,
    Policy,
    PolicyPlanner,
    ShareLibrary,
    class_rule,
    parse_device_budget,
    parse_managed_limit,
)

__all__ = ["ResolvedPolicy", "check_resolved", "resolve"]

_T = TypeVar("_T")


@dataclass(frozen=True)
class ResolvedPolicy:
    """A policy with its sizes in bytes on one device, and the environment applied."""

    name: str
    managed_limit_bytes: int | None
    """Hard cap on the managed bytes of the process; None for none."""
    device_budget_bytes: int | None
    """Limit on the managed bytes resident on the device; None for no limit."""
    system_headroom_bytes: int
    """Device memory that kind system leaves free."""
    planner: PolicyPlanner
    """How the budget is kept while a model trains."""
    caching: bool
    """Whether freed blocks are kept for reuse."""
    rules: tuple[ClassRule, ...]
    """One rule per class, in the order of :class:`umem.core.classes.TensorClass`."""
    share: tuple[ShareLibrary, ...]


def resolve(
    policy: Policy, device_total_bytes: int, environ: Mapping[str, str] = os.environ
) -> ResolvedPolicy:
    """Resolve a policy for a device and the environment; percentages refer to the device's bytes.

    ``UMEM_MANAGED_LIMIT`` (bytes) can lower ``limits.managed_bytes``: the smaller of the two holds.
    ``UMEM_DEVICE_BUDGET`` (bytes or a percentage) overrides ``device_budget``. A budget above the
    device's memory becomes the device's memory. ``UMEM_PLANNER`` overrides ``planner``.

    If a variable holds no usable value, or a number does not fit the device, the ``PolicyError``
    names the variable or the key.
    """
    if device_total_bytes <= 0:
        raise PolicyError(
            f"a device of {device_total_bytes} bytes has no memory to place tensors in: give its "
            "total memory"
        )
    rules = tuple(class_rule(policy, member) for member in TensorClass)
    headroom_bytes = policy.limits.system_headroom_bytes
    if headroom_bytes >= device_total_bytes and any(rule.kind == "system" for rule in rules):
        raise PolicyError(
            f"limits.system_headroom_bytes: {format_bytes(headroom_bytes)} leaves nothing of a "
            f"device of {format_bytes(device_total_bytes)} for kind system: lower it"
        )
    limits = (
        policy.limits.managed_bytes,
        _from_environment("UMEM_MANAGED_LIMIT", environ, parse_managed_limit),
    )
    return ResolvedPolicy(
        name=policy.name,
        managed_limit_bytes=min((limit for limit in limits if limit is not None), default=None),
        device_budget_bytes=_device_budget(policy, device_total_bytes, environ),
        system_headroom_bytes=headroom_bytes,
        planner=_from_environment("UMEM_PLANNER", environ, _read_planner) or policy.planner,
        caching=policy.caching,
        rules=rules,
        share=policy.share,
    )


def _device_budget(
    policy: Policy, device_total_bytes: int, environ: Mapping[str, str]
) -> int | None:
    source = "UMEM_DEVICE_BUDGET"
    budget = _from_environment(source, environ, parse_device_budget)
    if budget is None:
        source, budget = "device_budget", policy.device_budget
    if budget is None:
        return None
    budget_bytes = parse_budget(budget, device_total_bytes)
    if budget_bytes == 0:
        raise PolicyError(
            f"{source}: {budget} of {format_bytes(device_total_bytes)} is less than a byte: give a "
            "larger share"
        )
    return min(budget_bytes, device_total_bytes)


def _read_planner(text: str) -> PolicyPlanner:
    words = get_args(PolicyPlanner)
    if text not in words:
        hint = did_you_mean(text, words) or "."
        raise ValueError(f"{text!r} is no planner{hint} Planners: {', '.join(words)}")
    return cast(PolicyPlanner, text)


def _from_environment(
    name: str, environ: Mapping[str, str], read: Callable[[str], _T]
) -> _T | None:
    """Value of an environment variable; None where it is not set."""
    text = environ.get(name)
    if text is None:
        return None
    try:
        return read(text)
    except ValueError as error:
        raise PolicyError(f"environment variable {name}: {error}; or unset it") from None


def check_resolved(policy: object) -> None:
    """Refuse a policy that was not resolved for a device: ``PolicyError`` with the remedy."""
    if not isinstance(policy, ResolvedPolicy):
        raise PolicyError(
            f"policy: a {type(policy).__name__} is not resolved for a device: pass "
            "umem.policy.resolve(policy, hardware.device_bytes)"
        )
