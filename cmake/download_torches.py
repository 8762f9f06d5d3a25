"""Download what the guard is built with: each minor version of torch that umem takes.

Usage: ``python download_torches.py FOLDER``. Headers and libraries of the builds for the CPU, for
the Python that runs, go to ``FOLDER/2.8/torch`` and so on: ``UMEM_TORCH='FOLDER/*'`` then names
them all. Their C++ interface is that of the builds with CUDA. A minor version without a wheel for
this Python is left out.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tempfile
import tomllib
import zipfile
from pathlib import Path

PROJECT = Path(__file__).resolve().parents[1] / "pyproject.toml"
INDEX = "https://download.pytorch.org/whl/cpu"
MEMBERS = re.compile(r"torch/(version\.py|include/.*|lib/lib(c10|torch_cpu|torch_python)\.so)")


def minor_versions() -> list[str]:
    """The minor versions of torch within the project's limits."""
    needs = tomllib.loads(PROJECT.read_text())["project"]["dependencies"]
    (limits,) = (re.fullmatch(r"torch>=2\.(\d+),<2\.(\d+)", it) for it in needs if "torch" in it)
    assert limits is not None, "download_torches.py reads the limits on torch in another form"
    return [f"2.{minor}" for minor in range(int(limits[1]), int(limits[2]))]


def download(version: str, folder: Path) -> bool:
    """Unpack the newest torch of a minor version; False where there is none for this Python."""
    with tempfile.TemporaryDirectory() as downloads:
        options = ["--no-deps", "--only-binary=:all:", "--index-url", INDEX, "--dest", downloads]
        pip = [sys.executable, "-m", "pip", "download", *options, f"torch=={version}.*"]
        done = subprocess.run(pip, stderr=subprocess.PIPE, text=True, check=False)
        if "No matching distribution found" in done.stderr:
            return False
        if done.returncode != 0:
            sys.exit(done.stderr)
        (wheel,) = Path(downloads).glob("*.whl")
        with zipfile.ZipFile(wheel) as archive:
            members = [name for name in archive.namelist() if MEMBERS.fullmatch(name)]
            archive.extractall(folder / version, members)
    return True


def main(folder: Path) -> None:
    """Replace a folder by one with the minor versions that there are."""
    shutil.rmtree(folder, ignore_errors=True)  # of another Python
    found = [version for version in minor_versions() if download(version, folder)]
    print(f"torch {', '.join(found) or 'of no version'} in {folder}")
    if not found:
        sys.exit(f"no torch for Python {sys.version.split()[0]} at {INDEX}")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
