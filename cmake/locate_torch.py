"""Print, as JSON, the torch installations that the guard is built for, one for each minor version.

Usage: ``python locate_torch.py auto|none|FOLDER[;FOLDER...]``. A folder is one that holds the package
``torch``, such as ``site-packages``. Nothing is imported: in an isolated build torch is not on the
import path, but the interpreter still says which environment pip installs into.
"""

from __future__ import annotations

import importlib.util
import json
import re
import site
import sys
import sysconfig
from pathlib import Path

LIBRARIES = ("c10", "torch_cpu", "torch_python")


def environment_folders() -> list[Path]:
    """Folders where the interpreter's environment keeps packages, the first with torch first."""
    # Without isolation the import path decides; it also has folders of path files.
    spec = importlib.util.find_spec("torch")
    folders = [Path(spec.origin).parents[1]] if spec is not None and spec.origin else []
    if sys.prefix == sys.base_prefix:  # no virtual environment
        folders.append(Path(site.getusersitepackages()))
    folders += map(Path, (sysconfig.get_path("purelib"), sysconfig.get_path("platlib")))
    return folders + [Path(folder) for folder in site.getsitepackages()]


def locate(folder: Path) -> dict[str, str]:
    """What CMake needs to know of the torch in a folder; empty where there is none to build for."""
    package = folder / "torch"
    about = package / "version.py"
    version = re.search(r"^__version__ = '((\d+)\.(\d+).*)'$", text_of(about), re.MULTILINE)
    # Conda keeps headers and libraries beside those of its other packages.
    roots = [root for root in (package, Path(sys.prefix)) if (root / "include/ATen").is_dir()]
    if version is None or not roots:
        return {}
    include, lib = roots[0] / "include", roots[0] / "lib"
    libraries = [lib / f"lib{name}.so" for name in LIBRARIES]
    if not all(library.is_file() for library in libraries):
        return {}
    config = text_of(roots[0] / "share/cmake/Torch/TorchConfig.cmake")
    flags = re.search(r'^\s*set\(TORCH_CXX_FLAGS "(.+)"\)$', config, re.MULTILINE)
    return {
        "version": version[1],
        "minor": f"{version[2]}_{version[3]}",
        "include": f"{include};{include}/torch/csrc/api/include",
        "libraries": ";".join(map(str, libraries)),
        "flags": flags[1] if flags else "",
    }


def text_of(path: Path) -> str:
    """Text of a file; "" where there is none."""
    return path.read_text() if path.is_file() else ""


def locate_all(choice: str) -> list[dict[str, str]]:
    """One installation for each minor version; raises ``SystemExit`` for a folder without torch."""
    if choice == "none":
        return []
    if choice == "auto":
        found = [torch for torch in map(locate, environment_folders()) if torch]
        return found[:1]
    by_minor: dict[str, dict[str, str]] = {}
    for name in filter(None, choice.split(";")):
        torch = locate(Path(name).expanduser())
        if not torch:
            sys.exit(f"UMEM_TORCH: {name} holds no torch with headers and libraries")
        by_minor.setdefault(torch["minor"], torch)
    return list(by_minor.values())


if __name__ == "__main__":
    print(json.dumps(locate_all(sys.argv[1])))
