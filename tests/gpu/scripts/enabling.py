"""`umem.enable` after CUDA has started; facts as JSON."""

from __future__ import annotations

import json
import warnings
from typing import Any

import torch

import umem

if __name__ == "__main__":
    early = torch.zeros(1, device="cuda")
    facts: dict[str, Any] = {}
    try:
        umem.enable("sft")
    except umem.EnableError as error:
        facts["error"] = str(error)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        facts["fallback"] = umem.enable("sft", fallback=True)
    facts["warnings"] = [f"{w.category.__name__}: {w.message}" for w in caught]
    facts["enabled"] = umem.is_enabled()
    with umem.tensor_class("weights"):
        kept = torch.ones(1 << 20, device="cuda")
        facts["stock_bytes"] = kept.nbytes
        facts["stock_allocated"] = torch.cuda.memory_allocated()
    try:
        umem.tensors()
    except umem.EnableError as error:
        facts["tensors"] = str(error)
    print(json.dumps(facts))
