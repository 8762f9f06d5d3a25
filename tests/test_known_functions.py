"""Functions of torch's own cheap modules, which are called again without their modules."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from umem.streaming.activations.call_states import Settings
from umem.streaming.activations.known_functions import KnownFunction, known_function

CHANNELS = 6


def modules() -> list[nn.Module]:
    """One of each known class, with other attributes than the default ones."""
    torch.manual_seed(1)
    own = [
        nn.ReLU(inplace=True),
        nn.LeakyReLU(0.3),
        nn.GELU(approximate="tanh"),
        nn.SiLU(),
        nn.Hardswish(),
        nn.Sigmoid(),
        nn.Tanh(),
        nn.LayerNorm(5, eps=1e-2),
        nn.LayerNorm((4, 5), elementwise_affine=False),
        nn.GroupNorm(3, CHANNELS, eps=1e-2),
        nn.RMSNorm(5),
        nn.BatchNorm2d(CHANNELS, eps=1e-2),
        nn.BatchNorm2d(CHANNELS, affine=False, momentum=None, track_running_stats=False),
    ]
    for module in own:
        for parameter in module.parameters():
            nn.init.normal_(parameter, 1.0)
    return own


@pytest.mark.parametrize("module", modules(), ids=repr)
def test_a_known_function_has_the_bits_of_the_modules_call(module: nn.Module) -> None:
    x = torch.randn(3, CHANNELS, 4, 5)
    again = known_function(module)
    assert again is not None
    with torch.no_grad():
        expected = module(x.clone())
        found = again(x.clone())
        assert torch.equal(expected.view(torch.int32), found.view(torch.int32))


def test_running_averages_do_not_change() -> None:
    norm = nn.BatchNorm2d(CHANNELS)
    again = known_function(norm)
    assert again is not None
    again(torch.randn(3, CHANNELS, 4, 5))
    assert norm.num_batches_tracked == 0
    assert not norm.running_mean.any()  # type: ignore[union-attr]


def test_a_function_has_the_attributes_of_its_call() -> None:
    norm, x = nn.LayerNorm(5), torch.randn(2, 5)
    expected, again = norm(x), known_function(norm)
    norm.eps, norm.weight = 1.0, nn.Parameter(torch.zeros(5))
    assert again is not None
    assert torch.equal(again(x), expected)


def test_a_function_has_the_settings_of_its_call(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []

    def note(x: torch.Tensor) -> torch.Tensor:
        seen.append(torch.backends.cudnn.enabled)
        return x

    monkeypatch.setattr(torch.backends.cudnn, "enabled", False)
    again = KnownFunction(note, {}, Settings())
    monkeypatch.setattr(torch.backends.cudnn, "enabled", True)
    again(torch.ones(1))
    assert seen == [False]
    assert torch.backends.cudnn.enabled


class Own(nn.ReLU):
    """May do anything."""


@pytest.mark.parametrize(
    "module", [Own(), nn.BatchNorm2d(CHANNELS).eval(), nn.Softplus(), nn.Dropout()], ids=repr
)
def test_what_else_a_module_computes_is_not_known(module: nn.Module) -> None:
    assert known_function(module) is None


def test_a_class_with_another_forward_function_is_unknown(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(nn.ReLU, "forward", lambda _self, x: x)
    assert known_function(nn.ReLU()) is None


def test_a_weight_that_has_changed_in_place_is_autograds_error() -> None:
    norm = nn.LayerNorm(5)
    again = known_function(norm)
    with torch.no_grad():
        norm.weight.add_(1.0)
    assert again is not None
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        again(torch.randn(2, 5))
