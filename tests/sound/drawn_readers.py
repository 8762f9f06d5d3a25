"""Trainings in which drawn readers use tensors at drawn moments, from drawn threads and streams."""

from __future__ import annotations

import contextlib
import random
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, fields
from functools import partial
from typing import Any

import torch
from readers import READERS, Reader
from small_trainings import Net, Program, Run
from torch import nn

Optimizers = dict[str, Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]]

OPTIMIZERS: Optimizers = {
    "adamw": lambda every: torch.optim.AdamW(every, lr=1e-3, foreach=False),
    "adamw-foreach": lambda every: torch.optim.AdamW(every, lr=1e-3, foreach=True),
    "adamw-fused": lambda every: torch.optim.AdamW(every, lr=1e-3, fused=True),
    "adam-amsgrad": lambda every: torch.optim.Adam(every, lr=1e-3, amsgrad=True),
    "sgd": lambda every: torch.optim.SGD(every, lr=1e-3, momentum=0.9),
    "sgd-fused": lambda every: torch.optim.SGD(every, lr=1e-3, momentum=0.9, fused=True),
    "adagrad": lambda every: torch.optim.Adagrad(every, lr=1e-3),
    "rmsprop": lambda every: torch.optim.RMSprop(every, lr=1e-4, momentum=0.9, centered=True),
    "nadam": lambda every: torch.optim.NAdam(every, lr=1e-3),
}

CUDA_OPTIMIZERS: Optimizers = OPTIMIZERS | {
    "adamw-capturable": lambda every: torch.optim.AdamW(every, lr=1e-3, capturable=True)
}

BETWEEN_PASSES = ("after backward", "after clip", "after step", "after zero_grad", "in step hook")
IN_PASSES = ("between blocks", "in backward", "in gradient hook")
MOMENTS = (*BETWEEN_PASSES, *IN_PASSES)
TENSORS = ("weight", "bias", "gradient", "first state", "second state", "step count")
THREADS = ("this", "another", "two")
_OF_THE_PROCESS = ("dual_number", "tangent_by_func", "traced_by_fx", "under_fake_tensors")
"""Readers that change what all threads share: two of them at once differ in stock, too."""

STREAMS = ("current", "side")
BLOCKS = 3
"""The blocks whose tensors are read."""

_WHOLE_STEPS = 60
"""Steps of a training on a GPU, of which each has a reader of its own."""


@dataclass(frozen=True)
class Reading:
    """A use of a tensor: how, when, of which, and from where.

    Parameters
    ----------
    place
        The block after which a moment between blocks comes.
    block
        The block whose tensor is used.
    """

    reader: str
    moment: str = "after step"
    tensor: str = "weight"
    thread: str = "this"
    stream: str = "current"
    place: int = 0
    block: int = 1

    def __str__(self) -> str:
        usual = {field.name: field.default for field in fields(self)}
        words = [f"{self.tensor} of block {self.block}", self.moment]
        if self.moment == "between blocks":
            words.append(f"place {self.place}")
        words += [
            f"{name} {value}"
            for name in ("thread", "stream")
            if (value := getattr(self, name)) != usual[name]
        ]
        return f"{self.reader}({', '.join(words)})"

    @property
    def is_possible(self) -> bool:
        """Whether stock may do so: no change amid passes, and no race of the program itself."""
        kind = READERS[self.reader]
        if self.moment in IN_PASSES and (kind.writes or kind.passes or "graph" in kind.name):
            return False
        if kind.name == "swapped_and_back" and self.tensor in ("weight", "bias"):
            return False  # torch refuses the next backward pass
        if kind.name == "array_held" and "state" in self.tensor:
            return False  # numpy's arrays are of the host's tensors: umem streams a card's state
        if self.thread == "two":
            return not (kind.writes or kind.holds or kind.passes or kind.name in _OF_THE_PROCESS)
        return self.thread == "this" or not kind.writes

    @property
    def asks_versions(self) -> bool:
        """Whether torch compares the tensor's version, and stock may raise.

        A GPU's updates count when they are launched, in ``step()``, and late lanes' when they run.
        """
        return self.reader.startswith("old_graph")


def drawn(choose: Callable[[Sequence[Any]], Any], *, on_cuda: bool) -> Reading:
    """A possible reading. `choose` chooses one of some."""
    while True:
        reading = Reading(
            reader=choose(tuple(READERS)),
            moment=choose(MOMENTS),
            tensor=choose(TENSORS),
            thread=choose(THREADS),
            stream=choose(STREAMS) if on_cuda else "current",
            place=choose(range(BLOCKS)),
            block=choose(range(BLOCKS)),
        )
        if reading.is_possible and (on_cuda or not reading.asks_versions):
            return reading


class Readings:
    """Does the readings of the present step, each at its moment, and records what they give."""

    def __init__(self, run: Run, model: Any, optimizer: Any) -> None:
        self._run, self._model, self._optimizer = run, model, optimizer
        self._present: Sequence[Reading] = ()
        self._held: dict[int, Any] = {}
        self._is_busy = False

    def attach(self) -> None:
        """Have hooks call at the moments that lie in passes and in the step."""
        self._optimizer.register_step_post_hook(lambda *_: self.at("in step hook"))
        for number, block in enumerate(self._model.blocks):
            block.register_forward_hook(partial(self._block_ended, number))
            block.down.weight.register_post_accumulate_grad_hook(
                partial(self._at_place, "in gradient hook", number)
            )

    def _block_ended(self, number: int, _block: Any, _inputs: Any, output: torch.Tensor) -> None:
        self.at("between blocks", number)
        if output.requires_grad:
            output.register_hook(partial(self._at_place, "in backward", number))

    def _at_place(self, moment: str, number: int, _tensor: torch.Tensor) -> None:
        self.at(moment, number)

    def begin(self, readings: Sequence[Reading]) -> None:
        """Take the readings until the next backward pass; what they hold is made now."""
        self._present = readings
        self._held.clear()
        for number, reading in enumerate(readings):
            kind, tensor = READERS[reading.reader], self._tensor(reading)
            if kind.holds and tensor is not None:
                held = kind.use(self._model, self._optimizer, tensor)
                with contextlib.suppress(Exception):  # then the second part raises StopIteration
                    next(held)
                self._held[number] = held

    def at(self, moment: str, place: int | None = None) -> None:
        """Do the readings of a moment. Passes that a reading makes are no moments."""
        if self._is_busy:
            return
        self._is_busy = True
        try:
            for number, reading in enumerate(self._present):
                if reading.moment == moment and place in (None, reading.place):
                    self._read(number, reading)
        finally:
            self._is_busy = False

    def _tensor(self, reading: Reading) -> Any:
        """The tensor that is read; None where there is none now."""
        weight = self._model.blocks[reading.block].up.weight
        if reading.tensor == "weight":
            return weight
        if reading.tensor == "bias":
            return self._model.blocks[reading.block].up.bias
        if reading.tensor == "gradient":
            return weight.grad
        state = self._optimizer.state.get(weight, {})
        if reading.tensor == "step count":
            return state.get("step")
        moments = [each for name, each in state.items() if name != "step" and each is not None]
        wanted = 0 if reading.tensor == "first state" else 1
        return moments[wanted] if wanted < len(moments) else None

    def _read(self, number: int, reading: Reading) -> None:
        tensor, kind = self._tensor(reading), READERS[reading.reader]
        held = self._held.pop(number, None)
        if (tensor is None and held is None) or (kind.holds and held is None):
            self._run.record(str(reading), "nothing")
            return
        if reading.thread == "this":
            self._use(reading, kind, tensor, held)
            return
        count = 1 if reading.thread == "another" else 2
        values: list[Any] = [None] * count
        threads = [
            threading.Thread(
                target=self._use_in_a_thread, args=(each, values, reading, tensor, held)
            )
            for each in range(count)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        self._run.record(str(reading), values)

    def _use_in_a_thread(
        self, number: int, values: list[Any], reading: Reading, tensor: Any, held: Any
    ) -> None:
        with self._on_stream(reading):
            values[number] = self._value(READERS[reading.reader], tensor, held)

    def _use(self, reading: Reading, kind: Reader, tensor: Any, held: Any) -> None:
        with self._on_stream(reading):
            self._run.record(str(reading), self._value(kind, tensor, held))

    def _value(self, kind: Reader, tensor: Any, held: Any) -> Any:
        """What a use gives; an error's class, where it raises."""
        try:
            if held is None:
                return kind.use(self._model, self._optimizer, tensor)
            try:
                next(held)
            except StopIteration as end:
                return end.value
            raise AssertionError("a reader has two parts")
        except Exception as error:
            return f"raises {type(error).__name__}"

    @contextlib.contextmanager
    def _on_stream(self, reading: Reading) -> Iterator[None]:
        if reading.stream == "current" or not self._run.is_cuda:
            yield
            return
        current, side = torch.cuda.current_stream(), torch.cuda.Stream()
        side.wait_stream(current)
        with torch.cuda.stream(side):
            yield
        current.wait_stream(side)


def train_with_readers(
    run: Run, optimizer_name: str, readings_of: Callable[[int], Sequence[Reading]], steps: int
) -> None:
    """Train, and do the readings of each step from the second one on."""
    model, optimizer = run.model(lambda size: Net(size), CUDA_OPTIMIZERS[optimizer_name])
    readings = Readings(run, model, optimizer)
    readings.attach()
    for batch in run.batches(steps):
        loss = model(batch).square().mean()
        loss.backward()
        run.record("loss", loss)
        readings.begin(readings_of(run.step) if run.step else ())
        readings.at("after backward")
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        readings.at("after clip")
        optimizer.step()
        readings.at("after step")
        optimizer.zero_grad()
        readings.at("after zero_grad")


# ---- programs of the campaign ----


def readers_program(name: str) -> Program:
    """The program of drawn readers of this name, ``readers:OPTIMIZER:SEED:STEPS:DEVICE``."""
    _, optimizer_name, seed, steps, device = name.split(":")
    chance = random.Random(f"{optimizer_name} {seed}")
    every = [[drawn(chance.choice, on_cuda=device == "cuda")] for _ in range(int(steps))]

    def train(run: Run) -> None:
        late = run.size.late if run.is_cuda else 1
        first = int(steps)
        train_with_readers(
            run,
            optimizer_name,
            lambda step: every[step - late] if late <= step < late + first else (),
            first + late + 1,
        )

    train.__module__ = "readers"
    return Program(name, train)


def reader_programs(count: int, first_seed: int, *, on_cpu: bool) -> list[Program]:
    """Programs with so many drawn readers in all, by turns with each optimizer."""
    names = list(OPTIMIZERS if on_cpu else CUDA_OPTIMIZERS)
    device = "cpu" if on_cpu else "cuda"
    programs: list[Program] = []
    while count > 0:
        seed, which = divmod(len(programs), len(names))
        steps = min(count, _WHOLE_STEPS)
        programs.append(
            readers_program(f"readers:{names[which]}:{first_seed + seed}:{steps}:{device}")
        )
        count -= steps
    return programs
