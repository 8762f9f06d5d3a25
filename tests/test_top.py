"""`umem top` sees a running process of the same user, and no other."""

from __future__ import annotations

import json
import os
import signal
import socket
import stat
import subprocess
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from command_line import Run

from umem.core.errors import UnsupportedError
from umem.runtime import live_socket
from umem.runtime.live_socket import ask, live_processes, serve

UMEM = str(Path(sys.executable).with_name("umem"))
SUPPORT = Path(__file__).resolve().parent / "support"

WAIT = "import sys; print('ready', flush=True); sys.stdin.read()"


@pytest.fixture
def top(run: Run, runtime_folder: Path) -> Run:
    return partial(run, "top")


@pytest.fixture
def runtime_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """The folder of sockets, for this process and those that it starts."""
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    folders = live_socket._folders
    # Other tests' processes may be in the folders that all share.
    monkeypatch.setattr(live_socket, "_folders", lambda: folders()[:1])
    return tmp_path / "umem"


def start(*command: str, ready: str = "ready") -> subprocess.Popen[str]:
    process = subprocess.Popen(
        command,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {"CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": str(SUPPORT)},
    )
    assert process.stdout is not None
    assert process.stdout.readline().strip() == ready
    return process


@pytest.fixture
def fallback(runtime_folder: Path, tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    """A process under `umem run --fallback`, where umem cannot take over."""
    (tmp_path / "wait.py").write_text(WAIT)
    process = start(UMEM, "run", "--fallback", str(tmp_path / "wait.py"))
    yield process
    process.kill()
    process.communicate()


@pytest.mark.slow
def test_a_process_on_the_fallback_is_seen_until_it_ends(
    top: Run, fallback: subprocess.Popen[str], runtime_folder: Path
) -> None:
    status, shown, errors = top(fallback.pid, "--once")
    assert (status, errors) == (0, "")
    assert str(fallback.pid) in shown
    assert "torch's own allocator stays" in shown
    (path,) = runtime_folder.iterdir()
    assert path.name == f"{fallback.pid}.sock"
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE(runtime_folder.stat().st_mode) == 0o700

    # The only process needs no number.
    figures = json.loads(top("--json")[1])
    assert (figures["pid"], figures["policy"], figures["runs"]) == (fallback.pid, None, [])

    _, errors = fallback.communicate()
    assert fallback.returncode == 0
    assert errors.count("umem: not in use") == 1
    assert list(runtime_folder.iterdir()) == []
    status, _, message = top(fallback.pid)
    assert status == 2
    assert f"no process {fallback.pid}" in message


@pytest.mark.slow
def test_a_training_shows_its_steps_and_its_copies(top: Run, runtime_folder: Path) -> None:
    process = start(sys.executable, str(SUPPORT / "live_training.py"))
    assert process.stdin is not None
    assert process.stdout is not None
    for _ in range(4):
        process.stdin.write("step\n")
        process.stdin.flush()
        assert process.stdout.readline() == "stepped\n"
    (run,) = json.loads(top(process.pid, "--json")[1])["runs"]
    assert (run["model"], run["unit"], run["count"], run["planned"]) == ("Net", "step", 4, 0)
    assert run["late"] is not None
    assert "Net" in top(process.pid, "--once")[1]
    said, _ = process.communicate()
    assert said.splitlines()[0] == "4 steps of Net, 0 of them under a plan"
    assert len(said.splitlines()) == 3


def test_a_killed_process_is_gone_though_its_socket_stays(top: Run, runtime_folder: Path) -> None:
    process = start(
        sys.executable, "-c", "from umem.runtime.live_socket import serve; serve(dict)\n" + WAIT
    )
    assert live_processes() == [process.pid]
    process.send_signal(signal.SIGKILL)
    process.communicate()
    status, _, message = top(process.pid)
    assert status == 2
    assert f"no process {process.pid}" in message
    assert live_processes() == []
    assert list(runtime_folder.iterdir()) == []


@pytest.mark.slow
def test_the_next_process_removes_sockets_of_killed_ones_alone(runtime_folder: Path) -> None:
    serving = "from umem.runtime.live_socket import serve; serve(dict)\n" + WAIT
    killed, stopped = (start(sys.executable, "-c", serving) for _ in range(2))
    stopped.send_signal(signal.SIGSTOP)
    killed.kill()
    killed.communicate()
    file = runtime_folder / f"{killed.pid + 1_000_000_000}.sock"  # no process has this number
    file.write_text("no socket")
    running = start(sys.executable, "-c", serving)
    names = {f"{it.pid}.sock" for it in (stopped, running)}
    assert {it.name for it in runtime_folder.iterdir()} == names | {file.name}
    assert ask(running.pid) == {}
    for process in (stopped, running):
        process.kill()
        process.communicate()


@pytest.mark.slow
def test_a_stopped_process_is_said_to_be_busy(
    top: Run, runtime_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(live_socket, "_TIMEOUT_S", 0.2)
    process = start(
        sys.executable, "-c", "from umem.runtime.live_socket import serve; serve(dict)\n" + WAIT
    )
    process.send_signal(signal.SIGSTOP)
    assert os.WIFSTOPPED(os.waitpid(process.pid, os.WUNTRACED)[1])
    status, _, message = top(process.pid)
    assert status == 2
    assert f"process {process.pid} has not answered" in message
    assert live_processes() == [process.pid]
    process.kill()
    process.communicate()


@pytest.mark.slow
def test_the_view_follows_a_process_to_its_end(
    top: Run, fallback: subprocess.Popen[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    looks = []

    def look(pid: int) -> dict[str, Any]:
        looks.append(ask(pid))
        if len(looks) == 2:
            fallback.communicate()
        return looks[-1]

    monkeypatch.setattr("umem.cli.top.ask", look)
    status, shown, errors = top(fallback.pid, "--interval", "0.25")
    assert (status, errors, len(looks)) == (0, "", 2)
    assert shown.splitlines()[-1] == f"process {fallback.pid} has ended"


def test_a_forked_child_leaves_the_socket_to_its_parent(runtime_folder: Path) -> None:
    program = (
        "import os, sys; from umem.runtime.live_socket import serve; serve(dict)\n"
        "child = os.fork()\n"
        "if child == 0:\n    sys.exit()\n"
        "os.waitpid(child, 0)\n"
    )
    process = start(sys.executable, "-c", program + WAIT)
    assert ask(process.pid) == {}
    process.communicate()
    assert list(runtime_folder.iterdir()) == []


@pytest.mark.parametrize("arguments", [(), (os.getpid(),)])
def test_what_is_not_under_umem_is_said_to_be(top: Run, arguments: tuple[int, ...]) -> None:
    status, shown, message = top(*arguments)
    assert (status, shown) == (2, "")
    assert "umem run" in message


def test_a_folder_that_is_a_link_or_open_to_others_is_not_used(
    runtime_folder: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    other = tmp_path / "other"
    other.mkdir(mode=0o700)
    runtime_folder.symlink_to(other)
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(str(other / "1.sock"))
    listener.listen()
    with pytest.raises(UnsupportedError):
        ask(1)
    runtime_folder.unlink()
    other.chmod(0o755)
    other.rename(runtime_folder)
    with pytest.raises(UnsupportedError):
        ask(1)
    listener.close()


def test_a_process_without_a_folder_goes_on(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "umem").write_text("a file")
    monkeypatch.setattr(live_socket, "_folders", lambda: [tmp_path / "umem"])
    monkeypatch.setattr(live_socket, "_serves", False)  # as it may be since another test
    caplog.set_level("INFO", "umem")
    serve(dict)
    assert str(tmp_path / "umem") in caplog.text
