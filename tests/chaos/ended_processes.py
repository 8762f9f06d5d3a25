"""Processes of `umem` that a signal ends at a random moment, and what they leave behind."""

from __future__ import annotations

import json
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from forked_programs import ForkedPrograms
from training_program import CHECKPOINT_BYTES

import umem
from umem.cli import INTERRUPTED_STATUS
from umem.core.errors import UmemError
from umem.trace import load_trace

_HERE = Path(__file__).resolve().parent
_STEPS = 12
_LIMIT_S = 300.0
"""A process that takes longer hangs: it takes seconds, on a machine that others use too."""

_NEVER = re.compile(r"Fatal Python error|terminate called|atexit|^\w+(Error|Exception)\b", re.M)
"""What no process prints, whenever it is ended: the only exception is KeyboardInterrupt."""
_UMEM = str(Path(umem.__file__).parent)
_FINALIZERS = re.compile(
    r"^Exception ignored in atexit callback: <bound method finalize\._exitfunc"
    r".*?^KeyboardInterrupt",
    re.M | re.S,
)
"""A signal came while Python ran finalizers at its end, as torch's libraries have them."""

_LAYERS, _LAYER_BYTES = 16, 16 << 20
_TRACE = {
    "format": "umem-trace/1",
    "tensors": [
        {"id": layer, "bytes": _LAYER_BYTES, "class": "weights", "persistent": True}
        for layer in range(_LAYERS)
    ],
    "phases": [
        {"name": f"layer {layer}", "duration_us": 4000, "reads": [layer], "writes": [layer]}
        for layer in (*range(_LAYERS), *reversed(range(_LAYERS)))
    ],
}


@dataclass(frozen=True)
class Ended:
    """What became of a process."""

    status: int
    output: str
    errors: str
    took_s: float


class Processes:
    """Starts processes in folders of their own, from one that has torch imported.

    Parameters
    ----------
    is_gpu
        Whether they see the GPUs of this machine.
    """

    def __init__(self, *, is_gpu: bool = False) -> None:
        self._is_gpu = is_gpu
        self._temporary = tempfile.TemporaryDirectory(prefix="umem-chaos-")
        self._root = Path(self._temporary.name)
        for name in ("runtime", "cache", "tmp", "work"):
            (self._root / name).mkdir(mode=0o700)
        kept = {name: value for name, value in os.environ.items() if not name.startswith("UMEM_")}
        folders = [_HERE, _HERE.parent / "support", _HERE.parents[1] / "benchmarks"]
        self._environment = kept | {
            "XDG_RUNTIME_DIR": str(self._root / "runtime"),
            "XDG_CACHE_HOME": str(self._root / "cache"),
            "TMPDIR": str(self._root / "tmp"),
            # umem may be found by this process's path only.
            "PYTHONPATH": os.pathsep.join([*map(str, folders), *map(os.path.abspath, sys.path)]),
            "OMP_NUM_THREADS": "1",
            **({} if is_gpu else {"CUDA_VISIBLE_DEVICES": ""}),
        }
        self._trace = self._root / "trace.json"
        self._trace.write_text(json.dumps(_TRACE), encoding="utf-8")
        self._programs = ForkedPrograms(["preloaded"], self._environment, _LIMIT_S)
        self._training = [
            *("run", *(() if is_gpu else ("--fallback",)), str(_HERE / "training_program.py")),
            *(str(_STEPS), str(self._trace), str(self._root / "work")),
        ]
        hardware = ["--trace", str(self._trace), "--hardware", "h200", "--budget", "128MiB"]
        self._commands = {"plan": ["plan", *hardware], "simulate": ["simulate", *hardware]}
        whole = {"training": self._training, **self._commands}
        self._whole = {name: self._run(words) for name, words in whole.items()}
        self._checksum = self._stock_checksum()

    def close(self) -> None:
        """End the process that starts the others."""
        self._programs.close()
        self._temporary.cleanup()

    # ------------------------------------------------------------------ what is tried

    def kill_a_training(self, seed: int) -> None:
        """A training is killed; the next one is as if there had been none."""
        chance = random.Random(seed)
        before = _shared_memory()
        ended = self._end("training", self._training, signal.SIGKILL, chance)
        _check(ended, ended.status in (0, -signal.SIGKILL))
        self._check_files()
        following = self._run(self._training)
        _check(following, following.status == 0)
        _check(following, following.output == self._checksum)
        _check(
            following, following.errors.count("\n") == self._whole["training"].errors.count("\n")
        )
        assert not any((self._root / "runtime" / "umem").iterdir()), "a socket stays"
        left = _shared_memory() - before - _held_by_processes()
        assert not left, f"in /dev/shm: {left}"

    def end_a_training(self, seed: int) -> None:
        """A training is interrupted or terminated."""
        chance = random.Random(seed)
        number = chance.choice((signal.SIGINT, signal.SIGTERM))
        ended = self._end("training", self._training, number, chance)
        self._check_end(ended, number)
        if ended.status == INTERRUPTED_STATUS:
            tracebacks = ended.errors.count("Traceback")
            _check(ended, tracebacks <= 1)
            # Ahead of the program and behind it, there is no line of it to show.
            _check(ended, tracebacks == 1 or ended.output in ("", self._checksum))
        if ended.status == 0:
            _check(ended, ended.output == self._checksum)
        self._check_files()

    def end_a_command(self, seed: int) -> None:
        """`umem plan` or `umem simulate` is interrupted or terminated."""
        chance = random.Random(seed)
        name = chance.choice(list(self._commands))
        number = chance.choice((signal.SIGINT, signal.SIGTERM))
        ended = self._end(name, self._commands[name], number, chance)
        self._check_end(ended, number)
        if ended.status == INTERRUPTED_STATUS:
            _check(ended, ended.errors.endswith("umem: interrupted\n"))
            _check(ended, "Traceback" not in ended.errors)
        self._check_files()

    # ------------------------------------------------------------------ what must hold

    def _check_end(self, ended: Ended, number: signal.Signals) -> None:
        """Whole, or as Python ends by this signal."""
        # Python gives the signal back to the system when it ends.
        statuses = (0, -number, INTERRUPTED_STATUS if number == signal.SIGINT else 0)
        _check(ended, ended.status in statuses)
        finalizers = _FINALIZERS.search(ended.errors)
        _check(ended, finalizers is None or _UMEM not in finalizers[0])
        _check(ended, _NEVER.search(_FINALIZERS.sub("", ended.errors)) is None)

    def _check_files(self) -> None:
        """All that was written is whole, and nothing else is there."""
        work = self._root / "work"
        names = {it.name for it in work.iterdir()}
        assert names <= {"checkpoint"}, names
        if (work / "checkpoint").exists():
            content = (work / "checkpoint").read_bytes()
            assert content == content[:1] * CHECKPOINT_BYTES
        for path in (self._root / "cache").rglob("*"):
            if path.is_file():
                with suppress(UmemError, ValueError):
                    if path.suffix == ".json":
                        json.loads(path.read_bytes())
                    else:
                        load_trace(path)
                    continue
                raise AssertionError(f"{path} is damaged")
        found = [it.name for it in (self._root / "tmp").iterdir()]
        found = [it for it in found if not it.startswith("torchinductor_")]  # torch's own folder
        assert not found, f"in the folder of temporary files: {found}"
        runtime = self._root / "runtime" / "umem"
        sockets = list(runtime.iterdir()) if runtime.exists() else []
        assert len(sockets) <= 1, "sockets of more than the last process"

    # ------------------------------------------------------------------ starting

    def _stock_checksum(self) -> str:
        """What the program prints without umem."""
        done = subprocess.run(
            [sys.executable, *self._training[-4:]],
            env=self._environment | {"STOCK": "1"},
            capture_output=True,
            text=True,
            check=True,
        )
        assert self._whole["training"].output == done.stdout
        return done.stdout

    def _end(
        self, name: str, words: list[str], number: signal.Signals, chance: random.Random
    ) -> Ended:
        # A tenth from the very start of Python, which takes a second longer.
        moment = chance.random() * 1.1
        if chance.random() < 0.1:
            return self._run_anew(words, number, moment * (self._whole[name].took_s + 2))
        return self._run(words, number, moment * self._whole[name].took_s)

    def _run(
        self, words: list[str], number: signal.Signals | None = None, after_s: float = 0
    ) -> Ended:
        output, errors = self._root / "output", self._root / "errors"
        began_s = time.monotonic()
        status = self._programs.run(
            ["umem", *words], self._root, output, errors, _LIMIT_S, number=number, after_s=after_s
        )
        assert status is not None, f"a process hangs: {words}"
        took_s = time.monotonic() - began_s
        return Ended(status, output.read_text("utf-8"), errors.read_text("utf-8"), took_s)

    def _run_anew(self, words: list[str], number: signal.Signals, after_s: float) -> Ended:
        began_s = time.monotonic()
        process = subprocess.Popen(
            [sys.executable, "-m", "umem", *words],
            env=self._environment,
            cwd=self._root,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            # A shell's background job ignores the signal, and would hand that on.
            preexec_fn=partial(signal.signal, signal.SIGINT, signal.SIG_DFL),
        )
        # In the first hundredths of a second Python itself starts, and ends in its own way.
        time.sleep(max(after_s, 0.3))
        process.send_signal(number)
        try:
            output, errors = process.communicate(timeout=_LIMIT_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.communicate()
            raise AssertionError(f"a process hangs: {words}") from None
        return Ended(process.returncode, output, errors, time.monotonic() - began_s)


def _check(ended: Ended, holds: bool) -> None:
    assert holds, f"status {ended.status}: {ended.output}{ended.errors}"


def _shared_memory() -> set[str]:
    """Files of this user in /dev/shm."""
    user = os.geteuid()
    return {it.path for it in os.scandir("/dev/shm") if _owner(it) == user}


def _owner(entry: os.DirEntry[str]) -> int | None:
    try:
        return entry.stat(follow_symlinks=False).st_uid
    except FileNotFoundError:  # somebody has removed it
        return None


def _held_by_processes() -> set[str]:
    """Files that processes of this user have mapped, or open."""
    found = set()
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # it is another user's, or has ended
            lines = (process / "maps").read_text().splitlines()
            found |= {line.split(maxsplit=5)[-1] for line in lines if "/dev/shm/" in line}
            found |= {os.readlink(it) for it in (process / "fd").iterdir()}
    return found
