"""Recording: what each operator reads and writes, lifetimes, classes, FLOPs, and errors."""

from __future__ import annotations

import copy
import gc
from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint
from traced_memory import accesses, class_bytes, lifetimes_of, live_bytes

from umem.capture.offline.master_adamw import MasterAdamW
from umem.capture.offline.record import Step, record_step
from umem.core.classes import TensorClass
from umem.core.errors import TraceError
from umem.trace import Access, PhaseKind, Precision, Trace, check_trace

READ, WRITE = Access.READ, Access.WRITE
CLASSES = list(TensorClass)


def record(make_step: Callable[[], Step]) -> Trace:
    trace = record_step(make_step, name="test", source="test_trace_record.py")
    check_trace(trace, "test")
    assert trace.duration_s is None
    return trace


def record_function(step: Step) -> Trace:
    return record(lambda: step)


def tensor_named(trace: Trace, name: str) -> int:
    (tensor,) = (index for index, known in enumerate(trace.tensor_names) if known == name)
    return tensor


def class_of(trace: Trace, name: str) -> TensorClass:
    return CLASSES[trace.tensor_class[tensor_named(trace, name)]]


# ---------------------------------------------------------------------------------- by hand


@pytest.mark.slow
def test_a_step_small_enough_to_check_by_hand() -> None:
    def make_step() -> Step:
        weight = torch.randn(8, 4, requires_grad=True)
        inputs = torch.randn(2, 8)
        optimizer = torch.optim.SGD([weight], lr=0.1, foreach=False)

        def step() -> None:
            loss = (inputs @ weight).sum()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()

        return step

    trace = record(make_step)
    # The gradient of a sum is an expanded 1, a view; the input needs none.
    assert trace.phase_names == (
        "aten.mm",
        "aten.sum",
        "aten.ones_like",
        "backward: aten.mm",
        "optimizer parameter 0: aten.add_",
    )
    assert [accesses(trace, phase) for phase in range(5)] == [
        {"parameter 0": READ, "input": READ, "aten.mm": WRITE},
        {"aten.mm": READ, "aten.sum": WRITE},
        {"aten.sum": READ, "aten.ones_like": WRITE},
        {"input": READ, "aten.ones_like": READ, "parameter 0.grad": WRITE},
        {"parameter 0": READ | WRITE, "parameter 0.grad": READ},
    ]
    assert lifetimes_of(trace) == {
        "parameter 0": (128, "weights", True, 0, 4),
        "input": (64, "other", True, 0, 4),
        "aten.mm": (32, "activations", False, 0, 1),  # nothing needs it after the sum
        "aten.sum": (4, "activations", False, 1, 4),  # `loss` lives until the step returns
        "aten.ones_like": (4, "activations", False, 2, 3),
        "parameter 0.grad": (128, "gradients", False, 3, 4),
    }
    assert trace.flops.tolist() == [2 * 2 * 8 * 4, 0, 0, 2 * 2 * 8 * 4, 0]
    assert trace.memory_bytes.tolist() == [
        64 + 128 + 32,
        32 + 4,
        4 + 4,
        64 + 4 + 128,
        128 + 128 + 128,
    ]
    assert trace.phase_kind.tolist() == [PhaseKind.KERNEL] * 5


@pytest.mark.slow
def test_recordings_repeat() -> None:
    def make_step() -> Step:
        model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8))
        optimizer = torch.optim.AdamW(model.parameters())
        inputs = torch.randn(4, 8)

        def step() -> None:
            model(inputs).sum().backward()
            optimizer.step()
            optimizer.zero_grad()

        return step

    first, second = record(make_step), record(make_step)
    assert first.phase_names == second.phase_names
    assert first.tensor_names == second.tensor_names
    np.testing.assert_array_equal(first.last_phase, second.last_phase)
    np.testing.assert_array_equal(first.access_tensor, second.access_tensor)
    assert gc.isenabled()


# ---------------------------------------------------------------------------------- operators


@pytest.mark.slow
def test_views_share_a_storage_and_are_no_phase() -> None:
    whole = []

    def step() -> None:
        tensor = torch.zeros(4, 6)
        tensor.view(24).unsqueeze(0).transpose(0, 1)[2:].detach()
        tensor.t_()
        tensor[0].mul_(2)
        whole.append(tensor.shape)

    trace = record_function(step)
    assert trace.phase_names == ("aten.zeros", "aten.mul_")
    assert accesses(trace, 1) == {"aten.zeros": READ | WRITE}
    assert trace.memory_bytes.tolist() == [96, 2 * 16]


@pytest.mark.slow
def test_overwriting_a_part_keeps_the_rest() -> None:
    def step() -> None:
        tensor = torch.empty(4, 4)
        tensor.fill_(1)
        tensor[1].copy_(torch.ones(4))
        torch.add(tensor[0], 1, out=tensor[2])
        torch.mul(tensor, 2, out=tensor)
        torch.neg(torch.ones(4, 4), out=tensor)

    trace = record_function(step)
    found = [
        (name, accesses(trace, phase).get("aten.empty"))
        for phase, name in enumerate(trace.phase_names)
    ]
    assert found == [
        ("aten.fill_", WRITE),
        ("aten.ones", None),
        ("aten.copy_", READ | WRITE),
        ("aten.add", READ | WRITE),
        ("aten.mul", READ | WRITE),
        ("aten.ones", None),
        ("aten.neg", WRITE),
    ]
    # Memory that is handed out and not touched is there from the next phase on.
    assert trace.first_phase[tensor_named(trace, "aten.empty")] == 0


@pytest.mark.slow
def test_kinds() -> None:
    def step() -> None:
        source = torch.rand(8, 8)
        source.clone()
        torch.rand(8, 8).copy_(source)
        torch.rand(8, 8).copy_(source.t())
        source.to(torch.float16)
        torch.zeros(8)
        source.zero_()
        source.fill_(0.0)
        source.fill_(1.0)

    trace = record_function(step)
    kinds = [
        (name.removeprefix("aten."), PhaseKind(kind).name)
        for name, kind in zip(trace.phase_names, trace.phase_kind, strict=True)
        if name != "aten.rand"
    ]
    assert kinds == [
        ("clone", "MEMCPY"),
        ("copy_", "MEMCPY"),
        ("copy_", "KERNEL"),
        ("_to_copy", "KERNEL"),
        ("zeros", "MEMSET"),
        ("zero_", "MEMSET"),
        ("fill_", "MEMSET"),
        ("fill_", "KERNEL"),
    ]


@pytest.mark.slow
def test_precisions(monkeypatch: pytest.MonkeyPatch) -> None:
    def step() -> None:
        for dtype in (torch.float32, torch.bfloat16, torch.float16):
            matrix = torch.empty(4, 4, dtype=dtype)
            torch.mm(matrix, matrix)

    before = torch.get_float32_matmul_precision()
    try:
        torch.set_float32_matmul_precision("highest")
        exact = record_function(step)
        torch.set_float32_matmul_precision("high")
        fast = record_function(step)
    finally:
        torch.set_float32_matmul_precision(before)
    assert exact.phase_precision.tolist() == [Precision.FP32, Precision.BF16, Precision.FP16]
    assert fast.phase_precision.tolist() == [Precision.TF32, Precision.BF16, Precision.FP16]


@pytest.mark.slow
@pytest.mark.parametrize("causal", [False, True])
def test_attention_is_counted(causal: bool) -> None:
    batch, heads, seq, width = 2, 4, 64, 32

    def step() -> None:
        query, key, value = (
            torch.empty(batch, heads, seq, width, requires_grad=True) for _ in range(3)
        )
        functional.scaled_dot_product_attention(
            query, key, value, is_causal=causal
        ).sum().backward()

    trace = record_function(step)
    product = 2 * batch * heads * seq * seq * width
    # Two products forward; five backward, because the kernel computes the scores again.
    assert trace.flops.sum() == (2 + 5) * product * (0.5 if causal else 1)


@pytest.mark.slow
def test_lookups_read_the_rows_that_they_return() -> None:
    def make_step() -> Step:
        table = torch.randn(1000, 16)
        rows = torch.zeros(3, dtype=torch.int64)
        return lambda: functional.embedding(rows, table)

    assert record(make_step).memory_bytes.tolist() == [3 * 16 * 4 + 3 * 8 + 3 * 16 * 4]


@pytest.mark.slow
def test_lists_are_split_into_launches() -> None:
    # 320 blocks of 65,536 elements are one launch: two small tensors share it, large ones do not.
    def make_step() -> Step:
        sizes = (1000, 65_536, 320 * 65_536, 400 * 65_536)
        parameters = [nn.Parameter(torch.empty(size)) for size in sizes]
        optimizer = torch.optim.AdamW(parameters, fused=True)

        def step() -> None:
            for parameter in parameters:
                parameter.grad = torch.ones_like(parameter)
            optimizer.step()

        return step

    trace = record(make_step)
    fused = [phase for phase, name in enumerate(trace.phase_names) if "_fused_adamw_" in name]
    found = [
        {name for name in accesses(trace, phase) if name.endswith(".exp_avg")} for phase in fused
    ]
    assert found == [
        {"parameter 0.exp_avg", "parameter 1.exp_avg"},
        {"parameter 2.exp_avg"},
        {"parameter 3.exp_avg"},
    ]
    assert accesses(trace, fused[-1]) == {
        "parameter 3": READ | WRITE,
        "parameter 3.grad": READ,
        "parameter 3.exp_avg": READ | WRITE,
        "parameter 3.exp_avg_sq": READ | WRITE,
        "parameter 3.step": READ,
    }


@pytest.mark.slow
def test_results_of_list_operators_are_born_together() -> None:
    def step() -> None:
        parts = [torch.ones(320 * 65_536), torch.ones(320 * 65_536)]
        torch._foreach_mul(parts, 2.0)

    trace = record_function(step)
    assert trace.phase_names[2:] == ("aten._foreach_mul", "aten._foreach_mul")
    results = [tensor_named(trace, f"aten._foreach_mul [{part}]") for part in range(2)]
    assert trace.first_phase[results].tolist() == [2, 2]
    assert [
        set(accesses(trace, phase)) & {trace.tensor_names[r] for r in results} for phase in (2, 3)
    ] == [{"aten._foreach_mul [0]"}, {"aten._foreach_mul [1]"}]


@pytest.mark.slow
def test_running_statistics_are_written_in_training_only() -> None:
    def step_of(training: bool) -> Callable[[], Step]:
        def make_step() -> Step:
            model = nn.BatchNorm1d(4).train(training)
            inputs = torch.randn(8, 4)
            return lambda: model(inputs)

        return make_step

    for training, access in ((True, READ | WRITE), (False, READ)):
        trace = record(step_of(training))
        (phase,) = (p for p, name in enumerate(trace.phase_names) if "batch_norm" in name)
        assert accesses(trace, phase)["running_mean"] == access
        assert class_of(trace, "running_mean") is TensorClass.OTHER


# ---------------------------------------------------------------------------------- lifetimes


class Stack(nn.Module):
    """Linear layers, checkpointed or not."""

    def __init__(self, layers: int, reentrant: bool | None = None) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 64)) for _ in range(layers)
        )
        self.reentrant = reentrant

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            if self.reentrant is None:
                hidden = layer(hidden)
            else:
                hidden = checkpoint(layer, hidden, use_reentrant=self.reentrant)
        return hidden


def stack_step(
    reentrant: bool | None = None,
    *,
    micro_batches: int = 1,
    set_to_none: bool = True,
    autocast: torch.dtype | None = None,
    optimizer_type: Callable[..., torch.optim.Optimizer] = torch.optim.AdamW,
) -> Callable[[], Step]:
    def make_step() -> Step:
        model = Stack(6, reentrant)
        optimizer = optimizer_type(model.parameters())
        inputs = torch.randn(128, 64, requires_grad=reentrant is True)

        def step() -> None:
            for _ in range(micro_batches):
                with torch.autocast("cuda", dtype=autocast, enabled=autocast is not None):
                    loss = model(inputs).square().mean()
                loss.backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=set_to_none)

        return step

    return make_step


PARAMETER_BYTES = 6 * 2 * (64 * 64 + 64) * 4


@pytest.mark.slow
def test_classes_of_a_full_step() -> None:
    trace = record(stack_step())
    assert class_bytes(trace, TensorClass.WEIGHTS, persistent=True) == PARAMETER_BYTES
    assert class_bytes(trace, TensorClass.GRADIENTS, persistent=False) == PARAMETER_BYTES
    steps_bytes = 6 * 2 * 2 * 4
    assert (
        class_bytes(trace, TensorClass.OPTIMIZER_STATE, persistent=True)
        == 2 * PARAMETER_BYTES + steps_bytes
    )
    assert class_bytes(trace, TensorClass.OTHER, persistent=True) == 128 * 64 * 4
    assert class_bytes(trace, TensorClass.FROZEN_WEIGHTS, persistent=True) == 0
    assert class_of(trace, "layers.3.2.weight") is TensorClass.WEIGHTS
    assert class_of(trace, "layers.3.2.weight.grad") is TensorClass.GRADIENTS
    assert class_of(trace, "layers.3.2.weight.exp_avg") is TensorClass.OPTIMIZER_STATE
    assert "forward layers.3.2: aten.addmm" in trace.phase_names
    assert "backward layers.3.2: aten.mm" in trace.phase_names
    gelu = tensor_named(trace, "forward layers.3.1: aten.gelu")
    # The layer after it needs it for its weight's gradient; the next one backward does not.
    assert trace.phase_names[trace.last_phase[gelu]].startswith("backward layers.3.2: ")


@pytest.mark.slow
@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointing_lowers_the_peak_of_activations(reentrant: bool) -> None:
    plain, checkpointed = record(stack_step()), record(stack_step(reentrant))
    assert "recompute layers.3.0: aten.addmm" in checkpointed.phase_names
    assert not any(name.startswith("recompute") for name in plain.phase_names)
    kept_per_layer = 128 * 64 * 4
    # Every layer keeps three activations, or with a checkpoint one; one layer is computed again.
    assert live_bytes(plain, TensorClass.ACTIVATIONS).max() >= 3 * 6 * kept_per_layer
    assert live_bytes(checkpointed, TensorClass.ACTIVATIONS).max() <= (6 + 6) * kept_per_layer
    # Of a layer's two products the non-reentrant one leaves out the last: nothing saved it.
    assert ("recompute layers.3.2: aten.addmm" in checkpointed.phase_names) == reentrant
    forward_flops = 6 * 2 * 2 * 128 * 64 * 64
    assert checkpointed.flops.sum() - plain.flops.sum() >= forward_flops / 2


@pytest.mark.slow
def test_accumulation_keeps_gradients_between_micro_batches() -> None:
    trace = record(stack_step(micro_batches=3))
    gradient = tensor_named(trace, "layers.0.0.weight.grad")
    uses = [
        accesses(trace, phase)["layers.0.0.weight.grad"]
        for phase in range(trace.phase_count)
        if "layers.0.0.weight.grad" in accesses(trace, phase)
    ]
    assert uses[:3] == [WRITE, READ | WRITE, READ | WRITE]
    assert uses[3:]
    assert set(uses[3:]) == {READ}
    assert not trace.persistent[gradient]
    assert class_bytes(trace, TensorClass.GRADIENTS, persistent=False) == PARAMETER_BYTES


@pytest.mark.slow
def test_gradients_that_are_zeroed_persist() -> None:
    trace = record(stack_step(set_to_none=False))
    assert class_bytes(trace, TensorClass.GRADIENTS, persistent=True) == PARAMETER_BYTES
    assert class_bytes(trace, TensorClass.GRADIENTS, persistent=False) == 0
    last = [
        phase
        for phase in range(trace.phase_count)
        if "layers.0.0.weight.grad" in accesses(trace, phase)
    ][-1]
    assert trace.phase_names[last] == "aten.zero_"
    assert accesses(trace, last)["layers.0.0.weight.grad"] == WRITE


@pytest.mark.slow
def test_gradients_freed_at_the_start_of_a_step_count_once() -> None:
    def make_step() -> Step:
        model = nn.Linear(16, 16)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        inputs = torch.randn(4, 16)

        def step() -> None:
            optimizer.zero_grad()
            model(inputs).sum().backward()
            optimizer.step()

        return step

    trace = record(make_step)
    gradient = tensor_named(trace, "weight.grad")
    assert not trace.persistent[gradient]
    assert trace.first_phase[gradient] > 0
    assert trace.last_phase[gradient] == trace.phase_count - 1


@pytest.mark.slow
def test_memory_of_the_step_before_is_persistent_if_it_is_read() -> None:
    def make_step() -> Step:
        average = [torch.zeros(1000)]

        def step() -> None:
            average[0] = average[0] * 0.9 + 1

        return step

    trace = record(make_step)
    assert accesses(trace, 0)["input"] == READ
    assert trace.persistent[tensor_named(trace, "input")]
    assert not trace.persistent[tensor_named(trace, "aten.add")]


@pytest.mark.slow
def test_tied_weights_are_one_tensor() -> None:
    def make_step() -> Step:
        embedding = nn.Embedding(32, 16)
        head = nn.Linear(16, 32, bias=False)
        head.weight = embedding.weight
        model = nn.Sequential(embedding, head)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        tokens = torch.zeros(8, dtype=torch.int64)

        def step() -> None:
            model(tokens).sum().backward()
            optimizer.step()
            optimizer.zero_grad()

        return step

    trace = record(make_step)
    assert class_bytes(trace, TensorClass.WEIGHTS, persistent=True) == 32 * 16 * 4
    # The second gradient is added to the first.
    assert class_of(trace, "0.weight.grad") is TensorClass.GRADIENTS


@pytest.mark.slow
def test_autocast_for_a_gpu_computes_in_its_precision() -> None:
    trace = record(stack_step(autocast=torch.bfloat16))
    products = trace.flops > 0
    assert set(trace.phase_precision[products].tolist()) == {Precision.BF16}
    assert class_bytes(trace, TensorClass.WEIGHTS, persistent=True) == PARAMETER_BYTES


@pytest.mark.slow
def test_an_optimizer_that_steps_inside_the_backward_pass() -> None:
    def make_step() -> Step:
        model = Stack(3)
        optimizers = {p: torch.optim.SGD([p], lr=0.1, foreach=False) for p in model.parameters()}

        def update(parameter: torch.Tensor) -> None:
            optimizers[parameter].step()  # type: ignore[index]
            optimizers[parameter].zero_grad()  # type: ignore[index]

        for parameter in optimizers:
            parameter.register_post_accumulate_grad_hook(update)
        inputs = torch.randn(128, 64)
        return lambda: model(inputs).sum().backward()

    trace = record(make_step)
    assert "optimizer layers.0.0.weight: aten.add_" in trace.phase_names
    assert class_of(trace, "layers.2.2.weight.grad") is TensorClass.GRADIENTS
    # Each is gone before the next one's update.
    assert (
        live_bytes(trace, TensorClass.GRADIENTS).max()
        < class_bytes(trace, TensorClass.WEIGHTS, persistent=True) / 2
    )


@pytest.mark.slow
def test_names_of_several_models_and_of_modules_called_alone() -> None:
    def make_step() -> Step:
        encoder, decoder = nn.Linear(8, 4), nn.Linear(4, 8)
        model = nn.ModuleDict({"encoder": encoder, "decoder": decoder})
        critic = nn.Linear(8, 1)
        inputs = torch.randn(2, 8)
        assert len(model) == 2
        return lambda: critic(model["decoder"](model["encoder"](inputs))).sum().backward()

    trace = record(make_step)
    assert trace.phase_names[:3] == (
        "forward encoder: aten.addmm",
        "forward decoder: aten.addmm",
        "forward Linear1: aten.addmm",
    )
    assert class_of(trace, "Linear1.weight") is TensorClass.WEIGHTS


# ---------------------------------------------------------------------------------- the optimizer


def test_master_adamw_is_adamw_on_float32_weights() -> None:
    torch.manual_seed(0)
    reference = nn.Parameter(torch.randn(64).bfloat16().float())
    rounded = nn.Parameter(reference.detach().bfloat16())
    expected = torch.optim.AdamW([reference], lr=1e-4, weight_decay=0.1)
    optimizer = MasterAdamW([rounded], lr=1e-4, weight_decay=0.1)
    for _ in range(10):
        gradient = torch.randn(64).bfloat16()
        reference.grad, rounded.grad = gradient.float(), gradient
        expected.step()
        assert optimizer.step(lambda: 1.5) == 1.5
    master = optimizer.state[rounded]["master"]
    torch.testing.assert_close(master, reference.detach())
    assert torch.equal(rounded.detach(), master.bfloat16())
    # Alone, bfloat16 would have lost these updates: they are below its precision.
    assert not torch.equal(master, rounded.detach().float())


@pytest.mark.slow
def test_master_adamw_keeps_one_float32_gradient_at_a_time() -> None:
    trace = record(stack_step(optimizer_type=MasterAdamW))
    assert class_bytes(trace, TensorClass.OPTIMIZER_STATE, persistent=True) == (
        3 * PARAMETER_BYTES + 6 * 2 * 2 * 4
    )


# ---------------------------------------------------------------------------------- environment


@pytest.mark.slow
def test_tensors_for_a_gpu_need_none() -> None:
    def make_step() -> Step:
        model = nn.Linear(16, 16).to("cuda:0").cuda()
        table = torch.zeros(16, 16, device="cuda").to(0).pin_memory()
        with torch.device("cuda"):
            inputs = torch.randn(4, 16)
        return lambda: (
            model(inputs.to(torch.device("cuda"), non_blocking=True) @ table).sum().backward()
        )

    trace = record(make_step)
    assert "forward: aten.addmm" in trace.phase_names
    assert class_of(trace, "weight.grad") is TensorClass.GRADIENTS
    assert torch.autocast.__init__.__qualname__ == "autocast.__init__"


@pytest.mark.slow
def test_real_tensors_are_recorded() -> None:
    table = torch.arange(12.0).view(3, 4)

    def make_step() -> Step:
        weight = torch.randn(4, 3, requires_grad=True)
        return lambda: (table @ weight).add(table[:, :3]).sum().backward()

    trace = record(make_step)
    products = [p for p, name in enumerate(trace.phase_names) if name.endswith("aten.mm")]
    assert [accesses(trace, phase)["input"] for phase in products] == [READ, READ]
    assert trace.tensor_bytes[tensor_named(trace, "input")] == 48
    assert trace.persistent[tensor_named(trace, "input")]
    assert table.sum() == 66


@pytest.mark.slow
def test_tensor_subclasses_are_recorded_by_the_tensors_inside() -> None:
    from torch.testing._internal.two_tensor import TwoTensor

    def make_step() -> Step:
        pair = TwoTensor(torch.randn(4, 4), torch.randn(4, 4))
        return lambda: pair + 1

    trace = record(make_step)
    assert trace.phase_names == ("aten.add", "aten.add")


@pytest.mark.slow
def test_deep_copies_of_models_are_recorded() -> None:
    """As of a reference, or of an average of weights."""

    def make_step() -> Step:
        model = nn.Linear(8, 8)
        average = copy.deepcopy(model).requires_grad_(False)
        inputs = torch.randn(2, 8)

        def step() -> None:
            (model(inputs) - average(inputs)).square().mean().backward()
            model.zero_grad()

        return step

    trace = record(make_step)
    assert class_bytes(trace, TensorClass.FROZEN_WEIGHTS, persistent=True) == 4 * (64 + 8)


def test_progress_is_reported() -> None:
    reports: list[tuple[str, float]] = []

    def make_step() -> Step:
        tensor = torch.zeros(4)

        def step() -> None:
            for _ in range(1000):
                tensor.add_(1)

        return step

    record_step(
        make_step,
        name="n",
        source="s",
        progress=lambda stage, share: reports.append((stage, share)),
    )
    assert [entry for entry in reports if entry[1] in (0.0, 1.0)] == [
        (stage, share) for stage in ("build", "warm up", "record") for share in (0.0, 1.0)
    ]
    between = [share for stage, share in reports if 0 < share < 1]
    assert between == sorted(between)
    assert len(between) == 3


# ---------------------------------------------------------------------------------- errors


def test_a_step_that_needs_data_gets_a_remedy() -> None:
    def make_step() -> Step:
        loss = torch.ones(())
        return lambda: print(loss.item())

    with pytest.raises(TraceError) as caught:
        record(make_step)
    message = str(caught.value)
    assert f"test: {__file__}:" in message
    assert "in <lambda>" in message
    assert "aten._local_scalar_dense.default needs the data of a tensor" in message
    assert "leave out .item(), float()" in message


def test_a_step_that_raises_is_the_cause() -> None:
    def step() -> None:
        raise KeyError("batch")

    with pytest.raises(TraceError, match=r"in step: the step raised KeyError: 'batch'") as caught:
        record_function(step)
    assert isinstance(caught.value.__cause__, KeyError)


def test_errors_of_libraries_name_the_users_line() -> None:
    with pytest.raises(
        TraceError, match=r"test_trace_record\.py:\d+ in <lambda>: make_step raised"
    ):
        record(lambda: nn.Linear(4, 4)(torch.zeros(3)))


def test_make_step_must_return_a_function() -> None:
    with pytest.raises(TraceError, match="make_step returned tuple, which cannot be called"):
        record(lambda: (1, 2))  # type: ignore[arg-type, return-value]


@pytest.mark.slow
def test_a_step_without_memory_is_refused() -> None:
    with pytest.raises(TraceError, match="ran no operator that reads or writes memory"):
        record_function(lambda: None)


def test_parameters_made_outside_are_refused() -> None:
    model = nn.Linear(4, 4)
    with pytest.raises(TraceError, match="was made outside of make_step, with real memory"):
        record(lambda: lambda: model(torch.zeros(2, 4)))


@pytest.mark.skipif(torch.cuda.is_available(), reason="torch.cuda works here")
def test_calls_of_torch_cuda_are_explained() -> None:
    with pytest.raises(TraceError, match=r"leave out calls of torch\.cuda"):
        record_function(torch.cuda.synchronize)


@pytest.mark.slow
def test_hooks_are_gone_afterwards() -> None:
    from torch.nn.modules import module
    from torch.optim import optimizer

    def hooks() -> list[int]:
        return [
            len(module._global_forward_pre_hooks),
            len(module._global_forward_hooks),
            len(module._global_module_registration_hooks),
            len(optimizer._global_optimizer_pre_hooks),
            len(optimizer._global_optimizer_post_hooks),
        ]

    def make_second_step_fail() -> Step:
        step, runs = stack_step()(), iter([True])

        def steps() -> None:
            step()
            next(runs)

        return steps

    before = hooks()
    record(stack_step())
    with pytest.raises(TraceError, match="raised StopIteration"):
        record(make_second_step_fail)
    assert hooks() == before
    assert torch.ones(1).item() == 1.0
