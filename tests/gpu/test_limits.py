"""Policies and limits on a real card: the memory that they lead to."""

from __future__ import annotations

import pytest
from gpu_jobs import Job, Start

MIB = 1 << 20

KINDS = """
name: kinds
defaults: {kind: managed, min_bytes: 0}
classes:
  gradients: {min_bytes: 1MiB}
  activations: {kind: device}
  optimizer_state: {kind: pinned}
"""

PLAIN = """
name: plain
defaults: {kind: device}
"""

ADVICE = """
extends: managed
name: advice
classes:
  optimizer_state: {placement: host, min_bytes: 0}
"""


@pytest.fixture(scope="module")
def jobs(start: Start, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Job]:
    """All jobs at once, each with its own policy."""
    folder = tmp_path_factory.mktemp("policies")
    for name, text in (("kinds", KINDS), ("plain", PLAIN), ("advice", ADVICE)):
        (folder / f"{name}.yaml").write_text(text)
    return {
        "spill": start("limits.py", "spill", "managed", UMEM_DEVICE_BUDGET="256MiB"),
        "device_spill": start(
            "limits.py", "device_spill", str(folder / "plain.yaml"), UMEM_DEVICE_BUDGET="256MiB"
        ),
        "cap": start("limits.py", "cap", "managed", UMEM_MANAGED_LIMIT="64MiB"),
        "rmm_managed": start("limits.py", "rmm_managed", "rmm-managed"),
        "kinds": start("limits.py", "kinds", str(folder / "kinds.yaml")),
        "advised": start("limits.py", "advised", str(folder / "advice.yaml")),
    }


def test_over_the_budget_memory_is_mapped_on_the_host(jobs: dict[str, Job]) -> None:
    facts = jobs["spill"].facts()
    # Twelve tensors of 20 MiB fit in 256 MiB.
    resident = {"preferred": "device 0", "accessed_by": [], "read_mostly": False}
    mapped = {"preferred": "host", "accessed_by": ["device 0"], "read_mostly": False}
    assert facts["advice"] == [resident] * 12 + [mapped] * 18
    assert facts["spilled_bytes"] == 18 * 20 * MIB
    assert "over the budget" in facts["summary"]
    assert facts["values"] == [[number] for number in range(30)]
    assert facts["product_error"] < 0.05  # TF32 would be as good
    assert facts["again"] == 30
    # Beside the tensors there is a workspace of the product by now.
    assert facts["spilled_bytes_again"] < 1.5 * facts["spilled_bytes"]


def test_over_the_budget_device_memory_is_page_locked_host_memory(jobs: dict[str, Job]) -> None:
    facts = jobs["device_spill"].facts()
    for kinds in facts["kinds"]:
        assert kinds.count("device") >= 11  # twelve tensors fit, less what small ones take
        assert kinds.count("pinned") == 30 - kinds.count("device")
    assert facts["values"] == [[number] for number in range(30)]
    assert facts["budget_peak_bytes"] <= 256 * MIB
    assert facts["spilled_bytes"] >= 18 * 20 * MIB


def test_the_cap_is_hard(jobs: dict[str, Job]) -> None:
    facts = jobs["cap"].facts()
    assert facts["text"].startswith("CUDA out of memory.")
    assert "UMEM_MANAGED_LIMIT" in facts["text"]
    assert facts["fits"] == [32 * MIB, 16 * MIB]
    assert facts["managed_bytes"] <= 64 * MIB


def test_plain_rmm_managed_memory(jobs: dict[str, Job]) -> None:
    facts = jobs["rmm_managed"].facts()
    assert facts["losses"][-1] < facts["losses"][0]
    assert facts["kinds"] == ["managed"]
    assert facts["weight"] == {"preferred": "None", "accessed_by": [], "read_mostly": False}


def test_kinds_of_memory_by_class(jobs: dict[str, Job]) -> None:
    facts = jobs["kinds"].facts()
    reserved = facts.pop("reserved")
    expected = {
        "weights": ("managed", "managed"),
        "frozen_weights": ("managed", "managed"),
        "gradients": ("device", "managed"),  # the small one is below the class's min_bytes
        "optimizer_state": ("pinned", "pinned"),
        "activations": ("device", "device"),
        "other": ("managed", "managed"),
    }
    assert facts == {
        f"{name} {size_bytes}": [kind, True]
        for name, of_sizes in expected.items()
        for size_bytes, kind in zip((4096, 4 * MIB), of_sizes, strict=True)
    }
    assert all(reserved[kind] > 0 for kind in ("managed", "device", "pinned"))
    assert reserved["system"] == 0


def test_advice_follows_the_class(jobs: dict[str, Job]) -> None:
    facts = jobs["advised"].facts()
    on_device = {"preferred": "device 0", "accessed_by": [], "read_mostly": False}
    assert facts["frozen, before its first forward"] == on_device
    # Without a preferred location: otherwise an eviction would move the device's copies.
    assert facts["frozen"] == {"preferred": "None", "accessed_by": [], "read_mostly": True}
    assert facts["trained"] == on_device
    assert facts["state"] == {
        "preferred": "host",
        "accessed_by": ["device 0"],
        "read_mostly": False,
    }
    assert facts["same block"]
    assert facts["reused"] == on_device
    assert facts["failed_hints"] == 0
