"""Recording training on a GPU: CUDA's clock, autograd's own threads, agreement, and cost."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.checkpoint import checkpoint

import umem
from umem.core.classes import TensorClass
from umem.trace import Trace, check_trace

transformers = pytest.importorskip("transformers")

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("settled")]

VOCABULARY, SEQ = 2048, 256


@pytest.fixture(autouse=True, scope="module")
def after_the_first_forward_pass() -> None:
    """Until a module has run, all that is born counts as weights, batches too."""
    torch.nn.Linear(8, 8).cuda()(torch.zeros(8, device="cuda"))


def llama(layers: int = 4, hidden: int = 512, **settings: Any) -> Any:
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=hidden,
        intermediate_size=3 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=8,
        num_key_value_heads=4,
        max_position_embeddings=SEQ,
        use_cache=False,
        **settings,
    )
    return transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).train()


def training(
    model: Any, batch: int = 4, seq: int = SEQ
) -> tuple[torch.optim.Optimizer, Callable[[], torch.Tensor]]:
    """An optimizer and a step with no look at the loss, which would wait for the GPU."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    tokens = torch.randint(0, VOCABULARY, (batch, seq), device=next(model.parameters()).device)

    def step() -> torch.Tensor:
        loss: torch.Tensor = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return optimizer, step


def recorded(model: Any, optimizer: Any, step: Callable[[], object], **options: Any) -> Trace:
    with umem.record(model, optimizer, **options) as recording:
        for _ in range(12):
            step()
    check_trace(recording.trace, "test")
    return recording.trace


def held_bytes(trace: Trace, tensor_class: TensorClass, *, persistent: bool) -> int:
    chosen = (trace.tensor_class == tensor_class.number) & (trace.persistent == persistent)
    return int(trace.tensor_bytes[chosen].sum())


def live_peak(trace: Trace, chosen: Any) -> int:
    """Bytes of the blocks of the chosen tensors, in the phase that has most of them."""
    sizes = np.where(chosen, block_bytes(trace.tensor_bytes), 0)
    change = np.zeros(trace.phase_count + 1, np.int64)
    np.add.at(change, trace.first_phase, sizes)
    np.add.at(change, trace.last_phase + 1, -sizes)
    return int(change.cumsum().max())


def block_bytes(nbytes: Any) -> Any:
    """What the allocator hands out: multiples of 64 KiB from 2 MiB on."""
    step = np.where(nbytes < 2 << 20, 512, 64 << 10)
    return -(-nbytes // step) * step


@pytest.mark.parametrize("checkpointing", [None, False, True])  # none; by use_reentrant
def test_bytes_agree_with_the_model_and_the_allocator(checkpointing: bool | None) -> None:
    before = {name: memory.requested_bytes for name, memory in umem.memory_by_class().items()}
    model = llama().cuda()
    if checkpointing is not None:
        model.gradient_checkpointing_enable(
            gradient_checkpointing_kwargs={"use_reentrant": checkpointing}
        )
    optimizer, step = training(model, batch=16)
    trace = recorded(model, optimizer, step)
    parameters = list(model.parameters())
    weight_bytes = sum(parameter.nbytes for parameter in parameters)
    assert held_bytes(trace, TensorClass.WEIGHTS, persistent=True) == weight_bytes
    assert held_bytes(trace, TensorClass.GRADIENTS, persistent=False) == weight_bytes
    # Two moments, and a float32 count of steps for each parameter.
    state_bytes = 2 * weight_bytes + 4 * len(parameters)
    assert held_bytes(trace, TensorClass.OPTIMIZER_STATE, persistent=True) == state_bytes
    after = {name: memory.requested_bytes for name, memory in umem.memory_by_class().items()}
    for tensor_class in (TensorClass.WEIGHTS, TensorClass.OPTIMIZER_STATE):
        held = after[tensor_class] - before[tensor_class]
        assert held_bytes(trace, tensor_class, persistent=True) == held

    torch.cuda.synchronize()
    # Beside the training: libraries' workspaces, and what other tests have left.
    persistent_bytes = int(block_bytes(trace.tensor_bytes[trace.persistent]).sum())
    other_bytes = torch.cuda.memory_allocated() - persistent_bytes
    torch.cuda.reset_peak_memory_stats()
    step()
    peak = torch.cuda.max_memory_allocated() - other_bytes
    is_temporary = np.array([name.startswith("temporary of") for name in trace.tensor_names])
    shares = [live_peak(trace, chosen) / peak for chosen in (~is_temporary, is_temporary | True)]
    print(
        f"\nof the allocator's peak of {peak / 2**20:.0f} MiB: {shares[0]:.1%} in tensors that "
        f"modules show, {shares[1]:.1%} with temporaries"
    )
    assert 0.97 <= shares[1] <= 1.05
    layers = [name for name in trace.phase_names if name.startswith("backward model.layers.")]
    assert layers == [f"backward model.layers.{number}" for number in (3, 2, 1, 0)]


@pytest.mark.parametrize("reentrant", [False, True])
def test_whole_blocks_are_computed_again_in_autograds_thread(reentrant: bool) -> None:
    class Stack(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = torch.nn.Linear(64, 64)
            self.layers = torch.nn.ModuleList(
                torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.Linear(256, 64))
                for _ in range(3)
            )

        def forward(self, hidden: torch.Tensor) -> torch.Tensor:
            hidden = self.embed(hidden)
            for layer in self.layers:
                result: Any = checkpoint(layer, hidden, use_reentrant=reentrant)
                hidden = result
            return hidden

    model = Stack().cuda()
    optimizer = torch.optim.AdamW(model.parameters())

    def step() -> None:
        model(torch.randn(128, 64, device="cuda")).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    trace = recorded(model, optimizer, step)
    later = [name for name in trace.phase_names if name.startswith(("recompute", "backward lay"))]
    assert later == [
        f"{kind} layers.{number}" for number in (2, 1, 0) for kind in ("recompute", "backward")
    ]
    phase = trace.phase_names.index("recompute layers.1")
    span = slice(trace.access_start[phase], trace.access_start[phase + 1])
    assert (trace.access_mode[span] == 2).sum() >= 1  # activations, made anew


def test_durations_are_the_devices() -> None:
    """Phases add up to the time of the step between CUDA events of our own.

    Of a step that keeps the device busy: the host's times vary more than that.
    """
    model = llama(hidden=2048).cuda()
    optimizer, step = training(model, batch=48)
    trace = recorded(model, optimizer, step)
    for _ in range(3):
        step()
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    seconds = []
    for _ in range(5):
        start.record()
        step()
        end.record()
        end.synchronize()
        seconds.append(start.elapsed_time(end) * 1e-3)
    assert trace.duration_s is not None
    assert trace.duration_s.sum() == pytest.approx(statistics.median(seconds), rel=0.2)
    assert trace.metadata["median_step_s"] == pytest.approx(trace.duration_s.sum(), rel=0.1)


def test_bits_are_those_of_an_unrecorded_run() -> None:
    results = []
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        for is_recorded in (False, True):
            model = llama(attn_implementation="eager").cuda()
            torch.manual_seed(1)
            optimizer, step = training(model)
            if is_recorded:
                with umem.record(model, optimizer):
                    losses = [step() for _ in range(8)]
            else:
                losses = [step() for _ in range(8)]
            results.append([loss.item() for loss in losses])
    finally:
        torch.use_deterministic_algorithms(False)
    assert results[0] == results[1]


def test_recording_does_not_wait_for_the_gpu() -> None:
    """The host runs ahead of the device, in every step of a recording.

    Not a Llama: transformers looks at the positions of each batch, which waits for the GPU. Fewer
    launches than the driver queues.
    """
    model = torch.nn.Sequential(
        *(torch.nn.Sequential(torch.nn.Linear(512, 512), torch.nn.GELU()) for _ in range(6))
    ).cuda()
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    inputs = torch.randn(4096, 512, device="cuda")

    def step() -> None:
        model(inputs).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    def issued_share() -> float:
        """Time in which a step behind a busy GPU is issued, of the time in which it is done."""
        torch.cuda.synchronize()
        torch.cuda._sleep(400_000_000)  # about 0.2 s
        start = time.perf_counter()
        step()
        issued_s = time.perf_counter() - start
        torch.cuda.synchronize()
        return issued_s / (time.perf_counter() - start)

    for _ in range(3):
        step()
    plain = issued_share()
    with umem.record(model, optimizer, steps=6) as recording:
        shares = [issued_share() for _ in range(9)]  # 2 to warm up, one looked at, 6 timed
        assert recording.done
    print(f"\nissued in {plain:.1%} of a step; recording " + " ".join(f"{s:.1%}" for s in shares))
    assert plain < 0.5
    assert max(shares) < 0.5


@pytest.mark.parametrize("size", ["small", "large"])
def test_recording_costs_under_three_percent(size: str) -> None:
    """Timed steps only, in turns with plain ones, as steps vary by a tenth and more.

    And they drift: each turn's are held against those on both sides of them.

    Small: launches are the bottleneck, and all that the host does is seen. transformers waits for
    the GPU once in each forward pass, so that what the host does after it is seen in large models
    too.
    """
    layers, hidden, batch = (12, 768, 8) if size == "small" else (12, 2048, 8)
    model = llama(layers, hidden).cuda()
    optimizer, step = training(model, batch)

    def median_s(steps: int = 8) -> float:
        found = []
        for _ in range(steps):
            torch.cuda.synchronize()
            start = time.perf_counter()
            step()
            torch.cuda.synchronize()
            found.append(time.perf_counter() - start)
        return statistics.median(found)

    median_s(15)
    plain_s, timed, after = [median_s()], [], []
    for _ in range(30):
        with umem.record(model, optimizer, warmup=1) as recording:
            median_s(2)  # a warm-up, and the step that is looked at
            timed_s = median_s()
            step()
            torch.cuda.synchronize()
            assert recording.done
            after_s = median_s()
        plain_s.append(median_s())
        timed.append(2 * timed_s / (plain_s[-2] + after_s) - 1)
        after.append(2 * after_s / (plain_s[-2] + plain_s[-1]) - 1)
    shares = statistics.median(timed), statistics.median(after)
    quarters = ", ".join(f"{quarter * 1e3:.2f}" for quarter in statistics.quantiles(plain_s))
    print(f"\n{size}: quarters {quarters} ms a step, timed {shares[0]:+.2%}, then {shares[1]:+.2%}")
    assert shares[0] < 0.03
    assert shares[1] < 0.02


def test_a_captured_graph_is_left_alone() -> None:
    first = torch.nn.Linear(64, 64)
    model = torch.nn.Sequential(first, torch.nn.Linear(64, 64)).cuda()
    optimizer = torch.optim.AdamW(model.parameters(), capturable=True)
    inputs = torch.randn(8, 64, device="cuda")

    def step() -> None:
        optimizer.zero_grad()
        model(inputs).square().mean().backward()
        optimizer.step()

    with umem.record(model, optimizer) as recording:
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(4):
                step()
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            step()
        weight = first.weight.detach().clone()
        graph.replay()
        torch.cuda.synchronize()
    assert not torch.equal(weight, first.weight)
    assert not recording.done
    del graph
