"""Recordings from files, whoever made them."""

from __future__ import annotations

import os

from umem.errors import UmemError
from umem.telemetry._file import load_recording
from umem.telemetry._nsys import is_nsys_export, read_nsys
from umem.telemetry._recording import Recording

__all__ = ["read_recording"]

_REPORT_ENDINGS = (".nsys-rep", ".qdrep")


def read_recording(path: str | os.PathLike[str]) -> Recording:
    """Read what :meth:`umem.telemetry.Profile.save` or ``nsys export --type sqlite`` wrote.

    Parameters
    ----------
    path
        Told apart by its content. It may come from a stranger.

    Raises
    ------
    UmemError
        If it is neither, or cannot be read; the message names file, place and remedy.
    """
    place = os.fspath(path)
    if place.endswith(_REPORT_ENDINGS):
        raise UmemError(
            f"{place}: a report of Nsight Systems, which only it can read: export it with "
            f"`nsys export --type sqlite {os.path.basename(place)}` and give the result"
        )
    return read_nsys(path) if is_nsys_export(path) else load_recording(path)
