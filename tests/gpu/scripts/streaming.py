"""A training whose state may be streamed, in a process of its own: ``streaming.py MODE STEPS``.

With ``UMEM_POLICY`` umem is enabled; ``ROWS`` is the size of a batch; with ``ADAPTED`` adapters are
trained only; with ``HOST_UPDATES`` the host updates some units. The last line is JSON: what the
program saw, as checksums, and the memory in use on the card beyond that of CUDA and its libraries.
"""

from __future__ import annotations

import io
import json
import os
import sys
import threading
from collections.abc import Callable
from typing import Any

import torch
from begin import IS_MANAGED, begin, crcs, state_of
from card import CardMemory
from cuda.bindings import runtime as runtime_api
from torch import nn

import umem
from umem.cuda import bindings
from umem.managing import managers
from umem.runtime.state import runtime
from umem.runtime.unguarded import addresses_of
from umem.streaming import streamed_trainings
from umem.streaming.plan import host_updates
from umem.streaming.stage import CudaStateMemory

HIDDEN, LAYERS = 1024, 8
ROWS = int(os.environ.get("ROWS", "4096"))


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(HIDDEN)
        self.up = nn.Linear(HIDDEN, 4 * HIDDEN)
        self.down = nn.Linear(4 * HIDDEN, HIDDEN)
        self.adapter: nn.Sequential | None = None
        if "ADAPTED" in os.environ:
            self.adapt()

    def adapt(self, device: str = "cpu") -> None:
        """Freeze all but a new adapter."""
        self.requires_grad_(False)
        self.adapter = nn.Sequential(
            nn.Linear(HIDDEN, 16, bias=False), nn.Linear(16, 4 * HIDDEN, bias=False)
        ).to(device)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        normal = self.norm(x)
        hidden = self.up(normal)
        if self.adapter is not None:
            hidden = hidden + self.adapter(normal)
        return x + self.down(nn.functional.gelu(hidden))


class Training:
    """The same model and batches in every process."""

    def __init__(self, *, clips: bool, scales: bool = False, rate: Any = 1e-3) -> None:
        self.clips = clips
        self.scaler = torch.amp.GradScaler("cuda", 2.0**10, enabled=scales)
        self.rows = ROWS
        self.more_batches = 0
        """That are accumulated in a step."""
        torch.manual_seed(1)
        layers = [Layer() for _ in range(LAYERS)]
        self.model: Any = nn.Sequential(*layers, nn.Linear(HIDDEN, HIDDEN)).cuda()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=rate, fused=True)
        self.side = torch.cuda.Stream()
        self.losses: list[torch.Tensor] = []
        self.seen: list[torch.Tensor] = []
        self.averages = [torch.zeros_like(it) for it in self.model.parameters()]
        self.graph = torch.cuda.CUDAGraph()
        self.replayed: torch.Tensor | None = None
        self.kept: Any = None
        """What the program keeps of the memory of tensors, past torch."""

    def step(self) -> None:
        torch.manual_seed(100 + len(self.losses))
        batch = torch.randn(self.rows, HIDDEN, device="cuda")
        with torch.autocast("cuda", torch.float16, enabled=self.scaler.is_enabled()):
            loss = self.model(batch).float().square().mean()
        if self.scaler.is_enabled() and len(self.losses) % 3 == 2:
            loss = loss * float("inf")
        self.optimizer.zero_grad()
        self.scaler.scale(loss).backward()
        for _ in range(self.more_batches):
            again = torch.randn(self.rows, HIDDEN, device="cuda")
            self.model(again).square().mean().backward()
        if self.clips:
            nn.utils.clip_grad_norm_(self.model.parameters(), 0.1)
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.losses.append(loss.detach())

    def step_again(self, arrays: list[Any]) -> None:
        """A step on gradients that are halved past torch before it, and after it."""
        use_arrays(self, arrays)
        self.optimizer.step()
        use_arrays(self, arrays)

    def average(self) -> None:
        with torch.no_grad():
            torch._foreach_lerp_(self.averages, list(self.model.parameters()), 0.1)


def plain(_training: Training) -> None:
    pass


def averaged(training: Training) -> None:
    training.average()


def averaged_beside(training: Training) -> None:
    """On another stream, at once."""
    training.side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(training.side):
        training.average()
    torch.cuda.current_stream().wait_stream(training.side)


def averaged_behind_an_event(training: Training) -> None:
    """On another stream, which waits for an event of the step, behind the next forward pass."""
    event = torch.cuda.Event()
    event.record()
    with torch.no_grad():
        training.seen.append(training.model(torch.ones(8, HIDDEN, device="cuda")))
    training.side.wait_event(event)
    with torch.cuda.stream(training.side):
        training.average()
    torch.cuda.current_stream().wait_stream(training.side)


def read_behind_a_host_wait(training: Training) -> None:
    """By another stream, once the host knows that the step is over."""
    torch.cuda.current_stream().synchronize()
    with torch.cuda.stream(training.side):
        training.average()
    training.side.synchronize()


def norm_logged(training: Training) -> None:
    """Of the gradients, right behind the step."""
    gradients = [it.grad for it in training.model.parameters() if it.grad is not None]
    training.seen.append(nn.utils.get_total_norm(gradients))


def saved_and_loaded(training: Training) -> None:
    if len(training.losses) == 6:
        file = io.BytesIO()
        torch.save((training.model.state_dict(), training.optimizer.state_dict()), file)
        training.step()
        file.seek(0)
        model, optimizer = torch.load(file, weights_only=True)
        training.model.load_state_dict(model)
        training.optimizer.load_state_dict(optimizer)


def in_a_thread(training: Training) -> None:
    thread = threading.Thread(target=training.average)
    thread.start()
    thread.join()


def captured(training: Training) -> None:
    """A CUDA graph of a forward pass, captured right behind a step."""
    if len(training.losses) == 6:
        batch = torch.ones(8, HIDDEN, device="cuda")
        graph = torch.cuda.CUDAGraph()
        with torch.no_grad(), torch.cuda.graph(graph):
            result = training.model(batch)
        graph.replay()
        training.seen.append(result.clone())


def averaged_by_a_graph(training: Training) -> None:
    """Captured right behind a step, and replayed behind this one and all later ones."""
    if len(training.losses) == 6:
        with torch.cuda.graph(training.graph):
            training.average()
    if len(training.losses) >= 6:
        training.graph.replay()


def evaluated_by_a_graph(training: Training) -> None:
    """The same with a forward pass of the whole model."""
    if len(training.losses) == 6:
        training.kept = batch = torch.ones(8, HIDDEN, device="cuda")
        with torch.no_grad(), torch.cuda.graph(training.graph):
            training.replayed = training.model(batch)
    if training.replayed is not None:
        training.graph.replay()
        training.seen.append(training.replayed.clone())


def captured_with_a_fork(training: Training) -> None:
    """On the stream of the training, right behind a step."""
    if len(training.losses) in (6, 9):
        values, forked = torch.zeros(2, 1024, device="cuda"), torch.cuda.Stream()
        here = torch.cuda.current_stream()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=here):
            values[0].add_(1)
            with torch.cuda.stream(forked):
                forked.wait_stream(here)
                values[1].add_(2)
            here.wait_stream(forked)
        graph.replay()
        training.seen.append(values)


def copied_behind_any_event(training: Training) -> None:
    """By address, on another stream, behind events and streams of torch's generic classes."""
    here = torch.accelerator.current_stream()
    way = len(training.losses) % 4
    if way == 0:
        event = torch.Event(device="cuda")
        event.record()
        training.side.wait_event(event)
    elif way == 1:
        training.side.wait_event(here.record_event())
    elif way == 2:
        training.side.wait_stream(here)
    else:
        here.synchronize()
    kind = runtime_api.cudaMemcpyKind.cudaMemcpyDeviceToDevice
    places = addresses_of(list(training.model.parameters()))  # past the guard
    for to, place in zip(training.averages, places, strict=True):
        stream = training.side.cuda_stream
        runtime_api.cudaMemcpyAsync(to.data_ptr(), place, to.nbytes, kind, stream)
    here.wait_stream(training.side)
    training.seen.append(torch.stack([it.double().sum() for it in training.averages]))


def graph_model(training: Training) -> None:
    """From now on, calls of the model replay a graph, and its blocks are not called."""
    training.optimizer.zero_grad()
    batch = torch.randn(training.rows, HIDDEN, device="cuda")
    training.model = torch.cuda.make_graphed_callables(training.model, (batch,))
    training.optimizer.zero_grad()


def graphed(training: Training) -> None:
    """Before the first step: see :func:`main`."""


def graphed_late(training: Training) -> None:
    """In the middle of the training."""
    if len(training.losses) == 6:
        graph_model(training)


def graphed_block(training: Training) -> None:
    """One block is graphed in mid-training: the others are called as before."""
    if len(training.losses) == 6:
        training.optimizer.zero_grad()
        batch = torch.randn(training.rows, HIDDEN, device="cuda", requires_grad=True)
        training.model[2] = torch.cuda.make_graphed_callables(training.model[2], (batch,))


def gradients_clipped(training: Training) -> None:
    """Gradients of all units leave for the host, where nothing but clipping and the step is due."""
    for streamed in streamed_trainings():
        copied = streamed.gradients.sizes()
        # A later plan of the tuner leaves some on the device.
        if len(training.losses) >= 4 and streamed.gradients.copied != copied.keys():
            streamed.gradients.set_plan(copied)
            streamed.step.units.set_plan(frozenset(), slots=2, stages_operands=True)


def gradients_copied(training: Training) -> None:
    """Gradients of all units leave for the host, and come back for two more batches."""
    gradients_clipped(training)
    if len(training.losses) > 4:
        for _ in range(2):
            loss = training.model(torch.randn(ROWS, HIDDEN, device="cuda")).square().mean()
            loss.backward()
        norm_logged(training)


def accumulated(training: Training) -> None:
    """Three batches a step, and four of which a plan of three knows nothing."""
    training.more_batches = 3 if len(training.losses) % 5 == 4 else 2


def in_backward(training: Training) -> None:
    """Without clipping: parameters are updated in the backward pass where umem is enabled."""
    if IS_MANAGED and len(training.losses) == 1:
        umem.manage(training.model, training.optimizer, step_in_backward=True)


def buffers_filled_late(training: Training) -> None:
    """The program's stream is late with new memory, as on a card that many share."""
    if len(training.losses) != 1:
        return
    make = CudaStateMemory.buffer

    def late(memory: CudaStateMemory, size_bytes: int) -> torch.Tensor | None:
        torch.cuda._sleep(20_000_000)  # cycles
        buffer = make(memory, size_bytes)
        return None if buffer is None else buffer.fill_(0xFF)

    setattr(CudaStateMemory, "buffer", late)  # noqa: B010, the type checker takes no new method


def numbers() -> list[torch.Tensor]:
    """Requests of the size that a number has, all at once: they get what was freed just now."""
    return [torch.full((), float("nan"), device="cuda") for _ in range(64)]


def scaled(_training: Training) -> None:
    """In float16, with a scaler that skips each third step."""
    numbers()


def rate_changed(training: Training) -> None:
    """A learning rate on the device, right behind the step."""
    for group in training.optimizer.param_groups:
        group["lr"].mul_(0.9)
    numbers()


def weights_of(training: Training) -> list[torch.Tensor]:
    return [it.detach() for it in training.model.parameters()]


def moments_of(training: Training) -> list[torch.Tensor]:
    return [it["exp_avg"] for it in training.optimizer.state.values()]


def gradients_of(training: Training) -> list[torch.Tensor]:
    return [it.grad for it in training.model.parameters() if it.grad is not None]


def use_arrays(training: Training, arrays: list[Any]) -> None:
    """Note all bits of CuPy arrays, and change them."""
    import cupy

    with cupy.cuda.ExternalStream(torch.cuda.current_stream().cuda_stream):
        for it in arrays:
            bits = it.view(cupy.int32).sum(dtype=cupy.int64)
            training.seen.append(torch.as_tensor(bits, device="cuda").clone())
            it *= cupy.float32(0.5)


def at_addresses(tensors: list[torch.Tensor]) -> list[Any]:
    """Arrays that nobody but the program knows of."""
    import cupy

    places = [
        (address, it.nbytes) for address, it in zip(addresses_of(tensors), tensors, strict=True)
    ]
    memory = [cupy.cuda.UnownedMemory(*it, owner=None, device_id=0) for it in places]
    return [
        cupy.ndarray((size_bytes // 4,), cupy.float32, cupy.cuda.MemoryPointer(it, 0))
        for it, (_, size_bytes) in zip(memory, places, strict=True)
    ]


def in_arrays(training: Training, tensors_of: Callable[[Training], list[torch.Tensor]]) -> None:
    """Arrays that are made once, amid the training, and used after each step from then on."""
    import cupy

    if training.kept is None and len(training.losses) == 6:
        training.kept = [cupy.asarray(it) for it in tensors_of(training)]
    use_arrays(training, training.kept or [])


def weights_in_arrays(training: Training) -> None:
    in_arrays(training, weights_of)


def state_in_arrays(training: Training) -> None:
    in_arrays(training, moments_of)


def gradients_in_arrays(training: Training) -> None:
    """Of each step, after it: a second step uses what is left of them."""
    import cupy

    training.step_again([cupy.asarray(it) for it in gradients_of(training)])


def storages_kept(training: Training) -> None:
    if training.kept is None and len(training.losses) == 6:
        tensors = (*training.model.parameters(), *moments_of(training))
        training.kept = [it.untyped_storage() for it in tensors]
    for it in training.kept or []:
        floats = torch.empty(0, device="cuda").set_(it)
        training.seen.append(floats.view(torch.int32).sum())
        floats.mul_(0.5)


def addresses_held(training: Training) -> None:
    """A table of addresses, of weights and state."""
    if training.kept is None and len(training.losses) == 6:
        tensors = [*training.model.parameters(), *moments_of(training)]
        umem.hold(tensors)
        training.kept = at_addresses(tensors)
    use_arrays(training, training.kept or [])


def joined(training: Training) -> None:
    """Addresses that are asked for after each step."""
    umem.join()
    every = (*training.model.parameters(), *gradients_of(training), *moments_of(training))
    use_arrays(training, at_addresses(list(every)))


def varied(training: Training) -> None:
    """Batches of three sizes, evaluations, and a checkpoint that is saved and loaded."""
    saved_and_loaded(training)
    done = len(training.losses)
    training.rows = ROWS * (1 + done % 3) // 3
    if done % 4 == 0:
        with torch.no_grad():
            training.seen.append(training.model(torch.ones(ROWS, HIDDEN, device="cuda")))


MODES: dict[str, Callable[[Training], None]] = {
    it.__name__: it
    for it in (
        *(plain, averaged, averaged_beside, averaged_behind_an_event, read_behind_a_host_wait),
        *(norm_logged, saved_and_loaded, in_a_thread, captured, gradients_copied, in_backward),
        *(gradients_clipped, buffers_filled_late, varied, scaled, rate_changed),
        *(averaged_by_a_graph, evaluated_by_a_graph, captured_with_a_fork),
        *(copied_behind_any_event, graphed, graphed_late, graphed_block, weights_in_arrays),
        *(state_in_arrays, gradients_in_arrays, storages_kept, addresses_held, joined),
        accumulated,
    )
}


def have_host_update() -> None:
    """Have each plan leave every second unit whose state is streamed to the host."""

    def run(search: Any) -> None:
        plan = search.best
        streamed = [
            number
            for number, unit in enumerate(plan.units)
            if unit.state_bytes and unit.gradient_bytes and number not in plan.stream.resident
        ]
        search.best = search._plan(frozenset(streamed[::2]), plan.weights) or plan

    host_updates._LEAST_GAIN = -1e9
    setattr(host_updates._Search, "run", run)  # noqa: B010


def main() -> None:
    begin()
    if os.environ.get("HOST_UPDATES"):
        have_host_update()
    card = CardMemory()
    between = MODES[sys.argv[1]]
    training = Training(
        clips=between not in (in_backward, scaled),
        scales=between is scaled,
        rate=torch.tensor(1e-3, device="cuda") if between is rate_changed else 1e-3,
    )
    if between is graphed:
        graph_model(training)
    steps, waited = int(sys.argv[2]), 0
    training.side.wait_stream(torch.cuda.current_stream())
    # Captures are not made on the default stream.
    with torch.cuda.stream(training.side if between is captured_with_a_fork else None):
        for number in range(steps):
            if number == steps - 4:
                waited = sum(it.counts.waited for it in streamed_trainings())
            training.step()
            between(training)
    torch.cuda.synchronize()
    card.stop()
    facts: dict[str, Any] = {
        "losses": [float(loss).hex() for loss in training.losses],
        "seen": crcs(training.seen),
        "averages": crcs(training.averages),
        "weights": crcs(training.model.parameters()),
        "state": crcs(state_of(training.optimizer)),
    }
    if not IS_MANAGED:
        facts["peak_bytes"] = torch.cuda.max_memory_allocated()
        facts["beside_bytes"] = card.beside_bytes
        print(json.dumps(facts))
        return
    for streamed in streamed_trainings():
        counts = streamed.counts
        kinds = runtime().allocator.kind_stats(0)
        facts["streaming"] = {
            "streamed": counts.streamed,
            "in_line": counts.in_line,
            "waited": counts.waited - waited,
            "early": counts.early,
            "ahead": counts.ahead,
            "host_updates": counts.by_host,
            "pinned_bytes": kinds["pinned"]["reserved_bytes"],
            "managed_bytes": kinds["managed"]["reserved_bytes"],
            "budget_peak_bytes": runtime().allocator.stats(0)["budget_bytes"]["peak"],
            "hint_engines": len(managers()),
            "slots_bytes": streamed.step.units.slots_bytes,
            "card_peak_bytes": card.peak_bytes,
        }
        if between in (gradients_copied, gradients_clipped):
            gradients = [it.grad for it in training.model.parameters() if it.grad is not None]
            clipped = streamed.gradients.clipped
            facts["streaming"]["clipping_put_off"] = sum(map(bool, map(clipped.factors, gradients)))
            facts["streaming"]["gradients_on_host"] = sum(
                bindings.memory_type(it.data_ptr()) == "cudaMemoryTypeHost" for it in gradients
            )
        if (status := streamed.status().tuning) is not None:
            facts["streaming"] |= {
                "state": status.state,
                "plans": status.plans,
                "temporary_slots": 0 if status.plan is None else len(status.plan.temporary),
                "copied_blocks": status.copied_blocks,
                "spilled_bytes": status.spilled_bytes,
                "predicted_s": status.predicted_s,
                "measured_s": status.measured_s,
                "overflow_bytes": status.overflow_bytes,
                "bytes_out": status.activations.bytes_out,
                "late_fetches": status.activations.late_fetches,
            }
    print(json.dumps(facts))


if __name__ == "__main__":
    main()
