"""The machine in motion: blocks, the link and the compute stream, compiled by numba.

All compiled functions are in this file: numba's cache looks at the file of the function that is
called from Python only, and would not see a change elsewhere.

The link has two directions. Each serves one block at a time, first what a stalled phase waits for
(the foreground), then hints in their order (the background). Between two events rates are constant,
so time is exact: the next event is the earliest completion.
"""

from __future__ import annotations

import numpy as np

from umem.core.compiled import compiled
from umem.core.report import CAUSES
from umem.core.schedule import HintOp, ResidencyMode
from umem.trace import Access

__all__ = ["COUNTER", "HOST", "STALLS", "place", "run_step"]

# States of a block. A block in flight holds device memory.
NONE, HOST, DEVICE, BOTH, ARRIVING, LEAVING = range(6)
TO_DEVICE, TO_HOST = range(2)

HINT, FAULT, SPECULATION, EVICTION, COUNTER, MAPPED, COPY = range(len(CAUSES))
STALLS = ("fault", "prefetch", "room", "mapped", "copy")
STALL_FAULT, STALL_PREFETCH, STALL_ROOM, STALL_MAPPED, STALL_COPY = range(len(STALLS))

READ, WRITE = int(Access.READ), int(Access.WRITE)
KEEP, MAP, DUPLICATE, SYSTEM = (
    int(ResidencyMode.KEEP),
    int(ResidencyMode.MAP),
    int(ResidencyMode.DUPLICATE),
    int(ResidencyMode.SYSTEM),
)
PREFETCH, EVICT, DISCARD, COPY_IN, COPY_OUT = map(int, HintOp)


# --- the driver's list of blocks that it may evict, oldest first ---


@compiled
def _append(m, blocks, tensors, block):
    blocks[block].older = m.newest
    blocks[block].newer = -1
    if m.newest >= 0:
        blocks[m.newest].newer = block
    else:
        m.oldest = block
    m.newest = block
    blocks[block].listed = True


@compiled
def _unlist(m, blocks, tensors, block):
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


@compiled
def _evictable(tensors, tensor):
    return tensors[tensor].residency != KEEP and tensors[tensor].residency != SYSTEM


# --- residency ---


@compiled
def _take(m, blocks, tensors, block):
    """Count the device memory of a block."""
    size = blocks[block].bytes
    m.used_bytes += size
    m.class_bytes[tensors[blocks[block].tensor].number] += size


@compiled
def _give(m, blocks, tensors, block):
    """Count the device memory of a block as free."""
    size = blocks[block].bytes
    m.used_bytes -= size
    m.class_bytes[tensors[blocks[block].tensor].number] -= size


@compiled
def _settle(m, blocks, tensors, block, keeps_copy):
    """A block whose device memory is taken has its contents there now."""
    tensor = blocks[block].tensor
    blocks[block].state = BOTH if keeps_copy else DEVICE
    tensors[tensor].settled += 1
    tensors[tensor].copies += keeps_copy
    blocks[block].uses = 0
    if _evictable(tensors, tensor):
        _append(m, blocks, tensors, block)


@compiled
def _unsettle(m, blocks, tensors, block):
    """A block is about to leave the device, or to die there."""
    tensor = blocks[block].tensor
    tensors[tensor].settled -= 1
    tensors[tensor].copies -= blocks[block].state == BOTH
    _unlist(m, blocks, tensors, block)


@compiled
def _is_whole(tensors, tensor):
    """Whether all of a tensor is on the device, so that there is nothing to do block by block."""
    return tensors[tensor].settled == tensors[tensor].end - tensors[tensor].first


@compiled
def _kill(m, blocks, tensors, block):
    """The contents of a block are dead."""
    state = blocks[block].state
    if state in (ARRIVING, LEAVING):
        blocks[block].doomed = True
        return
    if state in (DEVICE, BOTH):
        _unsettle(m, blocks, tensors, block)
        _give(m, blocks, tensors, block)
        m.freed_bytes += blocks[block].bytes
    blocks[block].state = NONE


@compiled
def _bury(m, blocks, tensors, block):
    """End a transfer whose block died under way; the block's device memory is counted still."""
    _give(m, blocks, tensors, block)
    m.freed_bytes += blocks[block].bytes
    blocks[block].state = NONE
    blocks[block].doomed = False


@compiled
def _drop(m, blocks, tensors, block):
    """Free the device memory of a block that has a valid copy on the host."""
    _unsettle(m, blocks, tensors, block)
    _give(m, blocks, tensors, block)
    m.dropped_bytes += blocks[block].bytes
    blocks[block].state = HOST


# --- the link ---


@compiled
def _start_in(sim):
    """Give the idle direction to the device its next block, if one may go."""
    m = sim.machine[0]
    blocks = sim.blocks
    tensors = sim.tensors
    if m.holds:
        return
    while m.in_block < 0 and m.in_head < m.in_tail:
        hint = sim.in_queue[m.in_head, 0]
        tensor = sim.hint_tensor[hint]
        block = tensors[tensor].first + m.in_cursor
        superseded = sim.in_queue[m.in_head, 1] != tensors[tensor].generation
        if superseded or block == tensors[tensor].end:
            if not m.in_moved:
                m.hints_wasted += 1
            if not superseded:
                tensors[tensor].awaited = 0
            m.in_head += 1
            m.in_cursor = 0
            m.in_call_left = 0
            m.in_moved = False
            continue
        state = blocks[block].state
        if state == LEAVING:
            return
        if state != HOST:
            m.in_cursor += 1
            continue
        size = blocks[block].bytes
        if m.used_bytes + m.reserved_bytes + size > m.capacity_bytes:
            return
        copies = sim.hint_op[hint] == COPY_IN
        m.in_rate = m.copy_to_device_bytes_per_s if copies else m.to_device_bytes_per_s
        m.in_cause = COPY if copies else HINT
        m.in_latency = 0.0
        if m.in_call_left < size:
            m.in_latency = m.call_s
            m.in_call_left = m.call_bytes
        m.in_call_left -= size
        m.in_moved = True
        m.in_cursor += 1
        m.in_block = block
        m.in_left = size
        blocks[block].state = ARRIVING
        _take(m, blocks, tensors, block)
    while m.in_block < 0 and m.counter_head < m.counter_tail:
        block = sim.counter_queue[m.counter_head]
        m.counter_head += 1
        size = blocks[block].bytes
        # Access counters move what there is room for; they evict nothing.
        if blocks[block].state != HOST or m.used_bytes + m.reserved_bytes + size > m.capacity_bytes:
            continue
        m.in_rate = m.to_device_bytes_per_s
        m.in_cause = COUNTER
        m.in_latency = 0.0
        m.in_block = block
        m.in_left = size
        blocks[block].state = ARRIVING
        _take(m, blocks, tensors, block)


@compiled
def _start_out(sim):
    """Give the idle direction to the host its next block."""
    m = sim.machine[0]
    blocks = sim.blocks
    tensors = sim.tensors
    while m.out_block < 0 and m.out_head < m.out_tail:
        hint = sim.out_queue[m.out_head, 0]
        tensor = sim.hint_tensor[hint]
        block = tensors[tensor].first + m.out_cursor
        superseded = sim.out_queue[m.out_head, 1] != tensors[tensor].generation
        if superseded or block == tensors[tensor].end:
            if not m.out_moved:
                m.hints_wasted += 1
            m.out_head += 1
            m.out_cursor = 0
            m.out_call_left = 0
            m.out_moved = False
            continue
        m.out_cursor += 1
        state = blocks[block].state
        if state == BOTH:
            m.out_moved = True
            _drop(m, blocks, tensors, block)
        if state != DEVICE:
            continue
        copies = sim.hint_op[hint] == COPY_OUT
        size = blocks[block].bytes
        m.out_rate = m.copy_to_host_bytes_per_s if copies else m.to_host_bytes_per_s
        m.out_cause = COPY if copies else HINT
        m.out_latency = 0.0
        if m.out_call_left < size:
            m.out_latency = m.call_s
            m.out_call_left = m.call_bytes
        m.out_call_left -= size
        m.out_moved = True
        m.out_block = block
        m.out_left = size
        _unsettle(m, blocks, tensors, block)
        blocks[block].state = LEAVING


@compiled
def _arrive(sim):
    m = sim.machine[0]
    blocks = sim.blocks
    tensors = sim.tensors
    block = m.in_block
    m.in_block = -1
    tensor = blocks[block].tensor
    size = blocks[block].bytes
    m.in_bytes += size
    sim.traffic_bytes[TO_DEVICE, m.in_cause, tensors[tensor].number] += size
    sim.traffic_count[TO_DEVICE, m.in_cause, tensors[tensor].number] += 1
    if m.in_cause == COPY:
        m.copied_bytes += size
    if blocks[block].doomed:
        _bury(m, blocks, tensors, block)
    else:
        _settle(
            m, blocks, tensors, block, tensors[tensor].residency == DUPLICATE or m.in_cause == COPY
        )


@compiled
def _leave(sim):
    m = sim.machine[0]
    blocks = sim.blocks
    tensors = sim.tensors
    block = m.out_block
    m.out_block = -1
    size = blocks[block].bytes
    sim.traffic_bytes[TO_HOST, m.out_cause, tensors[blocks[block].tensor].number] += size
    sim.traffic_count[TO_HOST, m.out_cause, tensors[blocks[block].tensor].number] += 1
    if m.out_cause == COPY:
        m.copied_bytes += size
    if blocks[block].doomed:
        _bury(m, blocks, tensors, block)
        return
    m.out_bytes += size
    _give(m, blocks, tensors, block)
    blocks[block].state = HOST


@compiled
def _event(sim, until_s):
    """Go on to the next event of the link, at most to `until_s`; False if nothing moves."""
    m = sim.machine[0]
    blocks = sim.blocks
    tensors = sim.tensors
    _start_out(sim)
    _start_in(sim)
    in_waits = m.front_in <= 0 and m.in_block >= 0 and m.in_latency > 0
    out_waits = m.front_out <= 0 and m.out_block >= 0 and m.out_latency > 0
    in_rate = 0.0
    out_rate = 0.0
    in_left = 0.0
    out_left = 0.0
    if m.front_in > 0:
        in_rate, in_left = m.front_in_rate, m.front_in
    elif m.in_block >= 0 and not in_waits:
        in_rate, in_left = m.in_rate, m.in_left
    if m.front_out > 0:
        out_rate, out_left = m.front_out_rate, m.front_out
    elif m.out_block >= 0 and not out_waits:
        out_rate, out_left = m.out_rate, m.out_left
    if in_rate > 0 and out_rate > 0 and in_rate + out_rate > m.link_bytes_per_s:
        scale = m.link_bytes_per_s / (in_rate + out_rate)
        in_rate *= scale
        out_rate *= scale
    in_end = np.inf
    out_end = np.inf
    if in_waits:
        in_end = m.in_latency
    elif in_rate > 0:
        in_end = in_left / in_rate
    if out_waits:
        out_end = m.out_latency
    elif out_rate > 0:
        out_end = out_left / out_rate
    step_s = min(in_end, out_end)
    if step_s == np.inf:
        if until_s < np.inf:
            m.now_s = until_s
        return False
    if m.now_s + step_s > until_s:
        step_s = until_s - m.now_s
        m.now_s = until_s
    else:
        m.now_s += step_s
    # `<=`: what ends first ends exactly, whatever the rounding of rate times time.
    in_done = in_end <= step_s
    out_done = out_end <= step_s
    if in_waits:
        m.in_latency = 0.0 if in_done else m.in_latency - step_s
    elif m.front_in > 0:
        m.front_in = 0.0 if in_done else m.front_in - in_rate * step_s
    elif in_rate > 0:
        tensor = blocks[m.in_block].tensor
        sim.traffic_s[TO_DEVICE, m.in_cause, tensors[tensor].number] += step_s
        m.in_left -= in_rate * step_s
        if in_done:
            _arrive(sim)
    if out_waits:
        m.out_latency = 0.0 if out_done else m.out_latency - step_s
    elif m.front_out > 0:
        m.front_out = 0.0 if out_done else m.front_out - out_rate * step_s
    elif out_rate > 0:
        tensor = blocks[m.out_block].tensor
        sim.traffic_s[TO_HOST, m.out_cause, tensors[tensor].number] += step_s
        m.out_left -= out_rate * step_s
        if out_done:
            _leave(sim)
    sim.link_bytes[m.phase, TO_DEVICE] += in_rate * step_s
    sim.link_bytes[m.phase, TO_HOST] += out_rate * step_s
    return True


@compiled
def _run_until(sim, until_s):
    m = sim.machine[0]
    while m.now_s < until_s:
        _event(sim, until_s)


@compiled
def _carry(sim, in_bytes, in_rate, out_bytes, out_rate):
    """Move bytes in the foreground, both directions at once; the background has what is left."""
    m = sim.machine[0]
    m.front_in, m.front_in_rate = in_bytes, in_rate
    m.front_out, m.front_out_rate = out_bytes, out_rate
    while m.front_in > 0 or m.front_out > 0:
        _event(sim, np.inf)


# --- demand paging ---


@compiled
def _evict_oldest(sim, need_bytes):
    """Send the oldest blocks that the phase does not use to the host.

    The device memory is free at once; the caller spends the time. Gives the bytes to carry, and
    those that are missing still, above 0 if there is nothing more to evict.
    """
    m = sim.machine[0]
    blocks = sim.blocks
    tensors = sim.tensors
    out_bytes = 0
    block = m.oldest
    while need_bytes > 0:
        while block >= 0 and tensors[blocks[block].tensor].pinned == m.stamp:
            block = blocks[block].newer
        if block < 0:
            break
        following = blocks[block].newer
        size = blocks[block].bytes
        need_bytes -= size
        if blocks[block].state == BOTH:
            _drop(m, blocks, tensors, block)
        else:
            tensor_class = tensors[blocks[block].tensor].number
            _unsettle(m, blocks, tensors, block)
            _give(m, blocks, tensors, block)
            blocks[block].state = HOST
            out_bytes += size
            m.out_bytes += size
            sim.traffic_bytes[TO_HOST, EVICTION, tensor_class] += size
            sim.traffic_s[TO_HOST, EVICTION, tensor_class] += size / m.to_host_bytes_per_s
            sim.traffic_count[TO_HOST, EVICTION, tensor_class] += 1
        block = following
    return out_bytes, need_bytes


@compiled
def _wait_for_room(sim, size):
    """Wait for evictions that were asked for, as long as they are what makes room."""
    m = sim.machine[0]
    began_s = m.now_s
    m.holds = True  # room that is made here is not for what arrives ahead
    while m.used_bytes + size > m.capacity_bytes:
        _start_out(sim)
        if m.used_bytes + size <= m.capacity_bytes or m.out_block < 0:
            break
        _event(sim, np.inf)
    m.holds = False
    sim.stall_s[STALL_ROOM] += m.now_s - began_s


@compiled
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
    m.holds = True
    # What is in flight holds memory, and may be sent back once it is there.
    while missing > 0 and (m.in_block >= 0 or m.out_block >= 0):
        _event(sim, np.inf)
        more_bytes, missing = _evict_oldest(sim, m.used_bytes + room_bytes - m.capacity_bytes)
        out_bytes += more_bytes
    m.holds = False
    sim.stall_s[STALL_ROOM] += m.now_s - began_s
    if missing > 0:
        return False
    for i in range(count):
        _take(m, blocks, tensors, sim.batch[i])
    began_s = m.now_s
    m.fault_batches += 1
    m.fault_pages += pages
    _run_until(sim, m.now_s + m.fault_batch_s + pages * m.fault_service_s)
    if m.overlapped:
        _carry(
            sim, arrivals_bytes, m.to_device_bytes_per_s, float(out_bytes), m.to_host_bytes_per_s
        )
    else:
        _carry(sim, 0.0, 0.0, float(out_bytes), m.to_host_bytes_per_s)
        _carry(sim, arrivals_bytes, m.to_device_bytes_per_s, 0.0, 0.0)
    for i in range(count):
        block = sim.batch[i]
        _settle(m, blocks, tensors, block, tensors[blocks[block].tensor].residency == DUPLICATE)
    sim.stall_s[STALL_FAULT] += m.now_s - began_s
    return True


@compiled
def _faulting_pages(m, size):
    """Pages of a block that fault before the driver's speculation brings the rest."""
    pages = (size + m.page_bytes - 1) // m.page_bytes
    return min(pages, int(m.speculation_threshold * pages) + 1)


@compiled
def _fault_in(sim, first, last):
    """Bring in what the phase's accesses find on the host, and give new blocks their memory."""
    m = sim.machine[0]
    blocks = sim.blocks
    tensors = sim.tensors
    count = 0
    pages = 0
    arrivals_bytes = 0.0
    new_bytes = 0
    for access in range(first, last):
        tensor = sim.access_tensor[access]
        if tensors[tensor].residency == MAP or _is_whole(tensors, tensor):
            continue
        for block in range(tensors[tensor].first, tensors[tensor].end):
            if blocks[block].state == NONE:
                new_bytes += blocks[block].bytes
    # Where there is no room, first touches fault as well: the driver has to evict for them.
    _wait_for_room(sim, new_bytes)
    new_faults = m.used_bytes + new_bytes > m.capacity_bytes
    for access in range(first, last):
        tensor = sim.access_tensor[access]
        if tensors[tensor].residency == MAP or _is_whole(tensors, tensor):
            continue
        for block in range(tensors[tensor].first, tensors[tensor].end):
            state = blocks[block].state
            size = blocks[block].bytes
            if state == NONE:
                m.born_bytes += size
                if tensors[tensor].residency == SYSTEM and m.used_bytes + size > m.capacity_bytes:
                    m.born_bytes -= size
                    blocks[block].state = HOST
                    continue
                if not new_faults:
                    _take(m, blocks, tensors, block)
                    _settle(m, blocks, tensors, block, False)
                    continue
            elif state != HOST or tensors[tensor].residency == SYSTEM:
                continue
            faulting = _faulting_pages(m, size)
            if pages + faulting > m.faults_per_batch and count > 0:
                if not _serve_faults(sim, count, pages, arrivals_bytes):
                    return False
                count, pages, arrivals_bytes = 0, 0, 0.0
            sim.batch[count] = block
            count += 1
            pages += faulting
            if state == HOST:
                arrivals_bytes += size
                m.in_bytes += size
                tensor_class = tensors[tensor].number
                asked = min(size, faulting * m.page_bytes)
                rest = size - asked
                sim.traffic_bytes[TO_DEVICE, FAULT, tensor_class] += asked
                sim.traffic_s[TO_DEVICE, FAULT, tensor_class] += asked / m.to_device_bytes_per_s
                sim.traffic_count[TO_DEVICE, FAULT, tensor_class] += faulting
                if rest > 0:
                    seconds = rest / m.to_device_bytes_per_s
                    sim.traffic_bytes[TO_DEVICE, SPECULATION, tensor_class] += rest
                    sim.traffic_s[TO_DEVICE, SPECULATION, tensor_class] += seconds
                    sim.traffic_count[TO_DEVICE, SPECULATION, tensor_class] += 1
    if count > 0:
        return _serve_faults(sim, count, pages, arrivals_bytes)
    return True


# --- the step ---


@compiled
def place(sim, persistent):
    """Start with what is kept on the device there, then with what fits; False if that is too much.

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
                    _take(m, blocks, tensors, block)
                    _settle(m, blocks, tensors, block, False)
                else:
                    blocks[block].state = HOST
    return True


@compiled
def _issue(sim, phase):
    m = sim.machine[0]
    blocks = sim.blocks
    tensors = sim.tensors
    for hint in range(sim.hint_start[phase], sim.hint_start[phase + 1]):
        tensor = sim.hint_tensor[hint]
        op = sim.hint_op[hint]
        tensors[tensor].generation += 1
        tensors[tensor].awaited = 0
        if op == DISCARD:
            for block in range(tensors[tensor].first, tensors[tensor].end):
                _kill(m, blocks, tensors, block)
        elif op in (PREFETCH, COPY_IN):
            tensors[tensor].awaited = tensors[tensor].generation
            sim.in_queue[m.in_tail, 0] = hint
            sim.in_queue[m.in_tail, 1] = tensors[tensor].generation
            m.in_tail += 1
        else:
            sim.out_queue[m.out_tail, 0] = hint
            sim.out_queue[m.out_tail, 1] = tensors[tensor].generation
            m.out_tail += 1


@compiled
def _claim(sim, first, last):
    """Pin what the phase uses, and keep it: evictions of it that have not begun are off."""
    m = sim.machine[0]
    blocks = sim.blocks
    tensors = sim.tensors
    for access in range(first, last):
        tensor = sim.access_tensor[access]
        tensors[tensor].pinned = m.stamp
        if tensors[tensor].awaited == 0:
            tensors[tensor].generation += 1
        if m.by_access:
            for block in range(tensors[tensor].first, tensors[tensor].end):
                if blocks[block].listed:
                    _unlist(m, blocks, tensors, block)
                    _append(m, blocks, tensors, block)


@compiled
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


@compiled
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
        tensor_class = tensors[tensor].number
        residency = tensors[tensor].residency
        if _is_whole(tensors, tensor) and (tensors[tensor].copies == 0 or not mode & WRITE):
            continue
        for block in range(tensors[tensor].first, tensors[tensor].end):
            state = blocks[block].state
            if residency == MAP or state == HOST:
                size = blocks[block].bytes
                if mode & READ:
                    read_bytes += size
                    sim.traffic_bytes[TO_DEVICE, MAPPED, tensor_class] += size
                    sim.traffic_s[TO_DEVICE, MAPPED, tensor_class] += (
                        size / m.mapped_read_bytes_per_s
                    )
                    sim.traffic_count[TO_DEVICE, MAPPED, tensor_class] += 1
                if mode & WRITE:
                    written_bytes += size
                    sim.traffic_bytes[TO_HOST, MAPPED, tensor_class] += size
                    sim.traffic_s[TO_HOST, MAPPED, tensor_class] += (
                        size / m.mapped_write_bytes_per_s
                    )
                    sim.traffic_count[TO_HOST, MAPPED, tensor_class] += 1
                if residency == SYSTEM:
                    blocks[block].uses += 1
                    if blocks[block].uses == m.counter_threshold:
                        blocks[block].uses = 0
                        sim.counter_queue[m.counter_tail] = block
                        m.counter_tail += 1
            elif mode & WRITE and state == BOTH:
                blocks[block].state = DEVICE
                tensors[tensor].copies -= 1
    return read_bytes, written_bytes


@compiled
def _compute(sim, duration_s, read_bytes, written_bytes):
    """Run the phase's kernel, beside what it reads and writes in place."""
    m = sim.machine[0]
    began_s = m.now_s
    copied_bytes = m.copied_bytes
    if read_bytes > 0 or written_bytes > 0:
        read_rate = m.mapped_read_bytes_per_s
        write_rate = m.mapped_write_bytes_per_s
        if read_bytes > 0 and written_bytes > 0:
            scale = min(1.0, m.mapped_bytes_per_s / (read_rate + write_rate))
            read_rate *= scale
            write_rate *= scale
        _carry(sim, read_bytes, read_rate, written_bytes, write_rate)
        sim.stall_s[STALL_MAPPED] += max(0.0, m.now_s - began_s - duration_s)
    _run_until(sim, began_s + duration_s)
    slowed_s = (m.copied_bytes - copied_bytes) * m.copy_slowdown_s_per_byte
    if slowed_s > 0:
        sim.stall_s[STALL_COPY] += slowed_s
        _run_until(sim, m.now_s + slowed_s)


@compiled
def run_step(sim):
    """Run the step once more; False if a phase does not fit, which is then ``failed_phase``."""
    m = sim.machine[0]
    blocks = sim.blocks
    tensors = sim.tensors
    for phase in range(len(sim.duration_s)):
        m.stamp += 1
        m.phase = phase
        sim.link_bytes[phase] = 0.0
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
        sim.resident_bytes[phase] = m.class_bytes
        m.reserved_bytes = sim.birth_bytes[(phase + 1) % len(sim.duration_s)]
        _compute(sim, sim.duration_s[phase], read_bytes, written_bytes)
        sim.phase_end_s[phase] = m.now_s
        if not m.own_addresses:
            for death in range(sim.death_start[phase], sim.death_start[phase + 1]):
                tensor = sim.death_tensor[death]
                tensors[tensor].generation += 1
                tensors[tensor].awaited = 0
                for block in range(tensors[tensor].first, tensors[tensor].end):
                    _kill(m, blocks, tensors, block)
    return True
