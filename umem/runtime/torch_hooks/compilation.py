"""Calls a function before code is compiled, and before code that would be compiled again."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

from umem import patches
from umem.torch_compat import PRIVATE_NAMES, Need, require

__all__ = ["before_compiled_code"]


def before_compiled_code(settle: Callable[[], bool]) -> None:
    """Call a function before ``torch.compile`` compiles code, for the rest of the process.

    Compiled code checks the dispatch keys of its tensors. Where the function returns True, some had
    a guard's: from then on it is also called before that code runs, which would be compiled again
    and again otherwise; and before code whose checks the program skips. The compiler is imported,
    which takes a second or two in a process without an optimizer.
    """
    require(Need.MANAGE)
    handler = PRIVATE_NAMES["compiler_callbacks"].find()
    checks_nothing = PRIVATE_NAMES["skips_checks"].find()
    entered = threading.local()
    guarded: dict[int, Any] = {}

    def compilation_begins(*_: object) -> None:
        if settle() and (code := getattr(entered, "code", None)) is not None:
            guarded[id(code)] = code

    def settling(choose: Callable[[Any], Any]) -> Callable[[Any], Any]:
        def enter(code: Any) -> Any:
            if callable(code):  # nothing is compiled in other contexts, as an optimizer's step
                entered.code = code
                if id(code) in guarded or checks_nothing():
                    settle()
            return choose(code)

        return enter

    def forgetting(forget: Callable[[Any], None]) -> Callable[[Any], None]:
        def forget_others(its: Any) -> None:  # `torch.compiler.reset()` forgets torch's alone
            guarded.clear()
            try:
                forget(its)
            finally:
                its.register_start_callback(compilation_begins)

        return forget_others

    patches.wrap("compiled_context", settling)
    patches.wrap("compiler_reset", forgetting, owner=type(handler))
    handler.register_start_callback(compilation_begins)
