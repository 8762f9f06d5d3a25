"""Names that are loaded at their first use: of packages, and for commands."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from functools import wraps
from typing import Any, TypeVar

__all__ = ["lazy_names", "loads_names"]

_F = TypeVar("_F", bound=Callable[..., Any])


def lazy_names(package: str, modules: Mapping[str, str]) -> Callable[[str], Any]:
    """Return the ``__getattr__`` of a package that imports its modules when a name is asked for.

    Parameters
    ----------
    package
        The package's name.
    modules
        By module within the package, the names that the package has from it, between spaces.
    """
    module_of = {name: module for module, names in modules.items() for name in names.split()}

    def find(name: str) -> Any:
        module = module_of.get(name)
        if module is None:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        return getattr(importlib.import_module(f"{package}.{module}"), name)

    return find


def loads_names(namespace: dict[str, Any], modules: Mapping[str, str]) -> Callable[[_F], _F]:
    """Return a decorator of functions that need names of modules which take long to import.

    A function so decorated loads the names when it is called: ``--help`` needs none of them.

    Parameters
    ----------
    namespace
        The globals of the function's module, which get the names. What is there already stays.
    modules
        By module, names of it, between spaces.
    """

    def load() -> None:
        for module, names in modules.items():
            missing = [name for name in names.split() if name not in namespace]
            if missing:
                found = importlib.import_module(module)
                namespace.update({name: getattr(found, name) for name in missing})

    def decorate(function: _F) -> _F:
        @wraps(function)
        def called(*args: Any, **named: Any) -> Any:
            load()
            return function(*args, **named)

        return called  # type: ignore[return-value]

    return decorate
