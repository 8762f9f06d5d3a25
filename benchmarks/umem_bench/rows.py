"""Rows of a benchmark, each a case and a variant, as an option names them."""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence
from typing import TypeVar

__all__ = ["rows_named"]

_Case = TypeVar("_Case", bound=str)
_Variant = TypeVar("_Variant", bound=str)


def rows_named(
    text: str, variants: Mapping[_Case, Sequence[_Variant]], usual: Container[_Variant]
) -> list[tuple[_Case, _Variant]]:
    """Rows of a list such as ``llama-2-7b:umem,tiny:stock``, in its order.

    A case alone stands for its `usual` variants; an empty text for all cases but ``tiny``.

    Raises ``ValueError`` for a case or a variant that there is not.
    """
    rows: list[tuple[_Case, _Variant]] = []
    for word in text.split(",") if text else [it for it in variants if it != "tiny"]:
        name, _, wanted = word.strip().partition(":")
        case = next((it for it in variants if it == name), None)
        if case is None:
            raise ValueError(f"{name!r} is none of {', '.join(variants)}")
        known = variants[case]
        chosen = [it for it in known if it == wanted or (not wanted and it in usual)]
        if not chosen:
            raise ValueError(f"{wanted!r} is none of {', '.join(known)}")
        rows += [(case, variant) for variant in chosen]
    return list(dict.fromkeys(rows))
