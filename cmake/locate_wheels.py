"""Print, as JSON, where this interpreter's wheels keep RMM and CUDA's runtime.

Usage: ``python locate_wheels.py auto|12|13``. The wheels are looked up on the import path, so a
virtual environment, an isolated build and ``pip install --target`` with PYTHONPATH all work.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import sys
from pathlib import Path

MAJORS = ("13", "12")  # the order in which `auto` tries them

# Folders under the `nvidia` namespace package, by CUDA major: one for everything since 13,
# one for each component before. host_defines.h is the compiler component's.
HEADER_FOLDERS = {"13": ["cu13"], "12": ["cuda_runtime", "cuda_nvcc"]}
RUNTIME_HEADERS = ("cuda_runtime_api.h", "crt/host_defines.h")


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


def locate_runtime(major: str) -> dict[str, str]:
    """Headers and shared library of CUDA's runtime; empty strings where a piece is missing."""
    roots = [
        root / folder for folder in HEADER_FOLDERS[major] for root in package_folders("nvidia")
    ]
    includes = [root / "include" for root in roots if (root / "include").is_dir()]
    complete = all(first_file(includes, header) for header in RUNTIME_HEADERS)
    library = first_file([root / "lib" for root in roots], f"libcudart.so.{major}")
    if not complete or not library:
        return {"include": "", "library": ""}
    return {"include": ";".join(map(str, includes)), "library": library}


def locate(choice: str) -> dict[str, str]:
    """Everything that CMake needs to know, for a choice of `auto`, `12` or `13`."""
    majors = MAJORS if choice == "auto" else (choice,)
    major = next((major for major in majors if rmm_version(major)), "")
    if not major:
        return {"major": ""}
    rmm, logger = package_folders("librmm"), package_folders("rapids_logger")
    runtime = locate_runtime(major)
    return {
        "major": major,
        "rmm_version": rmm_version(major),
        "rmm_include": ";".join(str(folder / "include") for folder in rmm + logger),
        "rmm_library": first_file(rmm, "lib*/librmm.so"),
        "logger_library": first_file(logger, "lib*/librapids_logger.so"),
        "cudart_include": runtime["include"],
        "cudart_library": runtime["library"],
    }


if __name__ == "__main__":
    print(json.dumps(locate(sys.argv[1])))
