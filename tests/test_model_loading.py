"""Loaders of other libraries under a budget: every weight in its one place, with its bits."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from loading_memory import HostLoadingMemory
from other_process import run_forked

from umem.runtime import model_loading
from umem.runtime.model_loading import load_weight

CPU = torch.device("cpu")


@pytest.fixture
def memory(monkeypatch: pytest.MonkeyPatch) -> HostLoadingMemory:
    """Copies arrive late; buffers and pieces are small."""
    monkeypatch.setattr(model_loading, "_BUFFER_BYTES", 256)
    monkeypatch.setattr(model_loading, "_PIECE_BYTES", 100)
    return HostLoadingMemory()


def numbers(size: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """Any bits, those of NaN too, behind an odd number of bytes, as in a file."""
    count = torch.Size(size).numel() * dtype.itemsize
    made = torch.randint(0, 256, (count + dtype.itemsize,), dtype=torch.uint8)
    return made[dtype.itemsize :].view(dtype).view(torch.Size(size))


def bits(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().view(torch.uint8).numpy().tobytes()


@pytest.mark.parametrize("is_home", [True, False])
@pytest.mark.parametrize("size", [(1,), (64,), (7, 33), (3, 5, 67), (2, 0)])
@pytest.mark.parametrize(
    "dtype", [torch.bfloat16, torch.float32, torch.uint8, torch.bool, torch.float8_e4m3fn]
)
def test_all_bits_arrive_at_homes_and_on_the_device(
    memory: HostLoadingMemory, dtype: torch.dtype, size: tuple[int, ...], is_home: bool
) -> None:
    memory.has_room = not is_home
    source = numbers(size, dtype)
    if dtype is torch.bool:
        source = source.view(torch.uint8).bitwise_and(1).bool()

    made = load_weight(source, CPU, dtype, memory)

    if 0 in size:
        assert made is None, "nothing to copy: torch makes it"
        return
    assert made is not None
    assert (made.dtype, made.size(), made.stride()) == (dtype, source.size(), source.stride())
    assert bits(made) == bits(source)
    assert made.untyped_storage().nbytes() == made.nbytes
    assert not made._is_view()
    assert (memory.sent == 0) == is_home
    assert (memory.finished > 0) == is_home


@pytest.mark.parametrize("is_home", [True, False])
@pytest.mark.parametrize("to", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
@pytest.mark.parametrize("of", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_types_are_converted_as_torch_does(
    memory: HostLoadingMemory, of: torch.dtype, to: torch.dtype, is_home: bool
) -> None:
    memory.has_room = not is_home
    source = torch.randn(7, 111).mul(1e3).to(of)

    made = load_weight(source, CPU, to, memory)

    assert made is not None
    assert bits(made) == bits(source.to(to))


@pytest.mark.parametrize(
    "source",
    [
        torch.randn(4, 6).t(),
        torch.nn.Parameter(torch.randn(4)),
        torch.randn(4).to_sparse(),
        torch.randn(4, dtype=torch.complex64).conj(),
        torch.empty(4, device="meta"),
    ],
    ids=["transposed", "subclass", "sparse", "conjugate", "meta"],
)
def test_what_torch_alone_copies_is_its_own(
    memory: HostLoadingMemory, source: torch.Tensor
) -> None:
    assert load_weight(source, CPU, source.dtype, memory) is None
    assert load_weight(torch.arange(9), CPU, torch.float32, memory) is None


def test_without_memory_for_buffers_torch_copies(memory: HostLoadingMemory) -> None:
    memory.has_buffers = False
    assert load_weight(torch.randn(300), CPU, torch.float32, memory) is None


def test_a_copy_that_fails_leaves_no_other_under_way(memory: HostLoadingMemory) -> None:
    memory.fails_at = 5
    with pytest.raises(RuntimeError, match="lost"):
        load_weight(torch.randn(3000), CPU, torch.float32, memory)
    assert memory.under_way == 0


def test_threads_load_beside_each_other(memory: HostLoadingMemory) -> None:
    sources = [numbers((50 + number, 7), torch.int16) for number in range(24)]
    with ThreadPoolExecutor(4) as pool:
        made = list(pool.map(lambda it: load_weight(it, CPU, torch.int16, memory), sources))
    assert [bits(it) if it is not None else None for it in made] == list(map(bits, sources))


SCRIPT = """
import tempfile
import torch
from loading_memory import HostLoadingMemory
from umem.runtime import model_loading
from umem.adapters import adapt_loading
assert not adapt_loading(None)
import transformers.modeling_utils as its
from transformers import LlamaConfig, LlamaForCausalLM
config = LlamaConfig(hidden_size=32, intermediate_size=32, num_hidden_layers=2,
                     num_attention_heads=2, vocab_size=64)
model_loading._BUFFER_BYTES = 512
with tempfile.TemporaryDirectory() as folder:
    torch.manual_seed(0)
    LlamaForCausalLM(config).save_pretrained(folder, max_shard_size="20KB")

    def load(device):
        return [
            LlamaForCausalLM.from_pretrained(folder, device_map=device, dtype=dtype)
            for dtype in (torch.float32, torch.bfloat16)
        ]

    stock = load("cpu")
    before = its.caching_allocator_warmup
    memory = HostLoadingMemory(home_share=0.5)
    assert adapt_loading(memory)
    assert its.caching_allocator_warmup is not before
    models = load("cpu")
    load("meta")  # to another device it loads as ever
for model, other in zip(models, stock, strict=True):
    of_model, of_stock = model.state_dict(), other.state_dict()
    assert of_model.keys() == of_stock.keys()
    for name, weight in of_model.items():
        assert weight.dtype is of_stock[name].dtype
        assert torch.equal(weight, of_stock[name]), name
weights = [it for model in models for it in model.parameters()]
assert memory.made == len(weights), (memory.made, len(weights))
assert 0 < memory.finished < memory.made
assert memory.sent
assert {it.data_ptr() for it in weights} == memory.addresses, "there is no second copy"
print("loaded")
"""


@pytest.mark.slow
def test_transformers_loads_each_weight_once_to_its_place() -> None:
    pytest.importorskip("transformers.core_model_loading", reason="transformers before 5")
    assert "loaded\n" in run_forked(SCRIPT)
