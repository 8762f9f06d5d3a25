"""A training step from a model's shape: sizes and durations of its units, without a trace.

The operators are those that torch and transformers run for a Llama in eager mode. Their bytes per
element were read from traces of ``umem simulate``. Each operator takes the time of the roofline,
and waits for the processor to launch it.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Literal, NamedTuple

from umem.capture.offline import LORA_RANK, LORA_TARGETS
from umem.core.errors import HardwareError, UmemError
from umem.core.units import format_bytes
from umem.fit.shapes import Layer, Matrix, ModelShape
from umem.hardware import Hardware
from umem.predict.stream_prediction import PredictedStep, equal_parts
from umem.streaming.plan.loss_memory import sliced_loss_bytes, whole_loss_bytes
from umem.streaming.plan.step_timing import StreamUnit
from umem.streaming.plan.weight_plan import WeightUnit

__all__ = [
    "ALL_LINEAR",
    "LEAST_MOVED_BYTES",
    "MOMENTS",
    "QUANTISED",
    "TRAINING_PRECISIONS",
    "Workload",
    "class_bytes",
    "stock_bytes",
    "training_step",
]

TRAINING_PRECISIONS = ("bf16-master", "bf16", "fp32-autocast")
"""As of ``umem simulate``."""

MOMENTS = {"adamw": 2, "sgd": 1, "adamw8bit": 2}
"""Optimizers, SGD with momentum, and the tensors of state that each has for a parameter."""

QUANTISED = {"nf4": 0.5 + 4 / 64, "nf4-double": 0.5 + 1 / 64 + 4 / (64 * 256), "int8": 1.0}
"""Bytes of a frozen weight by bitsandbytes' formats: 4 bits with a scale for each 64, which may be
quantised too, with one for each 256 of them; 8 bits, whose scales for rows are few."""

ALL_LINEAR = "all-linear"
"""Adapters at every matrix but tables, as in PEFT."""

_BLOCK_8BIT, _LEAST_8BIT = 256, 4096
"""bitsandbytes' 8-bit state: a float32 scale for each block; smaller tensors have float32."""

_MOST_BYTES = 1 << 60
"""Of a unit's pass: plans add up several in 64 bits."""

LEAST_MOVED_BYTES = 1 << 20
"""Smaller tensors stay on the device, by ``min_bytes`` of the policies sft and lora."""

_FORWARD_LAUNCHES, _CHECKPOINTED_LAUNCHES, _BACKWARD_LAUNCHES = 6, 14, 3
"""The processor's time for a kernel of a training, in bare launches: in a forward pass Python calls
modules and the graph is made, for which a checkpoint takes each tensor in hand, also where it runs
the pass again; the backward pass is C++. With these the trainings of ``benchmarks/results`` that
wait for the processor are least off. Such trainings take up to twice as long on one host as on
another with the same GPU."""


class Work(NamedTuple):
    """What an operator does on the device."""

    flops: float
    """Floating-point operations."""
    size_bytes: float
    """Bytes of device memory."""
    kind: Kind = "vectorised"


Kind = Literal["vectorised", "unvectorised", "attention", "attention_backward"]
"""The figure of the machine that bounds an operator: :class:`umem.hardware.Hardware`."""


@dataclass(frozen=True)
class Workload:
    """What is done with a model."""

    shape: ModelShape
    mode: str
    """``sft``, ``lora`` or ``inference``."""
    batch: int
    seq: int
    precision: str
    checkpoint: bool
    optimizer: str = "adamw"
    accumulate: int = 1
    """Batches in a step."""
    gpus: int = 1
    """That divide weights, gradients and state among them, as FSDP does; each has its own batch."""
    rank: int = LORA_RANK
    targets: tuple[str, ...] = LORA_TARGETS
    """Matrices with adapters, or :data:`ALL_LINEAR`."""
    quantised: str = ""
    """Format of frozen matrices, of :data:`QUANTISED`; empty for bfloat16."""
    slices_loss: bool = False
    """Whether the loss is computed in slices of rows."""

    @property
    def tokens(self) -> int:
        """Tokens of a batch."""
        return self.batch * self.seq

    @property
    def step_tokens(self) -> int:
        """Tokens of a step, on all GPUs."""
        return self.tokens * self.accumulate * self.gpus

    @property
    def trains_all(self) -> bool:
        """Whether every weight is trained."""
        return self.mode == "sft"

    @property
    def autocasts(self) -> bool:
        """Whether weights are float32, and products bfloat16."""
        return self.precision == "fp32-autocast"

    @property
    def weight_width(self) -> int:
        """Bytes of a weight, and of its gradient."""
        return 4 if self.autocasts else 2

    @property
    def widens(self) -> bool:
        """Whether what is not quantised is float32, as of PEFT's prepare_model_for_kbit_training.

        What layers hand on is so, too.
        """
        return self.mode == "lora" and bool(self.quantised)

    @property
    def hidden_width(self) -> int:
        """Bytes of a number that one layer hands on to the next."""
        return 4 if self.autocasts or self.widens else 2

    @property
    def moments(self) -> int:
        """Tensors of the optimizer's own for a trained parameter."""
        return MOMENTS[self.optimizer]

    @property
    def has_master(self) -> bool:
        """Whether the optimizer has a float32 copy of each trained weight."""
        return self.trains_all and self.precision == "bf16-master"

    def state_bytes(self, parameters: int) -> int:
        """Bytes of optimizer state of a trained tensor."""
        if self.optimizer == "adamw8bit" and parameters >= _LEAST_8BIT:
            return self.moments * (parameters + 4 * math.ceil(parameters / _BLOCK_8BIT))
        width = 4 if self.optimizer == "adamw8bit" else self._number_width
        return width * (self.moments + self.has_master) * parameters

    def has_adapter(self, matrix: Matrix) -> bool:
        """Whether a frozen matrix has one."""
        is_named = matrix.name in self.targets or ALL_LINEAR in self.targets
        return self.mode == "lora" and is_named and not _is_whole(matrix)

    def weight_bytes(self, matrix: Matrix) -> int:
        """Bytes of a matrix. bitsandbytes quantises no tables, routers and experts."""
        if self.trains_all or not self.quantised or _is_whole(matrix):
            return self.whole_bytes(matrix.parameters)
        return int(QUANTISED[self.quantised] * matrix.parameters)

    def whole_bytes(self, parameters: int) -> int:
        """Bytes of weights that are not quantised."""
        return (4 if self.widens else self.weight_width) * parameters

    @property
    def update_bytes(self) -> Kernels:
        """Bytes for a trained parameter, by kernel of its update."""
        # Reads of weight, gradient and moments; writes of all but the gradient. With a master copy,
        # the gradient to float32 before it, and the weight from it.
        if self.optimizer == "adamw8bit":
            return Kernels((3 * self.weight_width, 4))
        update = self._number_width * (3 + 2 * self.moments)
        return Kernels((update, 6), (6,)) if self.has_master else Kernels((update,))

    @property
    def _number_width(self) -> int:
        """Bytes of a number of the state. PEFT makes adapters in float32."""
        return 2 if self.trains_all and self.precision == "bf16" else 4


def _is_whole(matrix: Matrix) -> bool:
    """Whether libraries leave a matrix as it is: it is no ``nn.Linear`` within a layer."""
    return matrix.count > 1 or matrix.name in ("router", _TABLE)


@dataclass(frozen=True)
class _Working:
    """Bytes that a unit's passes need, beside weights and gradients of whole units."""

    saved: int
    """Kept from its forward pass to its backward pass."""
    forward: int
    """At the fullest moment of its forward pass, `saved` included."""
    backward: int
    """At the fullest moment of its backward pass, `saved` and recomputed activations included."""
    cast: int = 0
    """Copies of weights in bfloat16 that autocast makes. Those of trained weights stay until the
    forward pass ends."""


def training_step(workload: Workload, hardware: Hardware, piece_bytes: int) -> PredictedStep:
    """Make what a plan needs of a training step.

    Units are those of :func:`umem.predict.stream_prediction.streamed_step`: the embedding, each
    layer, the last norm, and the head with the loss.

    Parameters
    ----------
    workload
        What is trained, and how.
    hardware
        The machine.
    piece_bytes
        Most state that is staged at a time.

    Raises
    ------
    HardwareError
        If the machine has no throughput for bfloat16.
    UmemError
        For experts in ``fp32-autocast``, which torch cannot run, and for a batch whose bytes no
        64-bit number holds.
    """
    if workload.shape.has_experts and workload.autocasts:
        raise UmemError(
            f"--precision: {workload.shape.name} has experts, whose grouped products take bfloat16 "
            "and no autocast: give bf16-master or bf16"
        )
    seconds = _roofline(hardware)
    alone = _parts(workload, seconds)
    parts, launch_s = _with_waits(alone, hardware)
    peaks_forward, peaks_backward, step_peak_bytes = _peaks(workload, parts, deferred=True)
    if (most_bytes := max(*peaks_forward, *peaks_backward)) > _MOST_BYTES:
        raise UmemError(
            f"a batch of {workload.tokens:,} tokens takes {format_bytes(most_bytes)}: give a "
            "smaller --batch or --seq"
        )
    units, weights = [], {}
    # A layer that runs twice keeps its input.
    input_bytes = workload.tokens * workload.shape.hidden * workload.hidden_width
    kept = _parts(replace(workload, checkpoint=False), seconds) if workload.checkpoint else parts
    freed_bytes = {
        part.name: part.working.saved - input_bytes
        for part in kept[1 : 1 + len(workload.shape.layers)]
        if part.working.saved > input_bytes
    }
    for part, forward_bytes, backward_bytes in zip(
        parts, peaks_forward, peaks_backward, strict=True
    ):
        pieces = equal_parts(part.state_bytes, piece_bytes) if part.state_bytes else ()
        units.append(
            StreamUnit(
                name=part.name,
                state_bytes=part.state_bytes,
                update_s=part.update_s,
                forward_s=part.forward_s,
                backward_s=part.backward_s,
                saved_bytes=part.working.saved,
                forward_peak_bytes=forward_bytes,
                backward_peak_bytes=backward_bytes,
                piece_bytes=tuple(pieces),
                gradient_bytes=part.gradient_bytes,
            )
        )
        if part.leaving:
            trained = range(len(part.leaving)) if workload.trains_all else ()
            is_table = part.name == _EMBEDDING
            weights[part.name] = WeightUnit(
                part_bytes=part.leaving,
                gathered=frozenset([0] if is_table else []),
                trained=frozenset(trained),
            )
    return PredictedStep(
        units=tuple(units),
        weights=weights,
        weight_bytes=sum(part.weight_bytes for part in parts),
        other_s=0.0,
        step_peak_bytes=step_peak_bytes,
        batches=workload.accumulate,
        model_flops=workload.accumulate * sum(part.flops for part in parts),
        freed_bytes={} if workload.checkpoint else freed_bytes,
        checkpointed_bytes=freed_bytes if workload.checkpoint else {},
        launch_s=workload.accumulate * launch_s,
        waits_s=workload.accumulate * (_passes_s(parts) - _passes_s(alone)),
    )


def _passes_s(parts: Sequence[_Part]) -> float:
    return sum(it.forward_s + it.backward_s for it in parts)


def _with_waits(parts: Sequence[_Part], hardware: Hardware) -> tuple[list[_Part], float]:
    """Units whose passes wait for the processor, and its time to launch a batch's kernels.

    Launches run ahead of the device within a batch, and not from one batch to the next: reading a
    loss, or looking whether it is finite as the Trainer does, waits for the device. So a forward
    pass whose kernels are short takes as long as their launches, also where the backward pass that
    comes after it takes the device longer.
    """
    passes = [(it.forward_launches, it.forward_s) for it in parts]
    passes += [(it.backward_launches, it.backward_s) for it in reversed(parts)]
    times_s = []
    launched_s = ended_s = 0.0
    for launches, compute_s in passes:
        first_s = max(0.0, launched_s - ended_s)
        launched_s += hardware.launch_s * launches
        times_s.append(max(first_s + compute_s, launched_s - ended_s))
        ended_s += times_s[-1]
    waiting = [
        replace(it, forward_s=forward_s, backward_s=backward_s)
        for it, forward_s, backward_s in zip(
            parts, times_s[: len(parts)], reversed(times_s[len(parts) :]), strict=True
        )
    ]
    return waiting, launched_s


def stock_bytes(workload: Workload, hardware: Hardware) -> int:
    """Bytes at the fullest moment of a step with everything on the device, and nothing deferred."""
    parts = _parts(workload, _roofline(hardware))
    forward, backward, step = _peaks(workload, parts, deferred=False)
    fixed = sum(part.state_bytes + sum(part.leaving) for part in parts)
    return fixed + max(*forward, *backward, step)


# Units.

_EMBEDDING = "model.embed_tokens"
_TABLE = "weight"
"""Name of the matrix at either end."""


@dataclass(frozen=True)
class _Part:
    """A unit of the step."""

    name: str
    largest: int
    """Parameters of the largest tensor."""
    weight_bytes: int
    leaving: tuple[int, ...]
    """Weights that may leave the device, by matrix."""
    state_bytes: int
    """That may leave it."""
    small_state_bytes: int
    """That always stays."""
    gradient_bytes: int
    update_s: float
    forward_s: float
    backward_s: float
    forward_launches: int
    """The processor's time in the forward pass, in bare launches."""
    backward_launches: int
    working: _Working
    flops: float


_Seconds = Callable[[Sequence[Work]], float]


def _roofline(hardware: Hardware) -> _Seconds:
    """Function that gives the time of operators on a machine."""
    flops_per_s = hardware.flops_per_s.get("bf16")
    if flops_per_s is None:
        raise HardwareError(
            f"{hardware.name} has no throughput for bf16: add flops_per_s.bf16 to the profile, or "
            "choose another one"
        )
    throughput: dict[Kind, float] = {
        "attention": min(flops_per_s, hardware.attention_flops_per_s),
        "attention_backward": min(flops_per_s, hardware.attention_backward_flops_per_s),
    }
    bandwidth: dict[Kind, float] = {"unvectorised": hardware.unvectorised_bytes_per_s}

    def duration(operator: Work) -> float:
        compute_s = operator.flops / throughput.get(operator.kind, flops_per_s)
        memory = bandwidth.get(operator.kind, hardware.memory_bytes_per_s)
        return max(compute_s, operator.size_bytes / memory, hardware.launch_s)

    def seconds(operators: Sequence[Work]) -> float:
        return sum(count * duration(it) for it, count in Counter(operators).items())

    return seconds


def _parts(workload: Workload, seconds: _Seconds) -> list[_Part]:
    """Units of the step, in the order of the forward pass."""
    shape, tokens, width = workload.shape, workload.tokens, workload.weight_width
    hidden, vocabulary = tokens * shape.hidden, tokens * shape.vocabulary
    residual = workload.hidden_width
    of_kinds: dict[int, _Part] = {}
    table = Matrix(_TABLE, shape.hidden, shape.vocabulary)
    lookup = [Work(0, 2 * residual * hidden, "unvectorised")]
    scatter = [Work(0, residual * hidden + width * table.parameters, "unvectorised")]
    nothing = _Working(0, residual * hidden, residual * hidden)
    table_ops = scatter if workload.trains_all else []
    # A table that the head uses too has to be there for both.
    of_table = () if shape.tied else (table,)
    parts = [
        _part(workload, _EMBEDDING, (table,), 0, of_table, lookup, table_ops, nothing, seconds)
    ]
    for number, layer in enumerate(shape.layers):
        made = of_kinds.get(id(layer))
        if made is None:
            forward, backward, again = _layer_operators(workload, layer)
            made = of_kinds[id(layer)] = _part(
                workload,
                "",
                layer.matrices,
                layer.small,
                layer.matrices,
                forward,
                backward,
                _layer_working(workload, layer),
                seconds,
                again,
            )
        parts.append(replace(made, name=f"model.layers.{number}"))
    norm = _vectors(_NORM[residual == 4], hidden)
    norm_saved = (4 + residual) * hidden
    norm_working = _Working(norm_saved, norm_saved + residual * hidden, 24 * hidden)
    norm_back = _norm_backward(workload, hidden)
    parts.append(
        _part(
            workload, "model.norm", (), shape.last_norm, (), norm, norm_back, norm_working, seconds
        )
    )
    head, head_back = _product(workload, table, tokens, casts_input=True)
    loss, loss_back = _vectors(_LOSS, vocabulary), _vectors(_LOSS_BACK, vocabulary)
    inputs = 2 * hidden + 2 * table.parameters if residual == 4 else 0
    of_loss = loss_bytes(workload)
    head_working = _Working(0, *(norm_saved + inputs + size_bytes for size_bytes in of_loss))
    own = () if shape.tied else (table,)
    made = _part(
        workload, "lm_head", own, 0, own, head + loss, head_back + loss_back, head_working, seconds
    )
    return [*parts, made]


def loss_bytes(workload: Workload) -> tuple[int, int]:
    """The most for logits and loss, in the loss's forward and in its backward pass."""
    of = sliced_loss_bytes if workload.slices_loss else whole_loss_bytes
    return of(workload.tokens, workload.shape.vocabulary)


def _part(
    workload: Workload,
    name: str,
    matrices: Sequence[Matrix],
    small: int,
    leaving: Sequence[Matrix],
    forward: Sequence[Work],
    backward: Sequence[Work],
    working: _Working,
    seconds: _Seconds,
    again: Sequence[Work] = (),
) -> _Part:
    """Make a unit of its matrices, its small parameters and its operators.

    `again` are those of recomputation, which are no arithmetic of the model.
    """
    shards = workload.gpus
    adapters = [
        workload.rank * size
        for it in matrices
        if workload.has_adapter(it)
        for size in (it.inputs, it.outputs)
    ]
    sizes = [it.parameters for it in matrices] if workload.trains_all else adapters
    parameters = sum(sizes) + (small if workload.trains_all else 0)
    tensors = workload.moments + workload.has_master
    state = [workload.state_bytes(it) // shards for it in sizes]
    # umem streams no 8-bit state, whose quantization maps belong to several parameters.
    is_streamed = workload.optimizer != "adamw8bit"
    moved_bytes = sum(it for it in state if is_streamed and it // tensors >= LEAST_MOVED_BYTES)
    all_state_bytes = sum(state) + workload.state_bytes(parameters - sum(sizes)) // shards
    weight_bytes = sum(map(workload.weight_bytes, matrices)) + workload.whole_bytes(small)
    # The many small matrices of adapters are updated by one kernel.
    updated = sizes if workload.trains_all else [parameters]
    updates = [
        it for size in updated if size for it in _vectors(workload.update_bytes, size // shards)
    ]
    gradient_bytes = (workload.weight_width if workload.trains_all else 4) * parameters
    if shards > 1:
        # A unit's weights are whole while it computes, and so are its gradients until they are
        # summed up; meanwhile the next unit's weights come.
        leaving, whole = (), 2 * weight_bytes
        working = _Working(
            working.saved,
            working.forward + whole,
            working.backward + whole + gradient_bytes,
            working.cast,
        )
    sums: list[Work] = []
    if workload.accumulate > 1 and parameters:
        # All batches but the first add their gradients to those that are there.
        share = (workload.accumulate - 1) / workload.accumulate
        sums = [Work(0, share * 3 * gradient_bytes)]
    return _Part(
        name=name,
        largest=max((it.parameters for it in matrices), default=small),
        weight_bytes=(weight_bytes + 4 * sum(adapters)) // shards,
        leaving=tuple(
            size for it in leaving if (size := workload.weight_bytes(it)) >= LEAST_MOVED_BYTES
        ),
        state_bytes=moved_bytes,
        small_state_bytes=all_state_bytes - moved_bytes,
        gradient_bytes=gradient_bytes // shards,
        update_s=seconds(updates),
        forward_s=seconds(forward),
        backward_s=seconds(backward) + seconds(again) + seconds(sums),
        forward_launches=len(forward)
        * (_CHECKPOINTED_LAUNCHES if workload.checkpoint else _FORWARD_LAUNCHES),
        backward_launches=_CHECKPOINTED_LAUNCHES * len(again)
        + _BACKWARD_LAUNCHES * (len(backward) + len(sums)),
        working=working,
        flops=sum(it.flops for it in (*forward, *backward)),
    )


# Operators, by the bytes per element that each of them reads and writes.


class Kernels(NamedTuple):
    """Kernels that compute element by element: bytes per element of each."""

    vectorised: tuple[int, ...] = ()
    unvectorised: tuple[int, ...] = ()
    """Their tensors differ in type or shape."""


_NORM = (Kernels((8, 4, 6), (6, 8, 4)), Kernels((8, 4), (8, 8)))
"""Forward pass of a norm in bfloat16, and under autocast."""
_NORM_BACK = (
    Kernels((12, 4, 8, 8, 12, 12, 6), (4, 6, 8, 4)),
    Kernels((12, 4, 8, 8, 12, 12), (8, 8, 4)),
)
_NORM_BACK_TRAINED = (Kernels((6, 2)), Kernels((12, 4)))
"""Besides, for the gradient of its weight."""
_ROPE = (Kernels((2, 6), (4, 4, 4)), Kernels((2, 12, 6), (6, 4, 6)))
_ROPE_BACK = (
    Kernels((2, 3, 6, 6, 4), (4, 3, 4)),
    Kernels((6, 2, 3, 6, 6, 6, 4), (6, 8, 3, 8)),
)
_ADD = (Kernels((6,)), Kernels((), (10,)))
_ADD_BACK = Kernels((6, 6))
_GRADIENT_SUM = (Kernels((6,)), Kernels((12,)))
"""Gradients of an input that several products use."""
_ACTIVATION = Kernels((4, 6))
_ACTIVATION_BACK = Kernels((6, 6, 6))
_NARROW = Kernels((6,))
"""A cast from float32 to bfloat16."""
_WIDEN = Kernels((), (6,))
"""A cast from bfloat16 to float32."""
_COPY = Kernels((4,))
_ADAPTER = Kernels((8, 6), (10,))
"""Of a product's output; its input is widened."""
_ADAPTER_BACK = (Kernels((6, 8), (6,)), Kernels((6, 6)))
"""Of a product's output and of its input."""
_LOSS = Kernels((8, 4), (6,))
_LOSS_BACK = Kernels((12, 6), (8,))
_ROUTED = Kernels((2,), (2, 4, 4))
"""For each element of an expert's input: sorted, weighted, put back, added up."""
_ROUTED_BACK = Kernels((1, 4, 6, 2, 2), (2, 6, 4, 2))
_GATED_BACK = Kernels((6, 6, 6), (8,))
_CLAMPED = Kernels((12, 4, 4, 4, 4, 6, 4, 6), (4,))
"""The activation of GPT-OSS, with its biases."""
_CLAMPED_BACK = Kernels((6, 6, 6, 6, 6, 4, 6, 3, 3, 3, 12, 4), (5, 5, 6, 6, 4))
_CLAMPED_OUTPUT = (Kernels((6,), (2,)), Kernels((2,), (2,)))
"""The bias of an expert's output, in the forward and in the backward pass."""


def _vectors(kernels: Kernels, elements: int) -> list[Work]:
    return [
        *(Work(0, size * elements) for size in kernels.vectorised),
        *(Work(0, size * elements, "unvectorised") for size in kernels.unvectorised),
    ]


def _norm_backward(workload: Workload, elements: int) -> list[Work]:
    operators = _vectors(_NORM_BACK[workload.hidden_width == 4], elements)
    if workload.trains_all:
        operators += _vectors(_NORM_BACK_TRAINED[workload.autocasts], elements)
    return operators


def _product(
    workload: Workload, matrix: Matrix, rows: int, *, casts_input: bool = False
) -> tuple[list[Work], list[Work]]:
    """Operators of a product with a matrix, in the forward and in the backward pass."""
    inputs, outputs = rows * matrix.inputs, rows * matrix.outputs
    flops = 2 * rows * matrix.inputs * matrix.outputs
    product = Work(flops, 2 * (inputs + matrix.parameters + outputs))
    # The gradient of the input, and that of a trained weight.
    forward, backward = [product], [product] * (2 if workload.trains_all else 1)
    if workload.autocasts or (workload.widens and _is_whole(matrix)):
        forward += _vectors(_NARROW, matrix.parameters)
        if workload.trains_all:
            backward += _vectors(_WIDEN, matrix.parameters)
        if casts_input:
            forward += _vectors(_NARROW, inputs)
            backward += _vectors(_WIDEN, inputs)
    if workload.weight_bytes(matrix) < workload.weight_width * matrix.parameters:
        # To bfloat16, in either pass.
        widened = [Work(0, workload.weight_bytes(matrix) + 2 * matrix.parameters)]
        if workload.quantised == "nf4-double":  # the scales first, and their mean
            widened += [Work(0, 5 * matrix.parameters // 64)] * 2
        forward += widened
        backward += widened
    if workload.has_adapter(matrix):
        forward += _vectors(_WIDEN, inputs) + _vectors(_ADAPTER, outputs)
        of_output, of_input = _ADAPTER_BACK
        backward += _vectors(of_output, outputs) + _vectors(of_input, inputs)
        for wide in (inputs, outputs):
            adapter = Work(2 * workload.rank * wide, 4 * wide, "unvectorised")
            forward.append(adapter)
            backward += [adapter, adapter]
    return forward, backward


def _layer_operators(workload: Workload, layer: Layer) -> tuple[list[Work], list[Work], list[Work]]:
    """Operators of a layer's forward pass, of its backward pass, and of recomputation."""
    tokens, autocasts = workload.tokens, workload.autocasts
    hidden = tokens * workload.shape.hidden
    forward: list[Work] = []
    backward: list[Work] = []
    last: list[Work] = []
    used: set[str] = set()
    for matrix in (*layer.attention, *layer.mlp, *layer.experts[:1]):
        there, back = _product(workload, matrix, tokens, casts_input=bool(matrix.group))
        forward, backward, last = forward + there, backward + back, there
        if matrix.group in used:
            back_sum = _GRADIENT_SUM[autocasts]
            backward += _vectors(back_sum, tokens * matrix.inputs)
        used |= {matrix.group} if matrix.group else set()
    if not layer.experts and workload.checkpoint:
        # Recomputation ends when all that the backward pass uses is there.
        forward, tail = forward[: -len(last)], last
    else:
        tail = []
    norm = _NORM[workload.hidden_width == 4]
    for _ in range(layer.norms):
        forward += _vectors(norm, hidden)
        backward += _norm_backward(workload, hidden)
    for width in (layer.queries, layer.keys):
        elements = tokens * width
        forward += _vectors(_ROPE[autocasts], elements)
        backward += _vectors(_ROPE_BACK[autocasts], elements)
        if layer.head_norms:
            forward += _vectors(norm, elements)
            backward += _norm_backward(workload, elements)
    backward += _vectors(_COPY, tokens * layer.values)
    attention, attention_back = _attention(workload, layer)
    forward, backward = [*forward, attention], [*backward, attention_back]
    add = _vectors(_ADD[workload.hidden_width == 4], hidden)
    forward, tail = [*forward, *add], [*tail, *add]
    backward += _vectors(_ADD_BACK, hidden)
    if layer.mlp:
        inner = tokens * layer.inner
        forward += _vectors(_ACTIVATION, inner)
        backward += _vectors(_ACTIVATION_BACK, inner)
    if layer.experts:
        there, back = _expert_operators(workload, layer)
        forward, backward = forward + there, backward + back
    return forward + tail, backward, forward if workload.checkpoint else []


def _attention(workload: Workload, layer: Layer) -> tuple[Work, Work]:
    tokens = workload.tokens
    # Causal attention uses half of the tokens that it sees.
    flops = tokens * layer.seen(workload.seq) * layer.heads_width
    size_bytes = 2 * tokens * (layer.queries + layer.keys + layer.values + layer.attended)
    return (
        Work(flops, size_bytes, "attention"),
        Work(2.5 * flops, 2 * size_bytes, "attention_backward"),
    )


def _expert_operators(workload: Workload, layer: Layer) -> tuple[list[Work], list[Work]]:
    shape = workload.shape
    rows = workload.tokens * shape.experts_per_token
    routed, inner = rows * shape.hidden, rows * layer.experts[2].inputs
    forward, backward = _vectors(_ROUTED, routed), _vectors(_ROUTED_BACK, routed)
    for matrix in layer.experts[1:]:
        there, back = _product(workload, matrix, rows)
        forward, backward = forward + there, backward + back
    if shape.clamped:
        output, output_back = _CLAMPED_OUTPUT
        forward += _vectors(_CLAMPED, inner) + _vectors(output, routed)
        backward += _vectors(_CLAMPED_BACK, inner) + _vectors(output_back, routed)
    else:
        forward += _vectors(_ACTIVATION, inner)
        backward += _vectors(_GATED_BACK, inner)
    return forward, backward


# Memory.


def _layer_working(workload: Workload, layer: Layer) -> _Working:
    """Memory of a layer's passes."""
    shape, tokens, autocasts = workload.shape, workload.tokens, workload.autocasts
    hidden = tokens * shape.hidden
    residual = workload.hidden_width * hidden
    heads = tokens * (layer.queries + layer.keys + layer.values + layer.attended)
    trained = workload.trains_all
    # Norms: the input in float32; for gradients of weights, what is scaled and what comes out.
    saved = layer.norms * hidden * (8 if trained else 4)
    saved += 2 * heads + (8 * tokens * (layer.queries + layer.keys) if layer.head_norms else 0)
    cast = 0
    if autocasts:
        # Each product has its own copy of its input, for the gradient of its weight.
        inputs = 2 * tokens * sum(it.inputs for it in layer.matrices if it.group)
        cast = 2 * sum(it.parameters for it in layer.matrices)
        saved += cast + (inputs if trained else 0)
    if not trained:
        adapted = [it for it in layer.matrices if workload.has_adapter(it)]
        saved += 4 * tokens * sum(it.inputs for it in adapted)
    widest = 0
    if layer.mlp:
        widest = 2 * tokens * layer.inner
        saved += (4 if trained else 3) * widest
    if layer.experts:
        rows = tokens * shape.experts_per_token
        inner = 2 * rows * layer.experts[2].inputs
        routed = 2 * rows * shape.hidden
        saved += (9 if shape.clamped else 4 if trained else 3) * inner + 2 * routed
        widest = max(widest, 2 * inner, routed)
    gradients = 0
    if trained:
        # At the fullest moment those of two matrices of the MLP are there, or of one and its copy
        # in bfloat16; with experts that of one tensor.
        largest = max(it.parameters for it in layer.matrices)
        gradients = (6 if autocasts else 2 if layer.experts else 4) * largest
    forward = residual + 2 * hidden + 3 * widest
    backward = saved + residual + widest + gradients
    if workload.checkpoint:
        return _Working(residual, residual + forward, residual + backward, cast)
    return _Working(saved, max(saved + 3 * 2 * hidden, forward), backward - gradients // 2, cast)


def _peaks(
    workload: Workload, parts: Sequence[_Part], *, deferred: bool
) -> tuple[list[int], list[int], int]:
    """Bytes of everything but leaving state and weights.

    Returns
    -------
    tuple
        At the fullest moment of each unit's forward pass, of each unit's backward pass, and when
        the optimizer's step begins. If updates are `deferred`, gradients live until the next
        forward pass of their unit.
    """
    fixed = sum(part.weight_bytes - sum(part.leaving) + part.small_state_bytes for part in parts)
    gradients = [part.gradient_bytes for part in parts]
    later = [*accumulate(reversed(gradients), initial=0)][::-1]
    if workload.accumulate > 1:  # those of the batches before are there all the time
        later = [later[0]] * len(later)
    # What earlier units keep; casts of trained weights until the forward pass ends, if not saved.
    kept = [0, *accumulate(part.working.saved for part in parts)]
    keeps_casts = workload.checkpoint and workload.trains_all
    casts = [0, *accumulate(part.working.cast if keeps_casts else 0 for part in parts)]
    forward, backward = [], []
    for number, part in enumerate(parts):
        held = later[number] if deferred or workload.accumulate > 1 else 0
        forward.append(fixed + held + kept[number] + casts[number + 1] + part.working.forward)
        early = part.working.backward + later[number + 1]
        # Behind it, all of its gradients are there.
        behind = later[number] + part.working.saved
        backward.append(fixed + kept[number] + max(early, behind))
    step = fixed + later[0]
    if workload.has_master:
        # The gradient of one tensor at a time, in float32.
        step += 4 * max(part.largest for part in parts)
    return forward, backward, step


def class_bytes(workload: Workload, hardware: Hardware) -> Mapping[str, int]:
    """Bytes of each class: weights, gradients, optimizer state, activations, logits."""
    parts = _parts(workload, _roofline(hardware))
    layers = [part.working for part in parts[1:-2]]
    largest = max(layers, key=lambda it: it.backward, default=_Working(0, 0, 0))
    return {
        "weights": sum(part.weight_bytes for part in parts),
        "gradients": sum(part.gradient_bytes for part in parts),
        "optimizer_state": sum(part.state_bytes + part.small_state_bytes for part in parts),
        "activations": sum(it.saved for it in layers) + largest.backward - largest.saved,
        # Of the forward pass; in slices, the gradient is the second tensor of that size.
        "logits": loss_bytes(workload)[1 if workload.slices_loss else 0],
    }
