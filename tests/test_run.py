"""`umem run`: the program runs as under `python program`."""

from __future__ import annotations

import json
import os
import py_compile
import signal
import subprocess
import sys
import threading
import zipfile
from collections import deque
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
from command_line import Run, umem_command

import umem
from umem.cli import INTERRUPTED_STATUS
from umem.cli.run import launch
from umem.core.errors import EnableError, UmemError
from umem.policy import load_policy
from umem.runtime import managed_runs
from umem.runtime.managed_runs import new_run

UMEM = str(Path(sys.executable).with_name("umem"))

# Prints what a program can see of the way it was started.
LOOK = """
import json, os, sys
if __name__ == "__main__":
    main = vars(sys.modules["__main__"])
    print(json.dumps({
        "argv": sys.argv,
        "path": sys.path[0],
        "file": globals().get("__file__"),
        "code": sys._getframe().f_code.co_filename,
        "spec": __spec__ and (__spec__.name, __spec__.origin),
        "package": __package__,
        "cached": globals().get("__cached__"),
        "loader": getattr(__loader__, "__name__", type(__loader__).__name__),
        "builtins": type(__builtins__).__name__,
        "names": sorted(globals()),
        "main": main is globals(),
        "policy": os.environ.get("UMEM_POLICY"),
    }))
    sys.exit(3)
"""

# A worker must import the script again to find Squares.
SPAWN = """
import torch
import umem

class Squares(torch.utils.data.Dataset):
    def __len__(self):
        return 4

    def __getitem__(self, index):
        return index * index, umem.is_enabled()

if __name__ == "__main__":
    loader = torch.utils.data.DataLoader(Squares(), 2, num_workers=1,
                                         multiprocessing_context="spawn")
    print([(squares.tolist(), any(enabled)) for squares, enabled in loader])
"""
SPAWN_OUTPUT = "[([0, 1], False), ([4, 9], False)]\n"


def write(path: Path, source: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(source)
    return path


# In this process, whose allocator is not swapped.


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> Run:
    """`umem run` in an empty folder."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(umem, "enable", lambda policy, *, fallback: load_policy(policy))
    monkeypatch.setattr("umem.cli.run.show_log", lambda level: None)  # it is the process's too
    monkeypatch.setattr(managed_runs, "_runs", deque())  # those of other tests
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)
    monkeypatch.setitem(sys.modules, "__main__", sys.modules["__main__"])
    for name in ("package", "package.look"):  # another test's
        monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.setenv("UMEM_POLICY", "")  # so that it is restored
    monkeypatch.delenv("UMEM_POLICY")
    return partial(umem_command(monkeypatch, capsys), "run")


Seen = tuple[int, dict[str, object]]
"""A program's status, and what LOOK printed."""


def under_python(*words: str) -> Seen:
    command = [sys.executable, *words]
    done = subprocess.run(
        command, capture_output=True, text=True, check=False, input=LOOK, close_fds=False
    )
    return done.returncode, json.loads(done.stdout)


@pytest.mark.parametrize(
    "words",
    [
        ("look.py", "--lr", "1e-4"),
        ("./code/../look.py",),
        ("link.py",),
        ("{folder}/look.py", "-"),
        ("look.pyc",),
        ("package",),
        ("archive.zip", "x"),
        ("-m", "package", "--lr", "1e-4"),
        ("-m", "package.look"),
        ("-c", LOOK, "x", "-c"),
        ("-", "x"),
        ("/dev/stdin",),
        ("named-pipe",),
        ("/dev/fd/{pipe}", "x"),
    ],
    ids=lambda words: " ".join(words)[:16].replace("\n", " "),
)
def test_a_program_sees_what_it_sees_under_python(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: tuple[str, ...]
) -> None:
    look = write(tmp_path / "look.py", LOOK)
    (tmp_path / "code").mkdir()
    write(tmp_path / "code" / "real.py", LOOK)
    (tmp_path / "link.py").symlink_to("code/real.py")
    py_compile.compile(str(look), "look.pyc")
    for name in ("__init__", "__main__", "look"):
        write(tmp_path / "package" / f"{name}.py", "" if name == "__init__" else LOOK)
    with zipfile.ZipFile("archive.zip", "w") as archive:
        archive.write(look, "__main__.py")
    os.mkfifo("named-pipe")
    monkeypatch.setenv("PYTHONDONTWRITEBYTECODE", "1")

    def started(how: Callable[..., Seen]) -> Seen:
        reading, writing = os.pipe()
        os.set_inheritable(reading, True)
        os.write(writing, LOOK.encode())
        os.close(writing)
        writer = threading.Thread(target=lambda: Path("named-pipe").write_text(LOOK))
        if "named-pipe" in words:
            writer.start()
        values = {"folder": str(tmp_path), "pipe": reading}
        these = [it if it is LOOK else it.format(**values) for it in words]
        try:
            return how(*these)
        finally:
            os.close(reading)
            if "named-pipe" in words:
                writer.join()

    def under_umem(*words: str) -> Seen:
        given = os.memfd_create("stdin")
        os.write(given, LOOK.encode())
        os.lseek(given, 0, os.SEEK_SET)
        kept = os.dup(0)
        os.dup2(given, 0)
        with open(given) as standard_input:
            monkeypatch.setattr(sys, "stdin", standard_input)
            try:
                status, output, errors = run(*words)
            finally:
                os.dup2(kept, 0)
                os.close(kept)
        assert errors == ""
        return status, json.loads(output)

    status, seen = started(under_python)
    assert started(under_umem) == (status, seen | {"policy": "sft"})


def test_what_was_managed_is_said_at_the_end(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Here the script is told of by the test; on a GPU its training is."""
    write(tmp_path / "train.py", "print('trained')")
    new_run(object(), "step", lambda: None).ends(None, is_planned=False)
    said = "umem: 1 steps of object, 0 of them under a plan\n"
    status, output, errors = run("train.py")
    assert (status, output) == (0, "trained\n")
    assert errors.startswith(said)
    for name, value in (("UMEM_LOG", "off"), ("LOCAL_RANK", "1")):
        with monkeypatch.context() as patched:
            patched.setenv(name, value)
            assert run("train.py") == (0, "trained\n", "")


def test_double_dash_ends_umems_options(run: Run, tmp_path: Path) -> None:
    write(tmp_path / "-odd.py", LOOK)
    status, output, errors = run("--", "-odd.py", "x")
    assert (status, errors) == (3, "")
    assert json.loads(output)["argv"] == ["-odd.py", "x"]


@pytest.mark.parametrize(
    ("source", "status", "last_line"),
    [
        ("import sys; sys.exit(7)", 7, None),
        ("import sys; sys.exit('no data')", 1, "no data"),
        ("raise ValueError('bad batch')", 1, "ValueError: bad batch"),
        ("raise EOFError", 1, "EOFError"),
        ("raise SystemExit", 0, None),
        ("def broken(:", 1, "SyntaxError: invalid syntax"),
        ("import sys; sys.excepthook = lambda *it: print('mine', it[1], file=sys.stderr)\n1 / 0",
         1, "mine division by zero"),
    ],
)  # fmt: skip
def test_ends_as_the_program_ends(
    run: Run, tmp_path: Path, source: str, status: int, last_line: str | None
) -> None:
    write(tmp_path / "ending.py", source)
    found, output, errors = run("ending.py")
    assert (found, output) == (status, "")
    assert errors.splitlines()[-1:] == ([last_line] if last_line else [])
    # The traceback shows the program's frames only.
    assert not any(own in errors for own in ("cli/run.py", "runpy", "typer"))


def test_nothing_runs_where_umem_cannot_take_over(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(policy: str, *, fallback: bool) -> None:
        raise EnableError("torch sees no GPU")

    monkeypatch.setattr(umem, "enable", refuse)
    write(tmp_path / "look.py", LOOK)
    assert run("look.py") == (2, "", "umem: torch sees no GPU\n")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["missing.py"], "there is no script 'missing.py'"),
        (["--policy", "sfft", "look.py"], "no policy is called 'sfft'"),
        (["--polcy", "sft", "look.py"], "No such option"),
        ([], "Usage: umem run"),
    ],
)
def test_command_line_errors_end_with_status_2(
    run: Run, tmp_path: Path, words: list[str], message: str
) -> None:
    write(tmp_path / "look.py", LOOK)
    status, output, errors = run(*words)
    assert status == 2
    assert message in output + errors
    assert "Traceback" not in errors


@pytest.mark.parametrize(
    ("program", "module", "message"),
    [
        ("missing.py", False, r"no script 'missing\.py' in .*: give the path"),
        ("folder", False, r"'folder' is a folder without a __main__\.py"),
        ("no_such_package.train", True, r"no module 'no_such_package\.train': install"),
        ("", True, r"no module ''"),
    ],
)
def test_program_that_is_not_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, program: str, module: bool, message: str
) -> None:
    (tmp_path / "folder").mkdir()
    monkeypatch.chdir(tmp_path)
    path = list(sys.path)

    with pytest.raises(UmemError, match=message):
        launch(program, kind="module" if module else "file")

    assert sys.path == path


# In a process that sees no GPU, so that `--fallback` keeps torch's allocator.


def environment(**variables: str) -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith("UMEM_")}
    return kept | {"CUDA_VISIBLE_DEVICES": ""} | variables


def umem_run(folder: Path, *words: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """`umem run` with these words, in a folder."""
    return subprocess.run(
        [UMEM, "run", *words],
        capture_output=True,
        text=True,
        check=False,
        cwd=folder,
        env=environment(**variables),
    )


@pytest.mark.slow
def test_script_sees_its_own_command_line(tmp_path: Path) -> None:
    write(tmp_path / "code" / "look.py", LOOK)
    words = ["a", "--policy", "its own", "-m", "--", "--help"]
    done = umem_run(tmp_path, "--fallback", "--policy", "lora", "code/look.py", *words)
    assert done.returncode == 3, done.stderr
    seen = json.loads(done.stdout)
    assert seen["argv"] == ["code/look.py", *words]
    assert seen["path"] == str(tmp_path / "code")
    assert seen["policy"] == "lora"
    (line,) = done.stderr.splitlines()
    assert line.startswith("umem: not in use, torch's own allocator stays: ")


@pytest.mark.slow
def test_child_process_inherits_the_policy(tmp_path: Path) -> None:
    write(tmp_path / "mine.yaml", "extends: lora\n")
    write(tmp_path / "elsewhere" / "look.py", LOOK)
    child = [UMEM, "run", "--fallback", "look.py"]
    write(
        tmp_path / "parent.py",
        f"import subprocess; raise SystemExit(subprocess.call({child!r}, cwd='elsewhere'))",
    )
    done = umem_run(tmp_path, "--fallback", "parent.py", UMEM_POLICY="./mine.yaml")
    assert done.returncode == 3, done.stderr
    assert json.loads(done.stdout)["policy"] == str(tmp_path / "mine.yaml")


@pytest.mark.slow
@pytest.mark.parametrize("program", [["spawning.py"], ["-m", "spawning"]])
def test_spawned_workers_import_it_and_do_not_swap(tmp_path: Path, program: list[str]) -> None:
    write(tmp_path / "spawning.py", SPAWN)
    done = umem_run(tmp_path, "--fallback", *program)
    assert done.returncode == 0, done.stderr
    assert done.stdout == SPAWN_OUTPUT
    assert done.stderr.count("umem: not in use") == 1


@pytest.mark.slow
def test_interrupt_ends_cleanly(tmp_path: Path) -> None:
    source = """
import atexit, time
atexit.register(print, "cleaned up")
print("ready", flush=True)
time.sleep(60)
"""
    write(tmp_path / "sleeping.py", source)
    process = subprocess.Popen(
        [UMEM, "run", "--fallback", "sleeping.py"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=tmp_path,
        env=environment(),
        # A shell's background job ignores the signal, and would hand that on.
        preexec_fn=partial(signal.signal, signal.SIGINT, signal.SIG_DFL),
    )
    with process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        process.send_signal(signal.SIGINT)
        output, errors = process.communicate(timeout=60)

    assert process.returncode == INTERRUPTED_STATUS
    assert output == "cleaned up\n"
    assert errors.splitlines()[-1] == "KeyboardInterrupt"
    assert errors.count("Traceback") == 1
