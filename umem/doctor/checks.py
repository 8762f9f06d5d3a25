"""Checks of this machine and Python environment: what umem needs, and what may go wrong."""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from enum import StrEnum
from typing import Any

from umem.core.errors import HardwareError, PolicyError
from umem.core.install import install_command
from umem.core.log import parse_log_level
from umem.core.units import format_bytes, parse_bytes
from umem.doctor.facts import Environment, GuardLibrary, dotted, version_numbers
from umem.doctor.features import Feature, features
from umem.hardware import load_hardware
from umem.hardware.capabilities import Capabilities
from umem.hardware.host_memory import PINNED_SHARE, MemoryLimit
from umem.hardware.host_share import HostShare, share_of
from umem.hardware.load import MEASURE, describe_machine
from umem.policy import check_environment, load_policy, resolve
from umem.torch_compat import NEWEST, OLDEST, Need

__all__ = ["Check", "Report", "Section", "Status", "diagnose"]


class Status(StrEnum):
    """Result of a check; with `FAIL` the swap cannot work until the fault is mended."""

    OK = "ok"
    WARN = "warn"
    FAIL = "fail"
    INFO = "info"


@dataclass(frozen=True)
class Check:
    """A check: its subject, the value found, why it matters, and a remedy."""

    name: str
    status: Status
    value: str
    why: str = ""
    remedy: str = ""


@dataclass(frozen=True)
class Section:
    """Checks that belong together."""

    title: str
    checks: tuple[Check, ...]


@dataclass(frozen=True)
class Report:
    """All checks and features."""

    sections: tuple[Section, ...]
    features: tuple[Feature, ...]
    devices: tuple[Capabilities, ...]

    @property
    def failures(self) -> tuple[Check, ...]:
        """The checks that keep the swap from working."""
        checks = (check for section in self.sections for check in section.checks)
        return tuple(check for check in checks if check.status is Status.FAIL)

    @property
    def swap_works(self) -> bool:
        """Whether ``umem.enable`` would take over the allocator here."""
        return not self.failures

    def to_dict(self) -> dict[str, Any]:
        """Return the report ready for JSON."""
        return {
            "swap_works": self.swap_works,
            "sections": [asdict(section) for section in self.sections],
            "features": [asdict(feature) for feature in self.features],
            "devices": [device.to_dict() for device in self.devices],
        }


def diagnose(environment: Environment) -> Report:
    """Judge the facts of :func:`umem.doctor.collect`."""
    sections = tuple(
        Section(title, tuple(checks(environment)))
        for title, checks in (
            ("System", _system),
            ("umem", _umem),
            ("PyTorch", _torch),
            ("Libraries", _libraries),
            ("GPUs", _gpus),
            ("Memory and limits", _limits),
            ("Settings", _settings),
        )
    )
    report = Report(sections, (), environment.devices or ())
    failures = [check.name for check in report.failures]
    return replace(report, features=features(environment, failures))


def _ok(name: str, value: str, why: str = "") -> Check:
    return Check(name, Status.OK, value, why)


def _info(name: str, value: str, why: str = "", remedy: str = "") -> Check:
    return Check(name, Status.INFO, value, why, remedy)


def _warn(name: str, value: str, why: str, remedy: str = "") -> Check:
    return Check(name, Status.WARN, value, why, remedy)


def _fail(name: str, value: str, why: str, remedy: str) -> Check:
    return Check(name, Status.FAIL, value, why, remedy)


# System, umem, PyTorch, libraries.

_PYTHON_OLDEST, _PYTHON_NEWEST = (3, 11), (3, 13)


def _system(environment: Environment) -> Iterator[Check]:
    host = environment.host
    if host.system.startswith("Linux"):
        yield _ok("operating system", f"{host.distribution}, {host.system}")
    else:
        why = "migratable managed memory exists on Linux only"
        yield _fail("operating system", host.system, why, "run under Linux")
    cpu = f"{host.cpu_architecture}, {host.cpu_count} usable, {host.cpu_model}"
    yield _info("CPU", cpu)
    value = f"{environment.python_version} at {environment.python_path}"
    if _PYTHON_OLDEST <= version_numbers(environment.python_version) <= _PYTHON_NEWEST:
        yield _ok("Python", value)
    else:
        newest = dotted(_PYTHON_NEWEST)
        why = f"tested with {dotted(_PYTHON_OLDEST)} to {newest}"
        yield _warn("Python", value, why, f"python{newest} -m venv .venv")


def _umem(environment: Environment) -> Iterator[Check]:
    yield _ok("umem", f"{environment.umem_version} at {environment.umem_path}")
    native, rebuild = environment.native, environment.rebuild_umem
    if native is None:  # a library that it needs is missing, or another build is needed
        install = environment.install_umem
        yield _fail("native library", "cannot be loaded", environment.native_error, install)
        return
    if not native.has_cuda:
        why = "built without CUDA and RMM, so it cannot serve a GPU"
        yield _fail("native library", f"host core only, {native.path}", why, rebuild)
        return
    value = f"for CUDA {native.cuda_version} and RMM {native.rmm_version}, {native.path}"
    yield _ok("native library", value)

    cuda_major = version_numbers(native.cuda_version)[0]
    built, installed = version_numbers(native.rmm_version), environment.packages["librmm"]
    value = f"built with {native.rmm_version}, librmm {installed or 'not'} installed"
    if installed is not None and version_numbers(installed) == built:
        yield _ok("RMM versions match", value)
    else:
        why = "RMM's C++ interface changes between minor releases, so they must be the same"
        remedy = f"pip install 'rmm-cu{cuda_major}=={built[0]}.{built[1]:02d}.*'"
        yield _fail("RMM versions match", value, why, remedy)

    if environment.guard is not None:
        yield _guard(environment.guard)

    torch_cuda = environment.torch.cuda if environment.torch else None
    value = f"native {native.cuda_version}, torch {torch_cuda or 'without CUDA'}"
    if torch_cuda is None:
        # A torch without CUDA fails in its own section.
        yield _info("CUDA versions match", value)
    elif version_numbers(torch_cuda)[0] == cuda_major:
        yield _ok("CUDA versions match", value)
    else:
        why = "two major versions of CUDA's runtime do not share streams and memory"
        yield _fail("CUDA versions match", value, why, rebuild)


def _guard(guard: GuardLibrary) -> Check:
    if not guard.problem:
        return _ok("guard", guard.path)
    why = f"{guard.problem}; step() waits until its updates have ended"
    return _warn("guard", "none", why, guard.remedy)


def _torch(environment: Environment) -> Iterator[Check]:
    torch = environment.torch
    oldest, newest, below = dotted(OLDEST), dotted(NEWEST), dotted((NEWEST[0], NEWEST[1] + 1))
    install = environment.install_torch(f">={oldest},<{below}")
    if torch is None:
        yield _fail("torch", "cannot be loaded", environment.torch_error, install)
        return
    value, version = f"{torch.version} at {torch.path}", version_numbers(torch.version)
    if version < OLDEST:
        yield _fail("torch", value, f"umem needs torch {oldest} or newer", install)
    elif version > NEWEST:
        why = f"newer than the tested range, {oldest} to {newest}"
        yield _warn("torch", value, why, install)
    else:
        yield _ok("torch", value)

    reinstall = f"{install} --force-reinstall"
    if torch.cuda is None:
        why = "this build of torch cannot use an NVIDIA GPU"
        yield _fail("torch's CUDA", "none", why, reinstall)
        return
    yield _ok("torch's CUDA", torch.cuda)
    name = "allocator can be swapped"
    if torch.cuda_started:
        why = "torch takes another allocator only before its first CUDA call"
        remedy = "call umem.enable() before anything that touches CUDA, or use umem run"
        yield _fail(name, "no: CUDA has started in this process", why, remedy)
        return
    needed = [entry for entry in torch.missing if entry.need is Need.ENABLE]
    if needed:
        why = "; ".join(f"this torch lacks {entry.name}: {entry.without}" for entry in needed)
        yield _fail(name, "no", why, reinstall)
    elif torch.missing:
        names = ", ".join(f"{entry.name} ({entry.need})" for entry in torch.missing)
        yield _warn(name, "yes", f"some calls will fail without {names}", reinstall)
    else:
        yield _ok(name, "yes")


_NEEDED = ("librmm", "cuda-python", "numba")

_LIBRARIES = {
    "rmm": ("for sharing memory with numba and CuPy", ""),
    "librmm": ("the native library allocates through it", ""),
    "cuda-python": ("umem reads the machine through it", ""),
    "cupti-python": ("for telemetry", "telemetry"),
    "numba": ("the planner and the simulator are compiled by it", ""),
    "numba-cuda": ("for numba sharing", "numba"),
    "cupy": ("for CuPy sharing", ""),
    "transformers": ("for the fine-tuning example, --model", "examples"),
    "peft": ("for LoRA in both", "examples"),
    "accelerate": ("for find_executable_batch_size", "examples"),
}
"""Library -> its purpose, and the extra of umem that installs it."""


def _libraries(environment: Environment) -> Iterator[Check]:
    for name, (why, extra) in _LIBRARIES.items():
        version = environment.packages[name]
        command = install_command(extra) if extra else environment.install_umem
        if name == "cupy":
            command = environment.install_cupy
        if version is not None:
            yield _ok(name, version, why)
        elif name in _NEEDED:
            yield _fail(name, "not installed", why, command)
        else:
            yield _info(name, "not installed", why, command)


# GPUs.


def _gpus(environment: Environment) -> Iterator[Check]:
    if not environment.devices:
        yield _no_gpu(environment)
        return
    yield _driver(environment, environment.devices[0])
    for device in environment.devices:
        yield from _device(device)
    nodes = (
        f"{node.number}: {format_bytes(node.total_bytes)}{'' if node.has_cpus else ' without CPUs'}"
        for node in environment.devices[0].numa_nodes
    )
    yield _info("NUMA nodes", ", ".join(nodes) or "none")


def _no_gpu(environment: Environment) -> Check:
    why = environment.devices_error or "the driver sees no GPU"
    remedy = "nvidia-smi shows whether driver and GPU are there"
    hidden = environment.variables.get("CUDA_VISIBLE_DEVICES")
    if hidden is not None:
        why += f" (CUDA_VISIBLE_DEVICES={hidden!r})"
        remedy += "; unset CUDA_VISIBLE_DEVICES"
    if environment.packages["cuda-python"] is None:
        remedy = environment.install_umem
    return _fail("GPU", "none usable", why, remedy)


def _driver(environment: Environment, device: Capabilities) -> Check:
    release = device.driver_release or "unknown release"
    value = f"{release}, serves CUDA up to {dotted(device.driver_version)}"
    # "" in a library without CUDA, which has a check of its own.
    built = environment.native.cuda_version if environment.native else ""
    if device.driver_version[0] >= version_numbers(built)[0]:
        return _ok("driver", value)
    why = f"umem's native library is built for CUDA {built}"
    command = install_command("cuda12")
    remedy = f"update the driver to 580 or newer, or install for a CUDA 12 torch: {command}"
    return _fail("driver", value, why, remedy)


def _device(device: Capabilities) -> Iterator[Check]:
    gpu = f"GPU {device.device_index}"
    free = "" if device.free_bytes is None else f", {format_bytes(device.free_bytes)} free"
    kind = ", coherent with its CPU" if device.is_coherent else ""
    if device.integrated:
        kind = ", in one pool with its CPU's"
    yield _ok(
        gpu,
        f"{device.device_name}, compute capability {dotted(device.compute_capability)}, "
        f"{format_bytes(device.total_bytes)}{free}, {device.copy_engines} copy engines"
        f"{', Grace Hopper' if device.is_grace_hopper else kind}",
    )
    name = f"{gpu} managed memory"
    if not device.concurrent_managed_access:
        yield _warn(
            name,
            "no concurrent managed access",
            "policies with managed memory need it: without it pages cannot migrate while the GPU "
            "runs (WSL, some virtual GPUs, old GPUs)",
            "use sft, lora or inference, which need none; for the policy managed, bare-metal Linux "
            "or a passed-through GPU of compute capability 6.0 or newer",
        )
    else:
        yield _ok(name, "concurrent access")
    reached = "reached by migration (HMM)" if device.pageable_memory_access else "not reached"
    if device.ats:
        reached = "reached through the CPU's page tables (ATS)"
    host = "reaches" if device.direct_managed_access_from_host else "does not reach"
    yield _info(f"{gpu} pageable memory", reached, f"the CPU {host} pages on the device in place")
    link = "unknown: NVML does not say"
    if device.nvlink_c2c:
        link = "NVLink-C2C"
    elif device.pcie_link is not None:
        link = "PCIe {} x{}".format(*device.pcie_link)
    if device.host_numa_node is not None:
        link += f", nearest CPUs on node {device.host_numa_node}"
    yield _info(f"{gpu} link", link)
    yield _rates(f"{gpu} rates", device)


def _rates(name: str, device: Capabilities) -> Check:
    """What predictions for the device rest on."""
    try:
        machine = describe_machine(device, None)
    except HardwareError as error:
        remedy = f"correct the file, or measure again: {MEASURE}"
        return _fail(name, "this machine's profile cannot be read", str(error), remedy)
    if machine.rates == "unknown":
        why = "no profile has this device: umem fit and predictions give no seconds for it"
        return _warn(name, machine.rates, why, f"{MEASURE} (two minutes)")
    return _info(name, machine.rates, machine.description)


# Memory and limits.

_SMALL_SHM_BYTES = 1 << 30
"""Below this, DataLoader workers run out of shared memory; containers start with 64 MiB."""

_HOST_SHARE = 0.8
"""Share of the available host memory that the advised limit allows to managed memory."""


def _limits(environment: Environment) -> Iterator[Check]:
    host = environment.host
    yield from _device_budgets(environment)
    yield _host_memory(environment)
    if host.memory is not None:
        yield _host_limit(host.memory.limit)
        share = share_of(host.memory, environment.variables, 1 + host.processes)
        yield _host_share(share)
        yield from _page_locked(share, environment)
    yield from _nodes_of_pinned(environment)
    why = "DataLoader workers hand batches over it"
    if host.shm_bytes is None:
        yield _warn("/dev/shm", "missing", why)
    elif host.shm_bytes < _SMALL_SHM_BYTES:
        remedy = "docker run --shm-size=8g (or --ipc=host)"
        yield _warn("/dev/shm", format_bytes(host.shm_bytes), why, remedy)
    else:
        yield _ok("/dev/shm", format_bytes(host.shm_bytes))


def _device_budgets(environment: Environment) -> Iterator[Check]:
    """What the budget of each GPU would be now, under the policy of the environment or sft."""
    name = environment.variables.get("UMEM_POLICY", "sft")
    for device in environment.devices or ():
        try:
            resolved = resolve(
                load_policy(name),
                describe_machine(device, None),
                environment.variables,
                free_bytes=device.free_bytes,
            )
        except (HardwareError, PolicyError):  # a check of its own says why
            return
        budget = resolved.device_budget_bytes
        value = "none" if budget is None else format_bytes(budget)
        why = resolved.budget_reason
        yield _info(f"GPU {device.device_index} device budget, policy {name}", value, why)


def _nodes_of_pinned(environment: Environment) -> Iterator[Check]:
    """Where page-locked memory lies, on a host with several nodes."""
    for device in environment.devices or ():
        near, name = device.host_numa_node, f"page-locked memory for GPU {device.device_index}"
        if near is None or sum(node.has_cpus for node in device.numa_nodes) < 2:
            continue
        if environment.host.chooses_nodes:
            yield _ok(name, f"on NUMA node {near}, nearest to it")
        else:
            why = "the kernel forbids choosing a NUMA node (seccomp), and a farther one is slower"
            remedy = f"docker run --cap-add SYS_NICE, or numactl --membind={near} outside"
            yield _warn(name, "on any NUMA node", why, remedy)


def _host_limit(limit: MemoryLimit | None) -> Check:
    if limit is None:
        return _info("host memory limit", "the machine's own")
    return _info(
        "host memory limit",
        f"{limit.path}: {format_bytes(limit.limit_bytes)}",
        f"less {format_bytes(limit.used_bytes)} in use, and {format_bytes(limit.cache_bytes)} of "
        f"that is files the kernel can drop: {format_bytes(limit.available_bytes)}",
    )


def _page_locked(share: HostShare, environment: Environment) -> Iterator[Check]:
    pools = [device for device in environment.devices or () if device.integrated]
    if pools:
        why = "the GPU's memory is the host's: a copy between them would gain nothing"
        yield _info("page-locked memory", "none", why)
        group = environment.host.memory and environment.host.memory.limit
        if group:
            yield _warn(
                "control group and GPU memory",
                f"{format_bytes(group.limit_bytes)} by {group.path}",
                "the kernel does not count GPU memory in a group, so that the limit does not bound "
                "it; umem's budget does",
                "export UMEM_DEVICE_BUDGET=SIZE for less than the budget above",
            )
        return
    limit_bytes = int(PINNED_SHARE * share.share_bytes)
    why = f"{100 * PINNED_SHARE:.0f} % of {format_bytes(share.share_bytes)}, its share"
    if share.ranks > 1 and not share.source:
        limit_bytes = share.left_bytes
        rest_bytes = int(share.total_bytes * (1.0 - PINNED_SHARE))
        why = (
            f"{format_bytes(share.available_bytes)}, less "
            f"{100 * (1.0 - PINNED_SHARE):.0f} % of the host, {format_bytes(rest_bytes)}, "
            f"by {share.ranks}"
        )
    limit = f"at most {format_bytes(limit_bytes)} for a process"
    yield _info("page-locked memory", limit, why)


def _host_share(share: HostShare) -> Check:
    why = f"{format_bytes(share.available_bytes)} available"
    if share.ranks > 1:
        how = share.source or "those of yours that are under umem, and the next one"
        why += f", divided among {share.ranks} processes ({how})"
    return _info("host memory share", format_bytes(share.share_bytes), why)


def _host_memory(environment: Environment) -> Check:
    host, name = environment.host.memory, "host memory"
    if host is None:
        return _warn(name, "unknown", "/proc/meminfo cannot be read")
    value = f"{format_bytes(host.total_bytes)}, {format_bytes(host.available_bytes)} available"
    if host.other_nodes_bytes:
        other = format_bytes(host.other_nodes_bytes)
        value += f", without {other} on NUMA nodes of GPUs or closed to this process"
    # On a coherent machine, and in one pool, the GPU's own memory is part of the host's: nothing to
    # compare.
    cards = [
        device.total_bytes
        for device in environment.devices or ()
        if not device.is_coherent and not device.integrated
    ]
    if any(device.integrated for device in environment.devices or ()):
        value += ", the GPU's memory included: they share one pool"
    largest_bytes = max(cards, default=0)
    if host.available_bytes >= largest_bytes:
        return _ok(name, value)
    limit_bytes = _managed_limit_bytes(environment.variables)
    if limit_bytes is not None and limit_bytes <= host.available_bytes:
        return _ok(name, f"{value}; UMEM_MANAGED_LIMIT keeps within it")
    advised_gib = max(1, int(host.available_bytes * _HOST_SHARE) >> 30)
    why = (
        f"less than a card's {format_bytes(largest_bytes)}: pages evicted from a full card "
        "would find no room, and the machine can hang"
    )
    return _warn(name, value, why, f"export UMEM_MANAGED_LIMIT={advised_gib}GiB")


def _managed_limit_bytes(variables: Mapping[str, str]) -> int | None:
    """UMEM_MANAGED_LIMIT; None if unset, or unusable, which its own check reports."""
    try:
        return parse_bytes(variables["UMEM_MANAGED_LIMIT"])
    except (KeyError, ValueError):
        return None


# Settings: umem's environment variables, and those of CUDA and torch that matter to umem.

_UMEM_VARIABLES = (
    "UMEM_POLICY",
    "UMEM_MANAGED_LIMIT",
    "UMEM_DEVICE_BUDGET",
    "UMEM_PLANNER",
    "UMEM_LOG",
    "UMEM_COMMIT",
    "UMEM_WITHOUT",
    "UMEM_POISON",
)

_ANY_MACHINE = "h200"
"""Percentages are checked against a card's memory; without a card, against that of this profile."""

_WITHOUT_EFFECT = "torch's own allocator reads it; under the swap it has no effect"

_HARMFUL_VARIABLES = {
    "PYTORCH_ALLOC_CONF": _WITHOUT_EFFECT,
    "PYTORCH_CUDA_ALLOC_CONF": _WITHOUT_EFFECT,
    "PYTORCH_NO_CUDA_MEMORY_CACHING": "torch's own allocator reads it; umem caches all the same",
    "CUDA_LAUNCH_BLOCKING": "kernels run one by one, so that no migration hides behind computation",
    "CUDA_MANAGED_FORCE_DEVICE_ALLOC": "managed memory is kept on the device, and never evicted",
}
"""Name -> the harm of setting it."""


def _settings(environment: Environment) -> Iterator[Check]:
    # UMEM_CUDA is read when umem is built.
    variables = {name: it for name, it in environment.variables.items() if name != "UMEM_CUDA"}
    if not variables:
        yield _info("environment variables", "none set")
    for name, value in variables.items():
        if name.startswith("UMEM_"):
            yield _umem_variable(name, value, environment)
        elif name in _HARMFUL_VARIABLES and value not in ("", "0"):
            yield _warn(name, value, _HARMFUL_VARIABLES[name], f"unset {name}")
        else:
            yield _info(name, value)


def _umem_variable(name: str, value: str, environment: Environment) -> Check:
    if name not in _UMEM_VARIABLES:
        near = difflib.get_close_matches(name, _UMEM_VARIABLES, n=1)
        remedy = f"use {near[0]}" if near else f"umem reads {', '.join(_UMEM_VARIABLES)}"
        return _warn(name, value, "umem reads no such variable", remedy)
    devices = environment.devices
    try:
        if name == "UMEM_POLICY":
            load_policy(value)
        elif name == "UMEM_LOG":
            parse_log_level(value)
        else:
            check_environment({name: value})
            machine = describe_machine(devices[0], None) if devices else load_hardware(_ANY_MACHINE)
            resolve(load_policy("managed"), machine, {name: value})
    except PolicyError as error:
        return _fail(name, value, str(error), f"correct it, or unset {name}")
    except HardwareError:  # the profile's own check says why
        pass
    return _ok(name, value)
