"""Shapes of language models, from Hugging Face configurations. Nothing is downloaded."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from umem.capture.offline.models import SHAPES, RecordedShape, llama_of_size
from umem.core.errors import UmemError
from umem.io.files import read_file, unreadable
from umem.io.problems import did_you_mean, shown

__all__ = ["Layer", "Matrix", "ModelShape", "generic_shape", "load_shape", "shape_names"]

_CONFIGS = Path(__file__).parent / "configs"
_MAX_CONFIG_BYTES = 2**20
_MAX_SIZE = 2**31
_MAX_LAYERS = 2_000
_MAX_PARAMETERS = 10**13
"""Ten times the largest model of today, and an answer still comes in seconds."""

_FOUR_NORMS = ("gemma2", "gemma3", "gemma3_text")
"""Families with a norm before and one behind attention and MLP."""
_HEAD_NORMS = ("qwen3", "qwen3_moe", "gemma3", "gemma3_text")
"""Families that normalise queries and keys."""
_QKV_BIASES = ("qwen2", "gpt_oss")
_BIASES = ("gpt_oss",)
"""Families with biases at the output of attention, the router and the experts."""
_TIED_BY_DEFAULT = ("gemma", "gemma2", "gemma3", "gemma3_text")
_NO_WINDOW = ("llama", "qwen2", "qwen3", "qwen3_moe")
"""Families whose configurations may name a window that they do not use by default."""
_UNLIKE_LLAMA = (
    "bert",
    "bloom",
    "falcon",
    "gpt2",
    "gpt_neo",
    "gpt_neox",
    "gptj",
    "mamba",
    "mamba2",
    "mpt",
    "opt",
    "roberta",
    "t5",
)
"""Families whose MLP or layer is another one, so that the formulas would be wrong."""

_SUFFIX = re.compile(r"-(?:hf|base|chat|instruct|it|pt)$")


@dataclass(frozen=True)
class Matrix:
    """A weight matrix, or one for each of several experts."""

    name: str
    inputs: int
    outputs: int
    count: int = 1
    """Experts, in one tensor."""
    group: str = ""
    """Matrices of one group read the same input. Empty for an input of its own."""

    @property
    def parameters(self) -> int:
        """Parameters of all experts."""
        return self.inputs * self.outputs * self.count


@dataclass(frozen=True)
class Layer:
    """A decoder layer."""

    queries: int
    """Width of all queries, as of all keys and all values."""
    keys: int
    values: int
    attended: int
    """Width of what attention returns."""
    heads_width: int
    """Sum over query heads of the widths of a key and a value: arithmetic of a pair of tokens."""
    window: int
    """Tokens that attention sees at most; 0 for all."""
    attention: tuple[Matrix, ...]
    mlp: tuple[Matrix, ...]
    """Of every token. The last one makes the output."""
    experts: tuple[Matrix, ...]
    """The router first; none in a dense layer."""
    small: int
    """Parameters of norms and biases."""
    norms: int
    """Norms over the hidden width."""
    head_norms: bool

    @property
    def matrices(self) -> tuple[Matrix, ...]:
        """All of them, in the order of the forward pass."""
        return self.attention + self.mlp + self.experts

    @property
    def parameters(self) -> int:
        """All parameters."""
        return sum(it.parameters for it in self.matrices) + self.small


@dataclass(frozen=True)
class ModelShape:
    """What the estimate needs to know of a model."""

    name: str
    family: str
    vocabulary: int
    hidden: int
    layers: tuple[Layer, ...]
    tied: bool
    """Whether the head uses the embedding's weights."""
    experts_per_token: int
    clamped: bool
    """Whether the experts' activation is the one of GPT-OSS, with a clamp and biases."""

    @property
    def parameters(self) -> int:
        """All parameters."""
        ends = self.vocabulary * self.hidden * (1 if self.tied else 2)
        return ends + self.hidden + sum(layer.parameters for layer in self.layers)

    @property
    def has_experts(self) -> bool:
        """Whether any layer is a mixture of experts."""
        return any(layer.experts for layer in self.layers)


def shape_names() -> tuple[str, ...]:
    """Names of known models: those of ``umem simulate`` and those with a configuration here."""
    shipped = (path.stem for path in _CONFIGS.glob("*.json"))
    return tuple(sorted({*SHAPES, *shipped}))


def load_shape(model: str) -> ModelShape:
    """Find a model's shape.

    Parameters
    ----------
    model
        A known name (:func:`shape_names`), a name on the Hugging Face Hub whose configuration is
        known, or the path of a ``config.json`` or of its folder. A folder with a known name is
        written with ``./``.

    Raises
    ------
    UmemError
        For an unknown name, and for a configuration that cannot be read or lacks a key. The
        message names the file and the key.
    """
    path = Path(os.path.expanduser(model))
    is_path = path.suffix == ".json" or model.startswith((".", "/", "~"))
    name = None if is_path else _known_names().get(_plain(model))
    if name is None and (is_path or path.exists()):
        file = path / "config.json" if path.is_dir() else path
        return _from_config(file.resolve().parent.name, _read(file), str(file))
    if name is None:
        known = shape_names()
        hint = did_you_mean(_plain(model), known) or "."
        raise UmemError(
            f"MODEL: {model!r} is not known{hint} Give the path of its config.json, --params such "
            f"as 7b, or one of: {', '.join(known)}"
        )
    if name in SHAPES:
        return _from_config(name, _recorded_config(SHAPES[name]), name)
    file = _CONFIGS / f"{name}.json"
    return _from_config(name, _read(file), str(file))


def generic_shape(size: str) -> ModelShape:
    """Shape of a Llama with about so many parameters, such as ``"7b"`` or ``"500m"``.

    That of :func:`umem.capture.offline.llama_of_size`, with its errors.
    """
    name, shape = llama_of_size(size)
    return _from_config(name, _recorded_config(shape), name)


# Names.


def _plain(name: str) -> str:
    """A name without its owner and the words for kinds of training."""
    found = name.rpartition("/")[2].lower().replace("_", "-").removeprefix("meta-")
    while _SUFFIX.search(found):
        found = _SUFFIX.sub("", found)
    return found


@cache
def _known_names() -> Mapping[str, str]:
    """Names of known models, by each way to write them without owner and suffix."""
    names = {name: name for name in SHAPES}
    for path in _CONFIGS.glob("*.json"):
        hub = str(_read(path).get("_name_or_path", path.stem))
        names |= {path.stem: path.stem, _plain(hub): path.stem}
    return names


def _recorded_config(shape: RecordedShape) -> dict[str, Any]:
    """Configuration of a model that ``umem simulate`` records."""
    windows = {"gpt_oss": {"sliding_window": 128, "sliding_window_pattern": 2}}
    return {
        "model_type": shape.family,
        "vocab_size": shape.vocabulary,
        "hidden_size": shape.hidden,
        "intermediate_size": shape.intermediate,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.key_value_heads,
        "head_dim": shape.head,
        "tie_word_embeddings": False,
        **windows.get(shape.family, {}),
        **shape.experts,
    }


# Configurations.


def _read(file: Path) -> dict[str, Any]:
    try:
        config = json.loads(read_file(file, _MAX_CONFIG_BYTES))
    except OSError as error:
        raise UmemError(f"{file}: {unreadable(error)}") from None
    except (ValueError, RecursionError) as error:
        raise UmemError(f"{file}: not a JSON file ({error}): give a model's config.json") from None
    if not isinstance(config, dict):
        raise UmemError(f"{file}: not an object of keys and values: give a model's config.json")
    return config


class _Keys:
    """Whole numbers of a configuration."""

    def __init__(self, config: Mapping[str, Any], place: str) -> None:
        self.config, self.place = config, place

    def number(self, *names: str, default: int | None = None, least: int = 1) -> int:
        """Value of the first of these keys that is there and not null."""
        for name in names:
            value = self.config.get(name)
            if value is None:
                continue
            if isinstance(value, bool) or not isinstance(value, int):
                raise UmemError(f"{self.place}: {name} is {shown(value)}: give a whole number")
            if not least <= value <= _MAX_SIZE:
                raise UmemError(
                    f"{self.place}: {name} is {shown(value)}: give {least} to {_MAX_SIZE}"
                )
            return value
        if default is None:
            raise UmemError(
                f"{self.place}: the key {names[0]} is missing: give the config.json of a decoder, "
                "or --params with a size such as 7b"
            )
        return default


def _from_config(name: str, config: Mapping[str, Any], place: str) -> ModelShape:
    inner = config.get("text_config")
    if isinstance(inner, dict):
        config = {"model_type": config.get("model_type", ""), **inner}
    family = str(config.get("model_type", ""))
    if family in _UNLIKE_LLAMA:
        raise UmemError(
            f"{place}: model_type {family!r} is no decoder with the layers of Llama, which the "
            "estimate is for: record the training with `umem trace` and use `umem simulate`"
        )
    keys = _Keys(config, place)
    hidden = keys.number("hidden_size", "n_embd", "d_model")
    count = keys.number("num_hidden_layers", "n_layer", least=0)
    if count > _MAX_LAYERS:
        raise UmemError(f"{place}: num_hidden_layers is {count}: give at most {_MAX_LAYERS}")
    dense = keys.number("first_k_dense_replace", default=0, least=0)
    experts = keys.number(
        "num_local_experts", "num_experts", "n_routed_experts", default=0, least=0
    )
    kinds: dict[tuple[bool, int], Layer] = {}
    layers = []
    for number in range(count):
        kind = experts > 0 and number >= dense, _window(keys, family, number)
        if kind not in kinds:
            kinds[kind] = _layer(keys, family, hidden, *kind)
        layers.append(kinds[kind])
    tied = config.get("tie_word_embeddings")
    shape = ModelShape(
        name=name,
        family=family,
        vocabulary=keys.number("vocab_size"),
        hidden=hidden,
        layers=tuple(layers),
        tied=family in _TIED_BY_DEFAULT if tied is None else bool(tied),
        experts_per_token=keys.number("num_experts_per_tok") if experts else 0,
        clamped=family == "gpt_oss",
    )
    if shape.parameters > _MAX_PARAMETERS:
        raise UmemError(
            f"{place}: {shape.parameters:.3g} parameters: the estimate is for "
            f"{_MAX_PARAMETERS:.0e} at most: check the sizes"
        )
    return shape


def _window(keys: _Keys, family: str, number: int) -> int:
    """Window of a layer; 0 for none."""
    window = keys.number("sliding_window", default=0, least=0)
    kinds = keys.config.get("layer_types")
    if isinstance(kinds, list) and number < len(kinds):
        return window if kinds[number] == "sliding_attention" else 0
    if family in _NO_WINDOW:
        return 0
    pattern = keys.number("sliding_window_pattern", default=2 if family == "gemma2" else 0, least=0)
    return 0 if pattern and (number + 1) % pattern == 0 else window


def _layer(keys: _Keys, family: str, hidden: int, has_experts: bool, window: int) -> Layer:
    heads = keys.number("num_attention_heads", "n_head")
    latent = keys.number("kv_lora_rank", default=0)
    if latent:
        rope = keys.number("qk_rope_head_dim")
        width, value_width = keys.number("qk_nope_head_dim") + rope, keys.number("v_head_dim")
        key_value_heads = heads
        attention, small = _latent_attention(keys, hidden, heads, latent, rope)
    else:
        key_value_heads = keys.number("num_key_value_heads", default=heads)
        width = value_width = keys.number("head_dim", default=max(1, hidden // heads))
        queries, shared = heads * width, key_value_heads * width
        attention = (
            Matrix("q_proj", hidden, queries, group="attention"),
            Matrix("k_proj", hidden, shared, group="attention"),
            Matrix("v_proj", hidden, shared, group="attention"),
            Matrix("o_proj", queries, hidden),
        )
        has_biases = family in _QKV_BIASES or keys.config.get("attention_bias") is True
        small = queries + 2 * shared if has_biases else 0
        small += hidden if family in _BIASES else 0
        small += heads if family == "gpt_oss" else 0  # attention sinks
    head_norms = family in _HEAD_NORMS
    norms = 4 if family in _FOUR_NORMS else 2
    small += norms * hidden + (2 * width if head_norms else 0)
    mlp: tuple[Matrix, ...] = ()
    experts: tuple[Matrix, ...] = ()
    if has_experts:
        inner = keys.number("moe_intermediate_size", "intermediate_size")
        count = keys.number("num_local_experts", "num_experts", "n_routed_experts")
        experts = (
            Matrix("router", hidden, count),
            Matrix("gate_up_proj", hidden, 2 * inner, count),
            Matrix("down_proj", inner, hidden, count),
        )
        shared_inner = keys.number(
            "shared_expert_intermediate_size",
            default=inner * keys.number("n_shared_experts", default=0, least=0),
            least=0,
        )
        mlp = _mlp(hidden, shared_inner) if shared_inner else ()
        if family in _BIASES:
            small += count + count * (2 * inner + hidden)
    else:
        mlp = _mlp(hidden, keys.number("intermediate_size"))
    return Layer(
        queries=heads * width,
        keys=key_value_heads * width,
        values=key_value_heads * value_width,
        attended=heads * value_width,
        heads_width=heads * (width + value_width),
        window=window,
        attention=attention,
        mlp=mlp,
        experts=experts,
        small=small,
        norms=norms,
        head_norms=head_norms,
    )


def _latent_attention(
    keys: _Keys, hidden: int, heads: int, latent: int, rope: int
) -> tuple[tuple[Matrix, ...], int]:
    """Matrices of attention with compressed keys and values, and parameters of its norms."""
    nope, value_width = keys.number("qk_nope_head_dim"), keys.number("v_head_dim")
    rank = keys.number("q_lora_rank", default=0)
    queries = heads * (nope + rope)
    if rank:
        of_queries: tuple[Matrix, ...] = (
            Matrix("q_a_proj", hidden, rank, group="attention"),
            Matrix("q_b_proj", rank, queries),
        )
    else:
        of_queries = (Matrix("q_proj", hidden, queries, group="attention"),)
    matrices = (
        *of_queries,
        Matrix("kv_a_proj_with_mqa", hidden, latent + rope, group="attention"),
        Matrix("kv_b_proj", latent, heads * (nope + value_width)),
        Matrix("o_proj", heads * value_width, hidden),
    )
    return matrices, latent + rank


def _mlp(hidden: int, inner: int) -> tuple[Matrix, ...]:
    return (
        Matrix("gate_proj", hidden, inner, group="mlp"),
        Matrix("up_proj", hidden, inner, group="mlp"),
        Matrix("down_proj", inner, hidden),
    )
