"""Loading a machine: a profile, or the machine at hand described by what its driver reports."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Any, NamedTuple

from umem.core.errors import HardwareError, UmemError
from umem.hardware import capabilities
from umem.hardware.capabilities import Capabilities
from umem.hardware.host_memory import host_memory
from umem.hardware.model import Hardware, Source, quantity_of
from umem.hardware.profile import hardware_names, load_profile

__all__ = ["describe_machine", "detect_hardware", "load_hardware"]


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
    >>> load_hardware("h200-pcie").to_device_bytes_per_s
    51000000000.0
    """
    if isinstance(source, Hardware):
        return source
    if source == "detect":
        return detect_hardware()
    return load_profile(source)


# The machine at hand: figures are detected, or else those of the nearest profile.


class _Reference(NamedTuple):
    """A profile from which other machines are described."""

    profile: str
    device_name: str
    """Regular expression of the device that the profile describes."""
    pcie: tuple[int, int] | None
    """The link that its figures are of: (generation, lanes), or None for NVLink-C2C."""


_GRACE = (_Reference("gh200-96", r".*GH200.*", None), _Reference("gh200-144", r".*GH200.*", None))
_HOPPER = (
    _Reference("h100-pcie", r"NVIDIA H100 80GB HBM3", (5, 16)),
    _Reference("h200-pcie", r"NVIDIA H200", (5, 16)),
)
_AMPERE = (_Reference("a100-40-pcie", r"NVIDIA A100-PCIE-40GB", (4, 16)),)

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

    Memory, link and ATS are this machine's, with the source "detected"; the rest is that of the
    nearest profile. `device` is an ordinal among the devices that this process sees;
    ``HardwareError`` where there is no such GPU: choose a profile then.
    """
    try:
        found = capabilities.detect(device)
    except UmemError as error:
        raise HardwareError(
            f"this machine has no GPU {device} to describe ({error}): choose a profile, one of "
            f"{', '.join(hardware_names())}"
        ) from error
    host = host_memory()
    return describe_machine(found, None if host is None else host.total_bytes)


def describe_machine(machine: Capabilities, host_bytes: int | None) -> Hardware:
    """Describe a machine by its capabilities and, where it is known, its host memory.

    Figures that are neither detected nor of the same device are marked as assumptions.
    """
    reference = _nearest(machine)
    profile = load_hardware(reference.profile)
    same = re.fullmatch(reference.device_name, machine.device_name) is not None and (
        abs(machine.total_bytes - profile.device_bytes) <= _SAME_MEMORY * profile.device_bytes
    )
    sources = dict(profile.sources)
    if not same:
        for name, source in sources.items():
            sources[name] = Source(f"as {reference.profile}, nearest: {source.text}", True)
    values: dict[str, Any] = {"device_bytes": machine.total_bytes, "ats": machine.ats}
    if host_bytes is not None:
        # The kernel of a Grace Hopper counts the GPU's memory, a node without CPUs, as the host's.
        nodes = [node.total_bytes for node in machine.numa_nodes if node.has_cpus]
        values["host_bytes"] = min(host_bytes, sum(nodes)) if nodes else host_bytes
    sources |= dict.fromkeys(values, Source("detected", False))
    link = _link_of(machine, reference)
    if link:
        for name in (*_LINK_FIGURES, "to_host_bytes_per_s"):
            sources[name] = Source(
                f"detected: {link}; {sources[name].text}", sources[name].assumption
            )
    if link and reference.pcie and machine.pcie_link != reference.pcie:
        scaled = _scaled(profile, machine.pcie_link, reference.pcie)
        theirs = "{} behind PCIe {} x{}".format(reference.profile, *reference.pcie)
        for name in scaled:
            there = quantity_of(name).format(getattr(profile, name))
            sources[name] = Source(f"detected: {link}; {there} of {theirs}, scaled to it", True)
        values |= scaled
    return replace(
        profile,
        name=machine.device_name,
        description=f"This machine; figures that were not detected are {reference.profile}'s",
        sources=MappingProxyType(sources),
        **values,
    )


def _nearest(machine: Capabilities) -> _Reference:
    known: tuple[_Reference, ...] = _AMPERE
    if machine.is_coherent or machine.is_grace_hopper:
        known = _GRACE
    elif machine.compute_capability >= (9, 0):
        known = _HOPPER
    return min(
        known, key=lambda one: abs(load_hardware(one.profile).device_bytes - machine.total_bytes)
    )


def _link_of(machine: Capabilities, reference: _Reference) -> str:
    """Name of the link of this machine that corresponds to the reference's; empty if unknown."""
    if reference.pcie is None:
        return "NVLink-C2C" if machine.nvlink_c2c else ""
    if machine.pcie_link is None or machine.pcie_link[0] not in _LANE_BITS_PER_S:
        return ""
    return "PCIe {} x{}".format(*machine.pcie_link)


def _scaled(profile: Hardware, link: Any, theirs: tuple[int, int]) -> dict[str, float]:
    """Figures of a profile's PCIe link, for another link of (generation, lanes)."""
    here, there = (_LANE_BITS_PER_S[generation] * lanes for generation, lanes in (link, theirs))
    values = {name: getattr(profile, name) * (here / there) for name in _LINK_FIGURES}
    to_host = min(profile.to_host_bytes_per_s, values["to_device_bytes_per_s"])
    return values | {"to_host_bytes_per_s": to_host}
