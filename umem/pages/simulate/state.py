"""The data that the engine works on: records of machine, link, blocks and tensors, and columns."""

from __future__ import annotations

from collections import namedtuple

import numpy as np

from umem.core.classes import TensorClass

__all__ = ["BLOCK", "COUNTERS", "DIRECTION", "HARDWARE", "MACHINE", "TENSOR", "Sim"]

HARDWARE = (
    ("link_bytes_per_s", "f8"),
    ("to_device_bytes_per_s", "f8"),
    ("to_host_bytes_per_s", "f8"),
    ("copy_to_device_bytes_per_s", "f8"),
    ("copy_to_host_bytes_per_s", "f8"),
    ("copy_link_bytes_per_s", "f8"),
    ("copy_slowdown_s_per_byte", "f8"),
    ("page_slowdown_s_per_byte", "f8"),
    ("call_s", "f8"),
    ("call_bytes", "i8"),
    ("mapped_read_bytes_per_s", "f8"),
    ("mapped_write_bytes_per_s", "f8"),
    ("mapped_bytes_per_s", "f8"),
    ("mapped_slowdown_s_per_byte", "f8"),
    ("fault_batch_s", "f8"),
    ("faults_per_batch", "i8"),
    ("fault_service_s", "f8"),
    ("speculation_threshold", "f8"),
    ("page_bytes", "i8"),
    ("access_counter_threshold", "i8"),
)
"""Fields of :class:`umem.hardware.Hardware` that the engine works with."""

COUNTERS = (
    "fault_pages",
    "fault_batches",
    "hints_late",
    "hints_wasted",
    "in_bytes",
    "out_bytes",
    "born_bytes",
    "freed_bytes",
    "dropped_bytes",
)
"""What the engine counts of one step."""

MACHINE = np.dtype(
    [
        *HARDWARE,
        # The mode of the run.
        ("capacity_bytes", "i8"),
        ("overlapped", "?"),  # evictions for faults, and the faults' pages
        ("by_access", "?"),  # the order of the driver's list
        ("own_addresses", "?"),
        ("waits", "?"),
        # The state of the run.
        ("now_s", "f8"),
        ("used_bytes", "i8"),
        ("class_bytes", "i8", len(TensorClass)),  # the same by class
        ("reserved_bytes", "i8"),  # for tensors that are about to be made
        ("oldest", "i8"),  # ends of the driver's list
        ("newest", "i8"),
        ("stamp", "i8"),  # number of the phase, over all steps
        ("phase", "i8"),
        ("failed_phase", "i8"),
        ("prefetch_paused", "?"),
        ("urgent_link_bytes_per_s", "f8"),  # of urgent bytes that cross the link both ways at once
        ("counter_head", "i8"),  # the ring of blocks that access counters move: its first entry
        ("counter_count", "i8"),  # and its length
        ("copied_bytes", "f8"),  # moved so far by explicit copies
        ("paged_bytes", "f8"),  # moved so far as pages, ahead of need
        *((name, "i8") for name in COUNTERS),
    ],
    align=True,
)
"""Numbers of one run; :class:`Sim` holds one record of it."""

DIRECTION = np.dtype(
    [
        # What a stalled phase waits for.
        ("urgent_bytes", "f8"),
        ("urgent_rate", "f8"),
        # The block that moves by hint; -1 for none.
        ("block", "i8"),
        ("left_bytes", "f8"),
        ("rate", "f8"),
        ("cause", "i8"),
        ("call_s", "f8"),  # what is left of its driver call's latency
        # The queue of hints, and the one at its head.
        ("head", "i8"),
        ("tail", "i8"),
        ("cursor", "i8"),  # its next block, from the tensor's first
        ("call_left", "i8"),  # bytes that the driver call at hand still moves
        ("moved", "?"),  # it has moved anything
        # Of the block that moves: whether it stays on the device too, and its tensor's writes when
        # it began.
        ("keeps", "?"),
        ("writes", "i8"),
    ],
    align=True,
)
"""One direction of the link."""

BLOCK = np.dtype(
    [
        ("bytes", "i8"),
        ("tensor", "i4"),
        # Neighbours in the driver's list of what it may evict, oldest first; -1 at the ends.
        ("older", "i4"),
        ("newer", "i4"),
        ("uses", "i4"),  # in place, since the last move; for access counters
        ("state", "u1"),
        ("listed", "?"),
        ("queued", "?"),  # for access counters to move it
        ("dead", "?"),  # while in flight
    ],
    align=True,
)

TENSOR = np.dtype(
    [
        ("first", "i8"),  # its blocks
        ("end", "i8"),
        ("used_at", "i8"),  # stamp of the phase that used it last
        ("generation", "i8"),  # of its latest hint; older ones are superseded
        ("awaited", "i8"),  # generation of a prefetch on its way; 0 for none
        ("writes", "i8"),  # times that its contents have changed or ended
        ("resident_blocks", "i4"),  # on the device and not in flight
        ("clean_blocks", "i4"),  # of those, blocks with a valid copy on the host
        ("class_number", "u1"),
        ("residency", "u1"),
    ],
    align=True,
)

Sim = namedtuple(
    "Sim",
    [
        "machine",  # MACHINE[1]
        "directions",  # DIRECTION[2]
        "blocks",  # BLOCK[B], in the order of their tensors
        "tensors",  # TENSOR[T]
        # Phases.
        "duration_s",  # float64[P]
        "access_start",  # int64[P + 1]
        "access_tensor",  # int32[A]
        "access_mode",  # uint8[A]
        "birth_bytes",  # int64[P]: memory that the phase is the first to use
        "death_start",  # int64[P + 1]: tensors whose last phase this is
        "death_tensor",  # int32[D]
        # Hints.
        "hint_start",  # int64[P + 1]
        "hint_op",  # uint8[H]
        "hint_tensor",  # int32[H]
        "queue",  # int64[2, Q, 2]: by direction, hint and generation; writes for `_keeps_both`
        "counter_queue",  # int32[B]: a ring of blocks, each at most once
        "batch",  # int32[faults_per_batch]: blocks of a batch of faults
        # What is counted.
        "traffic_bytes",  # int64[2, causes, classes]
        "traffic_s",  # float64[2, causes, classes]
        "traffic_count",  # int64[2, causes, classes]
        "stall_s",  # float64[stalls]
        "resident_bytes",  # int64[P, classes]
        "phase_start_s",  # float64[P]
        "phase_end_s",  # float64[P]
    ],
)
"""Everything that the compiled functions work on."""
