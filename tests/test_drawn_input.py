"""Drawn words, files and variables, most of them bad, and Ctrl-C: no traceback."""

from __future__ import annotations

import os
import random
import shlex
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

import umem.__main__
import umem.cli
from umem.__main__ import main
from umem.cli import COMMANDS, INTERRUPTED_STATUS, load_command
from umem.policy import load_policy
from umem.trace import save_trace

EACH = 50
"""Inputs that a test draws."""

PACKAGE = str(Path(umem.__file__).parent)
CATCHING = (umem.__main__.__file__, umem.cli.__file__)
"""Where Ctrl-C becomes a line and a status."""

WORDS = [
    *("", " ", "0", "-1", "20", "1e9", "nan", "inf", "1_000", "²", "٣", "1.5GiB", "64GiB", "80%"),
    *("0%", "101%", "9" * 30, "9" * 5000, "x" * 5000, "-", "--", "--help", "--json", "a=b", "a,b"),
    *(",", "a\nb", "\x1b[2J", "{", "[bold]", "détect", "💥", "\udcff", "%s", "/dev/null", "."),
    *("/proc/self/mem", "/", "~", "sft", "lora", "managed", "llama-tiny", "llama-2-7b", "7b", "1"),
    *("h100-pcie", "detect", "train.py:make_step", "train.py:lost", "train.py:", "./a/b/c", "both"),
    *("planned", "none", ".."),
]  # fmt: skip

TEXTS = {
    "train.py": (
        "import torch\ndef make_step():\n    weight = torch.ones(64, 64, requires_grad=True)\n"
        "    return lambda: (weight @ weight).sum().backward()\n"
    ),
    "ends.py": "raise SystemExit(3)\n",
    "good.yaml": "extends: sft\n",
    "machine.yaml": "extends: h100-pcie\n",
    "loop.yaml": "extends: ./loop.yaml\n",
    "keys.yaml": "extends: sft\n? [a, b]\n: 1\n<<: 3\n",
    "bomb.yaml": "a: &a [x, x]\nb: &b [*a, *a]\nc: [*b, *b]\nextends: sft\n",
    "tag.yaml": "extends: !!python/object/apply:os.system ['true']\n",
    "unit.yaml": "extends: sft\ndevice_budget: 20\n",
    "classes.yaml": "extends: managed\nclasses: {weights: {kind: lost, fraction: .nan}, x: 3}\n",
    "control.yaml": 'extends: sft\ndescription: "a\\e[2J"\n',
    "tab.yaml": "extends:\tsft\n\t- x",
    "empty.yaml": "",
    "config.json": '{"model_type": "llama", "hidden_size": -1, "num_hidden_layers": 1e99}',
    "list.json": "[" * 3000,
    "number.json": "1" * 9000,
}
"""Name -> content of small files."""

GOOD = {
    "run": ["ends.py"],
    "fit": ["llama-2-7b", "--gpu", "h100-sxm"],
    "simulate": ["--trace", "trace.npz"],
    "tune": ["--trace", "trace.npz"],
    "trace": ["--show", "trace.npz"],
    "plan": ["--trace", "trace.npz"],
    "policy": ["show", "good.yaml"],
    "hardware": ["show", "machine.yaml"],
}
"""Command -> words that it accepts."""

VARIABLES = [
    *("UMEM_POLICY", "UMEM_DEVICE_BUDGET", "UMEM_MANAGED_LIMIT", "UMEM_PLANNER", "UMEM_LOG"),
    *("UMEM_WITHOUT", "UMEM_POISON", "UMEM_COMMIT", "UMEM_LOST", "COLUMNS", "LINES", "TERM"),
    *("NO_COLOR", "FORCE_COLOR", "HOME", "XDG_CACHE_HOME", "XDG_RUNTIME_DIR", "TMPDIR"),
    *("CUDA_VISIBLE_DEVICES", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "NUMBA_CACHE_DIR"),
]  # fmt: skip


@pytest.fixture
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, make_trace: Any) -> list[str]:
    """Names in the current folder: good files, damaged ones, and what is no file."""
    monkeypatch.chdir(tmp_path)
    save_trace(make_trace({"w": (4096, "weights")}, [(1e-3, ["w"], [])]), "trace.npz")
    archive = Path("trace.npz").read_bytes()
    Path("cut.npz").write_bytes(archive[: len(archive) // 2])
    Path("flipped.npz").write_bytes(archive[:99] + bytes([archive[99] ^ 255]) + archive[100:])
    Path("noise").write_bytes(random.Random(0).randbytes(4096))
    for name, text in TEXTS.items():
        Path(name).write_text(text, encoding="utf-8")
    Path("folder").mkdir()
    os.mkfifo("pipe")
    Path("circle").symlink_to("circle")
    return [*os.listdir(), "missing", "missing/x.npz", "train.py/x.yaml", "new.npz", "new.yaml"]


def drawn_words(draw: random.Random, name: str, files: list[str]) -> list[str]:
    """A command line: a command's options, values and files for them, and more words."""
    command = load_command(name)
    words = [name]
    if name in GOOD and draw.random() < 0.5:
        words += GOOD[name]
    elif commands := getattr(command, "commands", None):
        words.append(draw.choice([*commands, "lost"]))
        command = commands.get(words[-1], command)

    def value() -> str:
        found = draw.choice(files if draw.random() < 0.5 else WORDS)
        return "train.py" if (name, found) == ("run", "pipe") else found  # it would wait, as Python

    for _ in range(draw.randint(0, 3) if command.params else 0):
        parameter = draw.choice(command.params)
        if parameter.param_type_name == "option":
            words.append(draw.choice([*parameter.opts, *parameter.secondary_opts]))
            if parameter.is_flag and draw.random() < 0.9:
                continue
        words.append(value())
    return [*words, *(value() for _ in range(draw.randint(0, 1)))]


class Interruption:
    """Ctrl-C where a function of umem begins, the one of this number."""

    def __init__(self, number: int) -> None:
        self._left = number
        self.is_sent = False

    def __call__(self, frame: FrameType, event: str, _: object) -> None:
        file = frame.f_code.co_filename
        if event == "call" and file.startswith(PACKAGE) and file not in CATCHING:
            self._left -= 1
            if not self._left:
                self.is_sent = True
                os.kill(os.getpid(), signal.SIGINT)


@pytest.fixture
def in_process(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Commands whose work is short, in a process that they leave as it was."""

    def end_at_once(*_: object) -> None:
        sys.stderr.write("umem: interrupted\n")
        raise SystemExit(INTERRUPTED_STATUS)

    monkeypatch.setattr(umem, "enable", lambda policy, *, fallback: load_policy(policy))
    monkeypatch.setattr("umem.cli.output.end_at_once", end_at_once)
    monkeypatch.setattr("umem.cli.top.live_processes", list)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)
    monkeypatch.setitem(sys.modules, "__main__", sys.modules["__main__"])
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    environment = dict(os.environ)
    yield
    os.environ.clear()
    os.environ.update(environment)
    signal.signal(signal.SIGINT, before)


@pytest.mark.slow
@pytest.mark.usefixtures("in_process")
@pytest.mark.parametrize("seed", range(5))
def test_no_input_ends_in_a_traceback(
    seed: int, files: list[str], monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    draw = random.Random(seed)
    wrong = []
    for _ in range(EACH):
        name = draw.choice([it for it in COMMANDS if it not in ("bench", "demo", "verify")])
        words = drawn_words(draw, name, files)
        variables = {it: draw.choice([*WORDS, *files]) for it in draw.sample(VARIABLES, 1)}
        number = int(1.5 ** draw.uniform(0, 20)) if draw.random() < 0.2 else 0
        interruption = Interruption(number)
        with monkeypatch.context() as patch:
            for variable, value in variables.items():
                patch.setenv(variable, value)
            patch.setattr(sys, "argv", ["umem", *words])
            ended: object = None
            sys.setprofile(interruption)
            try:
                main()
            except SystemExit as error:
                ended = error.code
            except BaseException as error:
                ended = error
            finally:
                sys.setprofile(None)
        _, errors = capfd.readouterr()
        is_message = errors.startswith("umem: ") or "Usage: " in errors or "validate" in words
        if (
            (ended not in (0, 1, 2, 3, INTERRUPTED_STATUS) and not isinstance(ended, str))
            or ("Traceback" in errors and (name != "run" or PACKAGE in errors))  # a program's own
            or (ended == 2 and not is_message)
            or (ended == INTERRUPTED_STATUS and not errors.endswith("umem: interrupted\n"))
            or ("\x1b[2J" in errors)
        ):
            given = shlex.join(
                [*(f"{it}={value}" for it, value in variables.items()), "umem", *words]
            )
            wrong.append(f"{given[:300]} {interruption.is_sent}: {ended!r}\n{errors[-1500:]}")
    assert not wrong, "\n".join([f"{len(wrong)} of {EACH}", *wrong])
