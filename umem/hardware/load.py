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
from umem.hardware.capabilities import Capabilities, host_memory_bytes
from umem.hardware.model import FIGURES, Hardware, Source, quantity_of
from umem.hardware.profile import hardware_names, load_profile

__all__ = ["describe_machine", "detect_hardware", "load_hardware"]


def load_hardware(source: str | os.PathLike[str] | Hardware | Mapping[str, Any]) -> Hardware:
    """Load a hardware profile and whatever it extends.

    Parameters
    ----------
    source
        The name of a profile (:func:`hardware_names`); ``detect`` for this machine, as
        :func:`detect_hardware`; the path of a YAML file, which as a string ends in ``.yaml`` or
        ``.yml`` or holds a ``/``; a mapping with the keys of such a file; or a :class:`Hardware`,
        which is returned as it is.

    Returns
    -------
    Hardware

    Raises
    ------
    HardwareError
        If there is no such profile or file, or it is no valid profile. The message has one line for
        each problem: file, line, column, key, what is wrong and what to do.
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


# This machine as hardware: what can be read is read, and the rest is the nearest profile's.


class _Relative(NamedTuple):
    """A profile that other machines are described by."""

    profile: str
    device_name: str
    """Regular expression of the device that the profile is of."""
    pcie: tuple[int, int] | None
    """The link that its figures hold for: (generation, lanes), or None for NVLink-C2C."""


_GRACE = (_Relative("gh200-96", r".*GH200.*", None), _Relative("gh200-144", r".*GH200.*", None))
_HOPPER = _Relative("h200-pcie", r"NVIDIA H200", (5, 16))
_AMPERE = _Relative("a100-40-pcie", r"NVIDIA A100-PCIE-40GB", (4, 16))

_SAME_MEMORY = 0.1
"""Devices of one name are the same where their memories differ by no more than this share."""

# Transfers per second of a lane, times the share of its bits that is payload (PCI Express Base
# Specification: 8b/10b, then 128b/130b, then 242 of 256 bytes of a flit).
_LANE_BYTES_PER_S = {
    1: 2.5e9 * 8 / 10 / 8,
    2: 5e9 * 8 / 10 / 8,
    3: 8e9 * 128 / 130 / 8,
    4: 16e9 * 128 / 130 / 8,
    5: 32e9 * 128 / 130 / 8,
    6: 64e9 * 242 / 256 / 8,
}

_OF_THE_LINK = (
    "to_device_bytes_per_s",
    "link_bytes_per_s",
    "copy_to_device_bytes_per_s",
    "copy_to_host_bytes_per_s",
    "mapped_read_bytes_per_s",
    "mapped_write_bytes_per_s",
    "mapped_bytes_per_s",
)
"""What follows the link's bandwidth. Moving pages to the host does not: the host bounds it."""


def detect_hardware(device: int = 0) -> Hardware:
    """Describe this machine, without starting CUDA in this process.

    Parameters
    ----------
    device : int
        Ordinal among the devices that this process sees.

    Returns
    -------
    Hardware
        Memory, link and ATS are this machine's, with the source "detected"; the rest is that of
        the nearest profile.

    Raises
    ------
    HardwareError
        Where there is no such GPU; choose a profile then.

    Examples
    --------
    >>> detect_hardware().device_bytes  # doctest: +SKIP
    150109880320
    """
    try:
        found = capabilities.detect(device)
    except UmemError as error:
        raise HardwareError(
            f"this machine has no GPU {device} to describe ({error}): choose a profile, one of "
            f"{', '.join(hardware_names())}"
        ) from error
    host = host_memory_bytes()
    return describe_machine(found, None if host is None else host[0])


def describe_machine(machine: Capabilities, host_bytes: int | None) -> Hardware:
    """Describe a machine by its capabilities.

    Parameters
    ----------
    machine
        From :func:`umem.hardware.capabilities.detect`.
    host_bytes
        Host memory that this process may use; None where the kernel does not say.

    Returns
    -------
    Hardware
        Figures that are neither read here nor of the same device are assumptions.
    """
    relative = _nearest(machine)
    profile = load_hardware(relative.profile)
    same = re.fullmatch(relative.device_name, machine.device_name) is not None and (
        abs(machine.total_bytes - profile.device_bytes) <= _SAME_MEMORY * profile.device_bytes
    )
    sources = dict(profile.sources)
    if not same:
        for name, source in sources.items():
            sources[name] = Source(f"as {relative.profile}, nearest: {source.text}", True)
    values: dict[str, Any] = {
        "device_bytes": machine.total_bytes,
        "ats": machine.ats,
    }
    if host_bytes is not None:
        values["host_bytes"] = _host_bytes(machine, host_bytes)
    sources |= {name: Source("detected", False) for name in values}
    linked, link_sources = _link(machine, relative, profile, sources)
    return replace(
        profile,
        name=machine.device_name,
        description=f"This machine; what was not detected is {relative.profile}'s",
        sources=MappingProxyType(sources | link_sources),
        **(values | linked),
    )


def _nearest(machine: Capabilities) -> _Relative:
    if machine.is_coherent or machine.is_grace_hopper:
        return min(
            _GRACE,
            key=lambda one: abs(load_hardware(one.profile).device_bytes - machine.total_bytes),
        )
    return _HOPPER if machine.compute_capability >= (9, 0) else _AMPERE


def _host_bytes(machine: Capabilities, host_bytes: int) -> int:
    # The kernel of a Grace Hopper counts the GPU's memory, a node without CPUs, as the host's.
    nodes = [node.total_bytes for node in machine.numa_nodes if node.has_cpus]
    return min(host_bytes, sum(nodes)) if nodes else host_bytes


def _link(
    machine: Capabilities, relative: _Relative, profile: Hardware, sources: dict[str, Source]
) -> tuple[dict[str, float], dict[str, Source]]:
    """Figures of this machine's link with their sources; none where the link is not known."""
    moving = (*_OF_THE_LINK, "to_host_bytes_per_s")
    if relative.pcie is None:
        if machine.nvlink_c2c is not True:
            return {}, {}
        return {}, {name: _detected("NVLink-C2C", sources[name]) for name in moving}
    if machine.pcie_link is None or machine.pcie_link[0] not in _LANE_BYTES_PER_S:
        return {}, {}
    link = "PCIe {} x{}".format(*machine.pcie_link)
    if machine.pcie_link == relative.pcie:
        return {}, {name: _detected(link, sources[name]) for name in moving}
    scale = _pcie_bytes_per_s(machine.pcie_link) / _pcie_bytes_per_s(relative.pcie)
    values = {name: getattr(profile, name) * scale for name in _OF_THE_LINK}
    values["to_host_bytes_per_s"] = min(
        profile.to_host_bytes_per_s, values["to_device_bytes_per_s"]
    )
    theirs = "PCIe {} x{}".format(*relative.pcie)
    return values, {
        name: Source(
            f"detected: {link}; {quantity_of(name).format(getattr(profile, name))} of "
            f"{relative.profile} behind {theirs}, scaled to it",
            True,
        )
        for name in FIGURES
        if name in moving
    }


def _detected(link: str, source: Source) -> Source:
    return Source(f"detected: {link}; {source.text}", source.assumption)


def _pcie_bytes_per_s(link: tuple[int, int]) -> float:
    generation, lanes = link
    return _LANE_BYTES_PER_S[generation] * lanes
