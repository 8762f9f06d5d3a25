"""What umem changes in torch and other libraries: all is listed, in force, and put back."""

from __future__ import annotations

import ast
import gc
import json
import sys
import weakref
from collections.abc import Collection, Iterator
from dataclasses import asdict
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from changed_torch import USES, Report, report
from once import made_once

import umem
from umem import patches
from umem.patches import PATCHES, PatchWay
from umem.torch_compat import PRIVATE_NAMES

PACKAGE = Path(umem.__file__).parent
REPLACED = sorted(key for key, it in PATCHES.items() if it.way is PatchWay.REPLACED)


# ------------------------------------------------------------------ a process with all changes


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Report:
    """What has changed in a process in which umem does all that it can do here."""

    def make(folder: Path) -> None:
        (folder / "report.json").write_text(json.dumps(asdict(report())))

    folder = made_once(tmp_path_factory, "changed_torch", make)
    return Report(**json.loads((folder / "report.json").read_text()))


@pytest.mark.slow
def test_every_attribute_of_torch_that_has_changed_is_listed(found: Report) -> None:
    assert found.unlisted == []
    assert found.wrong == []
    assert found.unseen == []


@pytest.mark.slow
def test_every_entry_is_in_force(found: Report) -> None:
    not_in_each_torch = "accelerator_graph_replay accelerator_graph_capture_begin to_dlpack"
    optional = {*not_in_each_torch.split(), "const_data_ptr"}
    if not torch.distributed.is_available():
        optional |= {"backend_methods", "fsdp_gathering"}
    assert set(found.lacking) <= optional
    assert set(found.in_force) == set(REPLACED) - set(found.lacking)


@pytest.mark.slow
def test_a_use_of_what_is_replaced_comes_to_umem(found: Report) -> None:
    assert set(found.reached) >= set(found.in_force)


@pytest.mark.slow
def test_the_same_objects_are_back_when_all_is_undone(found: Report) -> None:
    assert found.left == []


@pytest.mark.slow
@pytest.mark.skipif(
    not torch.distributed.is_available(), reason="this torch is built without torch.distributed"
)
def test_collectives_are_among_the_methods_that_take_tensors(found: Report) -> None:
    """They are found by their descriptions, which another torch may write in another way."""
    collectives = (
        "_allgather_base _reduce_scatter_base allgather allgather_coalesced allreduce "
        "allreduce_coalesced alltoall alltoall_base broadcast gather recv recv_anysource reduce "
        "reduce_scatter scatter send"
    )
    assert set(found.backend_methods) >= set(collectives.split())


def test_each_entry_has_a_use() -> None:
    assert sorted(USES) == REPLACED


# ------------------------------------------------------------------ replace, wrap and undo


class Base:
    def inherited(self) -> str:
        return "base"


class Library(Base):
    @staticmethod
    def static() -> str:
        return "static"

    def own(self) -> str:
        return "own"


@pytest.fixture
def entry() -> Iterator[str]:
    """An entry whose owner is given by the caller."""
    yield "subclass_operators"
    patches.undo("subclass_operators")


@pytest.mark.parametrize("attribute", ["own", "static", "inherited"])
def test_the_original_is_put_back(entry: str, attribute: str) -> None:
    before = dict(vars(Library))
    for _ in range(2):
        assert patches.replace(entry, lambda *_: "ours", owner=Library, attribute=attribute)
        assert getattr(Library(), attribute)() == "ours"
        assert (Library, attribute) in patches.in_force(entry)
        patches.undo(entry)
        patches.undo(entry)
        assert dict(vars(Library)) == before
        assert (Library, attribute) not in patches.in_force(entry)


def test_what_is_umems_already_is_not_wrapped_again(entry: str) -> None:
    own, originals = Library.own, []

    def make(original: Any) -> Any:
        originals.append(original)
        return lambda _: "ours"

    for _ in range(2):
        assert patches.wrap(entry, make, owner=Library, attribute="own")
    assert originals == [own]


def test_what_has_replaced_umems_since_stays(entry: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def around(word: str) -> Any:
        return lambda its: lambda self: f"{word} {its(self)}"

    patches.wrap(entry, around("ours"), owner=Library, attribute="own")
    theirs = around("theirs")(Library.own)
    with monkeypatch.context() as context:
        context.setattr(Library, "own", theirs)
        patches.undo(entry)
        assert Library().own() == "theirs ours own"
        patches.wrap(entry, around("again"), owner=Library, attribute="own")
        assert Library().own() == "again theirs ours own"
        patches.undo(entry)
        assert vars(Library)["own"] is theirs


def test_a_library_that_lacks_it_stays_as_is(entry: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert not patches.replace(entry, None, owner=Library, attribute="absent")
    assert not hasattr(Library, "absent")
    name = PATCHES["transformers_warmup"].path.partition(":")[0]
    monkeypatch.setitem(sys.modules, name, ModuleType(name))  # while it is imported
    assert not patches.replace("transformers_warmup", None)
    monkeypatch.delitem(sys.modules, name)
    assert not patches.replace("transformers_warmup", None)
    assert name not in sys.modules


def test_classes_of_the_program_are_not_kept_alive() -> None:
    kind = type("Kind", (), {"forward": staticmethod(lambda: "own")})
    assert patches.replace("function_forward", staticmethod(lambda: "ours"), owner=kind)
    assert kind.forward() == "ours"  # type: ignore[attr-defined]
    reference = weakref.ref(kind)
    del kind
    gc.collect()
    assert reference() is None


# ------------------------------------------------------------------ the code

# By the file: attributes that are not a library's, or that an entry of its own has.
OTHERS = {
    "runtime/torch_hooks/function_attributes.py": {"setattr"},  # `node_attributes`
    "runtime/torch_hooks/hidden.py": {"vars(hooks)['own']", "from_address"},  # `hook_dictionaries`
    "streaming/host_share/proof.py": {"setattr"},
    "streaming/step/call.py": {"setattr"},
    "streaming/step/host_units.py": {"setattr"},
    "swap.py": {"classifier.on_root"},
    "trace/model.py": {"object.__setattr__"},
}
WRAPPERS = {"wraps", "update_wrapper", "partial", "staticmethod", "classmethod", "property"}
CALLED = {
    key: it
    for key, it in PATCHES.items()
    if it.way is PatchWay.CALLED and it.attribute != "append"  # to a list, as any
}


def imports(tree: ast.AST) -> dict[str, str]:
    """What names of a module stand for that it imports, by the name."""
    found = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for it in node.names:
                top = it.name.partition(".")[0]
                found[it.asname or top] = it.name if it.asname else top
        elif isinstance(node, ast.ImportFrom):
            found.update((it.asname or it.name, f"{node.module}.{it.name}") for it in node.names)
    return found


def is_from(name: str, packages: Collection[str]) -> bool:
    return name.partition(".")[0] in packages


class Changes(ast.NodeVisitor):
    """Finds what a module may change in other libraries."""

    def __init__(self, source: str) -> None:
        tree = ast.parse(source)
        self.attributes: set[str] = set()
        """Attributes that are set past :mod:`umem.patches`, and functions that may set some."""
        self.calls: set[str] = set()
        """Functions that change a library for all its users."""
        self._imports = imports(tree)
        functions = (it for it in ast.walk(tree) if isinstance(it, ast.FunctionDef))
        self._functions = {it.name for it in functions}
        self.visit(tree)

    def visit_Assign(self, node: ast.Assign) -> None:
        for target in node.targets:
            if isinstance(target, ast.Tuple) and isinstance(node.value, ast.Tuple):
                for part, value in zip(target.elts, node.value.elts, strict=False):
                    self._see(part, value)
            else:
                self._see(target, node.value)
        self.generic_visit(node)

    def visit_Delete(self, node: ast.Delete) -> None:
        for target in node.targets:
            self._see(target, None)

    def visit_Name(self, node: ast.Name) -> None:
        if node.id in ("setattr", "delattr"):
            self.attributes.add(node.id)

    def visit_Attribute(self, node: ast.Attribute) -> None:
        if node.attr in ("__setattr__", "__delattr__"):
            self.attributes.add(ast.unparse(node))
        self.generic_visit(node)

    def visit_ImportFrom(self, node: ast.ImportFrom) -> None:
        if node.module == "unittest.mock":
            self.attributes.add(node.module)
        if node.module == "umem.torch_compat":
            pushes = [it.name for it in node.names if it.name.startswith("push_")]
            self.calls.update(PRIVATE_NAMES[it].path.split(".")[-1] for it in pushes)

    def visit_Call(self, node: ast.Call) -> None:
        origin = self._origin(node.func)
        *_, name = (origin or ast.unparse(node.func)).split(".")
        changes = name.startswith(("register", "set_", "change_")) and not name.endswith("_")
        is_known = any(name == it.attribute for it in CALLED.values())
        if origin:
            is_own = is_from(origin, ("umem", *sys.stdlib_module_names))
            is_call = (changes or is_known) and not is_own and name != "set_grad_enabled"
        else:  # of a module or an object that a variable has
            is_call = is_known and isinstance(node.func, ast.Attribute)
        if is_call:
            self.calls.add(name)
        self.generic_visit(node)

    def _origin(self, node: ast.expr) -> str:
        root, dot, rest = ast.unparse(node).partition(".")
        return f"{self._imports[root]}{dot}{rest}" if root in self._imports else ""

    def _see(self, target: ast.expr, value: ast.expr | None) -> None:
        text = ast.unparse(target)
        if (isinstance(target, ast.Subscript) and text.startswith("vars(")) or ".__dict__[" in text:
            self.attributes.add(text)
        if not isinstance(target, ast.Attribute):
            return
        if ".from_address(" in text:
            self.attributes.add("from_address")
            return
        origin = self._origin(target)
        is_own = text.startswith(("self.", "cls.")) or is_from(origin, sys.stdlib_module_names)
        if not is_own and (origin or target.attr == "__class__" or self._is_function(value)):
            self.attributes.add(text)

    def _is_function(self, value: ast.expr | None) -> bool:
        if isinstance(value, ast.Call):
            return ast.unparse(value.func).partition("(")[0].split(".")[-1] in WRAPPERS
        is_name = isinstance(value, ast.Name) and value.id in self._functions
        return is_name or isinstance(value, ast.Lambda)


FILES = {path.relative_to(PACKAGE).as_posix(): path.read_text() for path in PACKAGE.rglob("*.py")}


@pytest.mark.slow
def test_attributes_of_libraries_are_replaced_in_one_place() -> None:
    found = {file: Changes(source).attributes for file, source in FILES.items()}
    assert found.pop("patches.py") == {"setattr", "delattr"}
    assert {file: its for file, its in found.items() if its} == OTHERS


@pytest.mark.slow
def test_calls_that_change_a_library_are_listed() -> None:
    found = {(file, name) for file, source in FILES.items() for name in Changes(source).calls}
    found.remove(("swap.py", "set_allocator"))  # of the guard of tensors
    listed = {(it.made_in, it.attribute) for it in CALLED.values()}
    assert found == listed


@pytest.mark.parametrize(
    "code",
    [
        "torch.Tensor.data_ptr = ours",
        "torch.backends.cudnn.enabled = True",
        "del torch.Tensor.data_ptr",
        "module.forward, other = ours, 1",
        "for kind in kinds:\n    kind.forward = ours",
        "kind.forward = staticmethod(ours)",
        "kind.forward = functools.wraps(kind.forward)(ours)",
        "kind.forward = lambda: None",
        "setattr(kind, 'forward', ours)",
        "map(delattr, kinds, names)",
        "type.__setattr__(kind, 'forward', ours)",
        "vars(module)['forward'] = ours",
        "module.__dict__['forward'] = ours",
        "hooks.__class__ = Hooks",
        "ctypes.c_void_p.from_address(address).value = 1",
        "from unittest.mock import patch",
    ],
)
def test_a_change_past_the_one_place_is_found(code: str) -> None:
    assert Changes(f"import torch\ndef ours(): ...\n{code}").attributes


@pytest.mark.parametrize(
    "code",
    [
        "torch.optim.optimizer.register_optimizer_step_pre_hook(hook)",
        "from torch.nn.modules.module import register_module_backward_hook as r; r(hook)",
        "torch.set_default_dtype(torch.half)",
        "library.set_memory_manager(manager)",
    ],
)
def test_a_call_that_changes_a_library_is_found(code: str) -> None:
    assert Changes(f"import torch\n{code}").calls


def test_each_entry_stands_where_it_is_made() -> None:
    for key in REPLACED:
        source = FILES[PATCHES[key].made_in]
        assert f'"{key}"' in source or f"{PATCHES[key].attribute}=" in source, key
