"""Traces made from a recorded one: with more or fewer layers, or a rank's share of the state."""

from __future__ import annotations

import re
from dataclasses import replace

import numpy as np
import numpy.typing as npt

from umem.core.classes import TensorClass
from umem.core.errors import TraceError
from umem.trace import Trace, check_trace, first_and_last_use, ranges

__all__ = ["peak_live_bytes", "share_of_state", "with_layers"]

_LAYER = re.compile(r"\blayers\.(\d+)\b")
_OUTSIDE = -1
"""In place of a layer's number: embedding, head, loss and what they use."""

_STATE = (TensorClass.WEIGHTS, TensorClass.GRADIENTS, TensorClass.OPTIMIZER_STATE)
_OPTIMIZER = "optimizer "
"""How the names of the optimizer's phases begin."""

_Ints = npt.NDArray[np.int64]
_Indices = npt.NDArray[np.int64] | npt.NDArray[np.int32]


def peak_live_bytes(trace: Trace) -> int:
    """The most that is allocated in any phase."""
    change = np.zeros(trace.phase_count + 1, np.int64)
    np.add.at(change, trace.first_phase, trace.tensor_bytes)
    np.subtract.at(change, trace.last_phase + 1, trace.tensor_bytes)
    return int(np.cumsum(change).max())


def share_of_state(trace: Trace, ranks: int) -> Trace:
    """What one of several ranks holds when they share the state of the model evenly.

    Weights, gradients, optimizer state and what the optimizer allocates for a moment have their
    bytes divided by `ranks`, rounded up; so have the optimizer's phases their work. Activations and
    all other phases are those of the whole step. The whole weights that ranks gather for each
    layer, and the time of doing so, are not in it.

    Parameters
    ----------
    trace
        One step on one device.
    ranks
        Above 0.
    """
    member = trace.tensor_class
    shared = np.isin(member, [state.number for state in _STATE])
    shared |= (member == TensorClass.OTHER.number) & ~trace.persistent
    steps = np.array([name.startswith(_OPTIMIZER) for name in trace.phase_names])
    made = replace(
        trace,
        name=f"{trace.name}, 1/{ranks} of the state",
        tensor_bytes=np.where(shared, -(-trace.tensor_bytes // ranks), trace.tensor_bytes),
        flops=np.where(steps, trace.flops / ranks, trace.flops),
        memory_bytes=np.where(steps, -(-trace.memory_bytes // ranks), trace.memory_bytes),
    )
    check_trace(made, made.name)
    return made


def with_layers(trace: Trace, layers: int) -> Trace:
    """The step of a network that has another number of layers of the same kind.

    The first and the last layer stay what they are; those between are copies of a middle one.

    Parameters
    ----------
    trace
        Recorded, with the layers' numbers in the names of phases (``layers.3.``), and every layer
        the same: as many phases in each pass, and as many tensors first used there.
    layers
        At least 2.

    Raises
    ------
    TraceError
        If the trace is not of that kind.
    """
    phase_layer = np.array([_layer_of(name) for name in trace.phase_names], np.int64)
    count = int(phase_layer.max()) + 1
    if count < 3 or layers < 2:
        raise TraceError(
            f"the trace {trace.name!r} has {max(count, 0)} numbered layers, and {layers} are asked "
            "for: it takes 3 or more to make 2 or more"
        )
    first_use, _ = first_and_last_use(trace)
    tensor_layer = np.append(phase_layer, _OUTSIDE)[first_use]

    phases = _Sequence(phase_layer, layers, trace.name)
    tensors = _Sequence(tensor_layer, layers, trace.name)
    access = _spread(trace.access_start, phases.old)
    access_phase = np.repeat(np.arange(len(phases.old)), np.diff(trace.access_start)[phases.old])
    made = replace(
        trace,
        name=f"{trace.name}, {layers} layers",
        tensor_names=tuple(_renamed(trace.tensor_names, tensors)),
        tensor_bytes=trace.tensor_bytes[tensors.old],
        tensor_class=trace.tensor_class[tensors.old],
        persistent=trace.persistent[tensors.old],
        first_phase=phases.find(trace.first_phase[tensors.old], tensors).astype(np.int32),
        last_phase=phases.find(trace.last_phase[tensors.old], tensors).astype(np.int32),
        phase_names=tuple(_renamed(trace.phase_names, phases)),
        phase_kind=trace.phase_kind[phases.old],
        phase_precision=trace.phase_precision[phases.old],
        flops=trace.flops[phases.old],
        memory_bytes=trace.memory_bytes[phases.old],
        duration_s=None if trace.duration_s is None else trace.duration_s[phases.old],
        access_start=ranges(np.diff(trace.access_start)[phases.old]),
        access_tensor=tensors.find(trace.access_tensor[access], phases, access_phase).astype(
            np.int32
        ),
        access_mode=trace.access_mode[access],
    )
    check_trace(made, made.name)
    return made


class _Sequence:
    """Phases or tensors with another number of layers: which old one each is, and its new layer."""

    def __init__(self, layer: _Ints, layers: int, name: str) -> None:
        self._layer, self._layers, self._name = layer, layers, name
        self._count = int(layer.max()) + 1
        source = np.full(layers, self._count // 2)
        source[0], source[-1] = 0, self._count - 1
        pieces, piece_layers = [], []
        runs = np.split(np.arange(len(layer)), np.flatnonzero(np.diff(layer)) + 1)
        at = 0
        while at < len(runs):
            if layer[runs[at][0]] == _OUTSIDE:
                pieces.append(runs[at])
                piece_layers.append(np.full(len(runs[at]), _OUTSIDE))
                at += 1
                continue
            passed = runs[at : at + self._count]
            order = self._order(passed)
            for new in np.arange(layers)[::order]:
                run = passed[::order][source[new]]
                pieces.append(run)
                piece_layers.append(np.full(len(run), new))
            at += self._count
        self.old = np.concatenate(pieces)
        """Index in the old sequence, for each of the new."""
        self.layer = np.concatenate(piece_layers)
        """New layer of each of the new, or -1."""
        self.old_layer = layer[self.old]
        self._rank = _rank_in_layer(layer)
        self._table = self._places()

    def find(self, old: _Indices, user: _Sequence, at: _Ints | None = None) -> _Ints:
        """Indices in the new sequence of old ones that `user`, or its entries `at`, refers to.

        What lies so many layers further on from the user lies there still; where the user is in no
        layer, the nearer end of the network says which layer is meant.
        """
        layer, user_old, user_new = self._layer[old], user.old_layer, user.layer
        if at is not None:
            user_old, user_new = user_old[at], user_new[at]
        from_end = np.where(layer * 2 < self._count, layer, self._layers - self._count + layer)
        new = np.where(user_old == _OUTSIDE, from_end, user_new + layer - user_old)
        new[layer == _OUTSIDE] = _OUTSIDE
        if (new >= self._layers).any() or (new < _OUTSIDE).any():
            raise self._refusal("a layer uses what belongs to layers far from it")
        return self._table[new, self._rank[old]]

    def _order(self, passed: list[_Ints]) -> int:
        seen = [int(self._layer[run[0]]) for run in passed]
        for order in (1, -1):
            if seen[::order] == list(range(self._count)):
                if len({len(run) for run in passed}) == 1:
                    return order
                raise self._refusal("its layers are not all the same")
        raise self._refusal("a pass does not go through all layers one after another")

    def _places(self) -> _Ints:
        """Index in the new sequence by new layer, the last row for none, and rank within."""
        table = np.full((self._layers + 1, int(self._rank.max()) + 1), -1, np.int64)
        table[self.layer, _rank_in_layer(self.layer)] = np.arange(len(self.layer))
        return table

    def _refusal(self, reason: str) -> TraceError:
        return TraceError(
            f"the trace {self._name!r} cannot have another number of layers: {reason}; record a "
            "network of equal layers"
        )


def _layer_of(name: str) -> int:
    found = _LAYER.search(name)
    return int(found[1]) if found else _OUTSIDE


def _rank_in_layer(layer: _Ints) -> _Ints:
    """Place of each entry among those of its layer, in their order."""
    order = np.argsort(layer, kind="stable")
    sizes = np.unique(layer, return_counts=True)[1]
    rank = np.empty(len(layer), np.int64)
    rank[order] = np.arange(len(layer)) - np.repeat(ranges(sizes)[:-1], sizes)
    return rank


def _spread(start: _Ints, rows: _Ints) -> _Ints:
    """Indices of the entries of these rows, one row after another."""
    counts = np.diff(start)[rows]
    return np.repeat(start[rows] - ranges(counts)[:-1], counts) + np.arange(counts.sum())


def _renamed(names: tuple[str, ...], sequence: _Sequence) -> list[str]:
    return [
        _LAYER.sub(f"layers.{layer}", names[old]) if layer != _OUTSIDE else names[old]
        for old, layer in zip(sequence.old, sequence.layer, strict=True)
    ]
