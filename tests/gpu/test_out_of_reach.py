"""The features that `umem doctor` lists as missing, or working, under a swapped allocator.

A failure here is good news from torch, or bad: the doctor's list must follow.
"""

from __future__ import annotations

from collections.abc import Callable
from multiprocessing.reduction import ForkingPickler

import pytest
import torch
from torch import nn

pytestmark = pytest.mark.usefixtures("settled")


def compiled(mode: str) -> float:
    """Train a small compiled module for a few steps; its distance from the plain one."""
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(256, 256), nn.GELU(), nn.Linear(256, 256)).cuda()
    inputs = torch.randn(32, 256, device="cuda")
    torch._dynamo.reset()
    fast = torch.compile(module, mode=mode)
    for _ in range(4):
        outputs = fast(inputs)
        outputs.sum().backward()
    return (outputs - module(inputs)).abs().max().item()


def convolve(channels: int, *, benchmark: bool) -> torch.Size:
    # cuDNN remembers what it has chosen for a shape, and then would search no more.
    with torch.backends.cudnn.flags(enabled=True, benchmark=benchmark):
        layer = nn.Conv2d(channels, 32, 3).cuda()
        outputs = layer(torch.randn(4, channels, 32, 32, device="cuda"))
        outputs.sum().backward()
    return outputs.shape


def test_compile_works() -> None:
    assert compiled("default") < 1e-2  # TF32 would be as good


def test_compile_without_cuda_graphs_works() -> None:
    assert compiled("max-autotune-no-cudagraphs") < 1e-2


@pytest.mark.parametrize(("channels", "benchmark"), [(16, False), (24, True)])
def test_convolution_works(channels: int, benchmark: bool) -> None:
    assert convolve(channels, benchmark=benchmark) == (4, 32, 30, 30)
    assert not torch.backends.cudnn.benchmark


def test_convolution_works_where_the_program_sets_the_search() -> None:
    torch.backends.cudnn.benchmark = True
    assert not torch.backends.cudnn.benchmark
    assert convolve(40, benchmark=True) == (4, 32, 30, 30)


@pytest.mark.parametrize(
    ("use", "missing"),
    [
        pytest.param(torch.cuda.MemPool, "createOrIncrefPool", id="MemPool"),
        pytest.param(
            lambda: ForkingPickler.dumps(torch.ones(4, device="cuda")), "IpcHandle|Ipc", id="IPC"
        ),
    ],
)
def test_torch_names_the_missing_feature(use: Callable[[], object], missing: str) -> None:
    with pytest.raises(RuntimeError, match=f"(?i){missing}"):
        use()
