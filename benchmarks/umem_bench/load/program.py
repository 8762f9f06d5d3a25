"""A user's program that loads a model from files and generates one token, with its times.

A process of its own, started anew: what it imports is part of the time.
"""

from __future__ import annotations

import json
import os
import sys
import time
from itertools import pairwise
from typing import Any

__all__ = ["main"]

_PROMPT_SEED = 1


def main() -> None:
    """Do what the job says that is the only argument, as JSON; print what was measured."""
    job: dict[str, Any] = json.loads(sys.argv[1])
    # The clock is the kernel's, and the same in every process.
    marks = [float(job["started_s"]), time.perf_counter()]

    import torch
    from transformers import LlamaForCausalLM

    marks.append(time.perf_counter())
    if job["variant"] == "umem":
        import umem

        umem.enable(job["policy"])
    marks.append(time.perf_counter())
    limits = {"max_memory": {0: job["device_bytes"], "cpu": job["host_bytes"]}}
    made_from: Any = LlamaForCausalLM.from_pretrained
    model = made_from(
        job["folder"],
        dtype=getattr(torch, job["weights"]),
        device_map=job["device_map"],
        **(limits if job["device_bytes"] else {}),
    )
    device = "cpu" if job["device_map"] == "cpu" else "cuda"
    if device == "cuda":
        torch.cuda.synchronize()
    marks.append(time.perf_counter())
    prompt = torch.randint(
        1,
        model.config.vocab_size,
        (job["batch"], job["tokens"]),
        generator=torch.Generator().manual_seed(_PROMPT_SEED),
    ).to(device)
    made = model.generate(
        prompt,
        attention_mask=torch.ones_like(prompt),
        max_new_tokens=1,
        do_sample=False,
        pad_token_id=0,
        return_dict_in_generate=True,
        output_logits=True,
    )
    tokens, logits = made.sequences.cpu(), made.logits[0].cpu()
    marks.append(time.perf_counter())
    print(json.dumps(_figures(job, marks, model, tokens, logits)))


def _figures(
    job: dict[str, Any], marks: list[float], model: Any, tokens: Any, logits: Any
) -> dict[str, Any]:
    """The fields of a result, once no time counts any more."""
    from umem_bench.card import Card
    from umem_bench.generate.measure import tensor_hash
    from umem_bench.scale.measure import host_figures
    from umem_bench.training.measure import outside_figures

    names = ("python_s", "imports_s", "enable_s", "load_s", "pass_s")
    parts = dict(zip(names, (end - begin for begin, end in pairwise(marks)), strict=True))
    notes = [] if logits.isfinite().all() else ["its logits are not finite: equal bits say little"]
    found: dict[str, Any] = {
        "parts": parts,
        "parameters": sum(weight.numel() for weight in model.parameters()),
        "logits_hash": tensor_hash(logits),
        "tokens_hash": tensor_hash(tokens),
        "notes": notes,
    }
    card = None if job["card"] is None else Card.model_validate(job["card"])
    if job["variant"] == "umem":
        from umem.streaming import manage_weights

        status = manage_weights(model).status()
        found |= {"streamed_bytes": status.streamed_bytes, "resident_bytes": status.resident_bytes}
    return found | host_figures() | outside_figures(card, job["variant"])


if __name__ == "__main__":
    main()
    sys.stdout.flush()
    os._exit(0)  # the end of a process is not measured, and takes as long as its memory is large
