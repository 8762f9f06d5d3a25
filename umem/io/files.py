"""Files: written in one piece, and read within bounds, for they may come from strangers."""

from __future__ import annotations

import errno
import os
import secrets
import stat
import zlib
from pathlib import Path

from umem.core.errors import UmemError
from umem.core.units import format_bytes

__all__ = ["begins_with", "read_file", "replace_file", "unreadable", "write_file"]

_GZIP_MAGIC = b"\x1f\x8b"
_PART_BYTES = 2**20
_GZIP_WBITS = 31  # zlib's number for its largest window in a gzip wrapper


def replace_file(path: str | os.PathLike[str], content: bytes) -> None:
    """Write a file in one piece: a reader sees the old file or the whole new one.

    Missing folders are made. A symbolic link stays, and the file that it names is replaced. After
    a failure the old file is as it was, and nothing is left beside it.

    Raises OSError if it cannot be written, or `path` is something else than a regular file.
    """
    target = Path(os.path.realpath(path))
    if target.is_dir():
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    if target.exists() and not target.is_file():
        # Replacing /dev/null by a file would break the machine.
        raise OSError(errno.EINVAL, "Not a regular file", str(path))
    target.parent.mkdir(parents=True, exist_ok=True)
    # The temporary file's mode is the usual one, where tempfile's is its owner's alone.
    temporary = target.with_name(f".umem-{secrets.token_hex(8)}.tmp")
    try:
        with temporary.open("xb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(target)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def write_file(
    path: str | os.PathLike[str], content: bytes, error: type[UmemError] = UmemError
) -> None:
    """Call :func:`replace_file`, and raise `error` with path and remedy where it fails."""
    try:
        replace_file(path, content)
    except OSError as problem:
        reason = (problem.strerror or str(problem)).lower()
        remedy = "check the path and the space, or choose another place"
        raise error(f"{path}: cannot be written ({reason}): {remedy}") from problem


def read_file(path: str | os.PathLike[str], limit_bytes: int) -> bytes:
    """Content of a file, decompressed if it is in gzip, whatever its name.

    `limit_bytes` bounds the file, and its content: no more than this is ever decompressed.

    Raises OSError if it cannot be read, or `path` is something else than a regular file. Raises
    ValueError if it is larger, or damaged; the message says which, and what to do.
    """
    if "\0" in os.fsdecode(path):
        raise OSError(errno.EINVAL, "A null character in the path", str(path))
    with open(path, "rb", opener=_open_without_waiting) as file:
        if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            raise OSError(errno.EINVAL, "Not a regular file", str(path))
        # In parts: for one read, Python takes memory of the size asked for.
        content = bytearray()
        while part := file.read(min(_PART_BYTES, limit_bytes + 1 - len(content))):
            content += part
    if len(content) > limit_bytes:
        raise ValueError(f"larger than {format_bytes(limit_bytes)}: no file of umem is")
    if content.startswith(_GZIP_MAGIC):
        return _decompress(content, limit_bytes)
    return bytes(content)


def unreadable(problem: OSError | ValueError) -> str:
    """Say why :func:`read_file` cannot read a file, and what to do."""
    if isinstance(problem, ValueError):
        return str(problem)
    reason = (problem.strerror or str(problem)).lower()
    remedy = (
        "allow it, or choose another file" if problem.errno == errno.EACCES else "check the path"
    )
    return f"cannot be read ({reason}): {remedy}"


def begins_with(path: str | os.PathLike[str], mark: bytes) -> bool:
    """Whether a file begins with these bytes; False if it cannot be read."""
    try:
        with open(path, "rb", opener=_open_without_waiting) as file:
            return file.read(len(mark)) == mark
    except (OSError, ValueError):  # ValueError: a null character in the path
        return False


def _open_without_waiting(path: str, flags: int) -> int:
    # Opening a named pipe would wait for its writer.
    return os.open(path, flags | os.O_NONBLOCK)


def _decompress(content: bytearray, limit_bytes: int) -> bytes:
    stream = zlib.decompressobj(wbits=_GZIP_WBITS)
    try:
        plain = stream.decompress(content, limit_bytes + 1)
    except zlib.error as error:
        raise ValueError("its gzip data is damaged: copy the file again") from error
    if len(plain) > limit_bytes:
        raise ValueError(
            f"larger than {format_bytes(limit_bytes)} when decompressed: no file of umem is"
        )
    if not stream.eof:
        raise ValueError("its gzip data ends too early: copy the file again")
    if stream.unused_data:
        raise ValueError("bytes follow the end of its gzip data: copy the file again")
    return plain
