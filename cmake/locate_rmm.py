"""Print, as JSON, where this interpreter's environment keeps RMM and CUDA's runtime.

Usage: ``python locate_rmm.py auto|12|13``. Wheels are looked up on the import path, so a virtual
environment, an isolated build and ``pip install --target`` with PYTHONPATH all work. Where there
are none, the interpreter's conda environment serves: its packages are no Python packages, and lie
in ``include`` and ``lib``.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import re
import sys
from pathlib import Path

MAJORS = ("13", "12")  # the order in which `auto` tries them

# Folders under the `nvidia` namespace package, by CUDA major: one for everything since 13,
# one for each component before. host_defines.h is the compiler component's.
HEADER_FOLDERS = {"13": ["cu13"], "12": ["cuda_runtime", "cuda_nvcc"]}
RUNTIME_HEADERS = ("cuda_runtime_api.h", "crt/host_defines.h")

# Where the libraries are at run time, as seen from umem/runtime in site-packages.
WHEEL_PATHS = ("$ORIGIN/../../librmm/lib64", "$ORIGIN/../../rapids_logger/lib64")
RUNTIME_PATHS = {
    "13": "$ORIGIN/../../nvidia/cu13/lib",
    "12": "$ORIGIN/../../nvidia/cuda_runtime/lib",
}
CONDA_PATH = "$ORIGIN/../../../.."
"""``lib`` of an environment, above ``lib/python3.x/site-packages``."""


def package_folders(name: str) -> list[Path]:
    """Folders of an installed package, without importing it."""
    spec = importlib.util.find_spec(name)
    if spec is None:
        return []
    return [Path(folder) for folder in spec.submodule_search_locations or []]


def first_file(folders: list[Path], pattern: str) -> str:
    """Path of the first file that matches in any of the folders, or ""."""
    found = [path for folder in folders for path in sorted(folder.glob(pattern))]
    return str(found[0]) if found else ""


def rmm_version(major: str) -> str:
    """Version of librmm's wheel for a CUDA major, or ""."""
    try:
        return importlib.metadata.version(f"librmm-cu{major}")
    except importlib.metadata.PackageNotFoundError:
        return ""


def locate_runtime(roots: list[Path], major: str) -> dict[str, str]:
    """Headers and shared library of CUDA's runtime; empty strings where a piece is missing."""
    includes = [root / "include" for root in roots if (root / "include").is_dir()]
    complete = all(first_file(includes, header) for header in RUNTIME_HEADERS)
    library = first_file([root / "lib" for root in roots], f"libcudart.so.{major}")
    if not complete or not library:
        return {"cudart_include": "", "cudart_library": ""}
    return {"cudart_include": ";".join(map(str, includes)), "cudart_library": library}


def locate_wheels(majors: tuple[str, ...]) -> dict[str, str]:
    """Everything that CMake needs to know, from wheels; empty where there is no RMM."""
    major = next((major for major in majors if rmm_version(major)), "")
    if not major:
        return {}
    rmm, logger = package_folders("librmm"), package_folders("rapids_logger")
    roots = [
        root / folder for folder in HEADER_FOLDERS[major] for root in package_folders("nvidia")
    ]
    return {
        "major": major,
        "rmm_version": rmm_version(major),
        "rmm_include": ";".join(str(folder / "include") for folder in rmm + logger),
        "rmm_library": first_file(rmm, "lib*/librmm.so"),
        "logger_library": first_file(logger, "lib*/librapids_logger.so"),
        "run_path": ";".join((*WHEEL_PATHS, RUNTIME_PATHS[major])),
        **locate_runtime(roots, major),
    }


def locate_conda(majors: tuple[str, ...], prefix: Path) -> dict[str, str]:
    """The same, from a conda environment; empty where `prefix` is none, or has no RMM."""
    header = prefix / "include" / "rmm" / "version_config.hpp"
    if not (prefix / "conda-meta").is_dir() or not header.is_file():
        return {}
    version = re.search(r'^#define RMM_VERSION "(.+)"$', header.read_text(), re.MULTILINE)
    # An environment has one CUDA; its runtime is in a folder for each processor.
    roots = [prefix, *sorted(prefix.glob("targets/*"))]
    folders = [root / "lib" for root in roots]
    major = next((major for major in majors if first_file(folders, f"libcudart.so.{major}")), "")
    if not major:
        return {}
    return {
        "major": major,
        "rmm_version": version[1] if version else "",
        "rmm_include": str(prefix / "include"),
        "rmm_library": first_file([prefix / "lib"], "librmm.so"),
        "logger_library": first_file([prefix / "lib"], "librapids_logger.so"),
        "run_path": CONDA_PATH,
        **locate_runtime(roots, major),
    }


def locate(choice: str) -> dict[str, str]:
    """Everything that CMake needs to know, for a choice of `auto`, `12` or `13`."""
    majors = MAJORS if choice == "auto" else (choice,)
    return locate_wheels(majors) or locate_conda(majors, Path(sys.prefix)) or {"major": ""}


if __name__ == "__main__":
    print(json.dumps(locate(sys.argv[1])))
