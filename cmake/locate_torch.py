"""Print, as JSON, the torch installations that the guard is built for, one for each minor version.

Usage: ``python locate_torch.py auto|none|FOLDER[;FOLDER...]``. A folder is one that holds the
package ``torch``, such as ``site-packages``; wildcards name several. Nothing is imported: in an
isolated build torch is not on the import path, but the interpreter still says which environment pip
installs into.
"""

from __future__ import annotations

import glob
import importlib.util
import json
import os
import re
import site
import sys
import sysconfig
from pathlib import Path

LIBRARIES = ("c10", "torch_cpu", "torch_python")


def environment_folders() -> list[Path]:
    """Folders where the interpreter's environment keeps packages, in the order of imports."""
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
    text = about.read_text() if about.is_file() else ""
    version = re.search(r"^__version__ = ['\"]((\d+)\.(\d+).*)['\"]$", text, re.MULTILINE)
    # Conda keeps headers and libraries beside those of its other packages.
    roots = [package, Path(sys.prefix)]
    includes = [root / "include" for root in roots if (root / "include" / "ATen").is_dir()]
    libraries = [root / "lib" for root in roots if (root / "lib" / "libtorch_python.so").is_file()]
    if version is None or not includes or not libraries:
        return {}
    return {
        "version": version[1],
        "minor": f"{version[2]}_{version[3]}",
        "include": f"{includes[0]};{includes[0]}/torch/csrc/api/include",
        "libraries": ";".join(f"{libraries[0]}/lib{name}.so" for name in LIBRARIES),
    }


def locate_all(choice: str) -> list[dict[str, str]]:
    """One installation for each minor version; raises ``SystemExit`` for a folder without torch."""
    if choice == "none":
        return []
    if choice == "auto":
        return [torch for torch in map(locate, environment_folders()) if torch][:1]
    by_minor: dict[str, dict[str, str]] = {}
    for pattern in filter(None, choice.split(";")):
        # A pattern that matches nothing is named as it is.
        for folder in sorted(glob.glob(os.path.expanduser(pattern))) or [pattern]:
            torch = locate(Path(folder))
            if not torch:
                sys.exit(f"UMEM_TORCH: {folder} holds no torch with headers and libraries")
            by_minor.setdefault(torch["minor"], torch)
    return list(by_minor.values())


if __name__ == "__main__":
    print(json.dumps(locate_all(sys.argv[1])))
