"""A training whose state may be streamed, in a process of its own: ``streaming.py MODE STEPS``.

With ``UMEM_POLICY`` umem is enabled; ``ROWS`` is the size of a batch; with ``ADAPTED`` adapters are
trained only. The last line is JSON: what the program saw, as checksums, and the memory in use on
the card beyond that of CUDA and its libraries.
"""

from __future__ import annotations

import io
import json
import os
import sys
import threading
import zlib
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

import umem
from umem.cuda import bindings
from umem.executor.managers import managers
from umem.executor.state_memory import CudaStateMemory
from umem.executor.streamed_training import streamed_trainings
from umem.runtime.state import runtime

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
            self.requires_grad_(False)
            self.adapter = nn.Sequential(
                nn.Linear(HIDDEN, 16, bias=False), nn.Linear(16, 4 * HIDDEN, bias=False)
            )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        normal = self.norm(x)
        hidden = self.up(normal)
        if self.adapter is not None:
            hidden = hidden + self.adapter(normal)
        y: torch.Tensor = x + self.down(nn.functional.gelu(hidden))
        return y


def crc(tensor: torch.Tensor) -> int:
    return zlib.crc32(tensor.detach().cpu().contiguous().numpy().tobytes())


class CardMemory:
    """The most memory in use on the card, as NVML shows it, beyond that of the kernels."""

    def __init__(self) -> None:
        x = torch.ones(HIDDEN, HIDDEN, device="cuda", requires_grad=True)
        y = nn.functional.gelu(nn.functional.layer_norm(x @ x, [HIDDEN]))
        y.square().mean().backward()  # loads them
        del x, y
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        self._address = bindings.device_pci_address(0)
        self._base_bytes = self._used_bytes() - torch.cuda.memory_reserved()
        self.peak_bytes = 0
        self.beside_bytes = 0
        """The most beside what torch has reserved: later kernels need memory of their own."""
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._work, daemon=True)
        self._thread.start()

    def _used_bytes(self) -> int:
        total_bytes, free_bytes = bindings.nvml_memory_bytes(self._address) or (0, 0)
        return total_bytes - free_bytes

    def _work(self) -> None:
        while not self._ended.wait(0.002):
            before, reserved_bytes = self._used_bytes(), torch.cuda.memory_reserved()
            after = self._used_bytes()
            self.peak_bytes = max(self.peak_bytes, before - self._base_bytes)
            beside_bytes = min(before, after) - reserved_bytes - self._base_bytes
            self.beside_bytes = max(self.beside_bytes, beside_bytes)

    def stop(self) -> None:
        self._ended.set()
        self._thread.join()


class Training:
    """The same model and batches in every process."""

    def __init__(self, *, clips: bool) -> None:
        self.clips = clips
        self.rows = ROWS
        torch.manual_seed(1)
        layers = [Layer() for _ in range(LAYERS)]
        self.model = nn.Sequential(*layers, nn.Linear(HIDDEN, HIDDEN)).cuda()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3, fused=True)
        self.side = torch.cuda.Stream()
        self.losses: list[torch.Tensor] = []
        self.seen: list[torch.Tensor] = []
        self.averages = [torch.zeros_like(it) for it in self.model.parameters()]

    def step(self) -> None:
        torch.manual_seed(100 + len(self.losses))
        loss = self.model(torch.randn(self.rows, HIDDEN, device="cuda")).square().mean()
        self.optimizer.zero_grad()
        loss.backward()
        if self.clips:
            nn.utils.clip_grad_norm_(self.model.parameters(), 0.1)
        self.optimizer.step()
        self.losses.append(loss.detach())

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


def gradients_clipped(training: Training) -> None:
    """Gradients of all units leave for the host, where nothing but clipping and the step is due."""
    for streamed in streamed_trainings():
        copied = streamed.gradients.sizes()
        # A later plan of the tuner leaves some on the device.
        if len(training.losses) >= 4 and streamed.gradients.copied != copied.keys():
            streamed.gradients.set_plan(copied)
            streamed.step.units.set_plan(frozenset(), slots=2, stages_operands=True)


def gradients_copied(training: Training) -> None:
    """Gradients of all units leave for the host, and two more batches are added there."""
    gradients_clipped(training)
    if len(training.losses) > 4:
        for _ in range(2):
            loss = training.model(torch.randn(ROWS, HIDDEN, device="cuda")).square().mean()
            loss.backward()
        norm_logged(training)


def in_backward(training: Training) -> None:
    """Without clipping: parameters are updated in the backward pass where umem is enabled."""
    if "UMEM_POLICY" in os.environ and len(training.losses) == 1:
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
        *(gradients_clipped, buffers_filled_late, varied),
    )
}


def main() -> None:
    torch.use_deterministic_algorithms(True)
    if "UMEM_POLICY" in os.environ:
        assert umem.enable(os.environ["UMEM_POLICY"])
    card = CardMemory()
    between = MODES[sys.argv[1]]
    training = Training(clips=between is not in_backward)
    steps, waited = int(sys.argv[2]), 0
    for number in range(steps):
        if number == steps - 4:
            waited = sum(it.counts.waited for it in streamed_trainings())
        training.step()
        between(training)
    torch.cuda.synchronize()
    card.stop()
    state = [it for values in training.optimizer.state.values() for it in values.values()]
    facts: dict[str, Any] = {
        "losses": [float(loss).hex() for loss in training.losses],
        "seen": [crc(it) for it in training.seen],
        "averages": [crc(it) for it in training.averages],
        "weights": [crc(it) for it in training.model.parameters()],
        "state": [crc(it) for it in state],
    }
    if "UMEM_POLICY" not in os.environ:
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
                "copied_blocks": status.copied_blocks,
                "spilled_bytes": status.spilled_bytes,
                "predicted_s": status.predicted_s,
                "bytes_out": status.activations.bytes_out,
                "late_fetches": status.activations.late_fetches,
            }
    print(json.dumps(facts))


if __name__ == "__main__":
    main()
