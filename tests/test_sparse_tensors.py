"""Sparse tensors, and others without plain memory: the optimizer has them as without umem."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from found_trainings import Streams, streaming
from lazy_lanes import LazyLanes
from streamed_programs import WIDTH, Net, Program, bits, compare
from torch import nn

from umem.core.classes import TensorClass
from umem.runtime._native import Allocator, ClassSetting, Config
from umem.runtime.model_parts import lies_in_memory, main_chain, memory_bytes
from umem.streaming.stage import CudaStateMemory
from umem.streaming.weights import is_movable_weight

ROWS = 200
"""State of a table is staged in spans."""

SIDE = 8
MATRIX = torch.eye(SIDE)

KINDS: dict[str, Callable[[], torch.Tensor]] = {
    "coordinates": MATRIX.to_sparse,
    "compressed rows": MATRIX.to_sparse_csr,
    "nested": lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]),
    "nested, jagged": lambda: torch.nested.nested_tensor(
        [torch.ones(2), torch.ones(3)], layout=torch.jagged
    ),
    "quantised": lambda: torch.quantize_per_tensor(MATRIX, 1.0, 0, torch.quint8),
    "of another library": MATRIX.to_mkldnn,
    "without data": lambda: torch.empty(SIDE, SIDE, device="meta"),
    "conjugate": lambda: MATRIX.to(torch.complex64).conj(),
    "negative": lambda: MATRIX.to(torch.complex64).conj().imag,
}


@pytest.mark.filterwarnings("ignore:.*(prototype|beta|deprecated)")
class TestTensorsWithoutPlainMemory:
    @pytest.fixture(params=KINDS)
    def tensor(self, request: pytest.FixtureRequest) -> torch.Tensor:
        return KINDS[request.param]()

    def test_bytes_are_not_all_that_there_is(self, tensor: torch.Tensor) -> None:
        assert not lies_in_memory(tensor)
        assert memory_bytes(tensor) >= 0

    def test_state_and_gradients_stay(self, tensor: torch.Tensor) -> None:
        allocator = Allocator.on_host(Config([ClassSetting()] * len(TensorClass)))
        memory = CudaStateMemory(tensor.device, allocator, 1, 1)
        assert not memory.may_stage(tensor)
        assert not memory.is_movable(tensor)

    def test_weights_stay(self, tensor: torch.Tensor) -> None:
        assert not is_movable_weight(tensor)


def test_plain_memory() -> None:
    assert lies_in_memory(MATRIX)
    assert memory_bytes(MATRIX) == MATRIX.nbytes


def test_the_chain_of_layers_may_have_sparse_weights() -> None:
    layers = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    layers[1].weight = nn.Parameter(torch.eye(4).to_sparse())
    assert main_chain(nn.ModuleDict({"layers": layers})) is layers


class Looked(Net):
    """Tables with sparse gradients beside dense layers. One is changed in each forward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(ROWS, WIDTH, sparse=True)
        self.bound = nn.Embedding(ROWS, WIDTH, sparse=True, max_norm=1.0)
        self.register_buffer("neighbours", torch.eye(8).to_sparse())
        self.register_buffer("rows", torch.eye(8).to_sparse_csr())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows = (x[:, 0].abs() * 1000).long() % ROWS
        near = torch.sparse.mm(self.neighbours, torch.sparse.mm(self.rows, x))
        return super().forward(near + self.table(rows) + self.bound(rows // 2))


@pytest.mark.parametrize("eagerness", [0.0, 1.0])
@pytest.mark.parametrize("streams_weights", [False, True])
@pytest.mark.parametrize(
    "make_optimizer",
    [
        pytest.param(lambda ps: torch.optim.Adagrad(ps, lr=1e-2), id="Adagrad"),
        pytest.param(lambda ps: torch.optim.Adagrad(ps, lr=1e-2, foreach=False), id="each"),
        pytest.param(lambda ps: torch.optim.SGD(ps, lr=1e-2, momentum=0.9), id="SGD"),
        pytest.param(
            lambda ps: torch.optim.SGD(ps, lr=1e-2, momentum=0.9, foreach=False), id="SGD each"
        ),
        pytest.param(lambda ps: torch.optim.SGD(ps, lr=1e-2), id="SGD without state"),
    ],
)
def test_dense_and_sparse_gradients(
    make_optimizer: Callable[[Any], torch.optim.Optimizer], streams_weights: bool, eagerness: float
) -> None:
    run = compare(
        eagerness=eagerness,
        make_model=Looked,
        make_optimizer=make_optimizer,
        clips=False,
        streams_weights=streams_weights,
        copied_gradients=frozenset(("table", "bound", "head")),
    )
    assert any(it.grad.is_sparse for it in run.model.parameters())


def test_a_sparse_parameter() -> None:
    class Mixing(Net):
        def __init__(self) -> None:
            super().__init__()
            self.mixing = nn.Parameter(torch.eye(WIDTH).to_sparse().coalesce())

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(torch.sparse.mm(self.mixing, x.t()).t())

    def keep_dense(program: Program) -> None:
        program.seen.append(program.model.mixing.detach().to_dense())

    def make(parameters: Any) -> torch.optim.Optimizer:
        dense = [it for it in parameters if it.layout is torch.strided]
        return torch.optim.AdamW(dense, lr=1e-2)

    def run(lanes: Any) -> Any:
        program = Program(lanes, make_model=Mixing, make_optimizer=make, clips=False)
        program.step()
        program.stream()
        for _ in range(3):
            program.step()
            keep_dense(program)
        dense = [it.detach() for it in program.optimizer.param_groups[0]["params"]]
        return bits([*program.seen, *dense])

    assert run(lambda model: LazyLanes(model, 0.5)) == run(None)


@pytest.mark.parametrize("more_bytes", [-1, 30_000])
def test_sparse_adam_beside_adamw(more_bytes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two optimizers, as tables with sparse gradients need one of their own."""

    def train() -> Any:
        torch.manual_seed(0)
        model = Looked()
        tables = [model.table.weight, model.bound.weight]
        known = set(map(id, tables))
        others = [it for it in model.parameters() if id(it) not in known]
        optimizers = [torch.optim.AdamW(others, lr=1e-2), torch.optim.SparseAdam(tables, lr=1e-2)]
        losses = []
        for _ in range(8):
            loss = model(torch.randn(8, WIDTH)).square().mean()
            loss.backward()
            for it in optimizers:
                it.step()
                it.zero_grad()
            losses.append(loss.detach())
        states = [it.state_dict() for it in optimizers]
        return bits([losses, [it.detach() for it in model.parameters()], states])

    expected = train()
    streams = Streams(more_bytes)
    with streaming(streams, monkeypatch):
        found = train()
    assert found == expected
    assert len(streams.trainings) == 2
    assert any(it.counts.streamed for it in streams.trainings)
