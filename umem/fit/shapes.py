"""Shapes of language models, from Hugging Face configurations. Nothing is downloaded."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from umem.capture.offline import find_model, llama_of_size, model_config, model_names
from umem.core.errors import UmemError
from umem.fit.families import FAMILIES, WRAPPED, Family
from umem.io.files import read_file, unreadable
from umem.io.problems import did_you_mean, shown

__all__ = [
    "Layer",
    "Matrix",
    "ModelShape",
    "config_shape",
    "generic_shape",
    "load_shape",
]

_MAX_CONFIG_BYTES = 2**20
_MAX_SIZE = 2**31
_MAX_LAYERS = 2_000
_MAX_PARAMETERS = 10**13
"""Ten times the largest model of today, and an answer still comes in seconds."""

_EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts")
"""Keys of the number of experts."""

_PICTURES = "text_config"
"""Key of the language part of a model with pictures."""


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
    def inner(self) -> int:
        """Width of the MLP of every token; 0 for none."""
        return self.mlp[-1].inputs if self.mlp else 0

    @property
    def parameters(self) -> int:
        """All parameters."""
        return sum(it.parameters for it in self.matrices) + self.small

    def seen(self, seq: int) -> int:
        """Tokens of a sequence that attention sees at most, and so the cache keeps."""
        return min(seq, self.window) if self.window else seq


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
    last_norm: int
    """Parameters of the norm before the head."""
    quantisation: str = ""
    """How the configuration says that the file's weights are quantised, such as ``nf4``."""

    @property
    def parameters(self) -> int:
        """All parameters."""
        ends = self.vocabulary * self.hidden * (1 if self.tied else 2)
        return ends + self.last_norm + sum(layer.parameters for layer in self.layers)

    @property
    def has_experts(self) -> bool:
        """Whether any layer is a mixture of experts."""
        return any(layer.experts for layer in self.layers)


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
        For an unknown name, for a configuration that cannot be read or lacks a key, and for a
        family whose layers the estimate does not know. The message names the file and the key.
    """
    if not model:
        raise UmemError("MODEL: the name is empty: give one, such as llama-2-7b")
    path = Path(os.path.expanduser(model))
    is_path = path.suffix == ".json" or model.startswith((".", "/", "~"))
    name = None if is_path else find_model(model)
    if name is not None:
        return config_shape(name, model_config(name), name)
    if is_path or path.exists():
        file = path / "config.json" if path.is_dir() else path
        return config_shape(file.resolve().parent.name, _read(file), str(file))
    known = model_names()
    hint = did_you_mean(model.rpartition("/")[2].lower(), known) or "."
    raise UmemError(
        f"MODEL: {model!r} is not known{hint} Give the path of its config.json, --params such "
        f"as 7b, or one of: {', '.join(known)}"
    )


def generic_shape(size: str) -> ModelShape:
    """Shape of a Llama with about so many parameters, such as ``"7b"`` or ``"500m"``.

    That of :func:`umem.capture.offline.llama_of_size`, with its errors.
    """
    name, config = llama_of_size(size)
    return config_shape(name, config, name)


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
    """Values of a configuration, and of its family where it lacks a key."""

    def __init__(self, config: Mapping[str, Any], family: Family, place: str) -> None:
        self.config, self.family, self.place = config, family, place

    def number(self, *names: str, default: int | None = None, least: int = 1) -> int:
        """Whole number of the first of these keys that is there; the default if it is null."""
        for name, value in self._found(names):
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

    def flag(self, key: bool | str) -> bool:
        """Whether a key is set, or the answer itself."""
        return key if isinstance(key, bool) else any(bool(it) for _, it in self._found((key,)))

    def numbers(self, name: str) -> list[Any]:
        """A list; empty if there is none."""
        found = self.config.get(name)
        return found if isinstance(found, list) else []

    def _found(self, names: Sequence[str]) -> list[tuple[str, Any]]:
        for values in (self.config, self.family.defaults):
            found = [(name, values[name]) for name in names if name in values]
            if found:  # a null stands for what follows from other keys, not for the default
                return [it for it in found if it[1] is not None]
        return []


def config_shape(name: str, config: Mapping[str, Any], place: str) -> ModelShape:
    """Shape of a model of this name from a configuration of transformers.

    Errors as of :func:`load_shape`, with the configuration's `place`.
    """
    quantisation = config.get("quantization_config")
    family = str(config.get("model_type", ""))
    inner = config.get(_PICTURES)
    if isinstance(inner, dict):
        family = str(inner.get("model_type") or family)
        config = {key: config[key] for key in ("tie_word_embeddings",) if key in config} | inner
    family = WRAPPED.get(family, family)
    keys = _Keys(config, _family(family, config, place), place)
    hidden = keys.number("hidden_size")
    count = keys.number("num_hidden_layers", least=0)
    if count > _MAX_LAYERS:
        raise UmemError(f"{place}: num_hidden_layers is {count}: give at most {_MAX_LAYERS}")
    kinds: dict[tuple[bool, int], Layer] = {}
    layers = []
    for number in range(count):
        kind = _has_experts(keys, number), _window(keys, number)
        if kind not in kinds:
            kinds[kind] = _layer(keys, hidden, *kind)
        layers.append(kinds[kind])
    norm = hidden * keys.family.weighs_norms * (1 + keys.family.norm_biases)
    is_sparse = any(layer.experts for layer in layers)
    shape = ModelShape(
        name=name,
        family=family,
        vocabulary=keys.number("vocab_size"),
        hidden=hidden,
        layers=tuple(layers),
        tied=keys.flag("tie_word_embeddings"),
        experts_per_token=keys.number("num_experts_per_tok") if is_sparse else 0,
        clamped=keys.family.is_clamped,
        last_norm=norm,
        quantisation=_quantisation(quantisation),
    )
    if shape.parameters > _MAX_PARAMETERS:
        raise UmemError(
            f"{place}: {shape.parameters:.3g} parameters: the estimate is for "
            f"{_MAX_PARAMETERS:.0e} at most: check the sizes"
        )
    return shape


def _family(name: str, config: Mapping[str, Any], place: str) -> Family:
    remedy = (
        "record the training with `umem trace` and use `umem simulate`, or give --params with a "
        "size such as 7b for a Llama of that size"
    )
    if not name:
        raise UmemError(f"{place}: the key model_type is missing: {remedy}")
    family = FAMILIES.get(name)
    if family is None:
        raise UmemError(
            f"{place}: model_type {shown(name)} is none of the families whose layers the estimate "
            f"knows ({', '.join(FAMILIES)}): {remedy}"
        )
    for key in family.refused:
        if config.get(key):
            raise UmemError(
                f"{place}: {key} makes a layer of it that the estimate does not know: {remedy}"
            )
    return family


def _quantisation(config: object) -> str:
    """How the file's weights are quantised: bitsandbytes' format, or another method's name."""
    if not isinstance(config, dict):
        return ""
    if config.get("load_in_4bit"):
        return "nf4-double" if config.get("bnb_4bit_use_double_quant") else "nf4"
    if config.get("load_in_8bit"):
        return "int8"
    method = config.get("quant_method")
    return method if isinstance(method, str) and re.fullmatch(r"[\w-]{1,32}", method) else "unknown"


def _has_experts(keys: _Keys, number: int) -> bool:
    sparse = keys.family.sparse
    if not sparse or not keys.number(*_EXPERTS, least=0):
        return False
    if sparse == "first":
        return number >= keys.number("first_k_dense_replace", default=0, least=0)
    if sparse == "step":
        is_step = (number + 1) % keys.number("decoder_sparse_step", default=1) == 0
        return is_step and number not in keys.numbers("mlp_only_layers")
    return True


def _window(keys: _Keys, number: int) -> int:
    """Window of a layer; 0 for none."""
    windows = keys.family.windows
    window = keys.number("sliding_window", default=0, least=0)
    kinds = keys.numbers("layer_types")
    if number < len(kinds):
        return window if kinds[number] == "sliding_attention" else 0
    if isinstance(windows, int):
        pattern = keys.number("sliding_window_pattern", default=windows)
        return window if (number + 1) % pattern else 0
    if windows == "late":
        is_late = number >= keys.number("max_window_layers", default=0, least=0)
        return window if keys.flag("use_sliding_window") and is_late else 0
    return window if windows == "all" else 0


def _layer(keys: _Keys, hidden: int, has_experts: bool, window: int) -> Layer:
    family = keys.family
    heads = keys.number("num_attention_heads")
    latent = keys.number("kv_lora_rank", default=0)
    small = 0
    if latent:
        rope = keys.number("qk_rope_head_dim")
        width, value_width = keys.number("qk_nope_head_dim") + rope, keys.number("v_head_dim")
        key_value_heads = heads
        attention, small = _latent_attention(keys, hidden, heads, latent, rope)
    else:
        key_value_heads = keys.number("num_key_value_heads", default=heads)
        if heads % key_value_heads:
            raise UmemError(
                f"{keys.place}: num_key_value_heads is {key_value_heads}: give a divisor of "
                f"num_attention_heads, {heads}"
            )
        width = value_width = keys.number("head_dim", default=max(1, hidden // heads))
        queries, shared = heads * width, key_value_heads * width
        widths = {"q_proj": queries, "k_proj": shared, "v_proj": shared}
        if family.fuses_attention:
            widths = {"qkv_proj": queries + 2 * shared}
        read = [Matrix(name, hidden, it, group="attention") for name, it in widths.items()]
        attention = (*read, Matrix("o_proj", queries, hidden))
        small += (queries + 2 * shared) * keys.flag(family.qkv_biases)
        small += hidden * keys.flag(family.output_biases)
        small += heads * family.is_clamped  # attention sinks
    head_norms = family.head_norms if keys.flag(family.head_norms_key or True) else ""
    norm_width = {"": 0, "head": 2 * width, "all": (heads + key_value_heads) * width}[head_norms]
    small += family.norms * hidden * family.weighs_norms * (1 + family.norm_biases) + norm_width
    mlp: tuple[Matrix, ...] = ()
    experts: tuple[Matrix, ...] = ()
    if has_experts:
        is_own = family.sparse != "all"  # beside dense layers, whose width the other key has
        inner = keys.number("moe_intermediate_size" if is_own else "intermediate_size")
        count = keys.number(*_EXPERTS)
        experts = (
            Matrix("router", hidden, count),
            Matrix("gate_up_proj", hidden, 2 * inner, count),
            Matrix("down_proj", inner, hidden, count),
        )
        shared_inner = keys.number(family.shared, default=0, least=0) if family.shared else 0
        if family.shared == "n_shared_experts":
            shared_inner *= inner
        mlp = _mlp(hidden, shared_inner, family.fuses_mlp) if shared_inner else ()
        small += hidden * family.gates_shared
        small += (count + count * (2 * inner + hidden)) * family.is_clamped
    else:
        mlp = _mlp(hidden, keys.number("intermediate_size"), family.fuses_mlp)
    if mlp and keys.flag(family.mlp_biases):
        small += 2 * mlp[-1].inputs + hidden
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
        norms=family.norms,
        head_norms=bool(head_norms),
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
    biases = (rank + latent + rope + hidden) * keys.flag(keys.family.qkv_biases)
    return matrices, latent + rank + biases


def _mlp(hidden: int, inner: int, fuses: bool) -> tuple[Matrix, ...]:
    names = {"gate_up_proj": 2 * inner} if fuses else {"gate_proj": inner, "up_proj": inner}
    read = [Matrix(name, hidden, width, group="mlp") for name, width in names.items()]
    return (*read, Matrix("down_proj", inner, hidden))
