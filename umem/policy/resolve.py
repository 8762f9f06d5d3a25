"""Resolving a policy: its sizes and rules on one machine, with the environment applied."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, cast, get_args

from umem.core.arguments import check_argument
from umem.core.classes import TensorClass
from umem.core.errors import PolicyError
from umem.core.units import format_bytes, parse_budget
from umem.io.problems import did_you_mean
from umem.policy.choices import Choice, choose_rule
from umem.policy.models import (
    ClassRule,
    Policy,
    PolicyPlanner,
    ShareLibrary,
    class_rule,
    parse_device_budget,
    parse_managed_limit,
)

if TYPE_CHECKING:
    from umem.hardware import Hardware

__all__ = [
    "RESERVE_BYTES",
    "Refusable",
    "ResolvedPolicy",
    "check_environment",
    "check_resolved",
    "poisons",
    "resolve",
    "without",
]

Refusable = Literal["second_context", "prefetch", "advice"]
"""Calls that a driver may refuse, and that umem then does without."""

RESERVE_BYTES = 1 << 30
"""Free memory of a card that a policy without a budget leaves: for the process's CUDA context,
which does not exist yet when umem is enabled, for kernels that are loaded into it, and for
workspaces that libraries such as cuDNN allocate past torch. No allocator counts them. The size is
an assumption."""

POOL_SHARE = 0.85
"""Cap on a budget where CPU and GPU share one memory, as a share of what is free of it when umem
starts: a pool without any free memory hangs the machine, where a budget that is spent raises."""

_ONE_POOL = "CPU and GPU share one memory: a move would copy it onto itself."


@dataclass(frozen=True)
class ResolvedPolicy:
    """A policy on one machine, with its sizes in bytes and the environment applied."""

    name: str
    managed_limit_bytes: int | None
    """Hard cap on the managed bytes of the process; None for none."""
    device_budget_bytes: int | None
    """Limit on the device memory of umem's allocator; None for no limit."""
    budget_reason: str
    """Where the budget comes from, for people."""
    system_headroom_bytes: int
    """Device memory that kind system leaves free."""
    planner: PolicyPlanner
    """How the budget is kept while a model trains."""
    rules: tuple[ClassRule, ...]
    """One rule per class, in the order of :class:`umem.core.classes.TensorClass`; none of kind
    auto."""
    reasons: tuple[str, ...]
    """Why each class has its rule, for people: a sentence where the machine decided, else empty."""
    share: tuple[ShareLibrary, ...]
    recomputes: bool
    """Whether blocks may run forward again in the backward pass, in place of copies."""
    updates_on_host: bool
    """Whether the host may update a part of the state that is streamed."""
    slices_losses: bool
    """Whether cross entropies may be computed in slices of their rows."""

    @property
    def streams_state(self) -> bool:
        """Whether the optimizer's state is streamed."""
        return self.rules[TensorClass.OPTIMIZER_STATE.number].mechanism == "stream"

    @property
    def streams_weights(self) -> bool:
        """Whether weights that the budget has no room for are streamed."""
        classes = (TensorClass.WEIGHTS, TensorClass.FROZEN_WEIGHTS)
        return any(self.rules[it.number].mechanism == "stream" for it in classes)

    @property
    def copies_activations(self) -> bool:
        """Whether activations in plain device memory are copied out where a plan says so."""
        return self._copies(TensorClass.ACTIVATIONS)

    @property
    def copies_gradients(self) -> bool:
        """Whether gradients in plain device memory are copied out where a plan says so."""
        return self._copies(TensorClass.GRADIENTS)

    @property
    def homes(self) -> list[TensorClass]:
        """Classes that have their home in page-locked host memory."""
        return [it for it in TensorClass if self.rules[it.number].kind == "pinned"]

    def _copies(self, tensor_class: TensorClass) -> bool:
        rule = self.rules[tensor_class.number]
        return (rule.kind, rule.mechanism) == ("device", "copy")


def resolve(
    policy: Policy,
    hardware: Hardware,
    environ: Mapping[str, str] = os.environ,
    *,
    free_bytes: int | None = None,
) -> ResolvedPolicy:
    """Resolve a policy for a machine and the environment.

    Rules of kind auto become what is fastest by the machine's figures. Percentages refer to the
    device's memory. Where CPU and GPU share one memory, every class stays where it is, and the
    budget leaves the system its part. ``UMEM_MANAGED_LIMIT`` (bytes) can lower
    ``limits.managed_bytes``: the smaller of the two holds. ``UMEM_DEVICE_BUDGET`` (bytes or a
    percentage) overrides ``device_budget``. A budget above the device's memory becomes the device's
    memory. ``UMEM_PLANNER`` overrides ``planner``, which is none where no class has pages to plan.

    Parameters
    ----------
    policy
        From :func:`umem.policy.load_policy`.
    hardware
        The machine (:func:`umem.hardware.load_hardware`).
    environ
        The environment.
    free_bytes
        Free memory of the device, for the budget of a policy without one; None for all of it.

    Raises
    ------
    TypeError
        If `policy` is no :class:`umem.Policy`.
    PolicyError
        If a variable holds no usable value, or a number does not fit the device. The message names
        the variable or the key.
    """
    check_argument("policy", policy, Policy, "give one from umem.load_policy()")
    device_bytes = hardware.device_bytes
    chosen = [_on_machine(member, class_rule(policy, member), hardware) for member in TensorClass]
    kinds = {rule.kind for rule, _ in chosen}
    headroom_bytes = policy.limits.system_headroom_bytes
    if headroom_bytes >= device_bytes and "system" in kinds:
        raise PolicyError(
            f"limits.system_headroom_bytes: {format_bytes(headroom_bytes)} leaves nothing of a "
            f"device of {format_bytes(device_bytes)} for kind system: lower it"
        )
    limits = (policy.limits.managed_bytes, _from_environment("UMEM_MANAGED_LIMIT", environ))
    budget_bytes, budget_reason = _device_budget(policy, device_bytes, environ)
    if budget_bytes is None and "device" in kinds:
        budget_bytes, budget_reason = _budget_of_free_memory(device_bytes, free_bytes)
    if hardware.one_pool:
        pool_bytes, pool_reason = _budget_of_pool(device_bytes, free_bytes)
        if budget_bytes is None or budget_bytes > pool_bytes:
            budget_bytes, budget_reason = pool_bytes, pool_reason
    planner = _from_environment("UMEM_PLANNER", environ) or policy.planner
    return ResolvedPolicy(
        name=policy.name,
        managed_limit_bytes=min((limit for limit in limits if limit is not None), default=None),
        device_budget_bytes=budget_bytes,
        budget_reason=budget_reason,
        system_headroom_bytes=headroom_bytes,
        planner=planner if kinds & {"managed", "system"} else "none",
        rules=tuple(rule for rule, _ in chosen),
        reasons=tuple(reason for _, reason in chosen),
        share=policy.share,
        recomputes=policy.recompute == "auto" and not hardware.one_pool,
        updates_on_host=policy.host_update == "auto" and not hardware.one_pool,
        slices_losses=policy.slice_losses == "auto" and not hardware.one_pool,
    )


def _on_machine(tensor_class: TensorClass, rule: ClassRule, hardware: Hardware) -> Choice:
    if hardware.one_pool:
        kept = ClassRule(
            kind="device", mechanism="keep", min_bytes=rule.min_bytes, fraction=rule.fraction
        )
        return Choice(kept, _ONE_POOL)
    if rule.kind == "auto":
        return choose_rule(tensor_class, rule, hardware)
    return Choice(rule, "")


def _device_budget(
    policy: Policy, device_bytes: int, environ: Mapping[str, str]
) -> tuple[int | None, str]:
    """The budget that the environment or the policy states, and which of them; else None."""
    source = "UMEM_DEVICE_BUDGET"
    budget = _from_environment(source, environ)
    if budget is None:
        source, budget = "device_budget", policy.device_budget
    if budget is None:
        return None, "no budget: the driver evicts pages when the device is full"
    budget_bytes = parse_budget(budget, device_bytes)
    if budget_bytes == 0:
        raise PolicyError(
            f"{source}: {budget} of {format_bytes(device_bytes)} is less than a byte: give a "
            "larger share"
        )
    return min(budget_bytes, device_bytes), source


def _budget_of_free_memory(device_bytes: int, free_bytes: int | None) -> tuple[int, str]:
    free_bytes = device_bytes if free_bytes is None else free_bytes
    # A card that is nearly full has less than the reserve.
    reserve_bytes = min(RESERVE_BYTES, free_bytes // 2)
    reason = f"{format_bytes(free_bytes)} free, less {format_bytes(reserve_bytes)} in reserve"
    return max(free_bytes - reserve_bytes, 1), reason


def _budget_of_pool(device_bytes: int, free_bytes: int | None) -> tuple[int, str]:
    free_bytes = device_bytes if free_bytes is None else free_bytes
    reason = (
        f"{POOL_SHARE:.0%} of {format_bytes(free_bytes)} free in the one memory of CPU and GPU: "
        "the rest is the system's"
    )
    return max(int(POOL_SHARE * free_bytes), 1), reason


def _read_planner(text: str) -> PolicyPlanner:
    words = get_args(PolicyPlanner)
    if text not in words:
        hint = did_you_mean(text, words) or "."
        raise ValueError(f"{text!r} is no planner{hint} Planners: {', '.join(words)}")
    return cast(PolicyPlanner, text)


def _read_without(text: str) -> tuple[Refusable, ...]:
    words: tuple[Refusable, ...] = get_args(Refusable)
    found: list[Refusable] = []
    for word in filter(None, (part.strip() for part in text.split(","))):
        if word not in words:
            hint = did_you_mean(word, words) or "."
            raise ValueError(
                f"{word!r} is nothing that umem can do without{hint} Words: {', '.join(words)}"
            )
        found.append(word)
    return tuple(dict.fromkeys(found))


def _read_switch(text: str) -> bool:
    if text not in ("0", "1"):
        raise ValueError(f"{text!r} is neither 0 nor 1: set it to 1")
    return text == "1"


_READERS: Mapping[str, Callable[[str], Any]] = {
    "UMEM_MANAGED_LIMIT": parse_managed_limit,
    "UMEM_DEVICE_BUDGET": parse_device_budget,
    "UMEM_PLANNER": _read_planner,
    "UMEM_WITHOUT": _read_without,
    "UMEM_POISON": _read_switch,
}
"""Variables that change a policy, and what reads each."""


def _from_environment(name: str, environ: Mapping[str, str]) -> Any:
    """Value of an environment variable; None where it is not set."""
    text = environ.get(name)
    if text is None:
        return None
    try:
        return _READERS[name](text)
    except ValueError as error:
        raise PolicyError(f"environment variable {name}: {error}; or unset it") from None


def without(environ: Mapping[str, str] = os.environ) -> tuple[Refusable, ...]:
    """What ``UMEM_WITHOUT`` tells umem to do without; ``PolicyError`` for an unknown word."""
    return _from_environment("UMEM_WITHOUT", environ) or ()


def poisons(environ: Mapping[str, str] = os.environ) -> bool:
    """Whether ``UMEM_POISON`` has the allocator overwrite freed and new memory.

    ``PolicyError`` for any value but 0 and 1.
    """
    return _from_environment("UMEM_POISON", environ) or False


def check_environment(environ: Mapping[str, str] = os.environ) -> None:
    """Check the variables that change a policy, where there may be no device to resolve one for.

    ``PolicyError`` names the first that holds no usable value.
    """
    for name in _READERS:
        _from_environment(name, environ)


def check_resolved(policy: object) -> None:
    """Refuse a policy that was not resolved for a device: ``PolicyError`` with the remedy."""
    if not isinstance(policy, ResolvedPolicy):
        raise PolicyError(
            f"policy: a {type(policy).__name__} is not resolved for a device: pass "
            "umem.policy.resolve(policy, hardware)"
        )
