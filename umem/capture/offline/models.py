"""Traces of fine-tuning known models, recorded from the real model without its weights."""

from __future__ import annotations

import importlib
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from umem.capture.offline.known_models import find_model, model_config, model_names
from umem.core.errors import TraceError
from umem.core.install import install_command
from umem.io.problems import did_you_mean
from umem.trace import Trace

if TYPE_CHECKING:
    import torch

    from umem.capture.offline.record import Progress, Step

__all__ = ["LORA_RANK", "LORA_TARGETS", "MODES", "PRECISIONS", "model_trace"]

PRECISIONS = ("bf16-master", "bf16", "fp32-autocast")
"""Of weights and optimizer: bfloat16 weights and an AdamW with float32 state and weights; all in
bfloat16; all in float32, and autocast to bfloat16."""

MODES = ("lora", "sft")
"""Adapters over a frozen model, or every weight (supervised fine-tuning)."""

LORA_RANK = 16
LORA_TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj", "qkv_proj")
"""Matrices of attention; the last is of models that have one for the first three."""

_FUSED_ATTENTION = "umem_fused_attention"

_EXPERTS = {"num_local_experts", "num_experts", "n_routed_experts"}
"""Entries of configurations that say how many experts there are."""

_EXPERTS_NEED = {"transformers": (5, 0), "torch": (2, 11)}
"""Versions whose grouped matrix products can be recorded without data."""


def model_trace(
    model: str,
    mode: str,
    *,
    batch: int = 1,
    seq: int = 2048,
    accumulate: int = 1,
    checkpoint: bool = False,
    precision: str = "bf16-master",
    progress: Progress | None = None,
) -> Trace:
    """Record one step of fine-tuning a known model with :func:`record_step`.

    The model is that of `transformers`, with bfloat16 weights by default. ``lora`` trains PEFT
    adapters of rank 16 on the projections of attention, in float32 as PEFT makes them, with fused
    AdamW. ``sft`` trains every weight, by default with bfloat16 gradients and an AdamW whose two
    moments and copy of the weights are float32: 16 bytes per parameter in all. Gradients are freed
    after each step (``set_to_none=True``).

    Experts are grouped matrix products. Their arithmetic does not depend on how many tokens each
    expert gets, which is data; each gets some, so that all are read and have gradients. A sliding
    window counts as blocks of its length, or of the next one that divides `seq`, with the same
    arithmetic for each token. Attention sinks are a factor on the result of attention.

    Parameters
    ----------
    model, mode
        A name from :mod:`umem.capture.offline.known_models`, and one of :data:`MODES`.
    batch, seq
        Sequences per micro-batch and tokens in each.
    accumulate
        Micro-batches per step.
    checkpoint
        Whether to keep only each layer's input and to recompute the rest in the backward pass
        (non-reentrant).
    precision
        ``bf16-master`` as above; ``bf16`` for fused AdamW with state in bfloat16 too;
        ``fp32-autocast`` for weights, gradients and state in float32, with autocast to bfloat16.
    progress
        As for :func:`record_step`.

    Returns
    -------
    Trace
        Its metadata has the arguments, ``parameters`` and ``trainable_parameters``.

    Raises
    ------
    TraceError
        For an unknown name, a number out of range, or where transformers or PEFT is missing or, for
        experts, transformers or torch is too old.

    Examples
    --------
    >>> trace = model_trace("llama-tiny", "lora", batch=2, seq=64)
    >>> trace.metadata["parameters"]
    3164416
    """
    config = _find_config(model)
    _check_choice("mode", mode, MODES)
    _check_choice("precision", precision, PRECISIONS)
    for name, value, most in (
        ("batch", batch, 4096),
        ("seq", seq, 131_072),
        ("accumulate", accumulate, 1024),
    ):
        if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= most:
            raise TraceError(f"{name} is {value!r}: give a whole number from 1 to {most}")
    # Before the recording, which would see the tensors that they make on import.
    transformers = _import("transformers")
    peft = _import("peft") if mode == "lora" else None

    # Not at the top: listing the models must not need torch.
    import torch

    if _EXPERTS & config.keys():
        if precision == "fp32-autocast":
            raise TraceError(
                f"{model} has experts, whose grouped products take bfloat16 and no autocast: "
                "give another precision than fp32-autocast"
            )
        _require_version(model, transformers)
        _require_version(model, torch)

    from umem.capture.offline.master_adamw import MasterAdamW
    from umem.capture.offline.record import record_step

    counts: dict[str, int] = {}

    def make_step() -> Step:
        dtype = torch.float32 if precision == "fp32-autocast" else torch.bfloat16
        network = _build(transformers, config, dtype, seq)
        counts["parameters"] = sum(part.numel() for part in network.parameters())
        network = _adapt(network, peft, checkpoint)
        trained = [part for part in network.parameters() if part.requires_grad]
        counts["trainable_parameters"] = sum(part.numel() for part in trained)
        optimizer: torch.optim.Optimizer
        if mode == "sft" and precision == "bf16-master":
            optimizer = MasterAdamW(trained, lr=1e-5)
        else:
            optimizer = torch.optim.AdamW(trained, lr=1e-4, fused=True)
        micro_batches = [
            torch.randint(config["vocab_size"], (batch, seq)) for _ in range(accumulate)
        ]

        def step() -> None:
            for tokens in micro_batches:
                autocasts = precision == "fp32-autocast"
                with torch.autocast("cpu", torch.bfloat16, enabled=autocasts):
                    loss = network(input_ids=tokens, labels=tokens).loss / accumulate
                loss.backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)

        return step

    trace = record_step(
        make_step,
        name=f"{model}-{mode}",
        source=f"recorded with torch {torch.__version__}, transformers {transformers.__version__}",
        progress=progress,
    )
    metadata: dict[str, str | int | float] = {
        "model": model,
        "mode": mode,
        "batch": batch,
        "seq": seq,
        "accumulate": accumulate,
        "checkpoint": int(checkpoint),
        "precision": precision,
        **counts,
    }
    return replace(trace, metadata=metadata)


def _find_config(model: str) -> Mapping[str, Any]:
    try:
        return model_config(find_model(model) or model)
    except (KeyError, AttributeError):
        _check_choice("model", model, model_names())
        raise


def _check_choice(name: str, value: object, choices: Sequence[str]) -> None:
    if value not in choices:
        hint = did_you_mean(str(value), choices) or "."
        raise TraceError(f"unknown {name} {value!r}{hint} Known: {', '.join(choices)}")


def _import(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise TraceError(
            f"this trace needs {name}, which cannot be imported ({error}): "
            + install_command("examples")
        ) from error


def _require_version(model: str, library: Any) -> None:
    needed = _EXPERTS_NEED[library.__name__]
    if tuple(int(part) for part in library.__version__.split(".")[:2]) < needed:
        version = ".".join(map(str, needed))
        raise TraceError(
            f"{model} needs {library.__name__} {version}, and {library.__version__} is installed: "
            f"pip install '{library.__name__}>={version}'"
        )


def _build(transformers: Any, given: Mapping[str, Any], dtype: Any, seq: int) -> Any:
    config = transformers.AutoConfig.for_model(
        **{**given, "max_position_embeddings": max(seq, 4096), "use_cache": False}
    )
    # transformers drops a mask of ones, so that the kernel runs as causal, but to see that it reads
    # the mask, and it keeps one without data. An implementation without a function for masks gets
    # none.
    transformers.AttentionInterface.register(_FUSED_ATTENTION, _fused_attention)
    options = {"experts_implementation": "grouped_mm"} if _EXPERTS & given.keys() else {}
    network = transformers.AutoModelForCausalLM.from_config(
        config, dtype=dtype, attn_implementation=_FUSED_ATTENTION, **options
    )
    return network.train()


def _fused_attention(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: None,
    *,
    scaling: float,
    sliding_window: int | None = None,
    s_aux: torch.Tensor | None = None,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """Causal attention with the work of fused kernels, as ``transformers`` calls it.

    `query` is [batch, heads, tokens, width], as is the result with heads and tokens swapped; `key`
    and `value` may have fewer heads. `s_aux`, attention sinks, is [heads].
    """
    from torch.nn.functional import pad, scaled_dot_product_attention

    shape, tokens, width = query.shape, query.shape[2], value.shape[3]
    if width < shape[3]:
        # torch's fused operator has one width: values get zeros, as for FlashAttention.
        value = pad(value, (0, shape[3] - width))
    window = min(sliding_window or tokens, tokens)
    if window < tokens:
        # torch has no fused operator with a window. Blocks stand in its place, as if they were
        # heads, each of whose queries uses all of its keys. Which ones is the same without data.
        block = next(it for it in range(window, tokens + 1) if tokens % it == 0)
        query, key, value = (
            it.reshape(shape[0], -1, block, shape[3]) for it in (query, key, value)
        )
    attended = scaled_dot_product_attention(
        query,
        key,
        value,
        is_causal=query.shape[2] == tokens,
        scale=scaling,
        enable_gqa=query.shape[1] != key.shape[1],
    )
    attended = attended.reshape(shape)[..., :width].transpose(1, 2)
    if s_aux is not None:
        # Kernels without sinks are followed by this product, with a factor that also depends on the
        # sum of the scores (`flex_attention` of transformers).
        attended = attended * s_aux.sigmoid()[:, None]
    return attended.contiguous(), None


def _adapt(network: Any, peft: Any, checkpoint: bool) -> Any:
    """Add PEFT's adapters, and enable checkpointing, if wanted."""
    with warnings.catch_warnings():
        # PEFT uses names that releases of transformers since 4.56 change.
        warnings.simplefilter("ignore", FutureWarning)
        if peft is not None:
            adapters = peft.LoraConfig(
                r=LORA_RANK,
                lora_alpha=2 * LORA_RANK,
                target_modules=list(LORA_TARGETS),
                task_type="CAUSAL_LM",
            )
            network = peft.get_peft_model(network, adapters)
        if checkpoint:
            network.gradient_checkpointing_enable(
                gradient_checkpointing_kwargs={"use_reentrant": False}
            )
    return network
