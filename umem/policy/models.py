"""The words that a policy chooses from."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal, get_args

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
from umem.core.units import NUMBER_PATTERN, parse_bytes, parse_percent
from umem.io.problems import Conflict, raise_conflicts
from umem.io.yaml_files import stated_keys

__all__ = [
    "CHOICES",
    "EXTENDS_FOLLOWED",
    "Bytes",
    "ClassRule",
    "ClassRules",
    "DeviceBudget",
    "Eviction",
    "Limits",
    "ManagedLimit",
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

MemoryKind = Literal["managed", "device", "system", "pinned"]
Placement = Literal["device", "host", "any"]
Mechanism = Literal["auto", "migrate", "map", "duplicate", "copy", "discard", "fault", "keep"]
Eviction = Literal["auto", "lru", "first", "never"]
ShareLibrary = Literal["numba", "cupy"]
PolicyPlanner = Literal["planned", "lookahead", "fault", "none"]

CHOICES: dict[str, tuple[str, ...]] = {
    "kind": get_args(MemoryKind),
    "placement": get_args(Placement),
    "mechanism": get_args(Mechanism),
    "eviction": get_args(Eviction),
    "share": get_args(ShareLibrary),
    "planner": get_args(PolicyPlanner),
}
"""Valid words by key of the policy."""


# Sizes as fields of a policy: how they are checked, and how its JSON schema describes them.


def parse_managed_limit(value: int | str) -> int:
    """Read a cap on managed memory in bytes.

    Raises
    ------
    ValueError
        If it is no size as in :func:`umem.core.units.parse_bytes`, or 0.
    """
    size_bytes = parse_bytes(value)
    if size_bytes == 0:
        raise ValueError("0 bytes would forbid every managed allocation: for no limit, give null")
    return size_bytes


def parse_device_budget(value: int | str) -> int | str:
    """Check a budget without knowing the device: bytes, or a percentage, which stays text.

    Raises
    ------
    ValueError
        If it is neither, or 0.
    """
    if isinstance(value, str) and "%" in value:
        parse_percent(value)
        return value.strip()
    size_bytes = parse_bytes(value)
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
ManagedLimit = Annotated[int, BeforeValidator(parse_managed_limit), _size_schema(1)]
DeviceBudget = Annotated[
    int | str, BeforeValidator(parse_device_budget), _size_schema(1, _text_schema("%"))
]


# Combinations of a rule's keys that cannot work, with the remedy for each.


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
    return [
        Conflict(keys[:1], f"{wrong}; {remedy}", keys[1:])
        for holds, keys, wrong, remedy in table
        if holds
    ]


# The models of a policy: its keys, their types and what they are when nothing is said.

EXTENDS_FOLLOWED = "extends followed"
"""Validation context that says that the keys of what a policy extends are in it already."""


def _on_one_line(schema: dict[str, Any]) -> None:
    # The docstrings below the fields become descriptions with their line breaks.
    for field in schema["properties"].values():
        field["description"] = " ".join(field["description"].split())


# pydantic before 2.12 asks for defaults that depend on a key even where that key is in error, and
# so is not in `rule`.
def _usual_placement(rule: dict[str, Any]) -> Placement:
    return "host" if rule.get("kind") == "pinned" else "device"


def _usual_access(rule: dict[str, Any]) -> bool:
    return rule.get("placement") == "host"


class _Record(BaseModel):
    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        use_attribute_docstrings=True,
        json_schema_extra=_on_one_line,
    )


class ClassRule(_Record):
    """Where the tensors of one class live, and how they may move."""

    kind: MemoryKind = "managed"
    """Memory that the class comes from: managed (pages move between host and device), device (plain
    device memory), system (the host's own allocator, on devices that can read it), pinned
    (page-locked host memory)."""

    placement: Placement = Field(default_factory=_usual_placement)
    """Preferred location advice: device, host, or any for no advice. Default: device, and host for
    pinned memory."""

    accessed_by_device: StrictBool = Field(default_factory=_usual_access)
    """Map the pages for the device, so that it reads and writes them over the link instead of
    faulting. Default: true where placement is host."""

    read_mostly: StrictBool = False
    """Read-mostly advice: a read makes a copy beside the original, which is dropped at no cost; a
    write drops all copies but one. For contents that hardly ever change."""

    min_bytes: Bytes = 0
    """Smaller tensors stay in plain device memory and never move. Bytes, or text such as 1MiB."""

    mechanism: Mechanism = "auto"
    """How the class moves: auto (the planner chooses), migrate (prefetch of pages), map (used in
    place on the host, over the link), duplicate (read-mostly copies), copy (an explicit copy to a
    host block), discard (dead contents are dropped, live ones stay), fault (demand paging), keep
    (stays where it is)."""

    eviction: Eviction = "auto"
    """What leaves the device first when room is short: auto (what is needed again last), lru (what
    was used longest ago), first (this class before all others), never (this class stays)."""

    @model_validator(mode="after")
    def _is_possible(self) -> ClassRule:
        raise_conflicts(
            rule_conflicts(
                kind=self.kind,
                placement=self.placement,
                accessed_by_device=self.accessed_by_device,
                read_mostly=self.read_mostly,
                mechanism=self.mechanism,
                eviction=self.eviction,
            )
        )
        return self


class ClassRules(_Record):
    """One rule for every tensor class; a class rule in a file overrides `defaults` key by key."""

    weights: ClassRule = Field(default_factory=ClassRule)
    """Parameters that are trained, and every parameter until the first forward pass."""

    frozen_weights: ClassRule = Field(default_factory=ClassRule)
    """Parameters with requires_grad=False."""

    gradients: ClassRule = Field(default_factory=ClassRule)
    """Gradients of parameters."""

    optimizer_state: ClassRule = Field(default_factory=ClassRule)
    """What the optimizer keeps per parameter, such as Adam's two moments."""

    activations: ClassRule = Field(default_factory=ClassRule)
    """What forward and backward passes allocate."""

    other: ClassRule = Field(default_factory=ClassRule)
    """Everything else, such as input batches and the arrays of shared libraries."""

    @model_validator(mode="after")
    def _discards_only_what_dies(self) -> ClassRules:
        raise_conflicts(
            [
                Conflict(
                    (name, "mechanism"),
                    f"discard drops dead contents, and {name.replace('_', ' ')} live through the "
                    f"whole run: give {name} mechanism: auto",
                )
                for name in ("weights", "frozen_weights", "optimizer_state")
                if getattr(self, name).mechanism == "discard"
            ]
        )
        return self


class Limits(_Record):
    """Bounds on the whole process."""

    managed_bytes: ManagedLimit | None = None
    """Hard cap on the managed bytes of the process, cached ones too; past it an allocation fails
    with an out-of-memory error. Bytes, text such as 16GiB, or null for umem's own cap. The
    environment variable UMEM_MANAGED_LIMIT can lower it."""

    system_headroom_bytes: Bytes = 0
    """Device memory that kind system leaves free, in bytes or text such as 1GiB."""


class Policy(_Record):
    """Where every class of tensors lives, and within which bounds."""

    name: str = "custom"
    """Name shown in reports. Default: the file's name without its suffix. Not inherited."""

    description: str = ""
    """One sentence on what the policy is for. Not inherited."""

    extends: str | None = None
    """Policy to build on: the name of a preset, or a path relative to this file. Its keys hold
    where this file does not say otherwise; a list is replaced as a whole."""

    device_budget: DeviceBudget | None = None
    """Most bytes of managed memory resident on the device: bytes, text such as 64GiB, a percentage
    of the device's memory such as 80%, or null for no budget. The environment variable
    UMEM_DEVICE_BUDGET overrides it."""

    limits: Limits = Field(default_factory=Limits)
    """Bounds that hold for the whole process, whatever the class."""

    planner: PolicyPlanner = "planned"
    """Who keeps the budget while a model trains: planned (the fastest schedule of a recorded step),
    lookahead (prefetch for the next phases), fault (demand paging: what is missing comes by page
    fault), none (nobody: past the budget the allocator maps new memory on the host). The
    environment variable UMEM_PLANNER overrides it."""

    caching: StrictBool = True
    """Keep freed blocks for reuse; false gives each one back to RMM at once, which waits for the
    device every time, as RMM without a pool does."""

    share: tuple[ShareLibrary, ...] = Field(default=(), json_schema_extra={"uniqueItems": True})
    """Libraries whose arrays come from the same memory and count in the same statistics."""

    defaults: ClassRule = Field(default_factory=ClassRule)
    """Rule for every class; a key under classes wins over the same key here."""

    classes: ClassRules = Field(default_factory=ClassRules)
    """Keys that differ for a class."""

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
