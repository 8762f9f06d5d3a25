"""Recording training on a GPU: CUDA's clock, autograd's own threads, and agreement."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.checkpoint import checkpoint
from traced_memory import class_bytes, live_sizes

import umem
from umem.core.block_sizes import block_bytes
from umem.core.classes import TensorClass
from umem.trace import Trace, check_trace

transformers = pytest.importorskip("transformers")

pytestmark = pytest.mark.usefixtures("settled")

VOCABULARY, SEQ = 2048, 256


@pytest.fixture(autouse=True, scope="module")
def after_the_first_forward_pass() -> None:
    """Until a module has run, every new tensor counts as a weight, batches too."""
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
    """An optimizer, and a step that does not read the loss, which would wait for the GPU."""
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
    assert class_bytes(trace, TensorClass.WEIGHTS, persistent=True) == weight_bytes
    assert class_bytes(trace, TensorClass.GRADIENTS, persistent=False) == weight_bytes
    # Two moments, and a float32 count of steps for each parameter.
    state_bytes = 2 * weight_bytes + 4 * len(parameters)
    assert class_bytes(trace, TensorClass.OPTIMIZER_STATE, persistent=True) == state_bytes
    after = {name: memory.requested_bytes for name, memory in umem.memory_by_class().items()}
    for tensor_class in (TensorClass.WEIGHTS, TensorClass.OPTIMIZER_STATE):
        held = after[tensor_class] - before[tensor_class]
        assert class_bytes(trace, tensor_class, persistent=True) == held

    torch.cuda.synchronize()
    # Beside the training: libraries' workspaces, and what other tests have left.
    persistent_bytes = int(block_bytes(trace.tensor_bytes[trace.persistent]).sum())
    other_bytes = torch.cuda.memory_allocated() - persistent_bytes
    torch.cuda.reset_peak_memory_stats()
    step()
    peak = torch.cuda.max_memory_allocated() - other_bytes
    is_temporary = np.array([name.startswith("temporary of") for name in trace.tensor_names])
    blocks = block_bytes(trace.tensor_bytes)
    shares = [
        live_sizes(trace, it).max() / peak for it in (np.where(is_temporary, 0, blocks), blocks)
    ]
    print(
        f"\nof the allocator's peak of {peak / 2**20:.0f} MiB: {shares[0]:.1%} in tensors that "
        f"modules show, {shares[1]:.1%} with temporaries"
    )
    assert 0.97 <= shares[1] <= 1.05
    layers = [name for name in trace.phase_names if name.startswith("backward model.layers.")]
    assert layers == [f"backward model.layers.{number}" for number in (3, 2, 1, 0)]


@pytest.mark.parametrize("reentrant", [False, True])
def test_whole_blocks_are_recomputed_in_autograds_thread(reentrant: bool) -> None:
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
    """The host returns at once from a block that keeps the device busy for 0.02 s and more."""
    cycles = 50_000_000
    least_s = cycles / 2.5e9  # no GPU's clock is faster

    class Busy(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = torch.nn.Linear(64, 64)

        def forward(self, hidden: torch.Tensor) -> torch.Tensor:
            torch.cuda._sleep(cycles)
            return self.linear(hidden)

    model = torch.nn.Sequential(torch.nn.Linear(64, 64), Busy(), torch.nn.Linear(64, 64)).cuda()
    optimizer = torch.optim.AdamW(model.parameters())

    def step() -> None:
        model(torch.randn(8, 64, device="cuda")).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    trace = recorded(model, optimizer, step)
    assert trace.duration_s is not None
    assert trace.duration_s[trace.phase_names.index("forward 1")] >= least_s
    assert float(trace.metadata["median_step_s"]) >= least_s


def test_recording_changes_no_bit() -> None:
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

    def runs_ahead() -> bool:
        """Whether a step is issued while the GPU is busy with the work before it."""
        torch.cuda.synchronize()
        torch.cuda._sleep(2_000_000_000)  # about 1 s
        slept = torch.cuda.Event()
        slept.record()
        step()
        return not slept.query()

    for _ in range(3):
        step()
    assert runs_ahead()
    with umem.record(model, optimizer, steps=6) as recording:
        # 2 to warm up, one whose memory is tracked, 6 timed
        assert all(runs_ahead() for _ in range(9))
        torch.cuda.synchronize()  # the times of the last step
        assert recording.done


def test_a_captured_graph_is_not_recorded() -> None:
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
