"""Used by all programs: the command line, the model's shape, its data, and what is written down."""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import logging
import math
import os
import re
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch.utils.checkpoint import checkpoint

LEARNING_RATE = 1e-4
MAX_NORM = 1.0
SEED = 0

_CALLS = 100
"""Of torch, behind each step: less than 0.5 ms, which show how fast the processor is meanwhile."""

_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}

_FLOAT_PRIME = 2**53 - 111
"""The largest prime below 2**53: a float rounds what is larger, which hides small differences. No
smaller difference is a multiple of a prime, whatever tensor's number it is multiplied by."""


@dataclass(frozen=True)
class Shape:
    """A decoder and its batches."""

    hidden: int
    intermediate: int
    layers: int
    heads: int
    vocabulary: int
    batch: int
    tokens: int
    """In each sequence."""
    checkpoints: bool = False
    """Keep only each layer's input for the backward pass."""


SHAPES = {
    "tiny": Shape(64, 128, layers=2, heads=2, vocabulary=256, batch=2, tokens=32),
    # 21 million parameters, beside activations of some 2 GB.
    "small": Shape(384, 1024, layers=10, heads=6, vocabulary=4096, batch=16, tokens=512),
    # 0.56 billion parameters.
    "large": Shape(
        1280, 3456, layers=24, heads=20, vocabulary=32_000, batch=4, tokens=2048, checkpoints=True
    ),
    # 1.35 billion, and twice the tokens: the kernels take longer than the calls that launch them.
    "xlarge": Shape(
        2048, 5504, layers=24, heads=16, vocabulary=32_000, batch=8, tokens=2048, checkpoints=True
    ),
}


class Program:
    """What a program was asked for, and what it writes down: losses and times of its steps.

    Parameters
    ----------
    packages
        Whose versions are written beside torch's.
    own
        A parser of options that this program has beside those of all.
    shapes
        The program's, by size. Where there is none for ``xlarge``, that of ``large`` is taken.
    """

    def __init__(
        self,
        *packages: str,
        own: argparse.ArgumentParser | None = None,
        shapes: Mapping[str, Any] = SHAPES,
    ) -> None:
        parser = argparse.ArgumentParser(parents=[own] if own else [])
        parser.add_argument("--size", choices=SHAPES, default="small")
        parser.add_argument("--steps", type=int, default=16)
        parser.add_argument("--output", type=Path, required=True, help="of one JSON object")
        parser.add_argument("--deterministic", action="store_true")
        parser.add_argument("--checkpoints", action="store_true", help="checkpoint every block")
        parser.add_argument("--device-map", help="load the Llama from a file with this map")
        parser.add_argument("--writer", type=int, default=0, help="the rank that writes the output")
        self.options = parser.parse_args()
        self.shape = shapes.get(self.options.size) or shapes["large"]
        self.steps: int = self.options.steps
        self.on_gpu = torch.cuda.is_available()
        self.device = torch.device("cuda" if self.on_gpu else "cpu")
        self.rank = int(os.environ.get("RANK", 0))
        self.data_rank = self.rank
        """Ranks of the same number see the same data."""
        if self.on_gpu:
            torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", 0)))
        self._packages = ("torch", *packages)
        self._losses: list[Any] = []
        self._marks: list[Any] = []
        self._work_s: list[float] = []
        self._number = torch.zeros(1)
        logging.basicConfig(
            level=logging.INFO, format="%(levelname)s:%(name)s:%(message)s", force=True
        )
        if self.options.deterministic:
            os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"  # cuBLAS reads it when it starts
            torch.use_deterministic_algorithms(True)
            # As slow as the memory is large, and not needed for results to repeat.
            torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
            torch.backends.cuda.enable_cudnn_sdp(False)  # its backward pass is not deterministic
        torch.manual_seed(SEED)

    def config(self, **more: Any) -> Any:
        """The decoder for transformers: a Llama."""
        from transformers import LlamaConfig

        shape = self.shape
        return LlamaConfig(
            hidden_size=shape.hidden,
            intermediate_size=shape.intermediate,
            num_hidden_layers=shape.layers,
            num_attention_heads=shape.heads,
            num_key_value_heads=shape.heads,
            vocab_size=shape.vocabulary,
            max_position_embeddings=shape.tokens,
            tie_word_embeddings=False,
            **more,
        )

    def llama(self) -> Any:
        """A Llama with random weights in float32, to be trained; on the CPU if no map is given."""
        from transformers import LlamaForCausalLM

        model = LlamaForCausalLM(self.config(use_cache=False))
        if (places := self.options.device_map) is not None:
            with tempfile.TemporaryDirectory() as folder:
                model.save_pretrained(folder)
                model = LlamaForCausalLM.from_pretrained(folder, device_map=places)
        return self.trainable(model)

    def trainable(self, model: Any) -> Any:
        """A model of transformers in training mode; it checkpoints if the shape says."""
        if self.options.checkpoints or getattr(self.shape, "checkpoints", False):
            model.gradient_checkpointing_enable({"use_reentrant": False})
        return model.train()

    def block(self, module: Callable[..., Any], *inputs: Any) -> Any:
        """Call a block of a model, within a checkpoint of its own if ``--checkpoints`` says so."""
        if self.options.checkpoints:
            return checkpoint(module, *inputs, use_reentrant=False)
        return module(*inputs)

    @cached_property
    def _generator(self) -> torch.Generator:
        """Of data alone, on the device: the processor has no part in a step's time by it."""
        return torch.Generator(self.device).manual_seed(SEED + 1)

    def noise(self, *size: int) -> torch.Tensor:
        """The next random numbers of the data, on the device."""
        return torch.randn(size, generator=self._generator, device=self.device)

    def numbers(self, below: int, *size: int) -> torch.Tensor:
        """The next random integers of the data, on the device."""
        return torch.randint(below, size, generator=self._generator, device=self.device)

    def rows(self) -> list[dict[str, torch.Tensor]]:
        """A data set of the rank: random tokens, enough for all steps."""
        generator = torch.Generator().manual_seed(SEED + 1 + self.data_rank)
        size = (self.steps * self.shape.batch, self.shape.tokens)
        tokens = torch.randint(1, self.shape.vocabulary, size, generator=generator)
        return [{"input_ids": row, "labels": row} for row in tokens]

    def batches(self) -> Any:
        """A `DataLoader` of the rows."""
        return torch.utils.data.DataLoader(self.rows(), self.shape.batch)  # type: ignore[arg-type]

    def end_step(self, loss: torch.Tensor | float) -> None:
        """Note a step's loss, or another number that tells its result, and the time."""
        if isinstance(loss, torch.Tensor):
            loss = loss.detach().clone()
        self._losses.append(loss)
        if self.on_gpu:  # without a wait, which most trainings do not have in every step
            mark: Any = torch.cuda.Event(enable_timing=True)
            mark.record()
        else:
            mark = time.perf_counter()
        self._marks.append(mark)
        self._work_s.append(self._fixed_work_s())

    def _fixed_work_s(self) -> float:
        """Seconds that the processor takes for work that is always the same.

        Such as it has in a step: calls of torch, of which each does next to nothing.
        """
        begun_s = time.perf_counter()
        for _ in range(_CALLS):
            self._number.add_(1.0)
        return time.perf_counter() - begun_s

    def write(self, model: Any) -> None:
        """Write losses as hexadecimal, seconds from each step's end to the next, and memory.

        Beside each step's seconds, those of the fixed work behind it; and a checksum of the weights
        and buffers behind the last step, which shows where a difference in losses comes from.

        Of one rank, and of its GPU or the first of several.
        """
        if self.rank != self.options.writer:
            return
        losses = [float(loss) for loss in self._losses]
        if not all(map(math.isfinite, losses)):
            raise SystemExit("a loss is not finite: of what follows, equal bits tell nothing")
        found: dict[str, Any] = {}
        if self.on_gpu:
            torch.cuda.synchronize()
            took_s = [begin.elapsed_time(end) / 1e3 for begin, end in pairwise(self._marks)]
            found["peak_allocated_bytes"] = torch.cuda.max_memory_allocated()
            found["reserved_bytes"] = torch.cuda.memory_reserved()
            found["card_used_bytes"] = torch.cuda.device_memory_used()
        else:
            took_s = [end - begin for begin, end in pairwise(self._marks)]
        found |= {
            "process": os.getpid(),
            "losses": [loss.hex() for loss in losses],
            "seconds": took_s,
            "work_seconds": self._work_s[1:],
            "parameters": sum(weight.numel() for weight in model.parameters()),
            "weights": checksum(*map(_own_part, _weights_and_buffers(model))).hex(),
            "versions": {name: importlib.metadata.version(name) for name in self._packages},
            **_host_memory(),
        }
        self.options.output.write_text(json.dumps(found))


def checksum(*tensors: torch.Tensor) -> float:
    """A number that changes with the tensors' bits, infinite values or not.

    Each tensor is summed where it is: several may be on several devices.
    """
    total = sum(
        int(it.view(_INTEGERS[it.itemsize]).sum(dtype=torch.int64)) * number
        for number, it in enumerate(tensors, 1)
    )
    return float(total % _FLOAT_PRIME)


def _weights_and_buffers(model: Any) -> list[Any]:
    # Megatron-core's wrapper has a list of this name.
    return [*model.parameters(), *torch.nn.Module.buffers(model)]


def _own_part(weight: Any) -> torch.Tensor:
    """This rank's, of a weight that is divided among several."""
    part: torch.Tensor = weight.to_local() if hasattr(weight, "to_local") else weight
    return part.detach()


def _host_memory() -> dict[str, int]:
    """Memory of this process on the host, as the kernel counts it."""
    text = Path("/proc/self/status").read_text()
    kib = {name: int(size) for name, size in re.findall(r"^(Vm\w+):\s+(\d+) kB$", text, re.M)}
    return {"host_process_bytes": kib.get("VmHWM", 0) << 10}
