"""A compiler's launcher: what several builds compile from equal sources is compiled by the first.

`compile_once.py FOLDER COMPILER OPTION...`, as CMake calls it; the folder keeps the objects.
"""

from __future__ import annotations

import fcntl
import hashlib
import shutil
import subprocess
import sys
from pathlib import Path

_PLACES = ("-o", "-c", "-MT", "-MF", "-isystem")
"""Options whose next word is a place, which changes nothing that is not in the source then."""


def main(folder: str, *command: str) -> int:
    """Status of the compiler, whose object is there then."""
    if "-c" not in command:
        return subprocess.run(command).returncode
    place = command.index("-o")
    made = command[place + 1]
    # It writes the list of headers, too. Without lines' numbers: those are places.
    reads = [it for it in (*command[:place], *command[place + 2 :]) if it != "-c"]
    source = subprocess.run([*reads, "-E", "-P"], stdout=subprocess.PIPE)
    if source.returncode:
        return source.returncode
    known = hashlib.sha256(source.stdout)
    for before, word in zip(("", *command), command, strict=False):
        if before not in _PLACES and not word.startswith("-I"):
            known.update(word.encode() + b"\0")
    kept = Path(folder, known.hexdigest())
    with kept.with_suffix(".lock").open("a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not kept.exists():
            if status := subprocess.run(command).returncode:
                return status
            shutil.copyfile(made, kept)
    shutil.copyfile(kept, made)
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
