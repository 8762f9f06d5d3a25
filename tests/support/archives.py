"""Files of columns taken apart and put together again, changed."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np


def contents(path: Path) -> dict[str, Any]:
    """Header and columns of a file, as one mapping; columns are arrays."""
    with np.load(path) as archive:
        columns = {name: archive[name] for name in archive.files}
    return json.loads(columns.pop("header").tobytes()) | columns


def write_archive(path: Path, content: dict[str, Any]) -> None:
    """Write arrays as columns, and everything else as the header."""
    columns: dict[str, Any] = {key: it for key, it in content.items() if isinstance(it, np.ndarray)}
    header = {key: it for key, it in content.items() if key not in columns}
    text = np.frombuffer(json.dumps(header).encode(), np.uint8)
    with path.open("wb") as file:
        np.savez_compressed(file, **{"header": text, **columns})


def rewrite(path: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """Change a file's header and columns; lists become columns of the type that was there."""
    content = contents(path)
    types = {key: it.dtype for key, it in content.items() if isinstance(it, np.ndarray)}
    change(content)
    for key, dtype in types.items():
        if isinstance(content.get(key), list):
            content[key] = np.array(content[key], dtype)
    write_archive(path, content)
