"""Policies: where each class of tensors lives and how it may move, read from YAML.

A policy is plain data. The file says it once for all classes (``defaults``) and again for a class
where that differs (``classes``); a file may build on another one (``extends``). Loading merges the
three, so a :class:`Policy` in hand is complete: every class has its whole rule. Models made by
keyword in Python are checked in the same way, and raise pydantic's ``ValidationError``.
"""

from __future__ import annotations

from umem.policy.load import find_problems, load_policy, preset_names, presets_dir
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
from umem.policy.resolve import ResolvedPolicy, check_resolved, resolve

__all__ = [
    "ClassRule",
    "ClassRules",
    "Eviction",
    "Limits",
    "Mechanism",
    "MemoryKind",
    "Placement",
    "Policy",
    "PolicyPlanner",
    "ResolvedPolicy",
    "ShareLibrary",
    "check_resolved",
    "class_rule",
    "find_problems",
    "load_policy",
    "policy_schema",
    "preset_names",
    "presets_dir",
    "resolve",
]
