"""The commands that install an extra of umem or build it again, for remedies."""

from __future__ import annotations

import json
import os
from functools import cache

__all__ = ["build_command", "install_command"]


def install_command(extra: str, *, builds: bool = False) -> str:
    """Write the command that installs umem again, from the same place, with an extra.

    Where the folder or wheel that umem came from is not known, or is gone, the command is one for a
    checkout, and says so. With `builds` it is, too, where umem came from a wheel, which holds what
    is there already. pip builds a folder again each time.
    """
    editable, place = _origin()
    if builds and not os.path.isdir(place):
        place = ""
    build = "UMEM_CUDA=12 " if extra == "cuda12" else ""
    command = f"{build}pip install {editable}'{place or '.'}[{extra}]'"
    return command if place else f"{command} in a checkout of umem"


def build_command(extra: str) -> str:
    """Write the command that builds umem again from its sources, and leaves its dependencies alone.

    Where umem came from a wheel, which holds what is there already, the command is one for a
    checkout.
    """
    editable, place = _origin()
    build = "UMEM_CUDA=12 " if extra == "cuda12" else ""
    options = "--force-reinstall --no-deps --no-cache-dir"
    if os.path.isdir(place):
        return f"{build}pip install {options} {editable}'{place}'"
    return f"{build}pip install {options} . in a checkout of umem"


@cache
def _origin() -> tuple[str, str]:
    """Pip's option for an editable installation, and the path of a folder or wheel; or both empty.

    pip and others note them in ``direct_url.json`` (PEP 610), except for a package of an index.
    """
    # Here, because they load what speaks HTTP, and every command imports this module.
    from importlib import metadata
    from urllib.parse import urlsplit
    from urllib.request import url2pathname

    try:
        noted = metadata.distribution("umem").read_text("direct_url.json")
    except metadata.PackageNotFoundError:
        return "", ""
    origin = json.loads(noted or '{"url": ""}')
    url = urlsplit(origin["url"])
    path = url2pathname(url.path)
    if url.scheme != "file" or not os.path.exists(path):
        return "", ""
    return "--editable " if origin.get("dir_info", {}).get("editable") else "", path
