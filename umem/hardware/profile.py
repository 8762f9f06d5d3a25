"""Hardware profiles, those of umem and YAML files, in which every figure has a source: checked."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from types import MappingProxyType
from typing import Annotated, Any, Generic, TypeVar, get_args

from pydantic import (
    AfterValidator,
    BaseModel,
    Field,
    ValidationInfo,
    create_model,
    field_validator,
    model_validator,
)

from umem.core.errors import HardwareError
from umem.hardware.cards import CARDS, card_profile
from umem.hardware.model import FIGURES, PRECISIONS, Hardware, Source, quantity_of, rates_of
from umem.io.problems import InvalidFileError, KeyPath, raise_conflicts, shown
from umem.io.yaml_files import FileKind, read, validate

__all__ = ["hardware_names", "load_profile"]

_Value = TypeVar("_Value")
_MAX_TEXT = 2000
_MAX_NAME = 80  # of one that is refused


def _one_line(text: str) -> str:
    if len(text) > _MAX_TEXT:
        raise ValueError(f"longer than {_MAX_TEXT} characters: shorten it")
    return " ".join(text.split())


def _not_empty(text: str) -> str:
    if not text:
        raise ValueError("empty: say where the value comes from")
    return text


_Text = Annotated[str, AfterValidator(_one_line)]
_Reason = Annotated[_Text, AfterValidator(_not_empty)]


class _Figure(BaseModel, Generic[_Value], extra="forbid", defer_build=True):
    """A value, and where it comes from."""

    value: _Value
    assumption: _Reason | None = None
    source: _Reason | None = Field(default=None, validate_default=True)

    @model_validator(mode="before")
    @classmethod
    def _is_a_figure(cls, data: Any) -> Any:
        if not isinstance(data, dict):
            example = cls.model_fields["value"].metadata[-1].example
            raise ValueError(
                f"{shown(data)} is not a figure with its source: write {{value: {example}, source: "
                "...}, or assumption in place of source"
            )
        return data

    @field_validator("source")
    @classmethod
    def _has_one_source(cls, source: str | None, info: ValidationInfo) -> str | None:
        if "assumption" not in info.data:  # its own error is reported
            return source
        given = [text for text in (source, info.data["assumption"]) if text is not None]
        if len(given) == 2:
            raise ValueError("both source and assumption: keep the one that holds")
        if not given:
            raise ValueError(
                "neither source nor assumption: say where the value comes from or, if it is "
                "neither measured nor published, why it is assumed"
            )
        return source

    def as_source(self) -> Source:
        """Where the value comes from."""
        return Source(self.source or self.assumption or "", assumption=self.source is None)


class _Profile(BaseModel, extra="forbid", defer_build=True):
    name: _Text = "custom"
    description: _Text = ""
    extends: str | None = None

    @model_validator(mode="after")
    def _figures_agree(self) -> _Profile:
        pairs = (
            ("page_bytes", "block_bytes"),
            ("block_bytes", "call_bytes"),
            ("to_device_bytes_per_s", "link_bytes_per_s"),
            ("to_host_bytes_per_s", "link_bytes_per_s"),
            ("copy_to_device_bytes_per_s", "copy_link_bytes_per_s"),
            ("copy_to_host_bytes_per_s", "copy_link_bytes_per_s"),
            ("mapped_read_bytes_per_s", "mapped_bytes_per_s"),
            ("mapped_write_bytes_per_s", "mapped_bytes_per_s"),
        )
        conflicts = []
        figures: Any = self
        if figures.one_pool.value and figures.host_bytes.value:
            message = "device_bytes counts the one pool: give 0 B"
            conflicts.append((("host_bytes", "value"), message))
        for low, high in pairs:
            least = getattr(self, low).value
            if least > getattr(self, high).value:
                message = f"less than {low}: give at least {quantity_of(low).format(least)}"
                conflicts.append(((high, "value"), message))
        raise_conflicts(conflicts)
        return self


class _ByPrecision(BaseModel, extra="forbid", defer_build=True):
    @model_validator(mode="after")
    def _is_not_empty(self) -> _ByPrecision:
        if not self.model_fields_set:
            raise ValueError(f"missing: write figures below it, by {', '.join(PRECISIONS)}")
        return self


def _model_of(hint: Any) -> Any:
    """Field of the profile's model for a figure, or for one figure for each precision."""
    figure_of: Any = _Figure
    if hasattr(hint, "__metadata__"):
        return figure_of[hint], ...
    precisions: Any = dict.fromkeys(PRECISIONS, (figure_of[get_args(hint)[1]], None))
    return create_model("_Throughputs", __base__=_ByPrecision, **precisions), ...


_MODELS: Any = {name: _model_of(hint) for name, hint in FIGURES.items()}
_PROFILE = create_model("_HardwareProfile", __base__=_Profile, **_MODELS)


def _is_figure(path: KeyPath) -> bool:
    # A figure comes with its own source: that of the inherited figure would contradict it.
    return len(path) == (2 if path[:1] == ("flops_per_s",) else 1)


_AMD = re.compile(r"(amd|radeon|rocm|ryzen|strix|mi[23]\d\d|gfx\d).*", re.IGNORECASE)


def _own(name: str) -> Mapping[str, Any] | None:
    if _AMD.fullmatch(name):
        raise HardwareError(
            f"{name[:_MAX_NAME]}: umem needs CUDA, which AMD's GPUs do not run: choose the profile "
            "of an NVIDIA GPU (`umem hardware list`)"
        )
    return card_profile(name)


_KIND = FileKind(
    "hardware profile", "", HardwareError, replaces=_is_figure, own=_own, own_names=tuple(CARDS)
)


def load_profile(source: str | os.PathLike[str] | Mapping[str, Any]) -> Hardware:
    """Load a profile and the profile that it extends, as :func:`umem.hardware.load_hardware`."""
    try:
        profile = validate(_PROFILE, read(source, _KIND))
    except InvalidFileError as error:
        raise HardwareError(str(error)) from None
    values: dict[str, Any] = {}
    sources: dict[str, Source] = {}
    for name in FIGURES:
        written = getattr(profile, name)
        if isinstance(written, _Figure):
            values[name], sources[name] = written.value, written.as_source()
        else:
            given = {key: figure for key, figure in written if figure is not None}
            values[name] = MappingProxyType({key: figure.value for key, figure in given.items()})
            sources |= {f"{name}.{key}": figure.as_source() for key, figure in given.items()}
    return Hardware(
        name=profile.name or "custom",
        description=profile.description,
        sources=MappingProxyType(sources),
        rates=rates_of(sources),
        **values,
    )


def hardware_names() -> tuple[str, ...]:
    """Names of umem's own hardware profiles, sorted."""
    return _KIND.own_names
