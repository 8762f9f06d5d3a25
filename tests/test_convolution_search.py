"""cuDNN's search for algorithms stays off: the flag, its context manager, and one warning."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch.backends import cudnn

from umem import patches
from umem.runtime.convolution_search import leave_search_off
from umem.torch_compat import PRIVATE_NAMES

set_flag = PRIVATE_NAMES["set_cudnn_benchmark"].find()


@pytest.fixture
def was_on() -> bool:
    """Whether the program has switched the search on before umem."""
    return False


@pytest.fixture(autouse=True)
def off(was_on: bool) -> Iterator[None]:
    cudnn.benchmark = was_on
    leave_search_off()
    yield
    patches.undo("set_cudnn_benchmark", "cudnn_benchmark")
    cudnn.benchmark = False


def test_the_flag_stays_false_with_one_warning(caplog: pytest.LogCaptureFixture) -> None:
    for _ in range(2):
        cudnn.benchmark = True
        assert not cudnn.benchmark
        assert not torch._C._get_cudnn_benchmark()
    (record,) = caplog.records
    assert "torch.backends.cudnn.benchmark" in record.getMessage()


def test_so_it_does_in_a_block(caplog: pytest.LogCaptureFixture) -> None:
    with cudnn.flags(enabled=True, benchmark=True, deterministic=True):
        assert not cudnn.benchmark
        assert cudnn.deterministic
    assert not cudnn.benchmark
    assert len(caplog.records) == 1


@pytest.mark.parametrize("was_on", [True])
def test_what_was_on_before_is_switched_off(was_on: bool) -> None:
    assert not cudnn.benchmark


def test_false_is_no_matter_for_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    cudnn.benchmark = False
    with cudnn.flags(enabled=True):
        pass
    assert not caplog.records


def test_another_type_is_refused_as_by_torch() -> None:
    with pytest.raises(RuntimeError, match="bool"):
        cudnn.benchmark = 1  # type: ignore[assignment]


@pytest.mark.parametrize("was_on", [False])
def test_torch_itself_switches_it_on(was_on: bool) -> None:
    """The other tests look at a flag that can be on."""
    set_flag(True)
    assert cudnn.benchmark
