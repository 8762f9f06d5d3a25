#include "fake_driver.hpp"

#include <sys/mman.h>

#include <algorithm>
#include <iterator>
#include <numeric>
#include <stdexcept>
#include <utility>

namespace umem {

FakeSource::FakeSource(std::shared_ptr<Faults> faults, std::size_t capacity_bytes,
                       std::size_t offset_bytes)
    : faults_(std::move(faults)), capacity_bytes_(capacity_bytes), offset_bytes_(offset_bytes) {}

FakeSource::~FakeSource() {
  CHECK_EQUAL(held_.size(), 0U);  // a segment that nobody gave back
}

void* FakeSource::allocate(MemoryKind kind, int device, std::size_t bytes) {
  slow.enter("allocate");
  const std::lock_guard lock(mutex_);
  ++requests_;
  const bool fails = faults_->fails();
  if (throws_ || (fails && faults_->throws())) throw std::runtime_error("the driver has failed");
  if (fails) return nullptr;
  if (capacity_bytes_ != 0 && (bytes > capacity_bytes_ || held_bytes_ > capacity_bytes_ - bytes))
    return nullptr;
  const std::size_t capacity_of_kind = capacity_of_kind_[number_of(kind)];
  if (capacity_of_kind != 0 &&
      held_of_kind_[number_of(kind)] + bytes > capacity_of_kind)
    return nullptr;
  if (bytes > SIZE_MAX / 4) return nullptr;
  const std::size_t mapped_bytes = round_up(bytes, kPageBytes) + 2 * kPageBytes;
  void* mapped = mmap(nullptr, mapped_bytes, PROT_NONE,
                      MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (mapped == MAP_FAILED) return nullptr;
  const std::uintptr_t address =
      round_up(reinterpret_cast<std::uintptr_t>(mapped), kPageBytes) + offset_bytes_;
  held_[address] = {kind, device, bytes, mapped, mapped_bytes};
  held_bytes_ += bytes;
  held_of_kind_[number_of(kind)] += bytes;
  return reinterpret_cast<void*>(address);
}

void FakeSource::deallocate(MemoryKind kind, int device, void* address,
                            std::size_t bytes) noexcept {
  slow.enter("deallocate");
  const std::lock_guard lock(mutex_);
  const auto found = held_.find(reinterpret_cast<std::uintptr_t>(address));
  CHECK(found != held_.end());
  const Piece& piece = found->second;
  CHECK(piece.kind == kind);
  CHECK_EQUAL(piece.device, device);
  CHECK_EQUAL(piece.bytes, bytes);
  munmap(piece.mapped, piece.mapped_bytes);
  held_bytes_ -= bytes;
  held_of_kind_[number_of(kind)] -= bytes;
  held_.erase(found);
}

bool FakeSource::holds(std::uintptr_t address, std::size_t bytes) const {
  const std::lock_guard lock(mutex_);
  const auto after = held_.upper_bound(address);
  if (after == held_.begin()) return false;
  const auto& [start, piece] = *std::prev(after);
  return address + bytes <= start + piece.bytes;
}

FakeDriver::FakeDriver(std::shared_ptr<Faults> faults, std::size_t total_bytes,
                       std::unique_ptr<FakeVirtualMemory> virtual_memory)
    : faults_(std::move(faults)),
      total_bytes_(total_bytes),
      virtual_memory_(std::move(virtual_memory)) {}

FakeDriver::~FakeDriver() {
  CHECK_EQUAL(events_.size(), 0U);  // an event that nobody recycled
}

EventId FakeDriver::record(int device, StreamId stream) noexcept {
  return record_all(device, {&stream, 1});
}

EventId FakeDriver::record_all(int device, std::span<const StreamId> streams) noexcept {
  slow.enter("record");
  const std::lock_guard lock(mutex_);
  for (const StreamId stream : streams)
    CHECK(!capturing_.contains(stream));  // it would become a node of the graph
  if (faults_->fails() || refuses_events_) return 0;
  std::vector<Mark>& marks = events_[++last_event_];
  for (const StreamId stream : streams)
    marks.push_back({key(stream, device), streams_[key(stream, device)].launched});
  return last_event_;
}

bool FakeDriver::finished(EventId id) noexcept {
  const std::lock_guard lock(mutex_);
  const auto event = events_.find(id);
  CHECK(event != events_.end());
  for (const Mark& mark : event->second)
    if (!is_over(mark)) return false;
  events_.erase(event);
  return true;
}

void FakeDriver::wait(EventId id) noexcept {
  slow.enter("wait");
  const std::lock_guard lock(mutex_);
  const auto event = events_.find(id);
  CHECK(event != events_.end());
  for (const Mark& mark : event->second) complete(mark);
  events_.erase(event);
}

bool FakeDriver::order(int device, StreamId stream, EventId id) noexcept {
  slow.enter("order");
  const std::lock_guard lock(mutex_);
  CHECK(!capturing_.contains(stream));
  const auto event = events_.find(id);
  CHECK(event != events_.end());
  const bool ordered = !faults_->fails() && !refuses_events_;
  Stream& of = streams_[key(stream, device)];
  for (const Mark& mark : event->second)
    if (ordered && mark.stream != key(stream, device) && !is_over(mark))
      of.waits.push_back({of.launched++, mark});  // a piece of work, as any other
  events_.erase(event);
  return ordered;
}

// Finishes a stream's work, and before that what the work waits for.
void FakeDriver::complete(const Mark& mark) {
  Stream& stream = streams_[mark.stream];
  const auto comes_later = [&](const Wait& wait) { return wait.after >= mark.mark; };
  const auto first =
      std::stable_partition(stream.waits.begin(), stream.waits.end(), comes_later);
  const std::vector<Wait> over(first, stream.waits.end());
  stream.waits.erase(first, stream.waits.end());
  for (const Wait& wait : over) complete(wait.mark);
  stream.done = std::max(stream.done, mark.mark);
}

bool FakeDriver::runs_behind(DeviceStream later, DeviceStream earlier, std::uint64_t mark) {
  const std::lock_guard lock(mutex_);
  later = key(later.stream, later.device);
  earlier = key(earlier.stream, earlier.device);
  if (later == earlier || is_over({earlier, mark})) return true;
  std::map<DeviceStream, std::uint64_t> reached;
  std::vector<Mark> open{{later, streams_[later].launched + 1}};
  while (!open.empty()) {
    const Mark from = open.back();
    open.pop_back();
    for (const Wait& wait : streams_[from.stream].waits) {
      if (wait.after >= from.mark || reached[wait.mark.stream] >= wait.mark.mark) continue;
      reached[wait.mark.stream] = wait.mark.mark;
      open.push_back(wait.mark);
    }
  }
  return reached[earlier] >= mark;
}

bool FakeDriver::advise(int, Range range, Advice advice) noexcept {
  slow.enter("advise");
  const std::lock_guard lock(mutex_);
  advice_.push_back({range, advice});
  return !faults_->fails() && !refuses_hints_;
}

bool FakeDriver::populate(int, Range range) noexcept {
  slow.enter("populate");
  const std::lock_guard lock(mutex_);
  populated_.push_back(range);
  return !faults_->fails() && !refuses_hints_;
}

MemoryInfo FakeDriver::memory(int) noexcept {
  slow.enter("memory");
  return {total_bytes_, total_bytes_};
}

bool FakeDriver::synchronize(int) noexcept {
  slow.enter("synchronize");
  const std::lock_guard lock(mutex_);
  if (faults_->fails() || !capturing_.empty()) return false;
  for (auto& [id, stream] : streams_) {
    stream.done = stream.launched;
    stream.waits.clear();
  }
  return true;
}

bool FakeDriver::copy(int, std::uintptr_t to, std::uintptr_t from, std::size_t bytes) noexcept {
  slow.enter("copy");
  const std::lock_guard lock(mutex_);
  if (faults_->fails() || refuses_copies_) return false;
  CHECK(virtual_memory_->is_mapped(to) != virtual_memory_->is_mapped(from));
  copied_bytes_ += bytes;
  return true;
}

void FakeDriver::fill(int device, StreamId stream, Range range, unsigned char value) noexcept {
  const std::lock_guard lock(mutex_);
  CHECK_EQUAL(value, kPoison);
  if (capturing_.contains(stream)) return;
  fills_.push_back({key(stream, device), range, ++streams_[key(stream, device)].launched});
}

bool FakeDriver::evict(int, Range range) noexcept {
  slow.enter("evict");
  const std::lock_guard lock(mutex_);
  evicted_.push_back(range);
  return !faults_->fails() && !refuses_hints_;
}

std::uint64_t FakeDriver::launch(StreamId stream, int device) {
  const std::lock_guard lock(mutex_);
  return ++streams_[key(stream, device)].launched;
}

void FakeDriver::finish(StreamId stream, int device) {
  const std::lock_guard lock(mutex_);
  complete({key(stream, device), streams_[key(stream, device)].launched});
}

std::uint64_t FakeDriver::done(StreamId stream) {
  const std::lock_guard lock(mutex_);
  return streams_[key(stream, 0)].done;
}

std::uint64_t FakeDriver::launched(DeviceStream stream) {
  const std::lock_guard lock(mutex_);
  return streams_[key(stream.stream, stream.device)].launched;
}

void FakeDriver::begin_capture(StreamId stream) {
  const std::lock_guard lock(mutex_);
  capturing_.insert(stream);
}

void FakeDriver::end_capture(StreamId stream) {
  const std::lock_guard lock(mutex_);
  capturing_.erase(stream);
}

std::vector<Fill> FakeDriver::take_fills() {
  const std::lock_guard lock(mutex_);
  return std::exchange(fills_, {});
}

Machine::Machine(const MachineSettings& settings)
    : Machine(settings, std::make_shared<Faults>()) {}

Machine::Machine(const MachineSettings& settings, const std::shared_ptr<Faults>& its_faults)
    : Machine(settings, its_faults,
              std::make_unique<FakeSource>(its_faults, settings.capacity_bytes,
                                           settings.offset_bytes),
              std::make_unique<FakeDriver>(
                  its_faults, settings.device_bytes,
                  settings.virtual_memory ? std::make_unique<FakeVirtualMemory>(its_faults)
                                          : nullptr)) {}

Machine::Machine(const MachineSettings& settings, const std::shared_ptr<Faults>& its_faults,
                 std::unique_ptr<FakeSource> source_owner,
                 std::unique_ptr<FakeDriver> driver_owner)
    : faults(its_faults),
      source(*source_owner),
      driver(*driver_owner),
      allocator(settings.config, std::move(source_owner), std::move(driver_owner),
                settings.devices),
      device(allocator.device(0)) {}

std::uintptr_t Machine::allocate(std::size_t bytes, StreamId stream,
                                 TensorClass tensor_class) {
  return reinterpret_cast<std::uintptr_t>(device.allocate(bytes, stream, tensor_class));
}

Config config_of(MemoryKind kind, Advice advice) {
  Config config;
  for (ClassSetting& setting : config.classes) setting = {.kind = kind, .advice = advice};
  return config;
}

void check_consistent(const DeviceAllocator& device) {
  TieredStat segment, reserved, active, active_bytes, allocation, allocated_bytes, requested_bytes,
      split, split_bytes;
  for (const SegmentSnapshot& snapshot : device.segments()) {
    std::uintptr_t expected_address = snapshot.address;
    bool after_cached = false;
    segment.increase(snapshot.tier, 1);
    reserved.increase(snapshot.tier, snapshot.bytes);
    for (const BlockSnapshot& block : snapshot.blocks) {
      CHECK_EQUAL(block.address, expected_address);  // blocks tile their segment
      expected_address += block.bytes;
      const bool cached = block.state == BlockState::cached;
      CHECK(!(cached && after_cached));  // neighbours would have been merged
      after_cached = cached;
      if (!cached) {
        active.increase(snapshot.tier, 1);
        active_bytes.increase(snapshot.tier, block.bytes);
      } else if (snapshot.blocks.size() > 1) {
        split.increase(snapshot.tier, 1);
        split_bytes.increase(snapshot.tier, block.bytes);
      }
      if (block.state == BlockState::live) {
        allocation.increase(snapshot.tier, 1);
        allocated_bytes.increase(snapshot.tier, block.bytes);
        requested_bytes.increase(snapshot.tier, block.requested_bytes);
      }
    }
    CHECK_EQUAL(expected_address, snapshot.address + snapshot.bytes);
  }

  const DeviceStats stats = device.stats();
  const auto check_current = [](const TieredStat& actual, const TieredStat& expected) {
    CHECK_EQUAL(actual.all.current, expected.all.current);
    CHECK_EQUAL(actual.small_pool.current, expected.small_pool.current);
    CHECK_EQUAL(actual.large_pool.current, expected.large_pool.current);
  };
  check_current(stats.segment, segment);
  check_current(stats.reserved_bytes, reserved);
  check_current(stats.active, active);
  check_current(stats.active_bytes, active_bytes);
  check_current(stats.allocation, allocation);
  CHECK_EQUAL(std::accumulate(stats.served.begin(), stats.served.end(), std::int64_t{0}),
              stats.allocation.all.allocated);
  check_current(stats.allocated_bytes, allocated_bytes);
  check_current(stats.requested_bytes, requested_bytes);
  check_current(stats.inactive_split, split);
  check_current(stats.inactive_split_bytes, split_bytes);
}

std::string out_of_memory_text(Machine& machine, std::size_t bytes) {
  try {
    machine.allocate(bytes);
  } catch (const OutOfMemory& error) {
    return error.what();
  }
  check::fail(__FILE__, __LINE__, "the allocation was served");
}

bool contains(const std::string& text, const char* part) {
  return text.find(part) != std::string::npos;
}

}  // namespace umem
