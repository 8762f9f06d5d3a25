"""What the engine works on: records of the machine, of blocks and of tensors, and the columns."""

from __future__ import annotations

from collections import namedtuple

import numpy as np

from umem.core.classes import TensorClass

__all__ = ["BLOCK", "COUNTERS", "MACHINE", "TENSOR", "Sim"]

MACHINE = np.dtype(
    [
        # The machine and the mode of the run; names as in Hardware.
        ("capacity_bytes", "i8"),
        ("link_bytes_per_s", "f8"),
        ("to_device_bytes_per_s", "f8"),
        ("to_host_bytes_per_s", "f8"),
        ("copy_to_device_bytes_per_s", "f8"),
        ("copy_to_host_bytes_per_s", "f8"),
        ("copy_slowdown_s_per_byte", "f8"),
        ("call_s", "f8"),
        ("call_bytes", "i8"),
        ("mapped_read_bytes_per_s", "f8"),
        ("mapped_write_bytes_per_s", "f8"),
        ("mapped_bytes_per_s", "f8"),
        ("fault_batch_s", "f8"),
        ("faults_per_batch", "i8"),
        ("fault_service_s", "f8"),
        ("speculation_threshold", "f8"),
        ("page_bytes", "i8"),
        ("overlapped", "?"),
        ("by_access", "?"),
        ("counter_threshold", "i8"),
        ("own_addresses", "?"),
        ("waits", "?"),
        # The state of the run.
        ("now_s", "f8"),
        ("used_bytes", "i8"),
        ("class_bytes", "i8", len(TensorClass)),  # the same by class
        ("reserved_bytes", "i8"),
        ("oldest", "i8"),
        ("newest", "i8"),
        ("stamp", "i8"),
        ("phase", "i8"),
        ("holds", "?"),
        ("copied_bytes", "f8"),
        ("failed_phase", "i8"),
        ("in_block", "i8"),
        ("in_left", "f8"),
        ("in_latency", "f8"),
        ("in_rate", "f8"),
        ("in_cause", "i8"),
        ("in_cursor", "i8"),
        ("in_call_left", "i8"),
        ("in_moved", "?"),
        ("in_head", "i8"),
        ("in_tail", "i8"),
        ("counter_head", "i8"),
        ("counter_tail", "i8"),
        ("out_block", "i8"),
        ("out_left", "f8"),
        ("out_latency", "f8"),
        ("out_rate", "f8"),
        ("out_cause", "i8"),
        ("out_cursor", "i8"),
        ("out_call_left", "i8"),
        ("out_moved", "?"),
        ("out_head", "i8"),
        ("out_tail", "i8"),
        ("front_in", "f8"),
        ("front_in_rate", "f8"),
        ("front_out", "f8"),
        ("front_out_rate", "f8"),
        # Counters of the step.
        ("fault_pages", "i8"),
        ("fault_batches", "i8"),
        ("hints_late", "i8"),
        ("hints_wasted", "i8"),
        ("in_bytes", "i8"),
        ("out_bytes", "i8"),
        ("born_bytes", "i8"),
        ("freed_bytes", "i8"),
        ("dropped_bytes", "i8"),
    ],
    align=True,
)
"""Numbers of one run; :class:`Sim` holds one record of it."""

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
        ("doomed", "?"),  # dead while in flight
    ],
    align=True,
)

TENSOR = np.dtype(
    [
        ("first", "i8"),  # its blocks
        ("end", "i8"),
        ("pinned", "i8"),  # stamp of the phase that used it last
        ("generation", "i8"),  # of its latest hint; older ones are superseded
        ("awaited", "i8"),  # generation of a prefetch on its way; 0 for none
        ("settled", "i4"),  # blocks on the device and not in flight
        ("copies", "i4"),  # of those, blocks with a valid copy on the host
        ("number", "u1"),  # of its class
        ("residency", "u1"),
    ],
    align=True,
)

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
"""Fields of :data:`MACHINE` that count one step."""

Sim = namedtuple(
    "Sim",
    [
        "machine",  # MACHINE[1]
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
        "in_queue",  # int64[Q, 2]: hint, generation
        "out_queue",  # int64[Q, 2]
        "counter_queue",  # int32[C]: blocks
        "batch",  # int32[faults_per_batch]: blocks of a batch of faults
        # What is counted.
        "traffic_bytes",  # int64[2, causes, classes]
        "traffic_s",  # float64[2, causes, classes]
        "traffic_count",  # int64[2, causes, classes]
        "stall_s",  # float64[stalls]
        "resident_bytes",  # int64[P, classes]
        "phase_start_s",  # float64[P]
        "phase_end_s",  # float64[P]
        "link_bytes",  # float64[P, 2]: during the phase and its stall
    ],
)
"""Everything that the compiled functions work on."""
