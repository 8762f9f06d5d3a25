"""LoRA against full fine-tuning: unified-memory traffic, predicted for one GH200.

NVIDIA published for Llama-2-7B on one GH200 under RMM managed memory that 1.1 % of memory
operations are unified-memory activity with LoRA, and 9.8 % with full supervised fine-tuning. It did
not publish what counts as a memory operation, so these tests compare the order of the two shares.
"""

from __future__ import annotations

import pickle
from dataclasses import replace
from pathlib import Path

import pytest
from once import made_once
from umem_bench.shapes import LLAMA_1_7B
from umem_bench.training.variants import WORKLOADS

from umem.capture.offline import llama_of_size, model_trace
from umem.core.classes import TensorClass
from umem.core.report import MigrationReport
from umem.hardware import load_hardware
from umem.policy import load_policy, resolve
from umem.predict.prediction import predict
from umem.trace import Trace, check_trace, live_bytes, load_trace, save_trace
from umem.trace.published import PUBLISHED_UM_SHARES

pytestmark = pytest.mark.slow

BATCH, SEQ = 2, 2048

Reports = dict[str, dict[str, MigrationReport]]


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> tuple[Trace, Reports]:
    """The trace of SFT, and reports by mode and planner: Llama-2-7B on one GH200, as published."""

    def record(folder: Path) -> None:
        hardware = load_hardware("gh200-96")
        policy = resolve(load_policy("managed"), hardware, environ={})
        traces = {
            mode: model_trace("llama-2-7b", mode, batch=BATCH, seq=SEQ) for mode in ("lora", "sft")
        }
        reports = {
            mode: {it.planner: it for it in predict(trace, hardware, policy, ("fault", "planned"))}
            for mode, trace in traces.items()
        }
        save_trace(traces["sft"], folder / "sft.npz")
        (folder / "reports").write_bytes(pickle.dumps(reports))

    folder = made_once(tmp_path_factory, "lora-against-sft", record)
    return load_trace(folder / "sft.npz"), pickle.loads((folder / "reports").read_bytes())


def test_the_trace_has_the_models_real_size(found: tuple[Trace, Reports]) -> None:
    parameters = 6_738_415_616
    trace, _ = found
    check_trace(trace, "llama-2-7b")
    assert trace.metadata["parameters"] == parameters

    def persistent_bytes(tensor_class: TensorClass) -> int:
        chosen = trace.persistent & (trace.tensor_class == tensor_class.number)
        return int(trace.tensor_bytes[chosen].sum())

    assert persistent_bytes(TensorClass.WEIGHTS) == 2 * parameters
    state_bytes = persistent_bytes(TensorClass.OPTIMIZER_STATE)
    assert state_bytes == pytest.approx(12 * parameters, rel=1e-6)
    assert trace.flops.sum() == pytest.approx(6 * parameters * BATCH * SEQ, rel=0.05)


def test_demand_paging_stalls_sft_and_not_lora(found: tuple[Trace, Reports]) -> None:
    lora, sft = (found[1][mode]["fault"] for mode in ("lora", "sft"))

    for share in ("um_time_share", "um_ops_share", "um_bytes_share"):
        assert getattr(lora, share) <= PUBLISHED_UM_SHARES["llama-2-7b-lora"]
        assert getattr(sft, share) >= PUBLISHED_UM_SHARES["llama-2-7b-sft"]
    # LoRA fits: it trains as fast as with everything resident.
    assert lora.exposed_stall_s <= 0.01 * lora.ideal_s
    # SFT's optimizer state alone fills most of the device: it is moved in every step.
    assert sft.exposed_stall_s > sft.ideal_s
    moved = {
        entry.tensor_class
        for entry in sft.traffic
        if entry.direction == "to_device" and entry.bytes > 2**30
    }
    assert TensorClass.OPTIMIZER_STATE in moved
    assert sft.fault_pages > 0


def test_the_plan_removes_most_of_sfts_stall(found: tuple[Trace, Reports]) -> None:
    paged, planned = (found[1]["sft"][planner] for planner in ("fault", "planned"))

    assert planned.exposed_stall_s < 0.1 * paged.exposed_stall_s
    assert planned.moved_bytes() < paged.moved_bytes()
    assert planned.fault_pages < 0.01 * paged.fault_pages
    assert planned.moved_bytes(cause="hint") > 0.99 * planned.moved_bytes()
    # No plan is faster than the lower bound.
    assert planned.regret >= 1
    assert found[1]["lora"]["planned"].moved_bytes() == 0


def test_the_plan_of_7b_is_within_5_percent_of_its_bound(
    found: tuple[Trace, Reports],
) -> None:
    planned = found[1]["sft"]["planned"]

    # The bound does not count by how much moving pages slow the kernels beside them.
    assert planned.step_s - planned.stall_s["pages"] <= 1.05 * planned.lower_bound_s
    # The causes add up to the whole stall, to the microsecond.
    assert sum(planned.stall_s.values()) == pytest.approx(planned.exposed_stall_s, abs=1e-6)


def test_the_measured_pair_is_predicted_to_differ_as_the_published_one() -> None:
    """`umem bench training --workloads pair-lora,pair-sft`, in 16 GiB of managed memory of an H200.

    tests/gpu/test_lora_against_sft_measured.py measures it.
    """
    sft_name, config = llama_of_size("1.7b")
    widths = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
    shape = LLAMA_1_7B
    assert tuple(config[it] for it in widths) == (
        *(shape.hidden, shape.intermediate, shape.layers, shape.heads),
    )
    hardware = load_hardware("h200")
    policy = resolve(load_policy("managed"), hardware, environ={})
    for name, mode in (("llama-2-7b", "lora"), (sft_name, "sft")):
        workload = WORKLOADS["pair-lora" if mode == "lora" else "pair-sft"]
        model, (percent,) = workload.model, workload.budgets_percent
        trace = model_trace(
            name, mode, batch=model.batch, seq=model.tokens, checkpoint=True, precision="bf16"
        )
        peak_bytes = int(live_bytes(trace, trace.tensor_bytes).max())
        assert peak_bytes < 15 << 30
        budget = replace(policy, device_budget_bytes=int(peak_bytes * percent / 100))
        (paged,) = predict(trace, hardware, budget, ("fault",))
        for share in (paged.um_time_share, paged.um_ops_share, paged.um_bytes_share):
            assert (share <= PUBLISHED_UM_SHARES["llama-2-7b-lora"]) == (mode == "lora")
            assert (share >= PUBLISHED_UM_SHARES["llama-2-7b-sft"]) == (mode == "sft")
