"""The fields of a profile: what kind of value each holds."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import fields
from types import MappingProxyType
from typing import Any, get_args

from umem.core.errors import HardwareError
from umem.hardware.model import EvictionOrder, FaultEviction, Hardware, Source
from umem.hardware.quantities import (
    BLOCK,
    CAPACITY,
    COUNT,
    FLAG,
    FLOPS,
    RATE,
    SHARE,
    SIZE,
    SLOWDOWN,
    TIME,
    Quantity,
    word,
)
from umem.io.yaml_files import (
    Document,
    KeyPath,
    Kind,
    Place,
    Problem,
    UnusableError,
    did_you_mean,
    problem_at,
    shown,
)
from umem.trace import Precision

__all__ = ["FIELDS", "HARDWARE", "PRECISIONS", "build", "figures", "quantity_of"]

PRECISIONS = tuple(precision.name.lower() for precision in Precision)
"""Keys of ``flops_per_s``; the number of a precision is its place."""

_KINDS: dict[str, Quantity] = {
    "device_bytes": CAPACITY,
    "host_bytes": CAPACITY,
    "block_bytes": BLOCK,
    "page_bytes": BLOCK,
    "flops_per_s": FLOPS,
    "memory_bytes_per_s": RATE,
    "launch_s": TIME,
    "to_device_bytes_per_s": RATE,
    "to_host_bytes_per_s": RATE,
    "link_bytes_per_s": RATE,
    "call_s": TIME,
    "call_bytes": SIZE,
    "copy_to_device_bytes_per_s": RATE,
    "copy_to_host_bytes_per_s": RATE,
    "copy_slowdown_s_per_byte": SLOWDOWN,
    "page_slowdown_s_per_byte": SLOWDOWN,
    "mapped_read_bytes_per_s": RATE,
    "mapped_write_bytes_per_s": RATE,
    "mapped_bytes_per_s": RATE,
    "fault_batch_s": TIME,
    "faults_per_batch": COUNT,
    "fault_service_s": TIME,
    "speculation_threshold": SHARE,
    "fault_eviction": word(*get_args(FaultEviction)),
    "eviction_order": word(*get_args(EvictionOrder)),
    "ats": FLAG,
    "access_counter_threshold": COUNT,
}

FIELDS: Mapping[str, Quantity] = MappingProxyType(
    {
        field.name: _KINDS[field.name]
        for field in fields(Hardware)
        if field.name not in ("name", "description", "sources")
    }
)
"""By name, in the order of :class:`umem.hardware.Hardware`; ``flops_per_s`` holds one for each
precision."""


def quantity_of(name: str) -> Quantity:
    """Kind of a field, or of one precision such as ``flops_per_s.bf16``."""
    return FIELDS[name.partition(".")[0]]


def figures(hardware: Hardware) -> dict[str, Any]:
    """Values of a machine by field, with one entry for each precision."""
    values: dict[str, Any] = {}
    for name in FIELDS:
        value = getattr(hardware, name)
        if isinstance(value, Mapping):
            values |= {f"{name}.{key}": value[key] for key in PRECISIONS if key in value}
        else:
            values[name] = value
    return values


# A profile as written, checked key by key and made into a machine.


def _is_figure(path: KeyPath) -> bool:
    # A figure brings its own source: the inherited one would contradict it.
    return len(path) == (2 if path[0] == "flops_per_s" else 1)


HARDWARE = Kind(
    noun="hardware profile",
    shipped="hardware profile",
    plural="hardware profiles",
    folder="hardware",
    landmark="h200-pcie.yaml",
    example="extends: h200-pcie",
    instead_of_aliases="put what profiles have in common in a file to `extends`",
    error=HardwareError,
    is_replaced=_is_figure,
)

_TOP_KEYS = ("name", "description", "extends", *FIELDS)
_FIGURE_KEYS = ("value", "source", "assumption")
_MAX_TEXT = 2000


def build(document: Document) -> Hardware:
    """Check a profile and make the machine.

    Raises
    ------
    UnusableError
        With every problem, in the order of the text.
    """
    problems: set[Problem] = set()
    check = _Check(document, problems)
    check.keys((), document.data, _TOP_KEYS)
    texts = {key: check.text((key,), document.data.get(key, "")) for key in ("name", "description")}
    values: dict[str, Any] = {}
    sources: dict[str, Source] = {}
    for name in FIELDS:
        if name == "flops_per_s":
            values[name] = MappingProxyType(check.precisions(sources))
        else:
            values[name] = check.figure((name,), document.data.get(name), sources)
    if not problems:
        check.relations(values)
    if problems:
        raise UnusableError(
            sorted(problems, key=lambda p: (p.file, p.line or 0, p.column or 0, p.key, p.message))
        )
    name = texts["name"] or "custom"
    return Hardware(
        name=name,
        description=texts["description"],
        sources=MappingProxyType(sources),
        **values,
    )


class _Check:
    """Checks of one document; each problem goes to `problems` and the check goes on."""

    def __init__(self, document: Document, problems: set[Problem]) -> None:
        self.document = document
        self.problems = problems

    def complain(self, path: KeyPath, message: str, *, at_key: bool = False) -> None:
        """Note a problem at a key's value, or at the nearest key around it that is written."""
        entries = self.document.entries
        ways = (path[:length] for length in range(len(path), -1, -1))
        entry = next(entries[way] for way in ways if way in entries)
        place: Place = entry.key if at_key else entry.value
        self.problems.add(problem_at(place, path, message))

    def keys(self, path: KeyPath, said: Iterable[str], valid: tuple[str, ...]) -> None:
        """Complain of keys that are not valid here."""
        for key in said:
            if key not in valid:
                hint = did_you_mean(key, valid) or "."
                message = f"unknown key{hint} Valid keys: {', '.join(valid)}"
                self.complain((*path, key), message, at_key=True)

    def text(self, path: KeyPath, said: Any) -> str:
        """Text, on one line."""
        if not isinstance(said, str):
            self.complain(path, f"{shown(said)} is not text: write a string in quotes")
            return ""
        if len(said) > _MAX_TEXT:
            self.complain(path, f"longer than {_MAX_TEXT} characters: shorten it")
        return " ".join(said.split())

    def figure(self, path: KeyPath, said: Any, sources: dict[str, Source]) -> Any:
        """Value of a figure; its source goes to `sources`."""
        name = ".".join(map(str, path))
        quantity = quantity_of(name)
        form = f"write {{value: {quantity.example}, source: ...}}, or assumption in place of source"
        if said is None and path not in self.document.entries:
            self.complain(path, f"missing: {form}")
            return None
        if not isinstance(said, dict):
            self.complain(path, f"{shown(said)} is not a mapping: {form}")
            return None
        self.keys(path, said, _FIGURE_KEYS)
        self._source(path, said, sources)
        if "value" not in said:
            self.complain(path, f"no value: {form}")
            return None
        try:
            return quantity.parse(said["value"])
        except ValueError as error:
            self.complain((*path, "value"), str(error))
            return None

    def _source(self, path: KeyPath, said: dict[str, Any], sources: dict[str, Source]) -> None:
        given = [key for key in ("source", "assumption") if key in said]
        if len(given) != 1:
            wrong = (
                "both source and assumption: keep the one that holds"
                if given
                else "neither source nor assumption: say where the value comes from, or, where "
                "nothing measured or published stands behind it, why it is assumed"
            )
            self.complain(path, wrong)
            return
        (key,) = given
        text = self.text((*path, key), said[key])
        if isinstance(said[key], str) and not text:
            self.complain((*path, key), "empty: say where the value comes from")
        name = ".".join(map(str, path))
        sources[name] = Source(text, assumption=key == "assumption")

    def precisions(self, sources: dict[str, Source]) -> dict[str, float]:
        """Throughputs by precision, at least one."""
        path: KeyPath = ("flops_per_s",)
        said = self.document.data.get("flops_per_s")
        if not isinstance(said, dict) or not said:
            self.complain(path, f"missing: write figures below it, by {', '.join(PRECISIONS)}")
            return {}
        self.keys(path, said, PRECISIONS)
        return {
            key: self.figure((*path, key), said[key], sources) for key in PRECISIONS if key in said
        }

    def relations(self, values: dict[str, Any]) -> None:
        """Complain of values that are fine by themselves and cannot hold together."""
        for low, high in (
            ("page_bytes", "block_bytes"),
            ("block_bytes", "call_bytes"),
            ("to_device_bytes_per_s", "link_bytes_per_s"),
            ("to_host_bytes_per_s", "link_bytes_per_s"),
            ("mapped_read_bytes_per_s", "mapped_bytes_per_s"),
            ("mapped_write_bytes_per_s", "mapped_bytes_per_s"),
        ):
            if values[low] > values[high]:
                least = quantity_of(low).format(values[low])
                self.complain((high, "value"), f"less than {low}: give at least {least}")
