"""Bad input ends in one line that names the place and the remedy, never in a traceback."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from command_line import Run
from rich.console import Console

import umem
from umem.cli import INTERRUPTED_STATUS, output
from umem.core.errors import PolicyError
from umem.core.install import _origin, install_command

# A root user enters every folder, unless these are taken away.
WITHOUT_PRIVILEGES = (
    ["setpriv", "--bounding-set=-dac_override,-dac_read_search"] if os.geteuid() == 0 else []
)
DIGITS = "9" * 400


def umem_process(
    *arguments: object, prefix: list[str] | None = None, **options: Any
) -> subprocess.CompletedProcess[str]:
    command = [*(prefix or ()), sys.executable, "-c", "from umem.cli import main; main()"]
    options.setdefault("stdout", subprocess.PIPE)
    return subprocess.run(
        [*command, *map(str, arguments)], stderr=subprocess.PIPE, text=True, check=False, **options
    )


def write(path: Path, text: str) -> Path:
    path.write_text(text, encoding="utf-8")
    return path


# ------------------------------------------------------------------------ paths and outputs


@pytest.mark.slow
@pytest.mark.parametrize(
    "words",
    [
        ("run", "locked/train.py"),
        ("trace", "locked/train.py:make_step"),
        ("policy", "show", "locked/policy.yaml"),
    ],
    ids=lambda words: words[0],
)
def test_a_folder_that_may_not_be_entered(words: tuple[str, ...], tmp_path: Path) -> None:
    locked = tmp_path / "locked"
    locked.mkdir(mode=0)
    done = umem_process(*words, prefix=WITHOUT_PRIVILEGES, cwd=tmp_path)
    assert done.returncode == 2
    (line,) = done.stderr.splitlines()
    assert line.startswith(f"umem: {words[-1].partition(':')[0]}: ")
    assert "permission denied" in line


@pytest.mark.slow
@pytest.mark.parametrize(
    "words",
    [("trace", "--show", "locked"), ("fit", "./locked"), ("policy", "validate", "locked")],
    ids=lambda words: words[0],
)
def test_a_file_that_may_not_be_read(words: tuple[str, ...], tmp_path: Path) -> None:
    (tmp_path / "locked").touch(mode=0)
    done = umem_process(*words, prefix=WITHOUT_PRIVILEGES, cwd=tmp_path)
    assert done.returncode == 2
    (line,) = done.stderr.splitlines()
    assert "locked: cannot be read (permission denied): allow it" in line


@pytest.mark.parametrize(
    "words",
    [
        ("trace", "--show"),
        ("report",),
        ("plan", "--trace"),
        ("fit",),
        ("policy", "validate"),
        ("simulate", "--model", "llama-tiny", "--hardware"),
    ],
    ids=lambda words: words[0],
)
@pytest.mark.parametrize("kind", ["empty", "text", "noise", "huge", "folder", "pipe", "missing"])
def test_files_of_another_kind(run: Run, words: tuple[str, ...], kind: str, tmp_path: Path) -> None:
    path = tmp_path / "given"
    match kind:
        case "empty" | "huge":
            path.touch()
            os.truncate(path, 2**28 if kind == "huge" else 0)
        case "text":
            path.write_text("[to: be")
        case "noise":
            path.write_bytes(bytes(range(255, -1, -1)))
        case "folder":
            path.mkdir()
        case "pipe":
            os.mkfifo(path)
    status, text, errors = run(*words, path)
    assert (status, text) == (2, "")
    (line,) = errors.splitlines()
    assert str(path) in line
    assert len(line) < len(str(path)) + 200


@pytest.mark.parametrize("target", ["/dev/null", "/dev/full"])
def test_an_output_that_is_no_file_is_refused_before_the_work(run: Run, target: str) -> None:
    status, _, errors = run("trace", "--model", "llama-tiny", "--output", target)
    assert status == 2
    assert errors == f"umem: --output: {target} is a device or a pipe: give the name of a file\n"


@pytest.mark.parametrize(
    "words", [("run", "x.py"), ("run", "-m", "x"), ("doctor",), ("policy", "list"), ("bench",)]
)
def test_a_current_folder_that_is_gone(
    run: Run, words: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    tmp_path.rmdir()
    status, _, errors = run(*words)
    assert status == 2
    assert errors == "umem: the current folder is gone: change to one that exists\n"


@pytest.mark.slow
@pytest.mark.parametrize("words", ["--version", "policy list"])
def test_standard_output_on_a_full_disk(words: str) -> None:
    with open("/dev/full", "w") as full:
        done = umem_process(*words.split(), stdout=full)
    assert done.returncode == 2
    assert done.stderr == (
        "umem: standard output cannot be written (no space left on device): check where it goes\n"
    )


@pytest.mark.slow
def test_a_pipe_that_nobody_reads() -> None:
    reading, writing = os.pipe()
    os.close(reading)
    done = umem_process("policy", "list", stdout=writing)
    os.close(writing)
    assert (done.returncode, done.stderr) == (1, "")


@pytest.mark.slow
def test_letters_that_the_encoding_lacks(tmp_path: Path) -> None:
    """Printed as escapes."""
    path = write(tmp_path / "mine.yaml", "extends: sft\ndescription: h\u00e9llo \u2192\n")
    ascii_only = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    environment = {**os.environ, **ascii_only, "PYTHONIOENCODING": "ascii"}
    done = umem_process("policy", "show", path, env=environment)
    assert (done.returncode, done.stderr) == (0, "")
    assert "mine  h\\xe9llo \\u2192" in done.stdout
    done = umem_process("policy", "show", "h\u00e9", env=environment)
    assert done.returncode == 2
    assert len(done.stderr.splitlines()) == 1


@pytest.mark.slow
@pytest.mark.parametrize(
    ("error", "said"),
    [
        ("ModuleNotFoundError('No module named torch', name='torch')", "No module named torch"),
        ("OSError('libcudart.so.13: cannot open shared object file')", "libcudart.so.13: cannot"),
    ],
    ids=["missing", "broken"],
)
def test_torch_that_cannot_be_imported(error: str, said: str, tmp_path: Path) -> None:
    script = write(tmp_path / "train.py", "print('trained')\n")
    code = f"""
import sys

class WithoutTorch:
    def find_spec(self, name, *_):
        if name == "torch":
            raise {error}

sys.meta_path.insert(0, WithoutTorch())
sys.argv = ["umem", "run", {str(script)!r}]
from umem.cli import main
main()
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (2, "")
    (line,) = done.stderr.splitlines()
    assert line.startswith(f"umem: {said}")
    assert install_command("cuda13") in line


@pytest.mark.slow
def test_a_part_of_umem_that_is_missing_is_a_fault_of_its_own(tmp_path: Path) -> None:
    """It keeps its traceback."""
    code = (
        "import sys; sys.modules['umem.cli.fit'] = None; sys.argv = ['umem', 'fit', 'llama-2-7b']\n"
    )
    code += "from umem.cli import main; main()"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "Traceback" in done.stderr


# ------------------------------------------------------------------------------------ Ctrl-C


@pytest.mark.parametrize("place", ["umem.cli", "typer", "umem.cli.policy"])
@pytest.mark.parametrize("names", [False, True], ids=["", "while an attribute is named"])
def test_ctrl_c_while_a_command_is_imported(place: str, names: bool) -> None:
    code = f"""
import sys

class Named:
    def __set_name__(self, *_):
        raise KeyboardInterrupt

class Interrupting:
    def find_spec(self, name, *_):
        if name == {place!r}:
            if {names}:
                type("Made", (), {{"named": Named()}})
            raise KeyboardInterrupt

sys.meta_path.insert(0, Interrupting())
sys.argv = ["umem", "policy", "list"]
from umem.__main__ import main
main()
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == INTERRUPTED_STATUS
    assert (done.stdout, done.stderr) == ("", "umem: interrupted\n")


def interrupted(*_: object, **__: object) -> None:
    raise KeyboardInterrupt


@pytest.mark.parametrize("place", ["show_findings", "umem_command", "subprocess.run"])
def test_ctrl_c_ends_the_demo(run: Run, monkeypatch: pytest.MonkeyPatch, place: str) -> None:
    """Also in a command that it calls, and in the example that it starts on a GPU."""
    import demo

    monkeypatch.setattr(demo, "collect", lambda: None)
    monkeypatch.setattr(demo, "diagnose", lambda _: None)
    monkeypatch.setattr(demo, "show_findings", lambda *_: None)
    monkeypatch.setattr("torch.cuda.is_available", lambda: place == "subprocess.run")
    if place == "umem_command":
        monkeypatch.setattr("umem.cli.fit.load_hardware", interrupted, raising=False)
    else:
        monkeypatch.setattr(f"demo.{place}", interrupted)
    status, _, errors = run("demo")
    assert (status, errors) == (INTERRUPTED_STATUS, "umem: interrupted\n")


@pytest.fixture
def python_handles_sigint() -> Iterator[None]:
    """As in a terminal; a job in a shell's background inherits that SIGINT is ignored."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.slow
@pytest.mark.usefixtures("python_handles_sigint")
def test_ctrl_c_while_torch_records_a_model() -> None:
    """The process ends at once: an exception could meet C++ code that aborts."""
    code = """
import os, signal
from umem.cli.output import interruptible

class Unraisable:
    def __del__(self):
        os.kill(os.getpid(), signal.SIGINT)

with interruptible():
    Unraisable()
    print("went on")
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == INTERRUPTED_STATUS
    assert (done.stdout, done.stderr) == ("", "umem: interrupted\n")


@pytest.mark.usefixtures("python_handles_sigint")
def test_ctrl_c_raises_again_after_the_recording() -> None:
    with output.interruptible():
        assert signal.getsignal(signal.SIGINT) is not signal.default_int_handler
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


# ----------------------------------------------------------------------------- files' content


@pytest.mark.parametrize(
    ("command", "keys"),
    [
        ("policy", 'extends: sft\ndescription: "b\\e[2J"\n'),
        ("hardware", 'extends: h100-sxm\nlaunch_s: {value: 1us, source: "b\\e[2J"}\n'),
    ],
)
def test_control_characters_of_a_file(run: Run, tmp_path: Path, command: str, keys: str) -> None:
    path = write(tmp_path / "mine.yaml", keys + 'name: "a\\e[31mred"\n')
    status, text, _ = run(command, "show", path)
    assert status == 0
    assert "a\\x1b[31mred" in text
    assert "b\\x1b[2J" in text
    assert "\x1b" not in text


@pytest.mark.parametrize("command", ["show", "validate"])
def test_control_characters_of_a_key(run: Run, tmp_path: Path, command: str) -> None:
    path = write(tmp_path / "mine.yaml", 'extends: sft\n"a\\n\\e[31m": 3\n')
    status, _, errors = run("policy", command, path)
    assert status == 2
    (line,) = errors.splitlines()
    assert ":2:1: a\\n\\x1b[31m: unknown key" in line


def chain(folder: Path, length: int, last: str) -> Path:
    for number in range(length - 1):
        write(folder / f"p{number}.yaml", f"extends: ./p{number + 1}.yaml\n")
    write(folder / f"p{length - 1}.yaml", f"extends: {last}\n")
    return folder / "p0.yaml"


@pytest.mark.parametrize(("command", "last"), [("policy", "sft"), ("hardware", "h100-sxm")])
def test_a_longer_chain_of_files(run: Run, tmp_path: Path, command: str, last: str) -> None:
    status, _, errors = run(command, "show", chain(tmp_path, 1500, last))
    assert status == 2
    (line,) = errors.splitlines()
    assert "p15.yaml:1:1: extends: more than 16 files" in line


def test_the_longest_chain_of_policies(tmp_path: Path) -> None:
    assert umem.load_policy(chain(tmp_path, 15, "sft")).name == "p0"


@pytest.mark.parametrize("name", ["x" * 5000, f"./{'x' * 5000}.yaml"])
def test_a_parent_with_an_endless_name(name: str, tmp_path: Path) -> None:
    path = write(tmp_path / "mine.yaml", f'extends: "{name}"\n')
    with pytest.raises(PolicyError, match=r"mine\.yaml:1:1: extends: .*xxx") as caught:
        umem.load_policy(path)
    assert len(str(caught.value)) < 1200


@pytest.mark.parametrize(
    "change",
    [
        {"bytes": int(DIGITS)},
        {"duration_us": int(DIGITS)},
        {"id": int(DIGITS)},
        {"reads": [int(DIGITS)]},
        {"published": {"x": int(DIGITS)}},
    ],
    ids=lambda change: next(iter(change)),
)
def test_a_number_of_400_digits(run: Run, tmp_path: Path, change: dict[str, Any]) -> None:
    tensor = {"id": 0, "bytes": 512, "class": "weights", "persistent": True}
    phase = {"name": "a", "duration_us": 1, "reads": [0], "writes": []}
    trace: dict[str, Any] = {"format": "umem-trace/1", "tensors": [tensor], "phases": [phase]}
    for part in (tensor, phase, trace):
        part.update({key: value for key, value in change.items() if key in part})
    trace.update({key: value for key, value in change.items() if key == "published"})
    path = write(tmp_path / "trace.json", json.dumps(trace))
    status, _, errors = run("trace", "--show", path)
    assert status == 2
    (line,) = errors.splitlines()
    assert line.startswith(f"umem: {path}: ")
    assert len(line) < len(str(path)) + 200


@pytest.mark.slow
def test_many_problems(run: Run, tmp_path: Path) -> None:
    """Ten are shown, and the others are counted."""
    keys = "".join(f"key_{number}: 1\n" for number in range(1012))
    path = write(tmp_path / "mine.yaml", f"extends: sft\n{keys}")
    for command in ("show", "validate"):
        status, _, errors = run("policy", command, path)
        lines = errors.splitlines()
        assert (status, len(lines)) == (2, 11)
        assert lines[-1] == f"{path}: 1,002 more problems"
    status, text, _ = run("policy", "validate", "--json", path)
    assert len(json.loads(text)[0]["problems"]) == 1012
    profile = write(tmp_path / "machine.yaml", f"extends: h100-sxm\n{keys}")
    status, _, errors = run("hardware", "show", profile)
    assert (status, len(errors.splitlines())) == (2, 11)
    assert "1,002 more problems" in errors.splitlines()[-1]


# ------------------------------------------------------------------------- tables, remedies


def test_a_table_may_be_wider_than_the_terminal(
    capsys: pytest.CaptureFixture[str],
) -> None:
    table = output.make_table("class", numbers=("from step to step", "within the step"))
    table.add_row("optimizer_state", "75.31 GiB", "124.88 GiB")
    output.print_table(Console(width=20), table)
    heading, row = capsys.readouterr().out.splitlines()
    assert heading.split() == ["class", "from", "step", "to", "step", "within", "the", "step"]
    assert row.split() == ["optimizer_state", "75.31", "GiB", "124.88", "GiB"]


@pytest.mark.parametrize(
    ("noted", "command"),
    [
        (
            {"url": "file://{folder}", "dir_info": {"editable": True}},
            "pip install --editable '{folder}[plots]'",
        ),
        ({"url": "file://{folder}", "dir_info": {}}, "pip install '{folder}[plots]'"),
        ({"url": "file://{folder}/umem.whl"}, "pip install '{folder}/umem.whl[plots]'"),
        ({"url": "file:///gone"}, "pip install '.[plots]' in a checkout of umem"),
        (None, "pip install '.[plots]' in a checkout of umem"),
    ],
)
def test_the_command_that_installs_an_extra(
    noted: dict[str, Any] | None, command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From the place that umem came from, and from no index, which has none.

    To build it again takes its sources.
    """
    (tmp_path / "umem.whl").touch()
    text = None if noted is None else json.dumps(noted).replace("{folder}", str(tmp_path))

    class Distribution:
        def read_text(self, _: str) -> str | None:
            return text

    monkeypatch.setattr("importlib.metadata.distribution", lambda _: Distribution())
    _origin.cache_clear()
    try:
        assert install_command("plots") == command.format(folder=tmp_path)
        built = "pip install '.[plots]' in a checkout of umem" if ".whl" in command else command
        assert install_command("plots", builds=True) == built.format(folder=tmp_path)
    finally:
        _origin.cache_clear()
