"""Configurations of known models, by name, and of a Llama of a given size. Nothing is downloaded.

``umem fit``, ``umem simulate`` and recordings know these. ``known_models.json`` has what matters of
each published ``config.json``, and under ``also`` other names than the file on the Hugging Face Hub
suggests. The tiny Llama is umem's own.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

from umem.core.errors import UmemError

__all__ = ["find_model", "llama_of_size", "model_config", "model_names"]

_WORDS = re.compile(r"-(?:hf|base|chat|instruct|it|pt)(?=-|$)")
"""Words of a name that say how a model was trained, and nothing of its shape."""

_SIZED = "llama-"
"""What the names of models by their size begin with."""


def model_names() -> tuple[str, ...]:
    """Names of known models."""
    return tuple(_configs())


def find_model(name: str) -> str | None:
    """The name of a known model, from any way to write it, such as ``Qwen/Qwen3-8B-Base``."""
    return _names().get(_plain(name))


def model_config(name: str) -> Mapping[str, Any]:
    """Configuration of a known model, or of one that :func:`llama_of_size` names.

    Raises ``KeyError`` for others.
    """
    if name not in _configs() and name.startswith(_SIZED):
        try:
            return llama_of_size(name.removeprefix(_SIZED))[1]
        except UmemError:  # whose message is about an option
            raise KeyError(name) from None
    return _configs()[name]


def llama_of_size(size: str) -> tuple[str, Mapping[str, Any]]:
    """Name and configuration of a Llama with about so many parameters, such as ``"7b"``.

    The vocabulary is 32,000, heads are 128 wide, the MLP is 8/3 as wide as the model.
    ``UmemError`` if `size` is not such a number.
    """
    match = re.fullmatch(r"\s*(\d{1,6}(?:\.\d{1,6})?)\s*([bBmM])\s*", size)
    wanted = float(match[1]) * {"b": 1e9, "m": 1e6}[match[2].lower()] if match else 0.0
    if match is None or not 1e7 <= wanted <= 2e12:
        raise UmemError(f"--params: {size!r} is no size of a model: give 10m to 2000b, such as 7b")

    def inner(hidden: int) -> int:
        return -(-hidden * 8 // 3 // 256) * 256

    def parameters(hidden: int, layers: int) -> int:
        layer = 4 * hidden * hidden + 3 * hidden * inner(hidden) + 2 * hidden
        return 2 * 32_000 * hidden + hidden + layers * layer

    # Of Llama 2: 128 times as wide as deep. Then as many layers as come nearest.
    widths = range(128, 65_536, 128)
    hidden = next(
        it for it in widths if parameters(it, max(2, it // 128)) >= wanted or it == widths[-1]
    )
    ends = parameters(hidden, 0)
    layer = parameters(hidden, 1) - ends
    return f"{_SIZED}{match[1]}{match[2].lower()}", {
        "model_type": "llama",
        "vocab_size": 32_000,
        "hidden_size": hidden,
        "intermediate_size": inner(hidden),
        "num_hidden_layers": max(1, round((wanted - ends) / layer)),
        "num_attention_heads": hidden // 128,
    }


@cache
def _file() -> Mapping[str, Mapping[str, Any]]:
    found: Mapping[str, Mapping[str, Any]] = json.loads(
        Path(__file__).with_suffix(".json").read_bytes()
    )
    return found


@cache
def _configs() -> Mapping[str, Mapping[str, Any]]:
    return {name: {k: v for k, v in its.items() if k != "also"} for name, its in _file().items()}


@cache
def _names() -> Mapping[str, str]:
    """Names of known models, by each way to write them without owner and suffix."""
    return {also: name for name, its in _file().items() for also in (name, *its.get("also", ()))}


def _plain(name: str) -> str:
    """A name without its owner and the words for kinds of training."""
    found = name.rpartition("/")[2].lower().replace("_", "-").removeprefix("meta-")
    return _WORDS.sub("", found)
