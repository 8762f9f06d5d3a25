"""SECURITY.md: umem opens no network connection."""

from __future__ import annotations

from pathlib import Path

import pytest
from other_process import run_forked

from umem.runtime import _native

# Prints each socket's family, each address that is listened on, and each name that is looked up.
WATCHED = """
import os, sys
from importlib import import_module
from pkgutil import walk_packages

def watch(event, arguments):
    if event == "socket.__new__":
        print("family", int(arguments[1]))
    elif event == "socket.bind":
        print("address", os.path.realpath(arguments[1]))
    elif event in ("socket.getaddrinfo", "socket.gethostbyname"):
        print("name", arguments[0])

sys.addaudithook(watch)
import umem
from umem.cli import main
from umem.runtime.live_socket import ask, serve

for module in walk_packages(umem.__path__, "umem."):
    if module.name.startswith(("umem.examples", "umem.integrations")):
        continue  # scripts, and what needs other libraries
    import_module(module.name)
serve(dict)
print("process", os.getpid())
assert ask(os.getpid()) == {}
for words in (
    "fit llama-2-7b --gpu h100-sxm",
    "simulate --model llama-tiny --mode sft --batch 1 --seq 64",
    "doctor",
):
    sys.argv = ["umem", *words.split()]
    try:
        main()
    except SystemExit as ended:
        assert ended.code in (None, 0, 1), words
"""


@pytest.mark.slow
def test_the_only_socket_is_umem_tops(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    lines = run_forked(WATCHED, XDG_RUNTIME_DIR=str(tmp_path)).splitlines()
    seen = {line for line in lines if line.startswith(("family ", "address ", "name "))}
    (process,) = (line.removeprefix("process ") for line in lines if line.startswith("process "))
    path = tmp_path / "umem" / f"{process}.sock"
    assert seen == {"family 1", f"address {path}"}  # AF_UNIX
    assert not path.exists()


def test_the_native_library_calls_no_socket() -> None:
    symbols = Path(_native.__file__).read_bytes().split(b"\0")
    assert b"mmap" in symbols
    assert not {b"socket", b"connect", b"bind", b"getaddrinfo"} & set(symbols)
