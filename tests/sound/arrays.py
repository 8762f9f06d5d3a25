"""Programs that read memory by other libraries, by storages and by addresses, and files."""

from __future__ import annotations

import importlib
import io
import threading
from typing import Any

import torch
from readers import Wrapper
from small_trainings import Run, program, train
from torch.utils import dlpack

import umem


class Tagged(torch.Tensor):
    """A class of tensors, as libraries have them."""


@program()
def other_classes(run: Run) -> None:
    """``as_subclass`` of each weight, as libraries with tensor classes do."""
    model, optimizer = run.model()

    @torch.no_grad()
    def read() -> None:
        doubled = [weight.as_subclass(Tagged) * 2 for weight in model.parameters()]
        run.record("doubled", [each.as_subclass(torch.Tensor) for each in doubled])

    train(run, model, optimizer, read)


@program()
def tensors_on_the_host(run: Run) -> None:
    """``torch.as_tensor`` of weights for the host, which asks no ``__torch_function__``."""
    model, optimizer = run.model()

    def read() -> None:
        last = list(model.parameters())[-10:]
        run.record("host", [torch.as_tensor(w, dtype=torch.float64, device="cpu") for w in last])

    train(run, model, optimizer, read)


@program()
def weights_read_after_join(run: Run) -> None:
    """``umem.join()`` before a read past torch's functions: weights."""
    model, optimizer = run.model()

    def read() -> None:
        if run.is_umem:
            umem.join()
        last = list(model.parameters())[-10:]
        run.record("host", [torch.as_tensor(w, dtype=torch.float64, device="cpu") for w in last])

    train(run, model, optimizer, read)


@program()
def state_read_after_join(run: Run) -> None:
    """``umem.join()`` before a read past torch's functions: optimizer state."""
    model, optimizer = run.model()

    def read() -> None:
        if run.is_umem:
            umem.join()
        last = [its["exp_avg"] for its in optimizer.state.values()][-10:]
        run.record("host", [torch.as_tensor(m, dtype=torch.float64, device="cpu") for m in last])

    train(run, model, optimizer, read)


@program()
def storages_held(run: Run) -> None:
    """The program keeps the storages of weights, and reads them after each step.

    torch has one object in Python for each of them, which a count of uses cannot tell from none.
    """
    model, optimizer = run.model()
    held: list[tuple[Any, torch.Size]] = []

    def read() -> None:
        if not held:
            held.extend((each.untyped_storage(), each.shape) for each in model.parameters())
        empty: Any = torch.empty(0, device=run.device)
        run.record("held", [empty.clone().set_(kept, 0, shape) for kept, shape in held])

    train(run, model, optimizer, read)


@program()
def state_by_old_dlpack(run: Run) -> None:
    """``to_dlpack`` of optimizer state, as CuPy's ``fromDlpack`` takes it."""
    old: Any = dlpack
    model, optimizer = run.model()

    def read() -> None:
        state = [its["exp_avg"] for its in optimizer.state.values()]
        run.record("state", [old.from_dlpack(old.to_dlpack(each)) for each in state])

    train(run, model, optimizer, read)


@program()
def saved_in_a_thread(run: Run) -> None:
    """Another thread saves model and optimizer after some steps, and the file is loaded."""
    model, optimizer = run.model()

    def save() -> None:
        if run.step % 3 != 1:
            return
        file = io.BytesIO()

        def save_states() -> None:
            torch.save((model.state_dict(), optimizer.state_dict()), file)

        thread = threading.Thread(target=save_states)
        thread.start()
        thread.join()
        file.seek(0)
        weights, state = torch.load(file, weights_only=True, map_location="cpu")
        run.record("weights", weights)
        run.record("state", [its["exp_avg"] for its in state["state"].values()])

    train(run, model, optimizer, save)


# ---- addresses ----


class _AtAddress:
    """An array of CUDA's at an address, as an extension has it: it keeps nothing alive."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.__cuda_array_interface__ = {
            "data": (tensor.data_ptr(), False),
            "shape": tuple(tensor.shape),
            "typestr": "<f4",
            "version": 3,
        }


def _read_at_addresses(run: Run, model: Any, optimizer: Any) -> None:
    """Average weights and read state by addresses that were taken at the second step."""
    arrays: list[_AtAddress] = []

    def read() -> None:
        if not run.step:
            return
        if not arrays:
            state = [its["exp_avg"] for its in optimizer.state.values()]
            tensors = [*model.parameters(), *state]
            if run.is_umem:
                _hold(tensors)
            arrays.extend(map(_AtAddress, tensors))
        run.record("read", [torch.as_tensor(each, device="cuda") * 1 for each in arrays])

    train(run, model, optimizer, read)


def _hold(tensors: list[torch.Tensor]) -> None:
    getattr(umem, "hold")(tensors)  # noqa: B009, not in all versions


@program("cuda")
def addresses_held(run: Run) -> None:
    """Addresses that are kept from step to step, after ``umem.hold`` of their tensors."""
    _read_at_addresses(run, *run.model())


@program("cuda", expected=("EQUAL", "DIFFERENT", "CRASH"), page="addresses.md")
def addresses_kept(run: Run) -> None:
    """The same without it: out of reach by design. The weights' alone are asked for once."""
    model, optimizer = run.model()
    arrays: list[_AtAddress] = []

    def read() -> None:
        arrays.extend(map(_AtAddress, () if arrays else model.parameters()))
        run.record("read", [torch.as_tensor(each, device="cuda") * 1 for each in arrays])

    train(run, model, optimizer, read)


# ---- wrappers ----


def _read_by_wrappers(run: Run, *, are_held: bool) -> None:
    """Wrap some weights and state at the second step, and use the wrappers after each one."""
    model, optimizer = run.model()
    wrappers: list[Wrapper] = []

    @torch.no_grad()
    def read() -> None:
        if run.step and not wrappers:
            state = [its["exp_avg"] for its in optimizer.state.values()]
            tensors = [*list(model.parameters())[-10:], *state[-10:]]
            if are_held and run.is_umem:
                _hold(tensors)
            wrappers.extend(map(Wrapper, tensors))
        run.record("doubled", [each * 2 for each in wrappers])

    train(run, model, optimizer, read)


@program()
def wrappers_of_held_tensors(run: Run) -> None:
    """Wrappers around weights and state, after ``umem.hold`` of these."""
    _read_by_wrappers(run, are_held=True)


@program()
def wrappers_of_tensors(run: Run) -> None:
    """The same without it: where a wrapper's operators run, torch asks no guard."""
    _read_by_wrappers(run, are_held=False)


# ---- CuPy and Triton ----


def _on_this_stream() -> Any:
    cupy = importlib.import_module("cupy")
    return cupy.cuda.ExternalStream(torch.cuda.current_stream().cuda_stream)


@program("cuda", "cupy")
def weights_by_cupy(run: Run) -> None:
    """CuPy's arrays on ``detach()`` of weights, made once: other tensors on the same memory."""
    cupy = importlib.import_module("cupy")
    model, optimizer = run.model()
    held: list[Any] = []

    def read() -> None:
        if not held:
            held.extend(cupy.asarray(weight.detach()) for weight in model.parameters())
        with _on_this_stream():
            run.record("read", [torch.as_tensor(each * 1, device="cuda") for each in held])

    train(run, model, optimizer, read)


@program("cuda", "cupy")
def gradients_by_cupy(run: Run) -> None:
    """CuPy's arrays on gradients halve them before a step and zero them after it.

    The arrays are made of the gradients anew after each backward pass, and hold them. After the
    step they are used by their addresses alone.
    """
    cupy = importlib.import_module("cupy")
    model, optimizer = run.model()
    for batch in run.batches():
        loss = model(batch).square().mean()
        optimizer.zero_grad()
        loss.backward()
        arrays = [cupy.asarray(weight.grad) for weight in model.parameters()]
        with _on_this_stream():
            for array in arrays:
                array *= cupy.float32(0.5)
            optimizer.step()
            for array in arrays:
                array.fill(0)
        run.record("loss", loss)


@program("cuda", "triton")
def average_by_triton(run: Run) -> None:
    """A Triton kernel averages the weights, which it takes as arguments."""
    kernel = importlib.import_module("triton_kernels").lerp
    model, optimizer = run.model()
    averages = [torch.zeros_like(weight) for weight in model.parameters()]

    def average() -> None:
        for mean, weight in zip(averages, model.parameters(), strict=True):
            count = weight.numel()
            kernel[((count + 1023) // 1024,)](mean, weight, count, 1024)
        run.record("averages", averages)

    train(run, model, optimizer, average)
