"""Commands and trainings where nothing can be written, in ``/dev/shm`` neither."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

UNSHARE = ("unshare", "--mount", "--map-root-user")

READ_ONLY = r"""
set -e
mount --bind "$HOME" /dev/shm
while read -r _ folder _; do
  case "$folder" in
    /proc*|/sys*|/dev|/dev/pts|/dev/mqueue) ;;
    *) mount -o remount,bind,ro "$folder" 2> /dev/null || true ;;
  esac
done < /proc/mounts
mount -t tmpfs none "$TMPDIR"
for folder in "$HOME" /dev/shm /tmp .; do
  if touch "$folder/probe" 2> /dev/null; then echo "$folder can be written"; exit 99; fi
done
exec "$@"
"""
"""Makes all file systems read-only, but for a folder of temporary files, which torch needs."""

TRAINING = """
from streamed_programs import Program, bits
from umem.streaming.stage import HostLanes

found = []
for lanes in (None, lambda _: HostLanes()):
    program = Program(lanes, streams_weights=True)
    program.step()
    program.stream()
    for _ in range(4):
        program.step()
    found.append(bits([program.seen, list(program.model.parameters())]))
assert found[0] == found[1]
print("the same bits")
"""


@pytest.fixture
def script(tmp_path: Path) -> Path:
    path = tmp_path / "train.py"
    path.write_text(TRAINING)
    return path


def run_read_only(folder: Path, *command: str) -> subprocess.CompletedProcess[str]:
    if shutil.which("unshare") is None or subprocess.run([*UNSHARE, "true"]).returncode:
        pytest.skip("mount namespaces are not allowed here")
    kept = {name: value for name, value in os.environ.items() if not name.startswith("UMEM_")}
    places = dict.fromkeys(("HOME", "XDG_RUNTIME_DIR", "XDG_CACHE_HOME"), str(folder))
    (folder / "tmp").mkdir()
    places["TMPDIR"] = str(folder / "tmp")
    support = str(Path(__file__).parent / "support")
    return subprocess.run(
        [*UNSHARE, "sh", "-c", READ_ONLY, "sh", *command],
        env=kept | places | {"PYTHONPATH": support, "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        timeout=300,
    )


def umem(*words: str) -> tuple[str, ...]:
    return (str(Path(sys.executable).with_name("umem")), *words)


def test_a_training_runs(script: Path, tmp_path: Path) -> None:
    done = run_read_only(tmp_path, *umem("run", "--fallback", str(script)))
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "the same bits"


def test_commands_answer(tmp_path: Path) -> None:
    done = run_read_only(tmp_path, *umem("fit", "llama-2-7b", "--gpu", "h100-sxm"))
    assert done.returncode == 0, done.stderr
    assert "host memory" in done.stdout


def test_the_doctor_says_whether_umem_works(tmp_path: Path) -> None:
    done = run_read_only(tmp_path, *umem("doctor", "--json"))
    assert done.returncode == 1 - json.loads(done.stdout)["swap_works"], done.stderr
