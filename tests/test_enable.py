"""`umem.enable` and the package's surface on a machine, or in a process, without a GPU."""

from __future__ import annotations

import json
from typing import Any

import pytest
from other_process import run_forked, run_python

import umem

# In another process: what this one enables stays, and it imports umem only once.
WITHOUT_GPU = """
import json, warnings
import umem

facts = {}

def failure(name, call):
    try:
        call()
    except Exception as error:
        facts[name] = [type(error).__name__, str(error)]

def overridden():
    with umem.tensor_class("weights"):
        pass

failure("enable", umem.enable)
failure("unknown policy", lambda: umem.enable("no-such-policy", fallback=True))
failure("not a policy", lambda: umem.enable(3))
failure("tensors, not enabled", umem.tensors)
failure("tensor_class, not enabled", overridden)
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    facts["fallback"] = umem.enable("lora", fallback=True)
facts["warnings"] = [[w.category.__name__, str(w.message), w.filename] for w in caught]
facts["enabled"] = umem.is_enabled()
failure("tensors, after the fallback", umem.tensors)
failure("memory_by_class, after the fallback", umem.memory_by_class)
facts["memory_summary, after the fallback"] = umem.memory_summary()
failure("unknown class", lambda: umem.tensor_class("weight").__enter__())
overridden()  # does nothing, and says nothing
import torch
facts["computes"] = torch.ones(4).sum().item()
facts["cuda started"] = torch.cuda.is_initialized()
from umem.doctor import collect, diagnose
report = diagnose(collect())
facts["doctor"] = {"swap_works": report.swap_works, "failures": [it.name for it in report.failures]}
print(json.dumps(facts))
"""

# The whole swap, on stand-ins.
STAND_INS = """
import json, sys
import torch, umem, umem.swap
from stand_in_swap import stand_in

order, functions = stand_in(is_guarded=sys.argv[1:] == ["guarded"])
enabled = umem.enable("sft")
model = torch.nn.Linear(4, 4)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(2):
    model(torch.ones(1, 4)).sum().backward()
    optimizer.step()
stats = torch._C._cuda_memoryStats(0)["allocation"]["all"]["current"]
summary = umem.memory_summary(0).splitlines()[0]
state = umem.swap.runtime()
kinds = sorted({rule.kind for rule in state.resolved.rules})
from umem.managing import managers
print(json.dumps([enabled, order, len(functions), sorted(functions.values()), stats, summary,
                  list(state.device_budgets), kinds, len(managers())]))
"""


@pytest.mark.slow
@pytest.mark.parametrize("guard", [True, False])
def test_the_swap_comes_after_everything_that_can_fail(guard: bool) -> None:
    """Torch gets every entry point first; then a training goes on as before."""
    enabled, order, setters, addresses, blocks, summary, budgets, kinds, managers = json.loads(
        run_forked(STAND_INS, *(["guarded"] if guard else []), CUDA_VISIBLE_DEVICES="")
    )
    assert enabled is True
    functions: list[Any] = ["umem_malloc and umem_free of umem.so"]
    if guard:
        functions = [[0, 1], "umem_guard_malloc and umem_guard_free of guard.so"]
    assert order == [*functions, "install", "swap"]
    assert setters == len(addresses) == 7
    assert addresses == list(range(2, 9))
    assert blocks == 0
    assert summary == "GPU 0, policy sft"
    assert budgets == [100 << 30]  # of 101 GiB that are free
    # Nothing is managed, and nothing runs the hints that would take a second CUDA context.
    assert kinds == ["device", "pinned"]
    assert managers == 0


def python(code: str, *arguments: str) -> str:
    return run_python("-c", code, *arguments, CUDA_VISIBLE_DEVICES="")


@pytest.mark.slow
def test_a_process_without_a_gpu() -> None:
    facts: dict[str, Any] = json.loads(python(WITHOUT_GPU))
    kind, reason = facts["enable"]
    assert kind == "UnsupportedError"
    # One of: torch without CUDA, no driver, no visible device.
    assert "install" in reason or "CUDA_VISIBLE_DEVICES" in reason, reason
    # A fallback hides no wrong policy.
    kind, text = facts["unknown policy"]
    assert kind == "PolicyError"
    assert "no-such-policy" in text
    assert facts["not a policy"][0] == "TypeError"
    for call in ("tensors", "tensor_class"):
        kind, text = facts[f"{call}, not enabled"]
        assert kind == "EnableError"
        assert "call umem.enable() first" in text

    # The fallback warns once, and torch works on.
    assert facts["fallback"] is False
    [[category, text, file]] = facts["warnings"]
    assert category == "RuntimeWarning"
    assert text.startswith("umem is not in use, torch's own allocator stays: ")
    assert reason in text
    assert file == "<string>", "the warning points at the caller"
    assert facts["enabled"] is False
    assert facts["cuda started"] is False
    assert facts["computes"] == 4
    for call in ("tensors", "memory_by_class"):
        kind, text = facts[f"{call}, after the fallback"]
        assert kind == "EnableError"
        assert reason in text
    summary = facts["memory_summary, after the fallback"]
    assert summary.startswith("umem is not in use")
    assert reason in summary
    kind, text = facts["unknown class"]
    assert kind == "ValueError"
    assert "frozen_weights" in text
    assert not facts["doctor"]["swap_works"]
    assert "GPU" in facts["doctor"]["failures"]


def test_public_names_resolve() -> None:
    assert sorted(umem.__all__) == umem.__all__
    for name in umem.__all__:
        assert getattr(umem, name) is not None
    assert set(umem.__all__) <= set(dir(umem))
    with pytest.raises(AttributeError, match="no attribute 'enabel'"):
        umem.enabel  # noqa: B018


def test_importing_umem_imports_neither_torch_nor_the_library() -> None:
    code = (
        "import sys, umem; "
        "print(sorted({'torch', 'umem.runtime._native', 'rmm'} & set(sys.modules)))"
    )
    assert python(code) == "[]\n"


@pytest.mark.slow
def test_policies_load_without_torch() -> None:
    code = "import sys, umem; print(umem.load_policy('sft').name, 'torch' in sys.modules)"
    assert python(code) == "sft False\n"


@pytest.mark.slow
def test_streamed_weights_load_no_planner() -> None:
    """Numba and the managers of trainings take longer to import than all else of umem."""
    code = (
        "import sys; from umem.streaming import manage_weights; "
        "print(sorted({'numba', 'umem.managing'} & set(sys.modules)))"
    )
    assert run_forked(code, CUDA_VISIBLE_DEVICES="") == "[]\n"
