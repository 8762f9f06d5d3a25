"""Loading a machine: a profile, or the machine at hand described by what its driver reports."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

from umem.core.errors import HardwareError, UmemError
from umem.core.units import parse_bytes
from umem.hardware import capabilities
from umem.hardware.capabilities import Capabilities
from umem.hardware.cards import CARDS
from umem.hardware.host_memory import host_memory
from umem.hardware.model import Hardware, Source, quantity_of, rates_of
from umem.hardware.profile import load_profile
from umem.io.cache import config_folder

__all__ = [
    "MEASURE",
    "describe_machine",
    "detect_hardware",
    "load_hardware",
    "measured_profile",
    "nearest_card",
]

MEASURE = "umem hardware measure"
"""The command that measures the machine at hand."""


def load_hardware(source: str | os.PathLike[str] | Hardware | Mapping[str, Any]) -> Hardware:
    """Load a hardware profile, merged with the profiles that it extends.

    Parameters
    ----------
    source
        The name of a profile (:func:`hardware_names`); ``detect`` for this machine, as
        :func:`detect_hardware`; the path of a YAML file, which as a string ends in ``.yaml`` or
        ``.yml`` or holds a ``/``; a mapping with the keys of such a file; or a :class:`Hardware`,
        which is returned as it is.

    Raises
    ------
    HardwareError
        If there is no such profile or file, or it is no valid profile. The message has one line for
        each problem: file, line, column, key, the error and the remedy.
    TypeError
        If `source` is none of these.

    Examples
    --------
    >>> load_hardware("h200").to_device_bytes_per_s
    51000000000.0
    """
    if isinstance(source, Hardware):
        return source
    if source == "detect":
        return detect_hardware()
    return load_profile(source)


# The machine at hand: its own measured figures, those of its card, or those of the nearest card.

_SAME_MEMORY = 0.1
"""Devices of one name count as the same up to this relative difference of their memories."""

# Transfers per second of a lane, times the share of its bits that is payload (PCI Express Base
# Specification: 8b/10b, then 128b/130b, then 242 of 256 bytes of a flit).
_LANE_BITS_PER_S = {1: 2e9, 2: 4e9} | {
    3: 8e9 * 128 / 130,
    4: 16e9 * 128 / 130,
    5: 32e9 * 128 / 130,
    6: 64e9 * 242 / 256,
}

_LINK_FIGURES = (
    "to_device_bytes_per_s",
    "link_bytes_per_s",
    "copy_to_device_bytes_per_s",
    "copy_to_host_bytes_per_s",
    "copy_link_bytes_per_s",
    "mapped_read_bytes_per_s",
    "mapped_write_bytes_per_s",
    "mapped_bytes_per_s",
)
"""Figures in proportion to the link's bandwidth. ``to_host_bytes_per_s`` is not: the host limits
it."""


def detect_hardware(device: int = 0) -> Hardware:
    """Describe this machine, without starting CUDA in this process.

    Memory, ATS and whether there is one pool are this machine's, with the source "detected". The
    rest is what ``umem hardware measure`` found here or, without that, the profile of the device,
    with the link's figures in proportion to this machine's link. The rates of a device that has
    neither are unknown: those of the nearest profile stand in for them.

    `device` is an ordinal among the devices that this process sees; ``HardwareError`` where there
    is no such GPU: choose a profile then.
    """
    try:
        found = capabilities.detect(device)
    except UmemError as error:
        raise HardwareError(
            f"this machine has no GPU {device} to describe ({error}): choose a profile "
            "(`umem hardware list`)"
        ) from error
    host = host_memory()
    return describe_machine(found, None if host is None else host.total_bytes)


def describe_machine(
    machine: Capabilities, host_bytes: int | None, *, measured: bool = True
) -> Hardware:
    """Describe a machine by its capabilities and, where it is known, its host memory.

    Figures that are neither detected nor of the same device are marked as assumptions. Without
    `measured`, what ``umem hardware measure`` found counts for nothing.
    """
    profile, about = _profile_of(machine, measured)
    sources = dict(profile.sources)
    values: dict[str, Any] = {
        "device_bytes": machine.total_bytes,
        "ats": machine.ats,
        "one_pool": machine.integrated,
    }
    if machine.integrated:
        values["host_bytes"] = 0
    elif host_bytes is not None:
        # The kernel of a Grace Hopper counts the GPU's memory, a node without CPUs, as the host's.
        nodes = [node.total_bytes for node in machine.numa_nodes if node.has_cpus]
        values["host_bytes"] = min(host_bytes, sum(nodes)) if nodes else host_bytes
    sources |= dict.fromkeys(values, Source("detected", False))
    return replace(
        profile,
        name=machine.device_name,
        description=f"This machine{_link_of(machine)}; {about}",
        sources=MappingProxyType(sources),
        **values,
    )


def _profile_of(machine: Capabilities, measured: bool) -> tuple[Hardware, str]:
    """Figures for a machine, and where they come from."""
    path = measured_profile(machine.device_name)
    if measured and os.path.isfile(path):
        found = load_profile(path)
        if _has_memory(machine, found.device_bytes):
            return found, f"figures that were not detected were measured here ({path})"
    name = nearest_card(machine)
    profile = _on_link(load_profile(name), machine)
    if _is_card(machine, name):
        return profile, f"figures that were not detected are {name}'s"
    sources = {
        figure: Source(f"as {name}, nearest: {source.text}", True)
        for figure, source in profile.sources.items()
    }
    about = f"no profile has its rates: `{MEASURE}` measures them; {name}'s stand in for them"
    return replace(profile, sources=sources, rates="unknown"), about


def measured_profile(device_name: str) -> Path:
    """The file in which ``umem hardware measure`` keeps the figures of a device on this machine.

    It is below ``$XDG_CONFIG_HOME``, or ``~/.config``.
    """
    stem = re.sub(r"[^a-z0-9]+", "-", device_name.lower()).strip("-")
    return config_folder("hardware") / f"{stem}.yaml"


def nearest_card(machine: Capabilities) -> str:
    """Name of the device's own profile, or of the one with such a link and nearest memory."""
    links: tuple[str, ...] = ("PCIe",)
    if machine.integrated:
        links = ("one pool",)
    elif machine.is_coherent or machine.is_grace_hopper:
        links = ("NVLink-C2C", "half of")
    of_kind = [name for name, card in CARDS.items() if card.link.startswith(links)]
    own = [name for name in CARDS if _is_card(machine, name)]
    return min(
        own or of_kind,
        key=lambda name: abs(parse_bytes(CARDS[name].memory) - machine.total_bytes),
    )


def _is_card(machine: Capabilities, name: str) -> bool:
    is_called_so = re.fullmatch(CARDS[name].device_name, machine.device_name) is not None
    return is_called_so and _has_memory(machine, parse_bytes(CARDS[name].memory))


def _has_memory(machine: Capabilities, size_bytes: int) -> bool:
    return abs(machine.total_bytes - size_bytes) <= _SAME_MEMORY * size_bytes


def _link_of(machine: Capabilities) -> str:
    """Name of a machine's link, after a comma; empty if it is unknown or there is none."""
    if machine.integrated:
        return ", one pool of memory"
    if machine.nvlink_c2c:
        return ", NVLink-C2C"
    return ", PCIe {} x{}".format(*machine.pcie_link) if machine.pcie_link else ""


def _on_link(profile: Hardware, machine: Capabilities) -> Hardware:
    """A profile with the figures of its PCIe link in proportion to the machine's link."""
    theirs = re.fullmatch(r"PCIe (\d+) x(\d+)", CARDS[profile.name].link)
    link = machine.pcie_link
    if theirs is None or link is None or link[0] not in _LANE_BITS_PER_S:
        return profile
    generation, lanes = map(int, theirs.groups())
    factor = _LANE_BITS_PER_S[link[0]] * link[1] / (_LANE_BITS_PER_S[generation] * lanes)
    if factor == 1.0:
        return profile
    values = {name: getattr(profile, name) * factor for name in _LINK_FIGURES}
    values["to_host_bytes_per_s"] = min(
        profile.to_host_bytes_per_s, values["to_device_bytes_per_s"]
    )
    sources = dict(profile.sources)
    for name in values:
        there = quantity_of(name).format(getattr(profile, name))
        text = f"{there} of {profile.name} behind {theirs[0]}, scaled to {_link_of(machine)[2:]}"
        sources[name] = Source(text, True)
    return replace(profile, sources=sources, rates=rates_of(sources), **values)
