"""Programs with CUDA graphs, streams and events."""

from __future__ import annotations

from typing import Any

import torch
from small_trainings import Net, Run, program, train


@program("cuda")
def average_replayed(run: Run) -> None:
    """An average of weights, captured once and replayed after each step: replay takes no tensor."""
    model, optimizer = run.model()
    averages = [torch.zeros_like(weight) for weight in model.parameters()]
    captured: list[torch.cuda.CUDAGraph] = []

    @torch.no_grad()
    def capture() -> torch.cuda.CUDAGraph:
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            torch._foreach_lerp_(averages, list(model.parameters()), 0.1)
        return graph

    def average() -> None:
        if not run.is_late:
            return
        if not captured:
            captured.append(capture())
        captured[0].replay()
        run.record("averages", averages)

    train(run, model, optimizer, average)


@program("cuda")
def norms_replayed(run: Run) -> None:
    """The same with norms of gradients, which stay the same tensors, and of state."""
    model, optimizer = run.model()
    captured: list[tuple[torch.cuda.CUDAGraph, list[torch.Tensor]]] = []

    @torch.no_grad()
    def capture() -> tuple[torch.cuda.CUDAGraph, list[torch.Tensor]]:
        read = [it.grad for it in model.parameters()]
        read += [some["exp_avg"] for some in optimizer.state.values()]
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            norms = list(torch._foreach_norm(read))
        return graph, norms

    for batch in run.batches():
        optimizer.zero_grad(set_to_none=False)
        loss = model(batch).square().mean()
        loss.backward()
        if run.is_late:
            captured = captured or [capture()]
            graph, norms = captured[0]
            graph.replay()
            run.record("norms", norms)
        optimizer.step()
        run.record("loss", loss)


@program("cuda")
def capture_forks(run: Run) -> None:
    """A training on a side stream, where a capture forks to another stream in between.

    The event of the fork carries work from outside of the capture.
    """
    model, optimizer = run.model()
    side, other = torch.cuda.Stream(), torch.cuda.Stream()
    counts = [torch.zeros(1024, device=run.device) for _ in range(2)]

    def capture() -> None:
        if run.step not in (run.size.late, run.size.late + 3):
            return
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=side):
            counts[0].add_(1)
            other.wait_stream(side)
            with torch.cuda.stream(other):
                counts[1].add_(2)
            side.wait_stream(other)
        graph.replay()
        run.record("counts", counts)

    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        train(run, model, optimizer, capture)
    torch.cuda.current_stream().wait_stream(side)


def _graphed(model: Any, run: Run) -> Any:
    sample = torch.randn(run.size.rows, run.size.width, device=run.device)
    return torch.cuda.make_graphed_callables(model, (sample,))


@program("cuda")
def model_graphed(run: Run) -> None:
    """A whole model is graphed before its training: replays read weights by address."""
    model = _graphed(run.made(lambda: Net(run.size)), run)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    run.trains(model, optimizer)
    train(run, model, optimizer)


@program("cuda")
def model_graphed_late(run: Run) -> None:
    """The same amid a training: torch asserts that modules have no hooks then."""
    model, optimizer = run.model()
    for batch in run.batches():
        if run.step == run.size.late:
            optimizer.zero_grad()
            model = _graphed(model, run)
            optimizer.zero_grad()
        loss = model(batch).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        run.record("loss", loss)
        del loss  # with its graph, whose nodes are of the stream outside of a capture


@program("cuda")
def generic_events(run: Run) -> None:
    """``torch.Event`` and ``torch.Stream``, which are no classes of torch.cuda, order a read."""
    model, optimizer = run.model()
    side = torch.Stream(device="cuda")

    @torch.no_grad()
    def read() -> None:
        event = torch.Event(device="cuda")
        event.record(torch.accelerator.current_stream())
        side.wait_event(event)
        of_cuda = torch.cuda.Stream(
            stream_id=side.stream_id, device_index=side.device_index, device_type=side.device_type
        )
        with torch.cuda.stream(of_cuda):
            run.record("doubled", [weight * 2 for weight in model.parameters()])
        torch.cuda.current_stream().wait_stream(of_cuda)

    train(run, model, optimizer, read)


@program("cuda")
def batches_fetched_ahead(run: Run) -> None:
    """Batches come on a side stream and are freed at once; results go to page-locked memory."""
    model, optimizer = run.model()
    side, current = torch.cuda.Stream(), torch.cuda.current_stream()
    source = torch.Generator().manual_seed(1)
    shape = (run.size.rows, run.size.width)
    host = [torch.randn(*shape, generator=source).pin_memory() for _ in range(4)]
    outputs = torch.empty(run.size.rows, 16, pin_memory=True)
    weights = torch.empty_like(model.blocks[-1].up.weight, device="cpu").pin_memory()

    def fetch(number: int) -> torch.Tensor:
        with torch.cuda.stream(side):
            return host[number % 4].to("cuda", non_blocking=True)

    def send(to: torch.Tensor, value: torch.Tensor) -> torch.cuda.Event:
        to.copy_(value.detach(), non_blocking=True)
        event = torch.cuda.Event()
        event.record()
        return event

    coming = fetch(0)
    for _ in run.batches(rows=1):
        current.wait_stream(side)
        batch, coming = coming, fetch(run.step + 1)
        batch.record_stream(current)
        output = model(batch)
        loss = output.square().mean()
        del batch
        outputs_sent = send(outputs, output)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        weights_sent = send(weights, model.blocks[-1].up.weight)
        outputs_sent.synchronize()
        run.record("outputs", outputs)
        weights_sent.synchronize()
        run.record("weights", weights)
        run.record("loss", loss)
        del output, loss
        torch.cuda.empty_cache()


@program("cuda", "one process")
def memory_limited(run: Run) -> None:
    """A limit for the process, and questions about its memory."""
    torch.cuda.set_per_process_memory_fraction(0.9)
    torch.cuda.memory_allocated()
    torch.cuda.mem_get_info()
    torch.cuda.memory_snapshot()
    train(run, *run.model())
