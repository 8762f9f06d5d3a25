"""umem's log on standard error: what `UMEM_LOG` and `umem run` show, and never twice."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from umem.core.errors import PolicyError
from umem.core.log import is_first_rank, show_log

SAY = """
import logging
log = logging.getLogger("umem")
log.debug("d"), log.info("i"), log.warning("w")
"""


def said(program: str, variable: str | None) -> str:
    """What a script shows: pytest has handlers of its own for all logs."""
    environ = {name: it for name, it in os.environ.items() if name != "UMEM_LOG"}
    if variable is not None:
        environ["UMEM_LOG"] = variable
    done = subprocess.run(
        [sys.executable, "-c", "from umem.core.log import show_log\n" + program + SAY],
        env=environ,
        capture_output=True,
        text=True,
        check=True,
    )
    return "".join(done.stderr.split())


@pytest.mark.parametrize(
    ("default", "variable", "shown"),
    [
        (None, None, "w"),
        ("info", None, "iw"),
        ("info", "warning", "w"),
        (None, "debug", "diw"),
        ("info", "off", ""),
    ],
)
def test_levels(default: str | None, variable: str | None, shown: str) -> None:
    # The second call is umem.enable's, behind umem run.
    assert said(f"show_log({default!r}); show_log()", variable) == shown


@pytest.mark.parametrize(
    ("variable", "shown"), [(None, "W:w"), ("info", "I:iW:w"), ("debug", "D:dI:iW:w")]
)
def test_a_program_with_own_logging_shows_each_line_once(variable: str | None, shown: str) -> None:
    set_up = "import logging\nlogging.basicConfig(format='%(levelname).1s:%(message)s')"
    program = f"show_log('info')\n{set_up}"
    assert said(program, variable) == shown


def test_no_level_is_an_error() -> None:
    with pytest.raises(PolicyError, match=r"UMEM_LOG: 'loud'"):
        show_log(None, {"UMEM_LOG": "loud"})


def test_the_first_rank_of_a_host() -> None:
    assert is_first_rank({})
    assert is_first_rank({"LOCAL_RANK": "0"})
    assert not is_first_rank({"LOCAL_RANK": "1"})
