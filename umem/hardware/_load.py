"""Loading a profile by name, from a file or from a mapping."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from umem.config import UnusableError, read, shipped_dir, shipped_names
from umem.errors import HardwareError
from umem.hardware._model import Hardware
from umem.hardware._profile import HARDWARE, build

__all__ = ["hardware_dir", "hardware_names", "load_hardware"]

_THIS_MACHINE = "detect"


def load_hardware(source: str | os.PathLike[str] | Hardware | Mapping[str, Any]) -> Hardware:
    """Load a hardware profile and whatever it extends.

    Parameters
    ----------
    source
        The name of a profile (:func:`hardware_names`); ``detect`` for this machine, as
        :meth:`Hardware.detect`; the path of a YAML file, which as a string ends in ``.yaml`` or
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
    if source == _THIS_MACHINE:
        return Hardware.detect()
    try:
        return build(read(source, HARDWARE))
    except UnusableError as error:
        raise HardwareError("\n".join(map(str, error.problems))) from None


def hardware_names() -> tuple[str, ...]:
    """Names of the hardware profiles that come with umem, sorted.

    Raises
    ------
    HardwareError
        If they are missing.
    """
    return shipped_names(HARDWARE)


def hardware_dir() -> Path:
    """Folder of these profiles: inside the installed package, else in the source checkout.

    Raises
    ------
    HardwareError
        If neither exists.
    """
    return shipped_dir(HARDWARE)
