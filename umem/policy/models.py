"""The keys of a policy: their types, their defaults, and the combinations that cannot work."""

from __future__ import annotations

import ast
import inspect
from collections.abc import Mapping
from itertools import pairwise
from typing import Annotated, Any, Literal

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    StrictBool,
    ValidationInfo,
    WithJsonSchema,
    field_validator,
    model_validator,
)

from umem.core.classes import TensorClass
from umem.core.units import (
    LEAST_WITHOUT_UNIT,
    NUMBER_PATTERN,
    parse_bytes,
    parse_limit,
    parse_percent,
)
from umem.io.problems import Conflicts, raise_conflicts, shown
from umem.io.yaml_files import stated_keys

__all__ = [
    "EXTENDS_FOLLOWED",
    "ClassRule",
    "ClassRules",
    "Eviction",
    "Limits",
    "Mechanism",
    "MemoryKind",
    "Placement",
    "Policy",
    "PolicyPlanner",
    "ShareLibrary",
    "class_rule",
    "parse_device_budget",
    "parse_managed_limit",
    "policy_schema",
]

MemoryKind = Literal["auto", "managed", "device", "system", "pinned"]
Placement = Literal["device", "host", "any"]
Mechanism = Literal[
    "auto", "migrate", "map", "duplicate", "copy", "stream", "discard", "fault", "keep"
]
Eviction = Literal["auto", "lru", "first", "never"]
ShareLibrary = Literal["numba", "cupy"]
Recompute = Literal["auto", "never"]
PolicyPlanner = Literal["planned", "lookahead", "fault", "none"]

# Sizes: how they are checked, and how the JSON schema describes them.


def parse_managed_limit(value: int | str) -> int:
    """Read a cap on managed memory in bytes.

    ``ValueError`` if it is no size as in :func:`umem.core.units.parse_limit`, or 0.
    """
    size_bytes = parse_limit(value)
    if size_bytes == 0:
        raise ValueError("0 bytes would forbid every managed allocation: for no limit, give null")
    return size_bytes


def parse_device_budget(value: int | str) -> int | str:
    """Check a budget without knowing the device: a size, or a percentage, which stays text.

    ``ValueError`` if it is neither, or 0.
    """
    if isinstance(value, str) and "%" in value:
        parse_percent(value)
        return value.strip()
    size_bytes = parse_limit(value)
    if size_bytes == 0:
        raise ValueError(
            "a budget of 0 bytes keeps nothing on the device: for no budget, give null; to keep a "
            "class on the host, give its rule placement: host"
        )
    return size_bytes


def _text_schema(unit: str) -> dict[str, Any]:
    return {"type": "string", "pattern": rf"^\s*{NUMBER_PATTERN}\s*{unit}\s*$"}


def _size_schema(minimum: int, *others: dict[str, Any]) -> WithJsonSchema:
    text = _text_schema("([kKmMgGtT][iI]?[bB]|[bB])?")
    return WithJsonSchema({"anyOf": [{"type": "integer", "minimum": minimum}, text, *others]})


Bytes = Annotated[int, BeforeValidator(parse_bytes), _size_schema(0)]
ManagedLimit = Annotated[
    int, BeforeValidator(parse_managed_limit), _size_schema(LEAST_WITHOUT_UNIT)
]
DeviceBudget = Annotated[
    int | str,
    BeforeValidator(parse_device_budget),
    _size_schema(LEAST_WITHOUT_UNIT, _text_schema("%")),
]


Fraction = Annotated[float, Field(strict=True, ge=0.0, le=1.0)]


# Combinations of a rule's keys that cannot work, with the remedy for each.


def _rule_conflicts(rule: ClassRule) -> Conflicts:
    if rule.mechanism == "stream" and rule.kind not in ("pinned", "device"):
        message = (
            f"mechanism stream with kind {rule.kind}: streamed tensors have their home in "
            "page-locked host memory; set kind: pinned for optimizer_state, kind: device for "
            "weights, or mechanism: auto"
        )
        return [(("mechanism",), message)]
    if rule.kind == "auto":
        return _conflicts_of_auto(rule)
    if rule.kind in ("device", "pinned"):
        return _conflicts_of_fixed_memory(rule)
    mechanism, eviction = rule.mechanism, rule.eviction
    # The condition; the key to change; the error; the remedy.
    table = [
        (
            mechanism == "map" and rule.placement != "host",
            "mechanism",
            f"mechanism map with placement {rule.placement}: mapped pages live on the host",
            "set placement: host, or mechanism: migrate",
        ),
        (
            mechanism == "map" and rule.placement == "host" and not rule.accessed_by_device,
            "mechanism",
            "mechanism map with accessed_by_device false: the device would fault on every page",
            "set accessed_by_device: true, or mechanism: fault",
        ),
        (
            mechanism == "duplicate" and not rule.read_mostly,
            "mechanism",
            "mechanism duplicate without read_mostly: pages would move and leave no copy behind",
            "set read_mostly: true, or mechanism: migrate",
        ),
        (
            mechanism in ("migrate", "map", "copy") and rule.read_mostly,
            "mechanism",
            f"mechanism {mechanism} with read_mostly: a read duplicates such pages",
            "set mechanism: duplicate, or read_mostly: false",
        ),
        (
            mechanism == "copy" and rule.placement == "host",
            "mechanism",
            "mechanism copy with placement host: there is nothing on the device to copy out",
            "set placement: device, or mechanism: map",
        ),
        (
            mechanism == "fault" and rule.accessed_by_device,
            "mechanism",
            "mechanism fault with accessed_by_device true: mapped pages do not fault",
            "set mechanism: map, or accessed_by_device: false",
        ),
        (
            mechanism in ("map", "keep") and eviction in ("lru", "first"),
            "eviction",
            f"eviction {eviction} with mechanism {mechanism}: the class stays where it is",
            "set eviction: auto, or mechanism: migrate",
        ),
    ]
    return [((key,), f"{wrong}; {remedy}") for holds, key, wrong, remedy in table if holds]


def _conflicts_of_auto(rule: ClassRule) -> Conflicts:
    """Keys that only a stated kind of memory can have."""
    undecided: dict[str, Any] = {
        "placement": "device",
        "accessed_by_device": False,
        "read_mostly": False,
        "mechanism": "auto",
        "eviction": "auto",
    }
    conflicts = []
    if rule.placement == "host":  # which is why the device has access
        del undecided["accessed_by_device"]
    for key, value in undecided.items():
        if getattr(rule, key) != value:
            said = f"{key} {shown(getattr(rule, key))} with kind auto".replace("'", "")
            remedy = shown(value).replace("'", "")
            message = f"{said}: the machine decides; set {key}: {remedy}, or kind: managed"
            conflicts.append(((key,), message))
    return conflicts


def _conflicts_of_fixed_memory(rule: ClassRule) -> Conflicts:
    """Conflicts of plain device memory and of pinned memory, whose pages never move."""
    pinned = rule.kind == "pinned"
    place = "host" if pinned else "device"
    mapping = "such memory is always mapped" if pinned else "no host pages to map"
    # Stream and copy are not among the remedies: they are not for every class.
    mechanisms = ("keep", "map") if pinned else ("keep",)
    for_some_classes = ("stream",) if pinned else ("copy", "stream")
    access_follows = rule.placement != place or rule.accessed_by_device == pinned
    # Whether the key's value is possible; the key; why it is not; the value that is.
    table = [
        (rule.placement == place, "placement", f"such memory never leaves the {place}", place),
        (access_follows, "accessed_by_device", mapping, shown(pinned)),
        (not rule.read_mostly, "read_mostly", "only pages that move can be duplicated", "false"),
        (
            rule.mechanism in ("auto", *for_some_classes, *mechanisms),
            "mechanism",
            "such memory does not move",
            " or ".join(mechanisms),
        ),
        (rule.eviction in ("auto", "never"), "eviction", "such memory does not move", "never"),
    ]
    conflicts = []
    for possible, key, reason, remedy in table:
        if not possible:
            said = f"{key} {shown(getattr(rule, key))} with kind {rule.kind}".replace("'", "")
            message = f"{said}: {reason}; set {key}: {remedy}, or kind: managed"
            conflicts.append(((key,), message))
    return conflicts


# The keys of a policy file.

EXTENDS_FOLLOWED = "extends followed"
"""Validation context of a mapping that already holds the keys of the policy that it extends."""


def _describe(schema: dict[str, Any], model: type[BaseModel]) -> None:
    """Describe keys by the docstrings below them, each on one line.

    pydantic's `use_attribute_docstrings` would read the source for every command, which takes
    it a tenth of the time of `umem fit`.
    """
    (definition,) = ast.parse(inspect.getsource(model)).body
    assert isinstance(definition, ast.ClassDef)
    for key, below in pairwise(definition.body):
        match key, below:
            case ast.AnnAssign(target=ast.Name(name)), ast.Expr(ast.Constant(str(text))):
                schema["properties"][name]["description"] = " ".join(text.split())


class _Record(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", json_schema_extra=_describe)


class ClassRule(_Record):
    """Where the tensors of one class live, and how they may move."""

    kind: MemoryKind = "managed"
    """Memory that the class comes from: auto (what is fastest on the machine: kind, placement and
    mechanism), managed (pages move between host and device), device (plain device memory), system
    (the host's own allocator, on devices that can read it), pinned (page-locked host memory)."""

    # pydantic before 2.12 computes such defaults even where the key that they depend on is in error
    # and therefore missing.
    placement: Placement = Field(
        default_factory=lambda rule: "host" if rule.get("kind") == "pinned" else "device"
    )
    """Preferred location: device, host, or any for none. Default: device; host for pinned
    memory."""
    accessed_by_device: StrictBool = Field(
        default_factory=lambda rule: rule.get("placement") == "host"
    )
    """Map the pages for the device, which then reads and writes them over the link instead of
    faulting. Default: true where placement is host."""
    read_mostly: StrictBool = False
    """Read-mostly advice: a read makes a second copy of a page, which can be dropped at no cost; a
    write drops all copies but one. For contents that rarely change."""
    min_bytes: Bytes = 0
    """Smaller tensors stay in plain device memory and never move. Bytes, or text such as 1MiB."""
    fraction: Fraction = 1.0
    """The part of the class's bytes that may be on the device, from 0 to 1; the rest has its home
    on the host also where the budget has room for it. Staging buffers are beside it. For
    what is streamed: optimizer_state, and weights and frozen_weights, which are one to it."""
    mechanism: Mechanism = "auto"
    """How the class moves: auto (the planner chooses; with kind auto, the machine), migrate
    (prefetch of pages), map (used in place on the host, over the link), duplicate (read-mostly
    copies), copy (an explicit copy to the host and back; of kind device for activations, and
    for gradients, which are used on the host), stream (home in page-locked host memory, staged
    in device buffers for its use; for optimizer_state of kind pinned, and for those weights of
    kind device that the budget has no room for), discard (dead contents
    are dropped, live contents stay), fault (demand paging), keep (no movement)."""
    eviction: Eviction = "auto"
    """Order of eviction when device memory runs short: auto (tensors whose next use is
    furthest away), lru (the least recently used), first (this class before all others), never
    (this class stays)."""

    @model_validator(mode="after")
    def _is_possible(self) -> ClassRule:
        raise_conflicts(_rule_conflicts(self))
        return self


_STREAMED: Mapping[str, MemoryKind] = {
    "weights": "device",
    "frozen_weights": "device",
    "optimizer_state": "pinned",
}
"""Classes that can be streamed, with the kind of memory that they have then."""


class ClassRules(_Record):
    """One rule for every tensor class; a class rule in a file overrides `defaults` key by key."""

    weights: ClassRule = Field(default_factory=ClassRule)
    """Parameters that are trained, and every parameter until the first forward pass."""
    frozen_weights: ClassRule = Field(default_factory=ClassRule)
    """Parameters with requires_grad=False."""
    gradients: ClassRule = Field(default_factory=ClassRule)
    """Gradients of parameters."""
    optimizer_state: ClassRule = Field(default_factory=ClassRule)
    """State of the optimizer for each parameter, such as Adam's two moments."""
    activations: ClassRule = Field(default_factory=ClassRule)
    """Allocations of forward and backward passes."""
    other: ClassRule = Field(default_factory=ClassRule)
    """Everything else, such as input batches and the arrays of shared libraries."""

    @model_validator(mode="after")
    def _is_possible(self) -> ClassRules:
        found = ((name, _class_conflict(name, getattr(self, name))) for name in _CLASSES)
        conflicts = [((name, key), message) for name, (key, message) in found if key]
        if self.weights.fraction != self.frozen_weights.fraction and not conflicts:
            message = (
                f"fraction {self.weights.fraction:g} of weights and "
                f"{self.frozen_weights.fraction:g} of frozen_weights: they leave the device "
                "together; give both the same fraction"
            )
            conflicts.append((("weights", "fraction"), message))
        raise_conflicts(conflicts)
        return self


_CLASSES = tuple(ClassRules.model_fields)


def _class_conflict(name: str, rule: ClassRule) -> tuple[str, str]:
    """Key that cannot be of this class, with error and remedy; both empty if there is none."""
    kind = _STREAMED.get(name)
    if rule.mechanism == "stream" and rule.kind != kind:
        if kind:
            remedy = f"mechanism stream for {name}: set kind: {kind}, or mechanism: auto"
            return "mechanism", remedy
        return "mechanism", (
            "mechanism stream stages what is used block by block, so it is for weights, "
            f"frozen_weights and optimizer_state, and not for {name}; set mechanism: auto"
        )
    if rule.fraction != 1.0 and not kind:
        return "fraction", (
            "fraction is for what is streamed, so for weights, frozen_weights and "
            f"optimizer_state, and not for {name}: set fraction: 1"
        )
    if rule.fraction != 1.0 and rule.kind != "auto" and rule.mechanism != "stream":
        return "fraction", (
            f"fraction {rule.fraction:g} with mechanism {rule.mechanism}: only what is streamed is "
            f"divided between device and host; set mechanism: stream with kind: {kind}, kind: "
            "auto, or fraction: 1"
        )
    is_copied = (rule.kind, rule.mechanism) == ("device", "copy")
    if is_copied and name not in ("activations", "gradients"):
        return "mechanism", (
            "mechanism copy with kind device copies what the passes make, so it is for activations "
            f"and gradients and not for {name}; set mechanism: keep"
        )
    if rule.mechanism == "discard" and name in _STREAMED:
        return "mechanism", (
            f"discard drops dead contents, and {name.replace('_', ' ')} live through the whole "
            f"run: give {name} mechanism: auto"
        )
    return "", ""


class Limits(_Record):
    """Bounds on the whole process."""

    managed_bytes: ManagedLimit | None = None
    """Hard cap on the managed bytes of the process, cached ones too; past it an allocation fails
    with an out-of-memory error. Bytes, text such as 16GiB, or null for umem's own cap. The
    environment variable UMEM_MANAGED_LIMIT can lower it."""
    system_headroom_bytes: Bytes = 0
    """Device memory that kind system leaves free, in bytes or text such as 1GiB."""


class Policy(_Record):
    """Where every class of tensors lives, how it may move, and the limits on memory."""

    name: str = "custom"
    """Name shown in reports. Default: the file's name without its suffix. Not inherited."""
    description: str = ""
    """Purpose of the policy, in one sentence. Not inherited."""
    extends: str | None = None
    """Policy to build on: the name of a preset, or a path relative to this file. This file's keys
    override those of that policy; a list is replaced as a whole."""
    device_budget: DeviceBudget | None = None
    """Limit on what umem's memory takes on the device, live, cached and staging memory together:
    bytes, text such as 64GiB, or a percentage of the card's memory such as 80%. Of plain device
    memory (kind device) it is what nvidia-smi shows beside the process's CUDA context. Of managed
    memory it bounds residency, and nvidia-smi shows more: the driver keeps the memory of evicted
    pages. Default null: where classes have plain device memory, the card's free memory when umem
    is enabled, less a reserve; else no limit. The environment variable UMEM_DEVICE_BUDGET overrides
    it."""
    limits: Limits = Field(default_factory=Limits)
    """Bounds that do not depend on the class."""
    planner: PolicyPlanner = "planned"
    """How the budget is kept while a model trains: planned (the fastest schedule of a recorded
    step), lookahead (prefetch for the next phases), fault (demand paging: missing pages arrive by
    page fault), none (no plan: above the budget the allocator maps new memory on the host; so it is
    wherever no class has managed or system memory, which alone has pages to plan). The environment
    variable UMEM_PLANNER overrides it."""
    recompute: Recompute = "auto"
    """Whether blocks may run forward again in the backward pass, in place of copies of what they
    save, and the program's own checkpoints be left out where there is room: auto (where the plan is
    faster so, and a call has proved that it gives the same bits and does nothing else), never."""
    host_update: Recompute = "never"
    """Whether the host's cores may update a part of the state that is streamed: auto (where the
    plan is faster so, and the host has proved that it gives the bits of torch's kernels), never."""
    slice_losses: Recompute = "auto"
    """Whether cross entropies may be computed in slices of their rows: auto (where no plan has room
    for a loss, or it would take a quarter of the budget), never."""
    share: tuple[ShareLibrary, ...] = Field(default=(), json_schema_extra={"uniqueItems": True})
    """Libraries whose arrays come from the same memory and count in the same statistics."""
    defaults: ClassRule = Field(default_factory=ClassRule)
    """Rule for every class; the same key under classes takes precedence."""
    classes: ClassRules = Field(default_factory=ClassRules)
    """Keys whose values differ for a class."""

    @model_validator(mode="before")
    @classmethod
    def _complete(cls, data: Any, info: ValidationInfo) -> Any:
        if not isinstance(data, Mapping):
            return data
        if data.get("extends") is not None and info.context != EXTENDS_FOLLOWED:
            raise ValueError(
                "only load_policy follows `extends`: call umem.policy.load_policy with this mapping"
            )
        return _with_defaults(data)

    @field_validator("share")
    @classmethod
    def _names_once(cls, share: tuple[ShareLibrary, ...]) -> tuple[ShareLibrary, ...]:
        if len(set(share)) != len(share):
            raise ValueError("a library is named twice: remove one of the two")
        return share


def class_rule(policy: Policy, tensor_class: TensorClass) -> ClassRule:
    """Rule of one class in a policy."""
    rule: ClassRule = getattr(policy.classes, TensorClass(tensor_class).value)
    return rule


def policy_schema() -> dict[str, Any]:
    """JSON schema (draft 2020-12) of a policy file, for editors, as a JSON-ready mapping."""
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        **Policy.model_json_schema(),
        "title": "umem policy",
    }


def _with_defaults(data: Mapping[Any, Any]) -> dict[Any, Any]:
    """Write the keys of `defaults` into each class that does not set them.

    Values of a wrong type are left for validation to report.
    """
    values = dict(data)
    defaults = stated_keys(values.get("defaults", {}))
    classes = stated_keys(values.get("classes", {}))
    if defaults is None or classes is None:
        return values
    rules: dict[Any, Any] = {name: {} for name in ClassRules.model_fields} | classes
    for name, rule in rules.items():
        own = stated_keys(rule)
        if own is not None:
            rules[name] = defaults | own
    values["classes"] = rules
    return values
