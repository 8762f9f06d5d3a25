"""How a model is cut into blocks."""

from __future__ import annotations

import torch
from torch import nn

from umem.capture.live import find_blocks


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.mlp = nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.Linear(8, 4))
        self.experts = nn.ModuleList(nn.Linear(4, 4) for _ in range(6))


class Decoder(nn.Module):
    def __init__(self, layers: int = 3) -> None:
        super().__init__()
        self.position = nn.Parameter(torch.zeros(4))
        self.embed = nn.Embedding(8, 4)
        self.layers = nn.ModuleList(Layer() for _ in range(layers))
        self.norm = nn.LayerNorm(4)
        self.head = nn.Linear(4, 8)


def names(model: nn.Module) -> list[str]:
    return [block.name for block in find_blocks(model)]


def test_layers_and_what_lies_between_them() -> None:
    assert names(Decoder()) == ["embed", "layers.0", "layers.1", "layers.2", "norm", "head"]


def test_a_wrapper_changes_the_names_only() -> None:
    assert names(nn.Sequential(nn.Identity(), Decoder()))[:2] == ["1.embed", "1.layers.0"]


def test_all_disjoint_chains_are_cut() -> None:
    class Pair(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.encoder = Decoder(4)
            self.decoder = Decoder(2)

    found = names(Pair())
    assert [name for name in found if ".layers." in name] == [
        *(f"encoder.layers.{number}" for number in range(4)),
        *(f"decoder.layers.{number}" for number in range(2)),
    ]


def test_without_a_chain_the_children_are_the_blocks() -> None:
    class Plain(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)

    class Wrapper(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.module = Plain()

    assert names(Plain()) == ["first", "second"]
    assert names(Wrapper()) == ["module.first", "module.second"]
    assert names(nn.Linear(4, 4)) == []


def test_the_same_module_in_two_places_is_one_block() -> None:
    layer = nn.Linear(4, 4)
    assert names(nn.Sequential(layer, nn.Linear(4, 4), layer)) == ["0", "1"]
