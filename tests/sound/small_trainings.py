"""Small trainings that run stock and under umem: a model, a loop, and a record of every step."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

import torch
from torch import nn

Verdict = Literal[
    "EQUAL", "DIFFERENT", "LOUD", "CRASH", "HANG", "NO-PLAN", "STOCK-DIFFERS", "NOT-RUN"
]
"""What is said of a program.

``LOUD``: umem refused by an error of its own. ``CRASH``: the program failed otherwise, and does not
in stock. ``NO-PLAN``: equal, but nothing was deferred or away. ``STOCK-DIFFERS``: two stock runs
differ, or stock fails. ``NOT-RUN``: a package is missing, or no time was left.
"""

Need = Literal["cuda", "cupy", "triton", "one process"]

_CHUNK_WORDS = 1 << 20
_PRIME = 1_000_003
_MULTIPLIER = 2 * 2_654_435_761

_T = TypeVar("_T")


# ---- checksums ----


def _words(tensor: torch.Tensor) -> torch.Tensor:
    """The bits of a tensor as integers, in one dimension."""
    if tensor.layout is not torch.strided:
        tensor = tensor.to_dense()
    flat = tensor.detach().resolve_conj().resolve_neg().reshape(-1)
    if flat.is_complex():
        flat = torch.view_as_real(flat).reshape(-1)
    integer = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[flat.itemsize]
    return flat.contiguous().view(integer)


@torch.no_grad()
def checksum(tensor: torch.Tensor) -> torch.Tensor:
    """Checksum of all bits, an integer on the tensor's own device: nothing waits for it.

    Each word is multiplied by an odd number of its own, so that a change of one word always shows.
    """
    words = _words(tensor)
    total = torch.full((), words.numel(), dtype=torch.int64, device=words.device)
    longest = min(words.numel(), _CHUNK_WORDS)
    multipliers = torch.arange(longest, device=words.device).mul_(_MULTIPLIER).add_(1)
    for part in words.split(_CHUNK_WORDS) if longest else ():
        total = total * _PRIME + (part.to(torch.int64) * multipliers[: part.numel()]).sum()
    return total


# ---- models ----


class Block(nn.Module):
    """A norm and two layers."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))


class Net(nn.Module):
    """Blocks and a head."""

    def __init__(self, size: Size, make_block: Callable[[int], nn.Module] = Block) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(make_block(size.width) for _ in range(size.layers))
        self.head = nn.Linear(size.width, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x)


# ---- runs ----


@dataclass(frozen=True)
class Size:
    """Size of a training.

    Parameters
    ----------
    width
        Of a block's input.
    layers
        Number of blocks.
    rows
        Of a batch.
    steps
        Of the optimizer.
    late
        The first step at which umem has been at work for some steps.
    """

    width: int
    layers: int
    rows: int
    steps: int
    late: int


DEVICE_SIZE = Size(width=1024, layers=8, rows=2048, steps=18, late=9)
"""1 GiB of weights, gradients and state; a plan runs from the sixth step or so."""
HOST_SIZE = Size(width=16, layers=3, rows=12, steps=6, late=2)


class Run:
    """One stock run of a program: what it trains, and what it has recorded.

    Parameters
    ----------
    size
        Of the training.
    device
        Where it is.
    """

    is_umem = False

    def __init__(self, size: Size, device: str) -> None:
        self.size, self.device = size, device
        self.step = 0
        self.trained: list[tuple[Any, tuple[Any, ...]]] = []
        """Each model with its optimizers."""
        self._recorded: list[tuple[str, torch.Tensor | str]] = []

    @property
    def is_cuda(self) -> bool:
        """Whether the training is on a GPU."""
        return self.device == "cuda"

    @property
    def is_late(self) -> bool:
        """Whether umem has been at work for some steps."""
        return self.step >= self.size.late

    def made(self, make: Callable[[], _T]) -> _T:
        """A module with the run's own random numbers, on its device."""
        self._seed_device(1)
        module: Any = make()
        return module.to(self.device)

    def _seed_device(self, number: int) -> None:
        # Of this device alone: `torch.manual_seed` puts the stack into words, for CUDA's start.
        torch.default_generator.manual_seed(number)
        if self.is_cuda:
            torch.cuda.manual_seed_all(number)

    def trains(self, model: Any, *optimizers: Any) -> None:
        """Note a model and its optimizers: streamed from now on in a run that does so itself."""
        self.trained.append((model, optimizers))

    def model(
        self,
        make_model: Callable[[Size], nn.Module] = Net,
        make_optimizer: Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer] | None = None,
        size: Size | None = None,
    ) -> tuple[Any, Any]:
        """A model and its optimizer, by default a fused AdamW."""
        model: Any = self.made(lambda: make_model(size or self.size))
        make = make_optimizer or (lambda every: torch.optim.AdamW(every, lr=1e-3, fused=True))
        optimizer = make(model.parameters())
        self.trains(model, optimizer)
        return model, optimizer

    def frozen_model(self, make_model: Callable[[Size], nn.Module] = Net) -> Any:
        """A model that is not trained, of twice as many blocks: its weights exceed the budget."""
        size = Size(
            self.size.width, 2 * self.size.layers, self.size.rows, self.size.steps, self.size.late
        )
        model: Any = self.made(lambda: make_model(size)).requires_grad_(False)
        self.trains(model)
        self.begin()
        return model

    def batches(self, steps: int | None = None, rows: int | None = None) -> Iterator[torch.Tensor]:
        """The batch of each step."""
        for step in range(steps or self.size.steps):
            self.step = step
            if step == 1:
                self.begin()
            self._seed_device(100 + step)
            yield torch.randn(rows or self.size.rows, self.size.width, device=self.device)
            self.step_ended()

    def begin(self) -> None:
        """Begin to stream what is trained, in a run that does so itself."""

    def step_ended(self) -> None:
        """Note what became of a step, in a run under umem."""

    def record(self, name: str, value: object) -> None:
        """Record a value of the present step: checksums of tensors, and all else as text.

        Nothing waits for the values of a GPU before the run ends: a wait would hide what comes too
        early.
        """
        name = f"{self.step:03d}.{name}"
        if isinstance(value, torch.Tensor):
            self._recorded.append((name, checksum(value)))
        elif isinstance(value, dict):
            for key, part in value.items():
                self.record(f"{name[4:]}.{key}", part)
        elif isinstance(value, list | tuple):
            for number, part in enumerate(value):
                self.record(f"{name[4:]}.{number}", part)
        else:
            self._recorded.append((name, repr(value)))

    def results(self) -> dict[str, str]:
        """All records, and the last weights, buffers and optimizer states."""
        found: dict[str, str] = {}
        for model, optimizers in self.trained:
            self.record("end.weight", dict(model.named_parameters()))
            self.record("end.buffer", dict(model.named_buffers()))
            for optimizer in optimizers:
                self.record("end.state", [dict(its) for its in optimizer.state.values()])
        times: dict[str, int] = {}
        for name, value in self._recorded:
            text = value if isinstance(value, str) else f"{int(value) & (1 << 64) - 1:016x}"
            number = times[name] = times.get(name, 0) + 1
            found[name if number == 1 else f"{name}#{number}"] = text
        return found

    def close(self) -> None:
        """End what the run has begun."""


# ---- the table of programs ----


@dataclass(frozen=True)
class Program:
    """A program of the table.

    Parameters
    ----------
    name
        Of its function.
    train
        Runs it.
    needs
        What it cannot do without: a GPU, a package, or a process of its own.
    budget
        Share of stock's peak.
    expected
        The verdict that it must get.
    page
        The page of docs/ that names why it is another one than ``EQUAL``.
    """

    name: str
    train: Callable[[Run], None]
    needs: frozenset[Need] = frozenset()
    budget: float = 0.55
    expected: tuple[Verdict, ...] = ("EQUAL",)
    page: str = ""

    @property
    def kind(self) -> str:
        """The file that it is in."""
        return self.train.__module__

    @property
    def runs_on_host(self) -> bool:
        """Whether it runs on the CPU, in one process with others."""
        return not self.needs


PROGRAMS: dict[str, Program] = {}
"""Name -> program: those of all files that are imported."""


def program(
    *needs: Need, budget: float = 0.55, expected: Sequence[Verdict] = ("EQUAL",), page: str = ""
) -> Callable[[Callable[[Run], None]], Callable[[Run], None]]:
    """Put a function into the table of programs. One with CuPy or Triton needs a GPU, too."""

    def add(function: Callable[[Run], None]) -> Callable[[Run], None]:
        name = function.__name__
        assert name not in PROGRAMS, name
        PROGRAMS[name] = Program(name, function, frozenset(needs), budget, tuple(expected), page)
        return function

    return add


def train(
    run: Run,
    model: Any,
    optimizer: Any,
    between: Callable[[], None] | None = None,
    *,
    clip: float | None = None,
    steps: int | None = None,
    rows: int | None = None,
) -> None:
    """Train as most programs do, and do something after each step."""
    for batch in run.batches(steps, rows):
        loss = model(batch).square().mean()
        optimizer.zero_grad()
        loss.backward()
        if clip is not None:
            nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
        run.record("loss", loss)
        if between is not None:
            between()
