"""Plans which weights stay on the device, and which pass through staging buffers block by block.

Every block gives up about as many bytes: then the copies of the next block's share run beside each
block's computation, and a staging buffer is as small as one share.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations

__all__ = ["WeightPlan", "WeightUnit", "plan_weights", "staged_bytes"]

_MOST_COMBINED = 10
"""Parts of a unit of which all combinations are looked at: 1,023."""

_ALIGNMENT = 512
"""Of a part in a staging buffer, bytes."""

_EXPERTS_PER_CACHED = 2
"""Of so many experts of a streamed table one is cached at most: what room is left beyond keeps
tables whole on the device, so that a prompt's call, which needs all experts, copies less."""


@dataclass(frozen=True)
class WeightUnit:
    """Weights that are used together, such as those of a block."""

    part_bytes: tuple[int, ...]
    """Bytes of each tensor that can leave the device."""
    gathered: frozenset[int] = frozenset()
    """Numbers of tables of which a pass reads a few rows only, as an embedding's. Off the device
    they are read in place, over the link: no copy of the whole is needed."""
    trained: frozenset[int] = frozenset()
    """Numbers of parts that an optimizer updates."""
    experts: frozenset[int] = frozenset()
    """Numbers of tables of experts, of which passes with few tokens read some."""


@dataclass(frozen=True)
class WeightPlan:
    """Where weights are."""

    streamed: tuple[frozenset[int], ...]
    """By unit, the numbers of the parts that are staged for each use."""
    in_place: tuple[frozenset[int], ...]
    """By unit, the numbers of the parts that are used in host memory."""
    slots: int
    """Number of staging buffers; 0 if nothing is streamed."""
    slot_bytes: int
    """Size of each."""
    resident_bytes: int
    """Weights on the device."""
    streamed_bytes: int
    in_place_bytes: int
    cache_bytes: int = 0
    """Device memory for experts of streamed tables, where nothing else is streamed."""

    @property
    def cached_share(self) -> float:
        """Of the experts of each streamed table."""
        return self.cache_bytes / self.streamed_bytes if self.streamed_bytes else 0.0

    @property
    def device_bytes(self) -> int:
        """Device memory of weights, staging buffers and caches."""
        return self.resident_bytes + self.slots * self.slot_bytes + self.cache_bytes


def plan_weights(
    units: Sequence[WeightUnit],
    room_bytes: int,
    slots: int,
    *,
    experts_first: bool = False,
    caches_experts: bool = False,
    most_resident_bytes: int | None = None,
) -> WeightPlan:
    """Keep as many weights on the device as have room there beside the staging buffers.

    Gathered tables leave first, the largest before the others. Then each unit streams an equal
    share of what has no room. Parts larger than a slot stay on the device, unless all else is
    streamed already: then slots grow.

    Parameters
    ----------
    units
        In the order of the forward pass.
    room_bytes
        Device memory for weights and staging buffers.
    slots
        Number of staging buffers, 2 or more.
    experts_first
        Whether to stream tables of experts alone where that makes room enough.
    caches_experts
        Whether some experts of each streamed table are to have room on the device, in place of
        whole tables. For `experts_first`.
    most_resident_bytes
        The most that may stay on the device, beside staging buffers; None for as much as has room.

    Returns
    -------
    WeightPlan
        If the room is too small for any plan, the one that needs least.
    """
    all_bytes = sum(sum(unit.part_bytes) for unit in units)
    in_place: list[set[int]] = [set() for _ in units]
    gathered = sorted(
        ((size, n, part) for n, it in enumerate(units) for part, size in _gathered(it)),
        reverse=True,
    )
    most_bytes = all_bytes if most_resident_bytes is None else most_resident_bytes
    left_bytes = 0
    for size_bytes, number, part in gathered:
        if all_bytes - left_bytes <= min(room_bytes, most_bytes):
            break
        in_place[number].add(part)
        left_bytes += size_bytes
    none: list[frozenset[int]] = [frozenset()] * len(units)
    streamed, slot_bytes, has_cache = none, 0, False
    if all_bytes - left_bytes > min(room_bytes, most_bytes):
        can_stream = [
            {part: size for part, size in enumerate(unit.part_bytes) if part not in unit.gathered}
            for unit in units
        ]
        excess_bytes = all_bytes - left_bytes - room_bytes
        least_bytes = all_bytes - left_bytes - most_bytes

        def needed(slot_bytes: int) -> int:
            return max(excess_bytes + slots * slot_bytes, least_bytes)

        ways = [(can_stream, needed)]
        if experts_first:
            tables = [
                {part: size for part, size in some.items() if part in unit.experts}
                for unit, some in zip(units, can_stream, strict=True)
            ]
            tables_bytes = sum(sum(some.values()) for some in tables)

            def needed_with_cache(slot_bytes: int) -> int:
                return min(_EXPERTS_PER_CACHED * needed(slot_bytes), tables_bytes)

            ways.insert(0, (tables, needed))
            if caches_experts:
                ways.insert(0, (tables, needed_with_cache))
        for some, wanted in ways:
            streamed, slot_bytes = _streamed(some, wanted)
            has_room = _bytes_of(units, streamed) >= needed(slot_bytes)
            has_cache = caches_experts and has_room and some is not can_stream
            if has_room:
                break
    streamed_bytes = _bytes_of(units, streamed)
    resident_bytes = all_bytes - left_bytes - streamed_bytes
    cache_bytes = 0
    if has_cache:
        free_bytes = min(room_bytes - slots * slot_bytes, most_bytes) - resident_bytes
        cache_bytes = max(0, min(free_bytes, streamed_bytes // _EXPERTS_PER_CACHED))
    return WeightPlan(
        streamed=tuple(streamed),
        in_place=tuple(map(frozenset, in_place)),
        slots=slots if streamed_bytes else 0,
        slot_bytes=slot_bytes,
        resident_bytes=resident_bytes,
        streamed_bytes=streamed_bytes,
        in_place_bytes=left_bytes,
        cache_bytes=cache_bytes,
    )


def _bytes_of(units: Sequence[WeightUnit], parts: Sequence[frozenset[int]]) -> int:
    every = zip(units, parts, strict=True)
    return sum(unit.part_bytes[part] for unit, some in every for part in some)


def _gathered(unit: WeightUnit) -> Iterator[tuple[int, int]]:
    return ((part, unit.part_bytes[part]) for part in sorted(unit.gathered))


def staged_bytes(sizes: Sequence[int]) -> int:
    """Bytes of a staging buffer for parts of these sizes, each of which is aligned."""
    return sum(-(-size // _ALIGNMENT) * _ALIGNMENT for size in sizes)


def _streamed(
    units: Sequence[dict[int, int]], wanted: Callable[[int], int]
) -> tuple[list[frozenset[int]], int]:
    """Parts to stream, and the size of the slots that they need: the smallest that serves.

    `wanted` tells for the size of a slot how many bytes are to be streamed.
    """
    choices = [_combinations(tuple(unit.items())) for unit in units]
    sizes = sorted({staged for some in choices for staged, _, _ in some})
    # Units of the same sizes have the same choices, in one object: to hash all of it takes long.
    counts = Counter(map(id, choices))
    kinds = [(count, next(it for it in choices if id(it) == key)) for key, count in counts.items()]
    # Few units may have less to stream than buffers take.
    nothing: list[frozenset[int]] = [frozenset()] * len(units)
    least, best = wanted(0), -1
    for slot_bytes in sizes:
        wanted_bytes = wanted(slot_bytes)
        streamed_bytes = sum(count * _most_bytes(some, slot_bytes) for count, some in kinds)
        if streamed_bytes >= wanted_bytes:
            chosen, streamed_bytes = _share(choices, slot_bytes, wanted_bytes)
        missing = wanted_bytes - streamed_bytes
        if missing <= 0:
            return chosen, slot_bytes
        if missing < least:
            least, best = missing, slot_bytes
    if best < 0:
        return nothing, 0
    return _share(choices, best, wanted(best))[0], best


def _most_bytes(some: Sequence[_Choice], slot_bytes: int) -> int:
    """The most that a unit of these choices streams through such a slot."""
    return max((size for staged, size, _ in some if staged <= slot_bytes), default=0)


_Choice = tuple[int, int, frozenset[int]]
"""Bytes in a slot, bytes of weights, and numbers of parts."""


@functools.lru_cache(maxsize=256)  # layers have parts of the same sizes, and many plans are tried
def _combinations(parts_and_bytes: tuple[tuple[int, int], ...]) -> tuple[_Choice, ...]:
    """Sets of a unit's parts, by size, each of another size."""
    unit = dict(parts_and_bytes)
    largest = sorted(unit, key=lambda part: -unit[part])
    some = [frozenset(largest[: count + 1]) for count in range(len(largest))]
    some += [frozenset([part]) for part in unit]
    if len(unit) <= _MOST_COMBINED:
        some += [frozenset(it) for n in range(2, len(unit)) for it in combinations(unit, n)]
    found: dict[int, _Choice] = {}
    for parts in some:
        size_bytes = sum(unit[part] for part in parts)
        staged = staged_bytes([unit[part] for part in parts])
        # Of equal sizes the one of the fewest copies.
        known = found.get(size_bytes)
        if known is None or len(parts) < len(known[2]):
            found[size_bytes] = staged, size_bytes, parts
    return tuple(sorted(found.values(), key=lambda it: it[:2]))


def _share(
    choices: Sequence[tuple[_Choice, ...]], slot_bytes: int, wanted_bytes: int
) -> tuple[list[frozenset[int]], int]:
    """Divide bytes among units as evenly as their parts allow, with no unit above a slot."""
    every = {id(some): some for some in choices}
    fitting = {key: [it for it in some if it[0] <= slot_bytes] for key, some in every.items()}
    largest = {key: max((it[1] for it in fits), default=0) for key, fits in fitting.items()}
    # Units that cannot give a full share give what they have; the others share the rest.
    most = [largest[id(some)] for some in choices]
    share, open_units, rest = 0, len(most), wanted_bytes
    for size_bytes in sorted(most):
        share = -(-rest // open_units)
        if size_bytes >= share:
            break
        rest -= size_bytes
        open_units -= 1
    chosen: list[frozenset[int]] = []
    due = given = 0
    for unit_choices, most_bytes in zip(choices, most, strict=True):
        some = fitting[id(unit_choices)]
        due += min(share, most_bytes)
        # The smallest that keeps up, so that what a unit gives too much, the next ones give less.
        parts: frozenset[int] = frozenset()
        if due > given and some:
            enough = next((it for it in some if given + it[1] >= due), some[-1])
            parts = enough[2]
            given += enough[1]
        chosen.append(parts)
        if given >= wanted_bytes:
            break
    chosen += [frozenset()] * (len(choices) - len(chosen))
    return chosen, given
