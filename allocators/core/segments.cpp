#include "core/segments.hpp"

#include <algorithm>

namespace umem {

std::size_t spare_bytes(const Segment& segment, const Range& free) {
  if (segment.is_expandable) return segment.heap->expandable->whole_handles(free).bytes;
  return free.bytes == segment.bytes ? segment.raw_bytes : 0;
}

std::size_t spare_bytes(const Block& block) {
  return spare_bytes(*block.segment, {block.address, block.bytes});
}

Block* Segments::live_block(std::uintptr_t address) {
  const auto found = blocks_.find(address);
  return found == blocks_.end() || found->second.state != BlockState::live ? nullptr
                                                                           : &found->second;
}

std::optional<Range> Segments::find(std::uintptr_t address) const {
  auto after = segments_.upper_bound(address);
  if (after == segments_.begin()) return std::nullopt;
  const Segment& segment = std::prev(after)->second;
  if (address >= segment.address + segment.bytes) return std::nullopt;
  return Range{segment.address, segment.bytes};
}

Block* Segments::add(const Segment& fresh) {
  Segment& segment = segments_[fresh.address] = fresh;
  Block* block = &blocks_[fresh.address];
  block->address = fresh.address;
  block->bytes = fresh.bytes;
  block->segment = &segment;
  block->advice = fresh.heap->profile;
  segment.first = segment.last = block;
  stats_.segment.increase(fresh.heap->tier, 1);
  return block;
}

void Segments::cut(Block* block, std::size_t bytes) {
  if (block->bytes != bytes) cache(split(block, bytes));
}

void Segments::remove(Block* block) {
  const Segment& segment = *block->segment;
  stats_.segment.decrease(segment.heap->tier, 1);
  const std::uintptr_t address = segment.address;
  blocks_.erase(block->address);
  segments_.erase(address);
}

// Leaves `bytes` in the block. Returns the rest, which is in no index.
Block* Segments::split(Block* block, std::size_t bytes) {
  const std::uintptr_t address = block->address + bytes;
  Block& rest = blocks_[address];
  rest.address = address;
  rest.bytes = block->bytes - bytes;
  rest.segment = block->segment;
  rest.advice = block->advice;
  rest.previous = block;
  rest.next = block->next;
  (rest.next != nullptr ? rest.next->previous : rest.segment->last) = &rest;
  block->next = &rest;
  block->bytes = bytes;
  return &rest;
}

void Segments::cache(Block* block) {
  Heap& heap = *block->segment->heap;
  block->state = BlockState::cached;
  heap.index.insert(block);
  if (block->is_split()) {
    stats_.inactive_split.increase(heap.tier, 1);
    stats_.inactive_split_bytes.increase(heap.tier, block->bytes);
  }
  if (const std::size_t bytes = spare_bytes(*block); bytes != 0) {
    if (heap.on_device) idle_device_bytes_ += bytes;
    block->spare_previous = nullptr;
    block->spare_next = first_spare_;
    if (first_spare_ != nullptr) first_spare_->spare_previous = block;
    first_spare_ = block;
  }
}

void Segments::uncache(Block* block) {
  Heap& heap = *block->segment->heap;
  heap.index.remove(block);
  if (block->is_split()) {
    stats_.inactive_split.decrease(heap.tier, 1);
    stats_.inactive_split_bytes.decrease(heap.tier, block->bytes);
  }
  if (const std::size_t bytes = spare_bytes(*block); bytes != 0) {
    if (heap.on_device) idle_device_bytes_ -= bytes;
    Block* const next = block->spare_next;
    if (next != nullptr) next->spare_previous = block->spare_previous;
    (block->spare_previous != nullptr ? block->spare_previous->spare_next : first_spare_) = next;
  }
}

void Segments::put_back(Block* block) {
  if (Block* next = block->next; next != nullptr && next->state == BlockState::cached) {
    uncache(next);
    merge(block, next);
  }
  if (Block* previous = block->previous;
      previous != nullptr && previous->state == BlockState::cached) {
    uncache(previous);
    block = merge(previous, block);
  }
  cache(block);
}

// Merges two adjacent blocks that are in no index.
Block* Segments::merge(Block* left, Block* right) {
  if (left->advice != right->advice) left->advice = kMixedAdvice;
  left->bytes += right->bytes;
  left->next = right->next;
  (left->next != nullptr ? left->next->previous : left->segment->last) = left;
  blocks_.erase(right->address);
  return left;
}

Block* Segments::add_run(Heap& heap, const Range& mapped) {
  return add({.address = mapped.address,
              .bytes = mapped.bytes,
              .raw = reinterpret_cast<void*>(mapped.address),
              .raw_bytes = mapped.bytes,
              .heap = &heap,
              .is_expandable = true});
}

void Segments::add_mapped(Heap& heap, const Range& mapped) {
  Block* block = add_run(heap, mapped);
  const auto here = segments_.find(mapped.address);
  Segment& segment = here->second;
  const auto joins = [&](const Segment& it) {
    return it.heap == &heap && it.is_expandable && !it.is_alias;
  };
  const auto adjoins = [&](const Segment& left, const Segment& right) {
    return joins(left) && joins(right) && left.address + left.bytes == right.address;
  };
  if (const auto right = std::next(here);
      right != segments_.end() && adjoins(segment, right->second)) {
    Block* after = right->second.first;
    const bool is_free = after->state == BlockState::cached;
    if (is_free) uncache(after);
    join(segment, right->second);
    if (is_free) merge(block, after);
  }
  if (here != segments_.begin() && adjoins(std::prev(here)->second, segment)) {
    Block* before = std::prev(here)->second.last;
    const bool is_free = before->state == BlockState::cached;
    if (is_free) uncache(before);
    join(std::prev(here)->second, segment);
    if (is_free) block = merge(before, block);
  }
  cache(block);
}

// Makes one run of two that lie side by side.
void Segments::join(Segment& left, Segment& right) {
  for (Block* block = right.first; block != nullptr; block = block->next) block->segment = &left;
  left.last->next = right.first;
  right.first->previous = left.last;
  left.last = right.last;
  left.bytes += right.bytes;
  left.raw_bytes = left.bytes;
  stats_.segment.decrease(left.heap->tier, 1);
  segments_.erase(segments_.find(right.address));
}

void Segments::take_out(Block* block, const Range& gone) {
  uncache(block);
  const std::uintptr_t end = gone.address + gone.bytes;
  Block* const behind =
      end < block->address + block->bytes ? split(block, end - block->address) : nullptr;
  Block* const ahead = block->address < gone.address ? block : nullptr;
  if (ahead != nullptr) block = split(ahead, gone.address - ahead->address);
  remove_mapped(block, gone);
  if (ahead != nullptr) cache(ahead);
  if (behind != nullptr) cache(behind);
}

void Segments::remove_mapped(Block* block, const Range& gone) {
  Segment& segment = *block->segment;
  Heap& heap = *segment.heap;
  Block* const before = block->previous;
  Block* const after = block->next;
  if (after != nullptr) {
    const std::uintptr_t address = gone.address + gone.bytes;
    Segment& behind = segments_[address];
    behind = segment;
    behind.address = address;
    behind.bytes = segment.address + segment.bytes - address;
    behind.first = after;
    after->previous = nullptr;
    for (Block* moved = after; moved != nullptr; moved = moved->next) moved->segment = &behind;
    behind.raw = reinterpret_cast<void*>(address);
    behind.raw_bytes = behind.bytes;
    stats_.segment.increase(heap.tier, 1);
  }
  if (before != nullptr) {
    before->next = nullptr;
    segment.last = before;
    segment.bytes = segment.raw_bytes = gone.address - segment.address;
  } else {
    stats_.segment.decrease(heap.tier, 1);
    segments_.erase(segments_.find(segment.address));
  }
  blocks_.erase(gone.address);
}

std::vector<Spare> Segments::spares() const {
  std::vector<Spare> all;
  for (Block* block = first_spare_; block != nullptr; block = block->spare_next)
    if (!block->segment->heap->pool_in_use()) all.push_back({block, spare_bytes(*block)});
  std::sort(all.begin(), all.end(), [](const Spare& left, const Spare& right) {
    return left.block->address < right.block->address;
  });
  return all;
}

std::size_t Segments::used_bytes(const Heap& heap) const {
  std::size_t bytes = 0;
  for (const auto& [address, segment] : segments_) {
    if (segment.heap != &heap) continue;
    for (const Block* block = segment.first; block != nullptr; block = block->next)
      if (block->state != BlockState::cached) bytes += block->bytes;
  }
  return bytes;
}

std::vector<Run> Segments::mapped_runs() const {
  std::vector<Run> runs;
  for (const auto& [address, segment] : segments_)
    if (segment.is_expandable) runs.push_back({segment.heap, {segment.address, segment.bytes}});
  return runs;
}

}  // namespace umem
