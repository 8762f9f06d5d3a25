"""Programs whose loops are unusual: what they train, when, and by which losses."""

from __future__ import annotations

import copy
from collections.abc import Iterable
from typing import Any

import torch
from small_trainings import Block, Net, Run, Size, program, train
from torch import nn


@program()
def plain(run: Run) -> None:
    """Nothing between the steps: the control."""
    train(run, *run.model(), clip=0.5)


@program()
def two_losses(run: Run) -> None:
    """Two losses are computed, then each goes backward, is clipped and stepped on by itself.

    A fused Adam does not count versions of weights, so that stock runs this.
    """
    model, optimizer = run.model()
    for batch in run.batches():
        first, second = batch.chunk(2)
        losses = (model(first).square().mean(), (model(second) - 1).square().mean())
        for loss in losses:
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 0.05)
            optimizer.step()
            optimizer.zero_grad()
            run.record("loss", loss)


@program()
def late_gradient(run: Run) -> None:
    """A loss that saves no weight goes backward after step() and zero_grad(), and is clipped."""
    model, optimizer = run.model(make_optimizer=lambda every: torch.optim.AdamW(every, lr=1e-3))
    for batch in run.batches():
        loss = model(batch).square().mean()
        penalty = model.head.bias.sum() + sum(block.down.bias.sum() for block in model.blocks)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        penalty.backward()
        run.record("gradients", sum(weight.grad is not None for weight in model.parameters()))
        run.record("norm", nn.utils.clip_grad_norm_(model.parameters(), 1e-2))
        optimizer.step()
        optimizer.zero_grad()
        run.record("loss", loss)


class _Convolutions(nn.Module):
    """Convolutions with skips."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        width = 3 * size.width // 4
        self.blocks = nn.ModuleList(
            nn.Conv2d(width, width, 3, padding=1) for _ in range(size.layers)
        )
        self.head = nn.Conv2d(width, 8, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = x + torch.tanh(block(x))
        return self.head(x)


@program()
def old_graph_of_convolutions(run: Run) -> None:
    """A graph goes backward again after a fused step: its convolutions read the new weights."""
    model, optimizer = run.model(_Convolutions)
    channels, pixels = model.head.in_channels, 24 if run.is_cuda else 4
    for _ in run.batches(rows=1):
        image = torch.randn(4, channels, pixels, pixels, device=run.device, requires_grad=True)
        output = model(image)
        loss = output.square().mean()
        optimizer.zero_grad()
        loss.backward(retain_graph=True)
        optimizer.step()
        run.record("gradient", torch.autograd.grad(output.abs().mean(), image))
        run.record("loss", loss)


class _Skipping(Net):
    """Leaves blocks out at random, in another order each time, and calls one twice."""

    calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        chance = torch.Generator().manual_seed(self.calls)
        for number in torch.randperm(len(self.blocks), generator=chance).tolist():
            if number == 0 or torch.rand((), generator=chance) < 0.7:
                x = self.blocks[number](x)
        return self.head(self.blocks[1](x))


@program()
def stochastic_depth(run: Run) -> None:
    """Another choice of blocks, in another order, in each step."""
    train(run, *run.model(_Skipping), clip=0.5)


class _Adapted(Block):
    """A frozen block with a trained product of two small matrices beside one of its layers."""

    def __init__(self, width: int) -> None:
        super().__init__(width)
        self.requires_grad_(False)
        self.a = nn.Parameter(torch.randn(8, width) * 0.02)
        self.b = nn.Parameter(torch.zeros(4 * width, 8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        normal = self.norm(x)
        inner = self.up(normal) + normal @ self.a.t() @ self.b.t()
        return x + self.down(nn.functional.gelu(inner))


@program(budget=0.5)
def adapters_merged(run: Run) -> None:
    """Adapters are merged into frozen weights for an evaluation, by ``.data``, and taken off."""
    size = Size(run.size.width, 2 * run.size.layers, 512, run.size.steps, run.size.late)
    model, optimizer = run.model(lambda _: Net(size, _Adapted))
    sample = torch.randn(64, run.size.width, device=run.device)

    def merge_and_evaluate() -> None:
        with torch.no_grad():
            for block in model.blocks:
                block.up.weight.data += block.b @ block.a
            run.record("merged", model(sample))
            for block in model.blocks:
                block.up.weight.data -= block.b @ block.a

    train(run, model, optimizer, merge_and_evaluate, rows=min(512, run.size.rows))


@program()
def rates_searched(run: Run) -> None:
    """State is copied, rates grow for some steps, and state is loaded again."""
    model, optimizer = run.model()
    kept: list[Any] = []

    def search() -> None:
        if run.step == run.size.late:
            kept[:] = copy.deepcopy([model.state_dict(), optimizer.state_dict()])
        if 0 <= run.step - run.size.late < 3:
            optimizer.param_groups[0]["lr"] *= 2
        if run.step == run.size.late + 3:
            model.load_state_dict(kept[0])
            optimizer.load_state_dict(kept[1])
            kept.clear()

    train(run, model, optimizer, search)


@program()
def noise_and_left_out_steps(run: Run) -> None:
    """Adafactor with accumulated, noisy, clipped gradients; every fourth step is left out."""
    model, optimizer = run.model(make_optimizer=lambda every: torch.optim.Adafactor(every, lr=1e-3))
    for batch in run.batches():
        optimizer.zero_grad()
        for part in batch.chunk(3):
            loss = model(part).square().mean()
            (loss / 3).backward()
            run.record("loss", loss)
        noise = torch.Generator(run.device).manual_seed(run.step)
        with torch.no_grad():
            for weight in model.parameters():
                weight.grad.add_(
                    torch.randn(weight.shape, generator=noise, device=run.device), alpha=1e-5
                )
        nn.utils.clip_grad_value_(model.parameters(), 1e-2)
        if run.step % 4 != 3:
            optimizer.step()


@program()
def two_optimizers(run: Run) -> None:
    """Muon for matrices and AdamW for the rest, with a schedule each."""
    model: Any = run.made(lambda: Net(run.size))
    matrices = [weight for weight in model.blocks.parameters() if weight.ndim == 2]
    known = set(map(id, matrices))
    rest = [weight for weight in model.parameters() if id(weight) not in known]
    optimizers = (torch.optim.Muon(matrices, lr=1e-3), torch.optim.AdamW(rest, lr=1e-3))
    schedules: list[Any] = [
        torch.optim.lr_scheduler.CosineAnnealingLR(each, 10) for each in optimizers
    ]
    run.trains(model, *optimizers)
    for batch in run.batches():
        loss = model(batch).square().mean()
        model.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for each in [*optimizers, *schedules]:
            each.step()
        run.record("loss", loss)


@program()
def gradients_kept(run: Run) -> None:
    """The program keeps gradients, and changes them in place after the step that reads them."""
    model, optimizer = run.model()
    for batch in run.batches():
        loss = model(batch).square().mean()
        optimizer.zero_grad()
        loss.backward()
        kept = [weight.grad for weight in model.parameters()]
        optimizer.step()
        run.record("loss", loss)
        for gradient in kept:
            gradient.mul_(0)
        optimizer.zero_grad()


@program()
def gradients_asked_for(run: Run) -> None:
    """``torch.autograd.grad``, and an update by a fused kernel that counts no version."""
    model, optimizer = run.model()
    weights = list(model.parameters())
    for batch in run.batches():
        loss = model(batch).square().mean()
        gradients = torch.autograd.grad(loss, weights)
        with torch.no_grad():
            torch._fused_sgd_(
                weights,
                gradients,
                [],
                lr=1e-3,
                weight_decay=0.0,
                momentum=0.0,
                dampening=0.0,
                nesterov=False,
                maximize=False,
                is_first_step=False,
            )
        run.record("loss", loss)
        if run.step % 2:
            for weight, gradient in zip(weights, gradients, strict=True):
                weight.grad = gradient
            optimizer.step()


@program()
def views_kept_from_the_pass(run: Run) -> None:
    """A hook amid a block's call keeps a weight's ``detach()``, read and written after steps."""
    model, optimizer = run.model()
    kept: dict[int, torch.Tensor] = {}

    def keep(layer: Any, *_: object) -> None:
        if run.is_late:
            kept[run.step % 2] = layer.weight.detach().mT

    def read() -> None:
        run.record("kept", kept)
        with torch.no_grad():
            for view in kept.values():
                view.mul_(0.99)

    model.blocks[1].up.register_forward_hook(keep)
    train(run, model, optimizer, read)


def _fail(*_: object) -> None:
    raise ValueError("on purpose")


@program()
def errors_caught(run: Run) -> None:
    """Errors in a forward pass, a backward pass and a hook before the step; the loop goes on."""
    model, optimizer = run.model()
    for batch in run.batches():
        places: dict[int, Any] = {
            2: model.blocks[2].register_forward_pre_hook,
            3: model.blocks[1].up.weight.register_hook,
            4: optimizer.register_step_pre_hook,
        }
        register = places.get(run.step % 6)
        handle = register and register(_fail)
        try:
            optimizer.zero_grad()
            loss = model(batch).square().mean()
            loss.backward()
            optimizer.step()
            run.record("loss", loss)
        except ValueError as error:
            run.record("failed", str(error))
        if handle is not None:
            handle.remove()


@program()
def varying_lengths(run: Run) -> None:
    """Lengths change from step to step, between evaluations in inference mode."""
    model, optimizer = run.model()
    for batch in run.batches():
        rows = run.size.rows * (2 + run.step * 5 % 13) // 16
        loss = model(batch[: rows + 1]).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        run.record("loss", loss)
        with torch.inference_mode():
            run.record("evaluation", model(batch[:8]).clone())
        if run.is_cuda and run.step % 3 == 0:
            torch.cuda.empty_cache()
            torch.cuda.memory_summary()


class _Embeddings(nn.Module):
    """Embeddings that their forward pass changes, and some with sparse gradients."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.rows = 40 * size.width
        self.renormed = nn.Embedding(self.rows, size.width, max_norm=1.0)
        self.sparse = nn.Embedding(self.rows, size.width, sparse=True)
        self.net = Net(Size(size.width, size.layers // 2 + 1, size.rows, size.steps, size.late))

    def forward(self, numbers: torch.Tensor) -> torch.Tensor:
        return self.net(self.renormed(numbers) + self.sparse(numbers))


@program()
def embeddings(run: Run) -> None:
    """Embeddings with ``max_norm``, and a SparseAdam beside an AdamW."""
    if run.is_cuda:  # sparse gradients have no deterministic kernel, and are equal nevertheless
        torch.use_deterministic_algorithms(True, warn_only=True)
    model: Any = run.made(lambda: _Embeddings(run.size))
    dense = [weight for weight in model.parameters() if weight is not model.sparse.weight]
    optimizers = (
        torch.optim.AdamW(dense, lr=1e-3),
        torch.optim.SparseAdam([model.sparse.weight], lr=1e-3),
    )
    run.trains(model, *optimizers)
    for _ in run.batches(rows=1):
        order = torch.Generator().manual_seed(run.step)
        numbers = torch.randperm(model.rows, generator=order)[: run.size.rows // 2]
        loss = model(numbers.to(run.device)).square().mean()
        model.zero_grad()
        loss.backward()
        for each in optimizers:
            each.step()
        run.record("loss", loss)


@program()
def transformer_evaluated(run: Run) -> None:
    """A TransformerEncoder is evaluated after each step: the fast path asks its first layer."""

    class Encoder(nn.Module):
        def __init__(self, size: Size) -> None:
            super().__init__()
            layer = nn.TransformerEncoderLayer(
                size.width, 8, 4 * size.width, dropout=0.0, batch_first=True
            )
            self.encoder = nn.TransformerEncoder(layer, max(2, 3 * size.layers // 4))
            self.head = nn.Linear(size.width, 16)

        def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
            return self.head(self.encoder(x, src_key_padding_mask=mask))

    model, optimizer = run.model(Encoder)
    sequences = 16 if run.is_cuda else 2
    for batch in run.batches():
        batch = batch.view(sequences, -1, run.size.width)
        mask = torch.zeros(batch.shape[:2], dtype=torch.bool, device=run.device)
        mask[:, 3 * batch.shape[1] // 4 :] = True
        model.train()
        loss = model(batch, mask).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        run.record("loss", loss)
        model.eval()
        with torch.no_grad():
            run.record("evaluation", model(batch[:2], mask[:2]))


@program()
def parameter_made_of_a_parameter(run: Run) -> None:
    """``layer.weight = nn.Parameter(layer.weight)`` after a step, as when a layer is unshared."""
    model, optimizer = run.model()

    def rewrap() -> None:
        if run.step == run.size.late + 1:
            layer = model.blocks[-1].up
            old = layer.weight
            layer.weight = nn.Parameter(old)
            group = optimizer.param_groups[0]
            group["params"] = [layer.weight if each is old else each for each in group["params"]]
            optimizer.state[layer.weight] = optimizer.state.pop(old)

    train(run, model, optimizer, rewrap)


@program()
def classes_asked(run: Run) -> None:
    """``type(weight) is nn.Parameter`` chooses what is averaged after each step."""
    model, optimizer = run.model()
    averages: dict[str, torch.Tensor] = {}

    @torch.no_grad()
    def average() -> None:
        for name, weight in model.named_parameters():
            if type(weight) is nn.Parameter:
                averages.setdefault(name, torch.zeros_like(weight)).lerp_(weight, 0.1)
        run.record("averages", averages)

    train(run, model, optimizer, average)


def sgd(weights: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    """An SGD with momentum."""
    return torch.optim.SGD(weights, lr=1e-2, momentum=0.9)


@program()
def weights_by_turns(run: Run) -> None:
    """Blocks are frozen by turns, their gradients dropped, under SGD with momentum."""
    model, optimizer = run.model(make_optimizer=sgd)
    for batch in run.batches():
        for number, block in enumerate(model.blocks):
            block.requires_grad_((number + run.step) % 3 != 0)
        loss = model(batch).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        run.record("loss", loss)
