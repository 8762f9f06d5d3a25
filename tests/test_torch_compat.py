"""Private names of torch: which umem uses, where, and what happens in a torch that lacks one."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import umem
import umem.swap
from umem import patches, torch_compat
from umem.core.errors import UnsupportedError
from umem.hardware import load_hardware
from umem.policy import load_policy, resolve
from umem.runtime import state
from umem.streaming import begin
from umem.torch_compat import NEWEST, OLDEST, PRIVATE_NAMES, Need, missing, require

PACKAGE = Path(umem.__file__).parent


class Absent:
    """A class attribute that is not there."""

    def __get__(self, *_: object) -> Any:
        raise AttributeError


class Without:
    """An object as it would be without one of its attributes."""

    def __init__(self, whole: object, attribute: str) -> None:
        self._whole = whole
        self._attribute = attribute

    def __getattr__(self, name: str) -> Any:
        if name == self._attribute:
            raise AttributeError(name)
        return getattr(self._whole, name)


@pytest.fixture
def cuda_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    """A torch that seems to be built with CUDA, where this one is not."""
    monkeypatch.setattr(torch.version, "cuda", torch.version.cuda or "13.0")
    if not hasattr(torch._C, "_CUDAPluggableAllocator"):
        stub = type("Pluggable", (), {})
        monkeypatch.setattr(torch._C, "_CUDAPluggableAllocator", stub, raising=False)
    for entry in PRIVATE_NAMES.values():
        owner, attribute = entry.owner()
        if entry.is_cuda and not hasattr(owner, attribute):
            monkeypatch.setattr(owner, attribute, None, raising=False)


def hide(key: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let torch lack a name."""
    module, _, path = PRIVATE_NAMES[key].path.partition(":")
    *parents, attribute = path.split(".")
    owner, _ = PRIVATE_NAMES[key].owner()
    if owner in (torch.Tensor, torch.UntypedStorage):  # the attribute is inherited from C
        monkeypatch.setattr(owner, attribute, Absent())
    elif parents[:1] in (["ops"], ["_FunctionBase"], ["Variable"]):  # cannot be changed
        holder: Any = sys.modules[module]
        for name in parents[:-1]:
            holder = getattr(holder, name)
        monkeypatch.setattr(holder, parents[-1], Without(owner, attribute))
    else:
        monkeypatch.delattr(owner, attribute, raising=False)
    monkeypatch.delitem(vars(torch_compat), key, raising=False)  # found before


@pytest.fixture
def swapped(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The changes to the process that `umem.enable` has begun."""
    calls: list[str] = []

    def record(name: str) -> Callable[..., Any]:
        return lambda *_, **__: calls.append(name)

    library = SimpleNamespace(HAS_CUDA=True, installed=lambda: None, install=record("install"))
    monkeypatch.setattr(umem.swap, "native", lambda: library)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: False)
    monkeypatch.setattr(torch.cuda.memory, "change_current_allocator", record("swap"))
    monkeypatch.setattr(umem.swap, "detect_all", record("detect"))
    monkeypatch.setattr(state, "_fallback_reason", None)
    return calls


VERSION = tuple(int(part) for part in torch.__version__.split(".")[:2])
KNOWN = {key: it for key, it in PRIVATE_NAMES.items() if it.since <= VERSION}
NEEDED = [key for key, it in KNOWN.items() if it.need is Need.ENABLE]
OPTIONAL = [key for key, it in KNOWN.items() if it.need is not Need.ENABLE]


@pytest.mark.usefixtures("cuda_torch")
class TestMissing:
    def test_this_torch_has_all(self) -> None:
        assert missing() == []

    def test_names_this_torch_cannot_have_are_not_missed(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        hide("accelerator_stats", monkeypatch)
        hide("cuda_memory_stats", monkeypatch)
        monkeypatch.setattr(torch, "__version__", "2.8.0+cpu")
        monkeypatch.setattr(torch.version, "cuda", None)
        assert missing() == []

    def test_without_distributed_torch_lacks_nothing(self, monkeypatch: pytest.MonkeyPatch) -> None:
        hide("ProcessGroupBackend", monkeypatch)
        monkeypatch.setattr(torch.distributed, "is_available", lambda: False)
        assert missing() == []

    @pytest.mark.parametrize("key", NEEDED)
    def test_enable_changes_nothing_without_a_name(
        self, key: str, monkeypatch: pytest.MonkeyPatch, swapped: list[str]
    ) -> None:
        hide(key, monkeypatch)
        assert missing() == [PRIVATE_NAMES[key]]
        with pytest.raises(UnsupportedError, match=r"2\.8 to 2\.15.*fallback=True") as raised:
            umem.enable("sft")
        assert PRIVATE_NAMES[key].name in str(raised.value)
        with pytest.warns(RuntimeWarning, match=r"torch's own allocator stays") as warned:
            assert umem.enable("sft", fallback=True) is False
        assert PRIVATE_NAMES[key].name in str(warned[0].message)
        assert swapped == []
        assert not umem.is_enabled()

    @pytest.mark.parametrize("key", OPTIONAL)
    def test_a_feature_fails_without_its_name_and_enable_does_not(
        self, key: str, monkeypatch: pytest.MonkeyPatch, swapped: list[str]
    ) -> None:
        hide(key, monkeypatch)
        assert missing() == [PRIVATE_NAMES[key]]
        with pytest.raises(UnsupportedError, match=r"2\.8 to 2\.15") as raised:
            require(PRIVATE_NAMES[key].need)
        assert PRIVATE_NAMES[key].name in str(raised.value)
        with pytest.raises(UnsupportedError, match="no GPU"):
            umem.enable("sft")
        assert swapped == ["detect"]


def test_a_missing_name_cannot_be_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    hide("current_graph_task_id", monkeypatch)
    with pytest.raises(UnsupportedError, match=r"_current_graph_task_id.*2\.8 to 2\.15"):
        from umem.torch_compat import current_graph_task_id  # noqa: F401


@pytest.mark.slow
def test_what_umem_enable_imports_needs_no_other_name() -> None:
    code = (
        "from umem import torch_compat; import umem.managing, umem.swap, umem.streaming.begin; "
        "import umem.runtime.classification; print(*vars(torch_compat))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    functions = {
        "operator_schema",
        "torch_profiler_runs",
    }  # there whether torch has the name or not
    assert set(done.stdout.split()) & set(OPTIONAL) == functions


@pytest.mark.parametrize(
    ("preset", "slices", "is_hidden"),
    [
        *(("sft", "auto", False), ("sft", "never", False), ("managed", "auto", False)),
        ("sft", "auto", True),
    ],
)
def test_losses_are_left_to_torch_where_a_policy_says_so_and_where_it_lacks_a_name_of_slices(
    preset: str,
    slices: str,
    is_hidden: bool,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    if is_hidden:
        hide("register_scripted", monkeypatch)
    policy = load_policy(preset).model_copy(update={"slice_losses": slices})
    resolved = resolve(policy, load_hardware("h200"), {})
    model = torch.nn.Embedding(8, 2)
    losses = begin._sliced_losses(resolved, model, torch.device("cpu"), 1 << 30)
    assert (losses is not None) == ((preset, slices) == ("sft", "auto") and not is_hidden)
    assert ("losses are left to torch" in caplog.text) == is_hidden
    if losses is not None:
        losses.end()


FALLBACK = """
import warnings
from types import SimpleNamespace
import torch
from umem.torch_compat import PRIVATE_NAMES

owners = []
for entry in PRIVATE_NAMES.values():
    try:
        owners.append((entry, *entry.owner()))  # which may import some
    except AttributeError:
        continue  # of CUDA, or of a newer torch
hidden = []
for entry, owner, attribute in owners:
    try:
        delattr(owner, attribute)
    except (AttributeError, TypeError):
        continue  # of CUDA, or an attribute that cannot be deleted
    hidden.append(entry.name)

import umem.swap
umem.swap.native = lambda: SimpleNamespace(HAS_CUDA=True, installed=lambda: None)
torch.version.cuda = "13.0"
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    print(umem.enable("sft", fallback=True))
with umem.tensor_class("weights"):
    print(umem.is_enabled(), torch.ones(3).sum().item())
print(len(hidden) > 20, all(name in str(caught[0].message) for name in hidden if name in REQUIRED))
"""


@pytest.mark.slow
def test_a_process_goes_on_in_a_torch_without_most_names() -> None:
    """umem.enable can be imported, refuses, and leaves torch as it is."""
    required = [PRIVATE_NAMES[key].name for key in NEEDED]
    code = f"REQUIRED = {required}\n{FALLBACK}"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.stdout.split() == ["False", "False", "3.0", "True", "True"], done.stderr


def test_the_supported_range_is_that_of_the_package() -> None:
    pyproject = (PACKAGE.parent / "pyproject.toml").read_text()
    oldest, below = f"{OLDEST[0]}.{OLDEST[1]}", f"{NEWEST[0]}.{NEWEST[1] + 1}"
    assert f'"torch>={oldest},<{below}"' in pyproject


# ---- no private name of torch elsewhere ---------------------------------------------------


def private(name: object) -> bool:
    return isinstance(name, str) and name.startswith("_") and not name.endswith("__")


def own_names(tree: ast.AST) -> set[str]:
    """Private names that a module defines itself, in functions, classes, slots and fields."""
    names = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            names.add(node.name)
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            names.add(node.attr)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.add(node.id)
    return names


def uses(path: Path) -> list[str]:
    """Private names that a module takes from elsewhere, by line."""
    tree = ast.parse(path.read_text())
    torchs = {leaf for it in PRIVATE_NAMES.values() if private(leaf := it.path.split(".")[-1])}
    own = own_names(tree) - torchs
    found = []
    for node in ast.walk(tree):
        names: list[object] = []
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("torch"):
            names = [*(node.module or "").split("."), *(it.name for it in node.names)]
        elif isinstance(node, ast.Import):
            names = [part for it in node.names for part in it.name.split(".")[1:]]
        elif isinstance(node, ast.Attribute):
            is_own = ast.unparse(node.value) in ("self", "cls") or node.attr in own
            names = [] if is_own else [node.attr]
        elif isinstance(node, ast.Call) and ast.unparse(node.func) in (
            "getattr",
            "setattr",
            "hasattr",
            "delattr",
        ):
            names = [it.value for it in node.args[1:2] if isinstance(it, ast.Constant)]
        found += [
            f"{path.name}:{node.lineno}: {name}"  # type: ignore[attr-defined]
            for name in names
            if private(name)
        ]
    return found


@pytest.mark.slow
def test_every_private_name_of_torch_is_listed() -> None:
    found = [
        use
        for path in sorted(PACKAGE.rglob("*.py"))
        if path.name != "torch_compat.py"
        for use in uses(path)
        # Python's
        if not use.endswith((": _getframe", ": _exit", ": _run_module_as_main", ": _replace"))
    ]
    assert found == []


class Wrapped(torch.nn.Module):
    """A module of FSDP2, in a torch that has these names for its state."""

    def __init__(self, state: object) -> None:
        super().__init__()
        self.state = state

    def _get_fsdp_state(self) -> object:
        return self.state


class TestFSDP:
    """Other versions of torch have other names, and nothing fails."""

    group = SimpleNamespace(
        fsdp_params=[SimpleNamespace(sharded_param="weight", _sharded_param_data="flat")],
        comm_ctx=SimpleNamespace(all_gather_copy_in_stream="copies", all_gather_stream="gathers"),
    )

    def groups_of(self, state: object, monkeypatch: pytest.MonkeyPatch) -> list[Any]:
        fsdp = SimpleNamespace(FSDPModule=Wrapped)
        monkeypatch.setitem(sys.modules, "torch.distributed.fsdp", fsdp)
        model = torch.nn.Sequential(torch.nn.Linear(2, 2), Wrapped(state))
        groups = torch_compat.fsdp_groups(torch_compat.fsdp_modules(model))
        return [(torch_compat.fsdp_flats(it), torch_compat.fsdp_streams(it)) for it in groups]

    @pytest.mark.parametrize("is_new", [False, True])
    def test_groups_of_other_versions(self, is_new: bool, monkeypatch: pytest.MonkeyPatch) -> None:
        state = SimpleNamespace(_fsdp_param_group=self.group)
        if is_new:
            state = SimpleNamespace(_fsdp_param_groups=[self.group, self.group])
        found = [([("weight", "flat")], ["copies", "gathers"])]
        assert self.groups_of(state, monkeypatch) == found * (1 + is_new)

    @pytest.mark.parametrize(
        "state",
        [
            SimpleNamespace(),
            SimpleNamespace(_fsdp_param_group=None),
            SimpleNamespace(_fsdp_param_groups=[SimpleNamespace(fsdp_params=[object()])]),
        ],
    )
    def test_what_has_other_names_is_not_found(
        self, state: object, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        assert [it for it in self.groups_of(state, monkeypatch) if any(it)] == []

    def test_gathering_of_another_name_has_no_order(self, monkeypatch: pytest.MonkeyPatch) -> None:
        name = "torch.distributed.fsdp._fully_shard._fsdp_param_group"
        for module in (SimpleNamespace(), SimpleNamespace(FSDPParamGroup=type("Other", (), {}))):
            monkeypatch.setitem(sys.modules, name, module)
            assert not patches.wrap("fsdp_gathering", lambda gather: gather)

    def test_a_torch_without_fsdp(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setitem(sys.modules, "torch.distributed.fsdp", SimpleNamespace())
        assert list(torch_compat.fsdp_modules(Wrapped(SimpleNamespace()))) == []
