"""A Unix socket by which `umem top` asks a process for its figures.

A thread waits in ``accept()`` and gathers figures only when somebody asks, so that a training pays
nothing otherwise. Only the same user gets an answer: the folder has mode 0700 and is no link, the
socket has mode 0600, and the kernel names the caller's user.

A process that is killed leaves its socket. The next one that serves or asks removes it.

Processes tell each other by a connection that they begin or end, so that each can take its part of
what they share.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import logging
import os
import socket
import stat
import struct
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from umem.core.errors import UmemError, UnsupportedError

__all__ = ["BusyError", "ask", "live_processes", "serve"]

_LOG = logging.getLogger("umem")

_LEAST_INTERVAL_S = 0.25
"""Figures are gathered at most so often, however many ask."""

_TIMEOUT_S = 5.0
_ARRIVAL_S = 0.5
"""A process that begins waits so long for each other one that is busy or stopped."""

_QUEUED = 128
"""Callers that may wait, such as the ranks of a host, which all begin at once."""

_MOST_BYTES = 16 << 20
_PEER = struct.Struct("3i")  # struct ucred: pid, uid, gid

Figures = Callable[[], dict[str, Any]]

_serves = False


class BusyError(UmemError):
    """A process is there, and does not answer now."""


# ---- in the training ----


def serve(figures: Figures, on_arrival: Callable[[int], None] = lambda _: None) -> None:
    """Answer `umem top` with what `figures` returns, from now on, until the process ends.

    `on_arrival` is called with the number of this user's processes that serve on this host, this
    one included: now, and in another thread when one begins or ends. Where no socket can be made,
    the process goes on without, and the log says why.
    """
    global _serves
    if _serves:
        return
    try:
        server = _Server(figures, on_arrival)
    except (OSError, UmemError) as error:
        _LOG.info("umem: umem top will not see this process: %s", error)
        return
    _serves = True
    threading.Thread(target=server.run, name="umem-live", daemon=True).start()
    server.arrive()
    atexit.register(server.close)
    os.register_at_fork(after_in_child=server.leave)


class _Server:
    def __init__(self, figures: Figures, on_arrival: Callable[[int], None]) -> None:
        self._figures = figures
        self._on_arrival = on_arrival
        self._count = 0
        self._lock = threading.Lock()
        self._answer, self._made_s = b"", -_LEAST_INTERVAL_S
        self._name = f"{os.getpid()}.sock"
        self._folder = _own_folder()
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
        try:
            self._remove()  # of an earlier process with this number, that was killed
            _remove_dead(self._folder)
            self._socket.bind(_through(self._folder, self._name))
            os.chmod(self._name, 0o600, dir_fd=self._folder)
            self._socket.listen(_QUEUED)
        except OSError:
            self.leave()
            raise

    def arrive(self) -> None:
        """Count the processes, and wait until the others have counted them too."""
        self._look()
        for caller in self._tell():
            with caller, contextlib.suppress(OSError):
                caller.settimeout(_ARRIVAL_S)
                caller.recv(1)

    def _look(self) -> None:
        with self._lock:
            pids = [pid for pid in _numbers(self._folder) if Path(f"/proc/{pid}").exists()]
            if len(pids) != self._count:
                self._count = len(pids)
                try:
                    self._on_arrival(self._count)
                except Exception as error:  # the training goes on
                    _LOG.info("umem: other processes of the host do not count: %s", error)

    def _tell(self) -> list[socket.socket]:
        """Connect to the others, which then count the processes. Returns the connections."""
        callers = []
        for pid in _numbers(self._folder):
            if pid != os.getpid():
                with contextlib.suppress(OSError):
                    callers.append(_connected(self._folder, pid, timeout_s=0))
        return callers

    def run(self) -> None:
        while True:
            try:
                caller, _ = self._socket.accept()
                self._look()
            except OSError:  # closed
                return
            with caller, contextlib.suppress(OSError):
                caller.settimeout(_TIMEOUT_S)
                if _user_of(caller) == os.geteuid():
                    caller.sendall(self._text())

    def _text(self) -> bytes:
        now_s = time.monotonic()
        if now_s - self._made_s >= _LEAST_INTERVAL_S:
            try:
                figures = self._figures()
            except Exception as error:  # the training goes on, and the next call asks again
                figures = {"error": f"{type(error).__name__}: {error}"}
            self._answer, self._made_s = json.dumps(figures).encode(), now_s
        return self._answer

    def close(self) -> None:
        """Remove the socket, at the end of the process."""
        with contextlib.suppress(OSError):
            self._remove()
            for caller in self._tell():
                caller.close()
            self._socket.shutdown(socket.SHUT_RDWR)
        self.leave()

    def leave(self) -> None:
        """Drop the descriptors; in a forked process, the socket stays the parent's."""
        global _serves
        _serves = False
        atexit.unregister(self.close)
        with contextlib.suppress(OSError):
            self._socket.close()
            os.close(self._folder)

    def _remove(self) -> None:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(self._name, dir_fd=self._folder)


def _user_of(caller: socket.socket) -> int:
    peer = caller.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _PEER.size)
    user: int = _PEER.unpack(peer)[1]
    return user


# ---- for the viewer ----


def ask(pid: int) -> dict[str, Any]:
    """Ask a process for its figures.

    Raises
    ------
    UnsupportedError
        If there is no such process, it is not under umem or is another user's, or it has ended.
    BusyError
        If it does not answer now.
    """
    for path in _folders():
        with contextlib.suppress(FileNotFoundError, UnsupportedError), _opened(path) as folder:
            figures = _read(folder, pid)
            if "error" in figures:
                raise UmemError(f"process {pid} could not gather its figures: {figures['error']}")
            return figures
    if not Path(f"/proc/{pid}").exists():
        raise UnsupportedError(f"no process {pid} is running")
    raise UnsupportedError(
        f"process {pid} is not under umem, or is another user's: start it with `umem run`, or look "
        "as the user who did"
    )


def live_processes() -> list[int]:
    """Processes of this user that answer, by number."""
    found = set()
    for path in _folders():
        with contextlib.suppress(FileNotFoundError, UnsupportedError), _opened(path) as folder:
            for number in _numbers(folder):
                with contextlib.suppress(FileNotFoundError):
                    with contextlib.suppress(BusyError):
                        _read(folder, number)
                    found.add(number)
    return sorted(found)


def _numbers(folder: int) -> list[int]:
    """Processes that have a socket in a folder, or had one when they were killed."""
    names = [Path(name) for name in os.listdir(folder)]
    return [int(it.stem) for it in names if it.suffix == ".sock" and it.stem.isdecimal()]


def _remove_dead(folder: int) -> None:
    """Remove the sockets of processes that were killed."""
    for pid in _numbers(folder):
        if not Path(f"/proc/{pid}").exists():
            # In another namespace it may have this number, and live: then nothing waits for it.
            with contextlib.suppress(OSError):
                _connected(folder, pid, timeout_s=0).close()


def _connected(folder: int, pid: int, timeout_s: float) -> socket.socket:
    """A connection to a process; ``FileNotFoundError`` if none listens there."""
    name = f"{pid}.sock"
    if not stat.S_ISSOCK(os.stat(name, dir_fd=folder, follow_symlinks=False).st_mode):
        raise FileNotFoundError(name)
    caller = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        caller.settimeout(timeout_s)
        caller.connect(_through(folder, name))
    except ConnectionRefusedError:
        caller.close()
        if not Path(f"/proc/{pid}").exists():
            os.unlink(name, dir_fd=folder)
        raise FileNotFoundError(name) from None
    except BaseException:
        caller.close()
        raise
    return caller


def _read(folder: int, pid: int) -> dict[str, Any]:
    """The answer of a process; ``FileNotFoundError`` if none listens there."""
    try:
        with _connected(folder, pid, _TIMEOUT_S) as caller:
            text = _received(caller, pid)
    except TimeoutError:
        raise BusyError(
            f"process {pid} has not answered within {_TIMEOUT_S:g} s: it is busy, or stopped. "
            "Ask again"
        ) from None
    except ConnectionError:  # it ended meanwhile
        raise FileNotFoundError(pid) from None
    try:
        figures: dict[str, Any] = json.loads(text)
    except ValueError:  # it ended in the middle of its answer
        raise FileNotFoundError(pid) from None
    return figures


def _received(caller: socket.socket, pid: int) -> bytes:
    text = b""
    while part := caller.recv(1 << 16):
        text += part
        if len(text) > _MOST_BYTES:
            raise UmemError(f"process {pid} sends more than figures: look what it is")
    return text


# ---- the folder ----


def _folders() -> list[Path]:
    """Where sockets may be: a training may have had another environment than the viewer."""
    user = os.geteuid()
    roots = [os.environ.get("XDG_RUNTIME_DIR", ""), f"/run/user/{user}"]
    found = [Path(root) / "umem" for root in roots if root.startswith("/")]
    return list(dict.fromkeys([*found, Path(f"/tmp/umem-{user}")]))


def _own_folder() -> int:
    """Open, and make if it is missing, the first folder that only this user may enter."""
    *roots, last = _folders()
    for path in roots[:1] if os.environ.get("XDG_RUNTIME_DIR") else []:
        with contextlib.suppress(OSError, UnsupportedError):
            return _make(path)
    return _make(last)


def _make(path: Path) -> int:
    with contextlib.suppress(FileExistsError):
        path.mkdir(mode=0o700)
    return _open(path)


def _open(path: Path) -> int:
    """Open a folder that is this user's alone, and no link; ``UnsupportedError`` otherwise."""
    try:
        folder = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except FileNotFoundError:
        raise
    except OSError as error:
        reason = (error.strerror or str(error)).lower()
        raise UnsupportedError(f"{path} is not a folder of yours ({reason}): remove it") from error
    its = os.fstat(folder)
    if its.st_uid != os.geteuid() or its.st_mode & 0o077:
        os.close(folder)
        raise UnsupportedError(f"{path} is open to others: make it yours, with mode 0700")
    return folder


@contextmanager
def _opened(path: Path) -> Iterator[int]:
    folder = _open(path)
    try:
        yield folder
    finally:
        os.close(folder)


def _through(folder: int, name: str) -> str:
    """The path of a file by its open folder: short, and the folder cannot be exchanged."""
    return f"/proc/self/fd/{folder}/{name}"
