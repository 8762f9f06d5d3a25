"""Policies: where each class of tensors lives and how it may move, read from YAML.

A policy file has one rule for all classes (``defaults``), keys that differ for a class
(``classes``), and may build on another file (``extends``). Loading merges them, so that in a
:class:`Policy` every class has its complete rule. Models made in Python are checked in the same way
and raise pydantic's ``ValidationError``.
"""

from __future__ import annotations

from umem.policy.load import find_problems, load_policy, preset_names
from umem.policy.models import (
    ClassRule,
    ClassRules,
    Eviction,
    Limits,
    Mechanism,
    MemoryKind,
    Placement,
    Policy,
    PolicyPlanner,
    ShareLibrary,
    class_rule,
    policy_schema,
)
from umem.policy.resolve import (
    RESERVE_BYTES,
    Refusable,
    ResolvedPolicy,
    check_environment,
    check_resolved,
    poisons,
    resolve,
    without,
)

__all__ = [
    "RESERVE_BYTES",
    "ClassRule",
    "ClassRules",
    "Eviction",
    "Limits",
    "Mechanism",
    "MemoryKind",
    "Placement",
    "Policy",
    "PolicyPlanner",
    "Refusable",
    "ResolvedPolicy",
    "ShareLibrary",
    "check_environment",
    "check_resolved",
    "class_rule",
    "find_problems",
    "load_policy",
    "poisons",
    "policy_schema",
    "preset_names",
    "resolve",
    "without",
]
