"""Adapters: the core names no library, and each is found by the class of what is met."""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

import umem
from umem.adapters import ADAPTERS, adapt_loading, adapter_of, find_gathering, weight_parts
from umem.streaming.step import refusal

PACKAGE = Path(umem.__file__).parent

NAMED = re.compile(
    r"bitsandbytes|bnb|deepspeed|megatron|torchao|transformers|peft|accelerate|lightning|apex\b"
    r"|fsdp|(?<![a-z])dtensor|quant_state|absmax|qmap|is_paged$|_local_tensor",
    re.IGNORECASE,
)
"""Libraries, and attributes of their objects."""

EXCEPTIONS = {
    "capture/offline/models.py": "builds the models that `umem trace` names, by the library",
    "capture/offline/trace_cache.py": "a trace is as old as the libraries that made it",
    "streaming/stage/sharded_tensors.py": "a DTensor is torch's own class",
    "streaming/step/in_backward.py": "an error tells the user which wrappers reduce gradients",
    "swap.py": "a warning tells the user what to do about a library's parameters",
    "torch_compat.py": "has every private name of torch, of FSDP2's too",
    "patches.py": "the table of what is changed in libraries",
    "cli/fit.py": "says which library's format of weights and optimizer is counted",
    "cli/verify.py": "trains models of libraries, which have to be installed",
    "fit/": "a configuration names the library that quantises its weights",
    "doctor/": "looks at the libraries that are installed",
    "integrations/": "is called by a library",
}


def words(path: Path) -> Iterator[str]:
    """Names and strings of a file's code. Comments may give a library as a reason."""
    tree = ast.parse(path.read_text())
    texts = {id(it.value) for it in ast.walk(tree) if isinstance(it, ast.Expr)}
    for node in ast.walk(tree):
        if id(node) not in texts:
            found = (getattr(node, it, None) for it in ("id", "attr", "name", "arg", "module"))
            yield from (it for it in (*found, getattr(node, "value", None)) if isinstance(it, str))


@pytest.mark.slow
def test_the_core_names_no_library() -> None:
    named = {
        str(path.relative_to(PACKAGE))
        for path in PACKAGE.rglob("*.py")
        if any(map(NAMED.search, words(path)))
    }
    inside = {it for it in named if it.startswith("adapters/")}
    assert len(inside) >= len(ADAPTERS)
    expected = {it for it in named if it.startswith(tuple(EXCEPTIONS))}
    assert sorted(named - inside - expected) == []
    unused = [it for it in EXCEPTIONS if not any(name.startswith(it) for name in named)]
    assert unused == []


@pytest.mark.parametrize("adapter", ADAPTERS, ids=lambda it: it.module)
def test_an_adapter_imports_nothing_of_its_library_and_names_its_source(
    adapter: Any,
) -> None:
    module = sys.modules[type(adapter).__module__]
    assert module.__doc__ is not None
    assert "https://github.com/" in module.__doc__
    tree = ast.parse(Path(str(module.__file__)).read_text())
    imported = {it.module for it in ast.walk(tree) if isinstance(it, ast.ImportFrom)}
    imported |= {of.name for it in ast.walk(tree) if isinstance(it, ast.Import) for of in it.names}
    assert not any(str(it).startswith(adapter.module) for it in imported)


def of_library(base: type, module: str) -> type:
    """A class as the library's, and one that a program derives from it."""
    return type("Own", (type("Its", (base,), {"__module__": module}),), {"__module__": "program"})


@pytest.mark.parametrize("module", ["bitsandbytes.nn.modules", "torchao.optim.adam", "deepspeed"])
def test_an_adapter_is_found_by_the_class_of_what_is_met(module: str) -> None:
    adapter = adapter_of(of_library(nn.Parameter, module))
    assert adapter is not None
    assert adapter.module == module.partition(".")[0]
    assert adapter.step(of_library(nn.Parameter, "program")) is None


@pytest.mark.parametrize("kind", [torch.Tensor, nn.Parameter, torch.optim.AdamW, SimpleNamespace])
def test_other_classes_have_none(kind: type) -> None:
    assert adapter_of(kind) is None
    assert adapter_of(of_library(kind, "bitsandbytes_of_another_name")) is None


def test_scales_of_a_quantised_weight_are_parts_of_it() -> None:
    weight: Any = of_library(nn.Parameter, "bitsandbytes.nn.modules")(torch.zeros(8))
    assert list(map(id, weight_parts(weight))) == [id(weight)]
    inner = SimpleNamespace(absmax=torch.ones(1), state2=None)
    weight.quant_state = SimpleNamespace(absmax=torch.ones(2), state2=inner, code=torch.ones(16))
    expected = [weight, weight.quant_state.absmax, inner.absmax]
    assert list(map(id, weight_parts(weight))) == list(map(id, expected))


def test_optimizers_of_libraries_say_why_they_are_refused() -> None:
    made = of_library(torch.optim.Optimizer, "torchao.optim.adam").__base__
    assert made is not None
    assert "torchao.optim.adam.Its compiles" in refusal(made([torch.zeros(1)], {}))
    known = refusal(torch.optim.LBFGS([torch.zeros(1)]))
    assert "bitsandbytes' 32-bit Adam and AdamW, DeepSpeed's FusedAdam, and" in known


def test_loaders_are_adapted_until_all_are(monkeypatch: pytest.MonkeyPatch) -> None:
    answers = {"first": [True, True], "second": [False, True]}
    adapters = [
        SimpleNamespace(adapt_loading=lambda _, it=it: it.pop(0)) for it in answers.values()
    ]
    monkeypatch.setattr("umem.adapters.ADAPTERS", adapters)
    assert [adapt_loading(None) for _ in range(2)] == [False, True]


def test_a_model_that_no_library_gathers_has_no_streams() -> None:
    gathered = find_gathering(nn.Linear(2, 2))()
    assert (gathered.flats, gathered.streams) == ({}, ())
