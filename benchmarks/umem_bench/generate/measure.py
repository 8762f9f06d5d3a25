"""One variant in a worker: a user's script that generates text, with its times and results."""

from __future__ import annotations

import hashlib
import os
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch

from umem.streaming import WeightStatus, manage_weights
from umem_bench.allocators import select
from umem_bench.card import Card
from umem_bench.llama import build_for_inference
from umem_bench.results import GenerateVariant, LlamaShape, Record
from umem_bench.scale.measure import MANAGED_LIMIT_BYTES, host_figures
from umem_bench.timing import no_garbage_collection
from umem_bench.training.measure import card_figures, outside_figures
from umem_bench.training.variants import deepspeed_inference, not_installed

__all__ = [
    "ACCELERATE_LEFT_BYTES",
    "POLICY",
    "SHORT_TOKENS",
    "GenerateJob",
    "measure",
    "tensor_hash",
]

POLICY = "inference"
"""umem's."""

SHORT_TOKENS = 4
"""New ones of the generation whose time is taken off: the prompt's part is in it."""

_FIRST_TOKENS = 2

_SETTLING_TOKENS = 80
"""umem may place weights anew after 32 calls that need less than the first ones, or that are all of
few tokens, and again once their experts are cached."""

ACCELERATE_LEFT_BYTES = 512 << 20
"""Of accelerate's budget, for caches and activations, which its map of weights does not count; and
of ZeRO-Inference's."""

_PACKAGES: dict[GenerateVariant, str] = {"accelerate": "accelerate", "zero-inference": "deepspeed"}

_REST_ROUNDS = 1.5
"""Rounds that must fit the time before another one begins: one forward pass follows."""

_PROMPT_SEED = 1

_Generate = Callable[[int], torch.Tensor]
"""Generates so many new tokens; the prompt and they are returned, int64[batch, tokens]."""


class GenerateJob(Record):
    """One variant of one case, for a worker."""

    model: LlamaShape
    variant: GenerateVariant
    budget_bytes: int | None
    """Of device memory; None for stock."""
    tokens: int
    """New ones of a timed generation."""
    rounds: int
    limit_s: float
    """Of the process. Rounds that do not fit are left out, but the first."""
    card: Card | None
    """None to generate on the CPU."""


def measure(job: GenerateJob) -> Iterator[dict[str, Any]]:
    """Generate as a job says; yields the measured fields of one result."""
    end_s = time.perf_counter() + job.limit_s
    reason = not_installed(_PACKAGES.get(job.variant))
    if reason:
        yield reason
        return
    _place_allocator(job)
    yield _measure(job, end_s)


def _place_allocator(job: GenerateJob) -> None:
    """Put a variant's allocator in place, within its limits."""
    for name in ("UMEM_POLICY", "UMEM_DEVICE_BUDGET", "UMEM_PLANNER"):
        os.environ.pop(name, None)
    os.environ["UMEM_MANAGED_LIMIT"] = str(MANAGED_LIMIT_BYTES)
    if job.variant == "umem":
        os.environ["UMEM_DEVICE_BUDGET"] = str(job.budget_bytes)
        select("umem", POLICY, MANAGED_LIMIT_BYTES)


def _measure(job: GenerateJob, end_s: float) -> dict[str, Any]:
    found: dict[str, Any] = card_figures(job.card, "base_bytes")
    device = torch.device("cpu" if job.card is None else "cuda")
    network, built_s = _timed(job, lambda: _build(job, device))
    # Token 0 is the one that fills up.
    prompt = torch.randint(
        1,
        job.model.vocabulary,
        (job.model.batch, job.model.tokens),
        generator=torch.Generator(device).manual_seed(_PROMPT_SEED),
        device=device,
    )

    def generate(tokens: int) -> torch.Tensor:
        made: torch.Tensor = network.generate(
            prompt,
            attention_mask=torch.ones_like(prompt),
            max_new_tokens=tokens,
            min_new_tokens=tokens,
            do_sample=False,
            pad_token_id=0,
        )
        return made

    _, first_s = _timed(job, lambda: generate(_FIRST_TOKENS))
    if job.variant not in _PACKAGES:  # they do not adapt, and take seconds a token
        generate(_SETTLING_TOKENS)
    before = _status(job, network)
    rounds_s, tokens = _time_rounds(job, generate, end_s)
    after = _status(job, network)
    with torch.no_grad():
        logits = network(tokens).logits
    notes = _notes(before, after)
    if len(rounds_s) < job.rounds:
        notes.append(f"no time was left for more than {len(rounds_s)} of {job.rounds} rounds")
    if not logits.isfinite().all():
        notes.append("its logits are not finite, so that equal bits say little")
    found |= outside_figures(job.card, job.variant) | host_figures()
    if after is not None:
        found |= {
            "streamed_bytes": after.streamed_bytes,
            "resident_bytes": after.resident_bytes,
            "buffer_bytes": after.buffer_bytes,
            "cache_bytes": after.cache_bytes,
            "cached_share": _cached_share(before, after),
            "plans": after.plans,
        }
    return found | {
        "state": "measured",
        "parameters": sum(getattr(it, "ds_numel", it.numel()) for it in network.parameters()),
        "built_s": built_s,
        "first_s": first_s,
        "token_s": tuple(rounds_s),
        "tokens_hash": tensor_hash(tokens),
        "logits_hash": tensor_hash(logits),
        "notes": tuple(notes),
    }


def _build(job: GenerateJob, device: torch.device) -> Any:
    """The model where a variant has it: on the device, or on the CPU for another's hooks."""
    if job.variant not in _PACKAGES:
        return build_for_inference(job.model, device, device)
    room_bytes = (job.budget_bytes or 0) - ACCELERATE_LEFT_BYTES
    if job.variant == "zero-inference":
        network = build_for_inference(job.model, device, torch.device("cpu"))
        torch.cuda.empty_cache()
        return deepspeed_inference(network, job.model.batch, job.model.hidden, room_bytes)
    from accelerate import dispatch_model, infer_auto_device_map

    network = build_for_inference(job.model, device, torch.device("cpu"))
    torch.cuda.empty_cache()  # each weight was drawn on the device
    parts = infer_auto_device_map(
        network,
        # More than the model, so that nothing goes to the disk.
        max_memory={0: room_bytes, "cpu": 2 * job.model.weight_bytes},
        no_split_module_classes=[type(network.model.layers[0]).__name__],
    )
    # As transformers dispatches: the cache stays where its layers compute.
    return dispatch_model(network, parts, skip_keys="past_key_values")


def _time_rounds(
    job: GenerateJob, generate: _Generate, end_s: float
) -> tuple[list[float], torch.Tensor]:
    """Seconds a token in each round, and the tokens of the last one."""
    rounds_s: list[float] = []
    with no_garbage_collection():
        while True:
            tokens, long_s = _timed(job, lambda: generate(job.tokens))
            _, short_s = _timed(job, lambda: generate(SHORT_TOKENS))
            rounds_s.append((long_s - short_s) / (job.tokens - SHORT_TOKENS))
            left_s = end_s - time.perf_counter()
            if len(rounds_s) == job.rounds or left_s < _REST_ROUNDS * (long_s + short_s):
                return rounds_s, tokens


def _timed(job: GenerateJob, work: Callable[[], Any]) -> tuple[Any, float]:
    """What a function returns, and its seconds from an idle GPU to an idle GPU."""
    _synchronize(job)
    began_s = time.perf_counter()
    result = work()
    _synchronize(job)
    return result, time.perf_counter() - began_s


def _synchronize(job: GenerateJob) -> None:
    if job.card is not None:
        torch.cuda.synchronize()


def _status(job: GenerateJob, network: Any) -> WeightStatus | None:
    """What umem says of the weights; None for the other variants."""
    return manage_weights(network).status() if job.variant == "umem" else None


def _cached_share(before: WeightStatus | None, after: WeightStatus) -> float | None:
    """Of the experts that were chosen in between; None without a cache, or with another one."""
    if before is None or before.plans != after.plans:
        return None
    hits, misses = (
        now - then for now, then in zip(after.cached_experts, before.cached_experts, strict=True)
    )
    return hits / (hits + misses) if hits + misses else None


def _notes(before: WeightStatus | None, after: WeightStatus | None) -> list[str]:
    """What umem's statuses say against the rounds between them."""
    if before is None or after is None:
        return []
    notes = []
    if after.plans != before.plans:
        notes.append(f"umem placed weights {after.plans - before.plans} times within the rounds")
    if not after.streamed_bytes:
        notes.append("umem streams no weights")
    return notes


def tensor_hash(tensor: torch.Tensor) -> str:
    """BLAKE2 of a tensor's bits."""
    data = tensor.detach().cpu().contiguous().view(torch.uint8).numpy()
    return hashlib.blake2b(data.tobytes(), digest_size=16).hexdigest()
