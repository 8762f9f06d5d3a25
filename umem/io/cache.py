"""The user's folders: a cache of private files that can be made again, and the configuration."""

from __future__ import annotations

import contextlib
import os
import stat
from pathlib import Path

__all__ = ["cached_file", "config_folder", "keep_newest", "private_folder"]


def _base(variable: str, default: str) -> Path:
    """The folder that a variable of the specification of XDG base directories names."""
    named = os.environ.get(variable, "")
    # By the specification a relative path is to be ignored.
    return Path(named) if os.path.isabs(named) else Path(os.path.expanduser(default))


def config_folder(name: str) -> Path:
    """Folder ``umem/NAME`` in ``$XDG_CONFIG_HOME``, or in ``~/.config``; it is not made."""
    return _base("XDG_CONFIG_HOME", "~/.config") / "umem" / name


def private_folder(name: str) -> Path | None:
    """Folder ``umem/NAME`` in the user's cache folder, made if missing; None if there is none.

    The cache folder is ``$XDG_CACHE_HOME``, or ``~/.cache``. Nobody but the user may enter umem's
    folders in it (mode 0700). A folder of another user, or a symbolic link in place of one, is not
    used: whoever made it could put files there.
    """
    folder = _base("XDG_CACHE_HOME", "~/.cache")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for part in ("umem", name):
            folder /= part
            with contextlib.suppress(FileExistsError):
                folder.mkdir(mode=0o700)
            found = folder.lstat()
            if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid():
                return None
            if stat.S_IMODE(found.st_mode) != 0o700:
                folder.chmod(0o700)
    except OSError:  # a home that is read-only, missing or full
        return None
    return folder


def cached_file(folder: Path, name: str) -> Path | None:
    """A regular file of a private folder, marked as used just now; None if there is none."""
    path = folder / name
    try:
        if not stat.S_ISREG(path.lstat().st_mode):  # a symbolic link is not followed
            return None
        os.utime(path, follow_symlinks=False)
    except OSError:
        return None
    return path


def keep_newest(folder: Path, count: int) -> None:
    """Remove all files of a private folder but those that were used last."""
    with contextlib.suppress(OSError):  # another process may remove them too
        files = sorted(os.scandir(folder), key=lambda it: -it.stat(follow_symlinks=False).st_mtime)
        for file in files[count:]:
            os.unlink(file)
