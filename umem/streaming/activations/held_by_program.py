"""What the program itself holds of what a forward pass has saved, unit by unit.

A copy of it frees no memory before the program lets go: of the argument of a call, which lives as
long as the call, or of what a U-Net keeps for its way up.
"""

from __future__ import annotations

import weakref
from collections import defaultdict
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

from umem.offloading import ActivationStore

if TYPE_CHECKING:
    from umem.offloading.store import Stored

__all__ = ["HeldByProgram", "HeldBytes"]

HeldBytes = Mapping[str, tuple[tuple[int, str | None], ...]]
"""By unit, bytes that it has saved and the last unit in whose forward pass the program holds them;
None where it holds them still when the forward pass is over."""


class HeldByProgram:
    """Looks at it where units begin.

    Parameters
    ----------
    store
        Has what autograd saves.
    """

    def __init__(self, store: ActivationStore) -> None:
        self._store = store
        self._held: dict[weakref.ref[Stored], tuple[str, str]] = {}
        """What is held, the last unit that has saved it, and the last in which it was held."""
        self._found: defaultdict[str, list[tuple[int, str | None]]] = defaultdict(list)

    def unit_ends(self, name: str, parts: Iterable[tuple[object, range | None]]) -> None:
        """A unit has saved these parts of groups of the store."""
        for key, ordinals in parts:
            for stored in self._store.stored(key, ordinals):
                self._held[weakref.ref(stored)] = name, name

    def unit_begins(self, name: str) -> None:
        """Another unit begins."""
        for reference, (owner, last) in list(self._held.items()):
            stored = reference()
            if stored is not None and stored.is_kept():
                self._held[reference] = owner, name
                continue
            del self._held[reference]
            if stored is not None and last != owner:
                self._found[owner].append((stored.size_bytes, last))

    def released_bytes(self) -> int:
        """Bytes of it that the store has released."""
        some = (reference() for reference in self._held)
        return sum(
            it.size_bytes for it in some if it is not None and it.storage is None and it.is_kept()
        )

    def pass_ends(self) -> HeldBytes:
        """The forward pass is over."""
        for reference, (owner, _) in self._held.items():
            stored = reference()
            if stored is not None and stored.is_kept():
                self._found[owner].append((stored.size_bytes, None))
        return {name: tuple(its) for name, its in self._found.items()}
