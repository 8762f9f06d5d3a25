"""Runs a step: blocks, the link and the compute stream, compiled by numba.

All compiled functions are in this file: numba's cache looks at the file of the function that is
called from Python only, and would not see a change elsewhere.

The link has two directions. Each serves one block at a time: first what a stalled phase waits for
(urgent), then hints in their order. Between two events rates are constant, so time is exact: the
next event is the earliest completion.
"""

from __future__ import annotations

import numpy as np

from umem.core.compiled import compiled_in_place
from umem.core.report import CAUSES
from umem.core.schedule import HintOp, ResidencyMode
from umem.trace import Access

__all__ = [
    "ARRIVING",
    "BOTH",
    "COUNTER",
    "DEVICE",
    "HOST",
    "LEAVING",
    "STALLS",
    "TO_DEVICE",
    "place_initially",
    "run_step",
]

# States of a block. A block in flight holds device memory.
NONE, HOST, DEVICE, BOTH, ARRIVING, LEAVING = range(6)
TO_DEVICE, TO_HOST = range(2)

# What a direction of the link does until the next event.
IDLE, URGENT, CALLING, MOVING = range(4)

HINT, FAULT, SPECULATION, EVICTION, COUNTER, MAPPED, COPY = range(len(CAUSES))
STALLS = ("fault", "prefetch", "room", "mapped", "copy", "pages")
STALL_FAULT, STALL_PREFETCH, STALL_ROOM, STALL_MAPPED, STALL_COPY, STALL_PAGES = range(len(STALLS))

READ, WRITE = int(Access.READ), int(Access.WRITE)
_, KEEP, MAP, DUPLICATE, SYSTEM = map(int, ResidencyMode)
PREFETCH, EVICT, DISCARD, COPY_IN, COPY_OUT, WRITE_BACK, COPY_BACK = map(int, HintOp)


# --- the driver's list of blocks that it may evict, oldest first ---


@compiled_in_place
def _append(m, blocks, block):
    blocks[block].older = m.newest
    blocks[block].newer = -1
    if m.newest >= 0:
        blocks[m.newest].newer = block
    else:
        m.oldest = block
    m.newest = block
    blocks[block].listed = True


@compiled_in_place
def _unlist(m, blocks, block):
    if not blocks[block].listed:
        return
    before, after = blocks[block].older, blocks[block].newer
    if before >= 0:
        blocks[before].newer = after
    else:
        m.oldest = after
    if after >= 0:
        blocks[after].older = before
    else:
        m.newest = before
    blocks[block].listed = False


# --- residency ---


@compiled_in_place
def _allocate(m, blocks, tensors, block):
    """Count the device memory of a block as used."""
    size = blocks[block].bytes
    m.used_bytes += size
    m.class_bytes[tensors[blocks[block].tensor].class_number] += size


@compiled_in_place
def _free(m, blocks, tensors, block):
    """Count the device memory of a block as free."""
    size = blocks[block].bytes
    m.used_bytes -= size
    m.class_bytes[tensors[blocks[block].tensor].class_number] -= size


@compiled_in_place
def _make_resident(m, blocks, tensors, block, keeps_copy):
    """Put a block's contents into the device memory that it has already."""
    tensor = blocks[block].tensor
    blocks[block].state = BOTH if keeps_copy else DEVICE
    tensors[tensor].resident_blocks += 1
    tensors[tensor].clean_blocks += keeps_copy
    blocks[block].uses = 0
    if tensors[tensor].residency != KEEP and tensors[tensor].residency != SYSTEM:
        _append(m, blocks, block)


@compiled_in_place
def _end_residency(m, blocks, tensors, block):
    """Take a block off the books that is about to leave the device, or to die there."""
    tensor = blocks[block].tensor
    tensors[tensor].resident_blocks -= 1
    tensors[tensor].clean_blocks -= blocks[block].state == BOTH
    _unlist(m, blocks, block)


@compiled_in_place
def _is_whole(tensors, tensor):
    """Whether all of a tensor is on the device, so that there is nothing to do block by block."""
    return tensors[tensor].resident_blocks == tensors[tensor].end - tensors[tensor].first


@compiled_in_place
def _discard(m, blocks, tensors, block):
    """End a block's contents; what is in flight ends with its transfer."""
    state = blocks[block].state
    if state in (ARRIVING, LEAVING):
        blocks[block].dead = True
        return
    if state in (DEVICE, BOTH):
        _end_residency(m, blocks, tensors, block)
        _free(m, blocks, tensors, block)
        m.freed_bytes += blocks[block].bytes
    blocks[block].state = NONE


@compiled_in_place
def _drop(m, blocks, tensors, block):
    """Free the device memory of a block that has a valid copy on the host."""
    _end_residency(m, blocks, tensors, block)
    _free(m, blocks, tensors, block)
    m.dropped_bytes += blocks[block].bytes
    blocks[block].state = HOST


# --- the link ---


@compiled_in_place
def _count_traffic(sim, way, cause, tensor, size, seconds, count):
    number = sim.tensors[tensor].class_number
    sim.traffic_bytes[way, cause, number] += size
    sim.traffic_s[way, cause, number] += seconds
    sim.traffic_count[way, cause, number] += count


@compiled_in_place
def _keeps_both(op):
    """Whether a hint copies to the host what stays on the device."""
    return op in (WRITE_BACK, COPY_BACK)


@compiled_in_place
def _next_block(sim, way):
    """Next block of the hints for a direction, and its hint; -1 where no hint is left.

    Hints that are done or superseded leave the queue.
    """
    direction = sim.directions[way]
    while direction.head < direction.tail:
        hint = sim.queue[way, direction.head, 0]
        tensor = sim.hint_tensor[hint]
        latest = sim.tensors[tensor].generation
        if _keeps_both(sim.hint_op[hint]):
            latest = sim.tensors[tensor].writes
        superseded = sim.queue[way, direction.head, 1] != latest
        block = sim.tensors[tensor].first + direction.cursor
        if not superseded and block < sim.tensors[tensor].end:
            return block, hint
        if not direction.moved:
            sim.machine[0].hints_wasted += 1
        if way == TO_DEVICE and not superseded:
            sim.tensors[tensor].awaited = 0
        direction.head += 1
        direction.cursor = 0
        direction.call_left = 0
        direction.moved = False
    return -1, -1


@compiled_in_place
def _start(sim, way, block, cause, rate, keeps):
    """Give an idle direction a block, which stays on the device if `keeps`."""
    direction = sim.directions[way]
    direction.block = block
    direction.left_bytes = sim.blocks[block].bytes
    direction.cause = cause
    direction.rate = rate
    direction.call_s = 0.0
    direction.keeps = keeps
    if keeps:
        direction.writes = sim.tensors[sim.blocks[block].tensor].writes
    elif way == TO_DEVICE:
        sim.blocks[block].state = ARRIVING
        _allocate(sim.machine[0], sim.blocks, sim.tensors, block)
    else:
        _end_residency(sim.machine[0], sim.blocks, sim.tensors, block)
        sim.blocks[block].state = LEAVING


@compiled_in_place
def _start_hinted(sim, way, block, copies, copy_rate, page_rate, keeps):
    """Give an idle direction the next block of a hint.

    Pages move in the driver call at hand or a new one. Copies are queued one behind the other.
    """
    _start(sim, way, block, COPY if copies else HINT, copy_rate if copies else page_rate, keeps)
    m, direction = sim.machine[0], sim.directions[way]
    size = sim.blocks[block].bytes
    if not copies:
        if direction.call_left < size:
            direction.call_s = m.call_s
            direction.call_left = m.call_bytes
        direction.call_left -= size
    direction.cursor += 1
    direction.moved = True


@compiled_in_place
def _start_in(sim):
    """Give the direction to the device its next block, if it is idle and the block may come."""
    m, direction = sim.machine[0], sim.directions[TO_DEVICE]
    blocks = sim.blocks
    if m.prefetch_paused:
        return
    room_bytes = m.capacity_bytes - m.reserved_bytes - m.used_bytes
    while direction.block < 0:
        block, hint = _next_block(sim, TO_DEVICE)
        if block < 0:
            break
        if blocks[block].state == HOST:
            if blocks[block].bytes > room_bytes:
                return
            copies = sim.hint_op[hint] == COPY_IN
            rates = m.copy_to_device_bytes_per_s, m.to_device_bytes_per_s
            _start_hinted(sim, TO_DEVICE, block, copies, rates[0], rates[1], False)
        elif blocks[block].state == LEAVING:
            return
        else:
            direction.cursor += 1
    while direction.block < 0 and m.counter_count > 0:
        block = sim.counter_queue[m.counter_head]
        m.counter_head = (m.counter_head + 1) % len(blocks)
        m.counter_count -= 1
        blocks[block].queued = False
        # Access counters move what there is room for; they evict nothing.
        if blocks[block].state == HOST and blocks[block].bytes <= room_bytes:
            _start(sim, TO_DEVICE, block, COUNTER, m.to_device_bytes_per_s, False)


@compiled_in_place
def _start_out(sim):
    """Give the direction to the host its next block, if it is idle; clean blocks are dropped."""
    m, direction = sim.machine[0], sim.directions[TO_HOST]
    while direction.block < 0:
        block, hint = _next_block(sim, TO_HOST)
        if block < 0:
            return
        keeps = _keeps_both(sim.hint_op[hint])
        if sim.blocks[block].state == DEVICE:
            copies = sim.hint_op[hint] in (COPY_OUT, COPY_BACK)
            rates = m.copy_to_host_bytes_per_s, m.to_host_bytes_per_s
            _start_hinted(sim, TO_HOST, block, copies, rates[0], rates[1], keeps)
        else:
            direction.cursor += 1
            if sim.blocks[block].state == BOTH and not keeps:
                direction.moved = True
                _drop(m, sim.blocks, sim.tensors, block)


@compiled_in_place
def _finish(sim, way):
    """End the transfer of a direction's block."""
    m, direction = sim.machine[0], sim.directions[way]
    blocks, tensors = sim.blocks, sim.tensors
    block = direction.block
    direction.block = -1
    tensor = blocks[block].tensor
    size = blocks[block].bytes
    _count_traffic(sim, way, direction.cause, tensor, size, 0.0, 1)
    if direction.cause == COPY:
        m.copied_bytes += size
    else:
        m.paged_bytes += size
    if way == TO_DEVICE:
        m.in_bytes += size
    if direction.keeps:
        # Unless it was written, evicted or dropped meanwhile.
        if blocks[block].state == DEVICE and tensors[tensor].writes == direction.writes:
            blocks[block].state = BOTH
            tensors[tensor].clean_blocks += 1
    elif blocks[block].dead:
        _free(m, blocks, tensors, block)
        m.freed_bytes += size
        blocks[block].state = NONE
        blocks[block].dead = False
    elif way == TO_DEVICE:
        keeps_copy = tensors[tensor].residency == DUPLICATE or direction.cause == COPY
        _make_resident(m, blocks, tensors, block, keeps_copy)
    else:
        m.out_bytes += size
        _free(m, blocks, tensors, block)
        blocks[block].state = HOST


@compiled_in_place
def _activity(direction):
    """What a direction does until the next event, its rate, and what is left of it.

    Left are bytes at that rate, or seconds of a driver call, which moves nothing.
    """
    if direction.urgent_bytes > 0:
        return URGENT, direction.urgent_rate, direction.urgent_bytes
    if direction.block < 0:
        return IDLE, 0.0, 0.0
    if direction.call_s > 0:
        return CALLING, 0.0, direction.call_s
    return MOVING, direction.rate, direction.left_bytes


@compiled_in_place
def _time_left(activity, rate, left):
    if activity == IDLE:
        return np.inf
    return left if activity == CALLING else left / rate


@compiled_in_place
def _advance(sim, way, activity, rate, seconds, is_done):
    """Let a direction do what it does for some seconds, to its end where it is done then."""
    direction = sim.directions[way]
    moved_bytes = rate * seconds
    if activity == CALLING:
        direction.call_s = 0.0 if is_done else direction.call_s - seconds
    elif activity == URGENT:
        direction.urgent_bytes = 0.0 if is_done else direction.urgent_bytes - moved_bytes
    elif activity == MOVING:
        tensor = sim.blocks[direction.block].tensor
        _count_traffic(sim, way, direction.cause, tensor, 0, seconds, 0)
        direction.left_bytes -= moved_bytes
        if is_done:
            _finish(sim, way)


@compiled_in_place
def _event(sim, until_s):
    """Go on to the next event of the link, at most to `until_s`; False if nothing moves."""
    m = sim.machine[0]
    _start_out(sim)
    _start_in(sim)
    in_activity, in_rate, in_left = _activity(sim.directions[TO_DEVICE])
    out_activity, out_rate, out_left = _activity(sim.directions[TO_HOST])
    both_rate = m.link_bytes_per_s
    if in_activity == URGENT and out_activity == URGENT:
        both_rate = m.urgent_link_bytes_per_s
    elif (
        in_activity == MOVING
        and out_activity == MOVING
        and sim.directions[TO_DEVICE].cause == COPY
        and sim.directions[TO_HOST].cause == COPY
    ):
        both_rate = m.copy_link_bytes_per_s
    if in_rate > 0 and out_rate > 0 and in_rate + out_rate > both_rate:
        share = both_rate / (in_rate + out_rate)
        in_rate *= share
        out_rate *= share
    in_s = _time_left(in_activity, in_rate, in_left)
    out_s = _time_left(out_activity, out_rate, out_left)
    seconds = min(in_s, out_s)
    if seconds == np.inf:
        if until_s < np.inf:
            m.now_s = until_s
        return False
    if m.now_s + seconds > until_s:
        seconds = until_s - m.now_s
        m.now_s = until_s
    else:
        m.now_s += seconds
    # `<=`: what ends first ends exactly, whatever the rounding of rate times time.
    _advance(sim, TO_DEVICE, in_activity, in_rate, seconds, in_s <= seconds)
    _advance(sim, TO_HOST, out_activity, out_rate, seconds, out_s <= seconds)
    return True


@compiled_in_place
def _run_until(sim, until_s):
    m = sim.machine[0]
    while m.now_s < until_s:
        _event(sim, until_s)


@compiled_in_place
def _carry(sim, in_bytes, in_rate, out_bytes, out_rate, both_rate):
    """Move urgent bytes, both directions at once; hints have what is left of the link."""
    sim.machine[0].urgent_link_bytes_per_s = both_rate
    to_device, to_host = sim.directions[TO_DEVICE], sim.directions[TO_HOST]
    to_device.urgent_bytes, to_device.urgent_rate = in_bytes, in_rate
    to_host.urgent_bytes, to_host.urgent_rate = out_bytes, out_rate
    while to_device.urgent_bytes > 0 or to_host.urgent_bytes > 0:
        _event(sim, np.inf)


# --- demand paging ---


@compiled_in_place
def _evict_oldest(sim, need_bytes):
    """Send the oldest blocks that the phase does not use to the host.

    Their device memory is free at once, and the caller spends the time. Returns the bytes to carry,
    and the bytes that are still needed: above 0 if there is nothing more to evict.
    """
    m = sim.machine[0]
    blocks = sim.blocks
    tensors = sim.tensors
    out_bytes = 0
    block = m.oldest
    while need_bytes > 0:
        while block >= 0 and tensors[blocks[block].tensor].used_at == m.stamp:
            block = blocks[block].newer
        if block < 0:
            break
        following = blocks[block].newer
        size = blocks[block].bytes
        need_bytes -= size
        if blocks[block].state == BOTH:
            _drop(m, blocks, tensors, block)
        else:
            _end_residency(m, blocks, tensors, block)
            _free(m, blocks, tensors, block)
            blocks[block].state = HOST
            out_bytes += size
            m.out_bytes += size
            seconds = size / m.to_host_bytes_per_s
            _count_traffic(sim, TO_HOST, EVICTION, blocks[block].tensor, size, seconds, 1)
        block = following
    return out_bytes, need_bytes


@compiled_in_place
def _wait_for_room(sim, size):
    """Wait for evictions by hint, while there are any and there is no room."""
    m = sim.machine[0]
    began_s = m.now_s
    m.prefetch_paused = True  # the room that is made here is not for prefetches
    while m.used_bytes + size > m.capacity_bytes:
        _start_out(sim)
        if m.used_bytes + size <= m.capacity_bytes or sim.directions[TO_HOST].block < 0:
            break
        _event(sim, np.inf)
    m.prefetch_paused = False
    sim.stall_s[STALL_ROOM] += m.now_s - began_s


@compiled_in_place
def _serve_faults(sim, count, pages, arrivals_bytes):
    """One batch of faults: `count` blocks of ``sim.batch``, of which `pages` pages fault."""
    m = sim.machine[0]
    blocks = sim.blocks
    tensors = sim.tensors
    room_bytes = 0
    for i in range(count):
        room_bytes += blocks[sim.batch[i]].bytes
    _wait_for_room(sim, room_bytes)
    out_bytes, missing = _evict_oldest(sim, m.used_bytes + room_bytes - m.capacity_bytes)
    began_s = m.now_s
    m.prefetch_paused = True
    # What is in flight holds memory, and may be sent back once it is there.
    to_device, to_host = sim.directions[TO_DEVICE], sim.directions[TO_HOST]
    while missing > 0 and (to_device.block >= 0 or to_host.block >= 0):
        _event(sim, np.inf)
        more_bytes, missing = _evict_oldest(sim, m.used_bytes + room_bytes - m.capacity_bytes)
        out_bytes += more_bytes
    m.prefetch_paused = False
    sim.stall_s[STALL_ROOM] += m.now_s - began_s
    if missing > 0:
        return False
    for i in range(count):
        _allocate(m, blocks, tensors, sim.batch[i])
    began_s = m.now_s
    m.fault_batches += 1
    m.fault_pages += pages
    _run_until(sim, m.now_s + m.fault_batch_s + pages * m.fault_service_s)
    if m.overlapped:
        _carry(
            sim,
            arrivals_bytes,
            m.to_device_bytes_per_s,
            float(out_bytes),
            m.to_host_bytes_per_s,
            m.link_bytes_per_s,
        )
    else:
        link_rate = m.link_bytes_per_s
        _carry(sim, 0.0, 0.0, float(out_bytes), m.to_host_bytes_per_s, link_rate)
        _carry(sim, arrivals_bytes, m.to_device_bytes_per_s, 0.0, 0.0, link_rate)
    for i in range(count):
        block = sim.batch[i]
        keeps_copy = tensors[blocks[block].tensor].residency == DUPLICATE
        _make_resident(m, blocks, tensors, block, keeps_copy)
    sim.stall_s[STALL_FAULT] += m.now_s - began_s
    return True


@compiled_in_place
def _faulting_pages(m, size):
    """Pages of a block that fault before the driver's speculation brings the rest."""
    pages = (size + m.page_bytes - 1) // m.page_bytes
    return min(pages, int(m.speculation_threshold * pages) + 1)


@compiled_in_place
def _bytes_to_make(sim, first, last):
    """Bytes of the blocks that the phase's accesses find without contents."""
    blocks = sim.blocks
    tensors = sim.tensors
    new_bytes = 0
    for access in range(first, last):
        tensor = sim.access_tensor[access]
        if tensors[tensor].residency == MAP or _is_whole(tensors, tensor):
            continue
        for block in range(tensors[tensor].first, tensors[tensor].end):
            if blocks[block].state == NONE:
                new_bytes += blocks[block].bytes
    return new_bytes


@compiled_in_place
def _faults(sim, tensor, block, new_faults):
    """Whether a block faults; one without contents gets its memory where that takes no fault."""
    m = sim.machine[0]
    blocks = sim.blocks
    tensors = sim.tensors
    is_system = tensors[tensor].residency == SYSTEM
    if blocks[block].state != NONE:
        return blocks[block].state == HOST and not is_system
    size = blocks[block].bytes
    if is_system and m.used_bytes + size > m.capacity_bytes:
        blocks[block].state = HOST
        return False
    m.born_bytes += size
    if not new_faults:
        _allocate(m, blocks, tensors, block)
        _make_resident(m, blocks, tensors, block, False)
    return new_faults


@compiled_in_place
def _count_arrival(sim, tensor, size, faulting):
    """Count a block that comes by faults, and the rest of it by speculation."""
    m = sim.machine[0]
    m.in_bytes += size
    asked = min(size, faulting * m.page_bytes)
    seconds = asked / m.to_device_bytes_per_s
    _count_traffic(sim, TO_DEVICE, FAULT, tensor, asked, seconds, faulting)
    rest = size - asked
    if rest > 0:
        seconds = rest / m.to_device_bytes_per_s
        _count_traffic(sim, TO_DEVICE, SPECULATION, tensor, rest, seconds, 1)


@compiled_in_place
def _fault_in(sim, first, last):
    """Bring in what the phase's accesses find on the host, and give new blocks their memory."""
    m = sim.machine[0]
    blocks = sim.blocks
    tensors = sim.tensors
    count = 0
    pages = 0
    arrivals_bytes = 0.0
    new_bytes = _bytes_to_make(sim, first, last)
    # Where there is no room, first touches fault as well: the driver has to evict for them.
    _wait_for_room(sim, new_bytes)
    new_faults = m.used_bytes + new_bytes > m.capacity_bytes
    for access in range(first, last):
        tensor = sim.access_tensor[access]
        if tensors[tensor].residency == MAP or _is_whole(tensors, tensor):
            continue
        for block in range(tensors[tensor].first, tensors[tensor].end):
            if not _faults(sim, tensor, block, new_faults):
                continue
            size = blocks[block].bytes
            faulting = _faulting_pages(m, size)
            if pages + faulting > m.faults_per_batch and count > 0:
                if not _serve_faults(sim, count, pages, arrivals_bytes):
                    return False
                count, pages, arrivals_bytes = 0, 0, 0.0
            sim.batch[count] = block
            count += 1
            pages += faulting
            if blocks[block].state == HOST:
                arrivals_bytes += size
                _count_arrival(sim, tensor, size, faulting)
    return count == 0 or _serve_faults(sim, count, pages, arrivals_bytes)


# --- the step ---


@compiled_in_place
def place_initially(sim, persistent):
    """Place what is kept on the device there, then what fits; False if the device cannot keep it.

    A block of a tensor that is not persistent has no contents before its first use.
    """
    m = sim.machine[0]
    blocks = sim.blocks
    tensors = sim.tensors
    for kept in (True, False):
        for tensor in range(len(persistent)):
            if not persistent[tensor] or (tensors[tensor].residency == KEEP) != kept:
                continue
            for block in range(tensors[tensor].first, tensors[tensor].end):
                fits = m.used_bytes + blocks[block].bytes <= m.capacity_bytes
                if kept and not fits:
                    return False
                if fits and tensors[tensor].residency != MAP:
                    _allocate(m, blocks, tensors, block)
                    _make_resident(m, blocks, tensors, block, False)
                else:
                    blocks[block].state = HOST
    return True


@compiled_in_place
def _enqueue(sim, way, hint, generation):
    direction = sim.directions[way]
    sim.queue[way, direction.tail, 0] = hint
    sim.queue[way, direction.tail, 1] = generation
    direction.tail += 1


@compiled_in_place
def _issue(sim, phase):
    """Issue the hints of a phase: discard, or queue for a direction of the link."""
    m = sim.machine[0]
    blocks = sim.blocks
    tensors = sim.tensors
    for hint in range(sim.hint_start[phase], sim.hint_start[phase + 1]):
        tensor = sim.hint_tensor[hint]
        op = sim.hint_op[hint]
        if _keeps_both(op):
            _enqueue(sim, TO_HOST, hint, tensors[tensor].writes)
            continue
        tensors[tensor].generation += 1
        tensors[tensor].awaited = 0
        if op == DISCARD:
            tensors[tensor].writes += 1
            for block in range(tensors[tensor].first, tensors[tensor].end):
                _discard(m, blocks, tensors, block)
        elif op in (PREFETCH, COPY_IN):
            tensors[tensor].awaited = tensors[tensor].generation
            _enqueue(sim, TO_DEVICE, hint, tensors[tensor].generation)
        elif _is_whole(tensors, tensor) and (
            tensors[tensor].clean_blocks == tensors[tensor].resident_blocks
        ):
            # The host has it all: dropping it waits for no transfer.
            for block in range(tensors[tensor].first, tensors[tensor].end):
                _drop(m, blocks, tensors, block)
        else:
            _enqueue(sim, TO_HOST, hint, tensors[tensor].generation)


@compiled_in_place
def _claim(sim, first, last):
    """Pin what the phase uses, and keep it: evictions of it that have not begun are off."""
    m = sim.machine[0]
    blocks = sim.blocks
    tensors = sim.tensors
    for access in range(first, last):
        tensor = sim.access_tensor[access]
        tensors[tensor].used_at = m.stamp
        if tensors[tensor].awaited == 0:
            tensors[tensor].generation += 1
        if sim.access_mode[access] & WRITE:
            tensors[tensor].writes += 1
        if m.by_access:
            for block in range(tensors[tensor].first, tensors[tensor].end):
                if blocks[block].listed:
                    _unlist(m, blocks, block)
                    _append(m, blocks, block)


@compiled_in_place
def _await(sim, first, last):
    """Wait for what is in flight, and for what was asked for where the schedule says so."""
    m = sim.machine[0]
    blocks = sim.blocks
    tensors = sim.tensors
    began_s = m.now_s
    for access in range(first, last):
        tensor = sim.access_tensor[access]
        late = False
        while m.waits and tensors[tensor].awaited > 0:
            at_s = m.now_s
            if not _event(sim, np.inf):
                break
            late = late or m.now_s > at_s
        if late:
            m.hints_late += 1
        if tensors[tensor].awaited > 0:
            # It cannot come in for want of room, or faults overtake it.
            tensors[tensor].awaited = 0
            tensors[tensor].generation += 1
        if _is_whole(tensors, tensor):
            continue
        for block in range(tensors[tensor].first, tensors[tensor].end):
            while blocks[block].state == ARRIVING or blocks[block].state == LEAVING:
                _event(sim, np.inf)
    sim.stall_s[STALL_PREFETCH] += m.now_s - began_s


@compiled_in_place
def _use(sim, first, last):
    """Mark what is written; give the bytes read and written in place over the link."""
    m = sim.machine[0]
    blocks = sim.blocks
    tensors = sim.tensors
    read_bytes = 0.0
    written_bytes = 0.0
    for access in range(first, last):
        tensor = sim.access_tensor[access]
        mode = sim.access_mode[access]
        residency = tensors[tensor].residency
        if _is_whole(tensors, tensor) and (tensors[tensor].clean_blocks == 0 or not mode & WRITE):
            continue
        for block in range(tensors[tensor].first, tensors[tensor].end):
            state = blocks[block].state
            if residency == MAP or state == HOST:
                size = blocks[block].bytes
                if mode & READ:
                    read_bytes += size
                    seconds = size / m.mapped_read_bytes_per_s
                    _count_traffic(sim, TO_DEVICE, MAPPED, tensor, size, seconds, 1)
                if mode & WRITE:
                    written_bytes += size
                    seconds = size / m.mapped_write_bytes_per_s
                    _count_traffic(sim, TO_HOST, MAPPED, tensor, size, seconds, 1)
                if residency == SYSTEM:
                    blocks[block].uses += 1
                    if blocks[block].uses >= m.access_counter_threshold:
                        blocks[block].uses = 0
                        if not blocks[block].queued:
                            blocks[block].queued = True
                            end = (m.counter_head + m.counter_count) % len(blocks)
                            sim.counter_queue[end] = block
                            m.counter_count += 1
            elif mode & WRITE and state == BOTH:
                blocks[block].state = DEVICE
                tensors[tensor].clean_blocks -= 1
    return read_bytes, written_bytes


@compiled_in_place
def _compute(sim, duration_s, read_bytes, written_bytes):
    """Run the phase's kernel, beside its accesses in place and whatever the link moves.

    Accesses in place cost the longer of two times: the link's, of which the kernel hides its own
    duration, and that by which they slow the kernel. Bytes that arrive or leave by hint while the
    kernel runs slow it besides.
    """
    m = sim.machine[0]
    began_s, copied_bytes, paged_bytes = m.now_s, m.copied_bytes, m.paged_bytes
    slowed_s = 0.0
    if read_bytes > 0 or written_bytes > 0:
        _carry(
            sim,
            read_bytes,
            m.mapped_read_bytes_per_s,
            written_bytes,
            m.mapped_write_bytes_per_s,
            min(m.mapped_bytes_per_s, m.link_bytes_per_s),
        )
        slowed_s = (read_bytes + written_bytes) * m.mapped_slowdown_s_per_byte
        sim.stall_s[STALL_MAPPED] += max(slowed_s, m.now_s - began_s - duration_s)
    _run_until(sim, began_s + duration_s + slowed_s)
    copies_s = (m.copied_bytes - copied_bytes) * m.copy_slowdown_s_per_byte
    pages_s = (m.paged_bytes - paged_bytes) * m.page_slowdown_s_per_byte
    sim.stall_s[STALL_COPY] += copies_s
    sim.stall_s[STALL_PAGES] += pages_s
    _run_until(sim, m.now_s + copies_s + pages_s)


@compiled_in_place
def run_step(sim):
    """Run the step once more; False if a phase does not fit, which is then ``failed_phase``."""
    m = sim.machine[0]
    blocks = sim.blocks
    tensors = sim.tensors
    for phase in range(len(sim.duration_s)):
        m.stamp += 1
        m.phase = phase
        sim.phase_start_s[phase] = m.now_s
        first, last = sim.access_start[phase], sim.access_start[phase + 1]
        # Admission: what arrives ahead leaves room for what the phase at hand, and while it runs
        # the one after it, makes anew.
        m.reserved_bytes = sim.birth_bytes[phase]
        _issue(sim, phase)
        _claim(sim, first, last)
        _await(sim, first, last)
        if not _fault_in(sim, first, last):
            m.failed_phase = phase
            return False
        read_bytes, written_bytes = _use(sim, first, last)
        for number in range(len(m.class_bytes)):
            sim.resident_bytes[phase, number] = m.class_bytes[number]
        m.reserved_bytes = sim.birth_bytes[(phase + 1) % len(sim.duration_s)]
        _compute(sim, sim.duration_s[phase], read_bytes, written_bytes)
        sim.phase_end_s[phase] = m.now_s
        if not m.own_addresses:
            for death in range(sim.death_start[phase], sim.death_start[phase + 1]):
                tensor = sim.death_tensor[death]
                tensors[tensor].generation += 1
                tensors[tensor].awaited = 0
                tensors[tensor].writes += 1
                for block in range(tensors[tensor].first, tensors[tensor].end):
                    _discard(m, blocks, tensors, block)
    return True
