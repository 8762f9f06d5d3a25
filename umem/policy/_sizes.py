"""Sizes as fields of a policy: how they are checked, and how its JSON schema describes them."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BeforeValidator, WithJsonSchema

from umem.units import NUMBER_PATTERN, parse_bytes, parse_percent

__all__ = ["Bytes", "DeviceBudget", "ManagedLimit", "parse_device_budget", "parse_managed_limit"]


def parse_managed_limit(value: int | str) -> int:
    """Read a cap on managed memory in bytes.

    Raises
    ------
    ValueError
        If it is no size as in :func:`umem.units.parse_bytes`, or 0.
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
