// A paused device: plain device memory is with the driver, its contents are on the host, and its
// addresses stay reserved.
#include <algorithm>
#include <utility>

#include "core/device_allocator.hpp"
#include "core/format_bytes.hpp"

namespace umem {
namespace {

// Blocks of a segment that `holds`, adjacent ones as one range.
template <class Predicate>
void append_ranges(const Segment& segment, Predicate holds, std::vector<Range>& to) {
  bool is_open = false;
  for (const Block* block = segment.first; block != nullptr; block = block->next) {
    const bool held = holds(*block);
    if (held && is_open)
      to.back().bytes += block->bytes;
    else if (held)
      to.push_back({block->address, block->bytes});
    is_open = held;
  }
}

std::size_t total_bytes(const std::vector<Range>& ranges) {
  std::size_t bytes = 0;
  for (const Range& range : ranges) bytes += range.bytes;
  return bytes;
}

// Sets a flag for a scope.
class FlagSet {
 public:
  explicit FlagSet(bool& flag) : flag_(flag) { flag_ = true; }
  ~FlagSet() { flag_ = false; }
  FlagSet(const FlagSet&) = delete;
  FlagSet& operator=(const FlagSet&) = delete;

 private:
  bool& flag_;
};

}  // namespace

PauseReport DeviceAllocator::pause(std::size_t host_available_bytes) {
  end_locking_ahead();
  std::unique_ptr<HostCopy> copy;  // after a failure it is freed without the locks
  const BothLocks locks(locks_);
  const std::string gpu = "GPU " + std::to_string(device_);
  if (paused_ != nullptr)
    throw PauseError(gpu + " is paused already: call umem.resume() before the next umem.pause()");
  if (!active_pools_.empty())
    throw PauseError("a CUDA graph is being captured on " + gpu +
                     ", or a memory pool is in use: call umem.pause() after that");
  const FlagSet closed(cache_closed_);
  if (!locks_.unlocked([&] { return driver_.synchronize(device_); }))
    throw PauseError("the work of " + gpu +
                     " cannot be waited for: an earlier CUDA call of the program has failed, or a "
                     "CUDA graph is being captured, or this process is a forked child");
  const std::size_t& held_bytes =
      kind_stats_[static_cast<std::size_t>(MemoryKind::device)].reserved_bytes;
  const std::size_t held_before = held_bytes;
  synchronize_events();
  gather_free_memory();
  release_spares(segments_.spares());

  std::vector<Range> live, managed;
  for (const auto& [address, segment] : segments_) {
    if (segment.is_expandable)
      append_ranges(
          segment, [](const Block& block) { return block.state != BlockState::cached; }, live);
    else if (takes_advice(segment.heap->kind))
      // What the budget has left on the host is there already.
      append_ranges(
          segment,
          [&](const Block& block) { return !routes_.is_spill(*segment.heap) || unspilled(block); },
          managed);
  }
  const std::size_t copy_bytes = total_bytes(live);
  // Of managed memory no more can be on the device.
  const MemoryInfo memory = locks_.unlocked([&] { return driver_.memory(device_); });
  const std::size_t most_evicted_bytes = std::min(total_bytes(managed), memory.total_bytes);
  if (copy_bytes + most_evicted_bytes > host_available_bytes)
    throw PauseError("umem.pause() needs up to " + format_bytes(copy_bytes + most_evicted_bytes) +
                     " of host memory for what is on " + gpu + ", and " +
                     format_bytes(host_available_bytes) +
                     " are available: free tensors or host memory before");
  copy = std::make_unique<HostCopy>(device_, source_, driver_, limits_.pinned);
  if (!locks_.unlocked([&] { return copy->allocate(copy_bytes); }))
    throw PauseError("the host has no memory for the " + format_bytes(copy_bytes) +
                     " that are on " + gpu + ": free tensors or host memory before umem.pause()");
  const auto save = [&](const Range& range) { return copy->save(range); };
  if (!locks_.unlocked([&] { return std::all_of(live.begin(), live.end(), save); }))
    throw PauseError("the memory of " + gpu +
                     " cannot be copied to the host: an earlier CUDA call of the program has "
                     "failed");
  for (auto& [address, segment] : segments_)
    if (std::exchange(segment.is_alias, false))
      segment.heap->expandable->keep_alias({segment.address, segment.bytes});
  const std::vector<Run> runs = segments_.mapped_runs();
  locks_.unlocked([&] {
    for (const Run& run : runs) mapped_.unmap(run);
  });
  for (const Run& run : runs) count_memory(*run.heap, run.range.bytes, run.range.bytes, false);
  paused_ = std::move(copy);
  budget_.add_locked_by_others(static_cast<std::ptrdiff_t>(paused_->pinned_bytes()));
  count_page_tables();

  PauseReport report{.returned_bytes = held_before - held_bytes,
                     .kept_bytes = held_bytes + budget_.page_table_bytes(),
                     .evicted_bytes = 0,
                     .host_bytes = paused_->bytes()};
  locks_.unlocked([&] {
    for (const Range& range : managed)
      (config_.prefetches && driver_.evict(device_, range) ? report.evicted_bytes
                                                           : report.kept_bytes) += range.bytes;
  });
  return report;
}

void DeviceAllocator::resume() {
  const BothLocks locks(locks_);
  const std::string gpu = "GPU " + std::to_string(device_);
  if (paused_ == nullptr)
    throw PauseError(gpu + " is not paused: call umem.pause() before umem.resume()");
  const FlagSet closed(cache_closed_);
  // What was freed meanwhile is not mapped again.
  synchronize_events();
  std::vector<Spare> freed = segments_.spares();
  std::erase_if(freed, [](const Spare& spare) { return !spare.block->segment->is_expandable; });
  release_spares(std::move(freed));

  const std::vector<Run> runs = segments_.mapped_runs();
  std::size_t bytes = 0;
  for (const Run& run : runs) bytes += run.range.bytes;
  locks_.unlocked([&] {
    std::size_t mapped = 0;
    const auto stay_paused = [&](const std::string& reason) {
      for (std::size_t i = 0; i < mapped; ++i) mapped_.unmap(runs[i]);
      throw PauseError(reason);
    };
    for (; mapped < runs.size(); ++mapped)
      if (!mapped_.map(runs[mapped]))
        stay_paused(gpu + " has no room for the " + format_bytes(bytes) +
                    " that umem.pause() gave back, and stays paused: " +
                    format_bytes(driver_.memory(device_).free_bytes) +
                    " are free. Free memory on it (nvidia-smi shows whose it is), then call "
                    "umem.resume() again");
    for (const Run& run : runs)
      if (!paused_->restore(run.range))
        stay_paused("memory cannot be copied back to " + gpu +
                    ", which stays paused: an earlier CUDA call of the program has failed");
  });
  for (const Run& run : runs) count_memory(*run.heap, run.range.bytes, run.range.bytes, true);
  budget_.add_locked_by_others(-static_cast<std::ptrdiff_t>(paused_->pinned_bytes()));
  locks_.unlocked([copy = std::move(paused_)]() mutable { copy.reset(); });
  count_page_tables();
  bring_back();
}

// Prefetches managed memory whose home is the device, as when it was new. What finds no room comes
// when it is used.
void DeviceAllocator::bring_back() {
  std::vector<Range> ranges;
  for (const auto& [address, segment] : segments_) {
    if (!takes_advice(segment.heap->kind)) continue;
    append_ranges(
        segment,
        [this](const Block& block) {
          return block.state != BlockState::cached && block.advice != kMixedAdvice &&
                 routes_.profile(block.advice).advice.placement == Placement::device;
        },
        ranges);
  }
  for (const Range& range : ranges)
    note_hint(
        locks_.unlocked([&] { return config_.prefetches && driver_.populate(device_, range); }),
        has_warned_of_prefetch_, "prefetch");
}

bool DeviceAllocator::is_paused() const {
  const std::lock_guard lock(locks_.books);
  return paused_ != nullptr;
}

void DeviceAllocator::check_not_paused() const {
  if (paused_ != nullptr)
    throw PauseError("GPU " + std::to_string(device_) +
                     " is paused (umem.pause()), and nothing can be allocated on it: call "
                     "umem.resume() before");
}

}  // namespace umem
