// Random work in eight threads, against a shadow of what the allocator should hold.
//
// Usage: stress [steps [seed]]. `steps` is the total over all threads, 100,000 by default.
//
// Each thread allocates, frees (its own blocks and others'), records streams, launches and finishes
// work, changes classes, begins and ends private pools and empties the cache. A block enters the
// shadow after the allocator has handed it out and leaves before it is given back, so two blocks
// that overlap in the shadow overlap in fact. Between rounds all threads stop, and the statistics
// must equal the shadow's to the last byte.
#include <atomic>
#include <barrier>
#include <chrono>
#include <random>
#include <thread>

#include "steps.hpp"

namespace umem {
namespace {

constexpr std::size_t kThreads = 8;
constexpr std::size_t kRounds = 5;
constexpr std::size_t kMaxHeldBlocks = 50;  // per thread
constexpr int kDevices = 2;
constexpr std::size_t kBudgetBytes = 600 * MiB;
constexpr StreamId kCommonStreams = 4;          // streams that every thread uses
constexpr StreamId kFirstPrivateStream = 1000;  // one for each thread, for its pools

// The part of a block's memory that nobody else may have.
std::size_t extent_bytes(std::size_t bytes) {
  return round_up(bytes, bytes < kPageBytes ? kMinBlockBytes : kLargeStepBytes);
}

struct Held {
  std::uintptr_t address;
  std::size_t bytes;
  int device;
  StreamId stream;
  TensorClass tensor_class;
  PoolId pool;
  std::vector<StreamId> recorded;
};

struct ClassCount {
  std::int64_t allocations = 0, allocated_bytes = 0, requested_bytes = 0;
  std::int64_t born = 0, died = 0;
};

// Who has which addresses, and how much of each class there should be.
class Shadow {
 public:
  explicit Shadow(FakeDriver& driver) : driver_(driver), mapped_(driver.virtual_memory()) {}

  void add(const Held& block) {
    const std::lock_guard lock(mutex_);
    const std::uintptr_t end = block.address + extent_bytes(block.bytes);
    const auto next = live_.lower_bound(block.address);
    CHECK(next == live_.end() || next->first >= end);
    CHECK(next == live_.begin() || std::prev(next)->second.end <= block.address);
    live_[block.address] = {end, block};

    // What other streams still used may only be handed out once their work is over. Mapped memory
    // serves another stream than before behind the work of all.
    const bool is_mapped = mapped_ != nullptr && mapped_->holds(block.address, 1);
    auto used = in_use_.upper_bound(block.address);
    while (used != in_use_.begin() && std::prev(used)->second.end > block.address) --used;
    while (used != in_use_.end() && used->first < end) {
      for (const auto& [stream, mark] : used->second.marks) CHECK(driver_.done(stream) >= mark);
      if (is_mapped && block.stream != used->second.home)
        for (const auto& [stream, mark] : used->second.beside)
          CHECK(driver_.runs_behind({block.device, block.stream}, stream, mark));
      used = in_use_.erase(used);
    }
    count(block, true);
  }

  void remove(const Held& block) {
    const std::lock_guard lock(mutex_);
    const auto found = live_.find(block.address);
    CHECK(found != live_.end());
    const std::uintptr_t end = found->second.end;
    live_.erase(found);
    count(block, false);
    std::map<StreamId, std::uint64_t> marks;
    for (const StreamId stream : block.recorded)
      if (stream != block.stream) marks[stream] = driver_.launch(stream);
    driver_.launch(block.stream, block.device);
    std::map<DeviceStream, std::uint64_t> beside;
    for (StreamId stream = 0; stream < kCommonStreams; ++stream)
      beside[{block.device, stream}] = driver_.launched({block.device, stream});
    in_use_[block.address] = {end, marks, block.stream, beside};
  }

  void retag(Held& block, TensorClass tensor_class) {
    const std::lock_guard lock(mutex_);
    if (block.tensor_class == tensor_class) return;
    count(block, false);
    block.tensor_class = tensor_class;
    count(block, true);
    live_.at(block.address).block.tensor_class = tensor_class;
  }

  void count_refusal(int device) { ++refusals_[static_cast<std::size_t>(device)]; }

  // With all threads at rest.
  void check(const DeviceAllocator& device, int number) const {
    const DeviceStats stats = device.stats();
    const std::vector<SegmentSnapshot> segments = device.segments();
    std::array<std::int64_t, kClasses> slack{};  // what aliases have beyond the request
    for (const SegmentSnapshot& segment : segments)
      for (const BlockSnapshot& block : segment.blocks) {
        if (block.state != BlockState::live) continue;
        const std::size_t more = block.bytes - extent_bytes(live_.at(block.address).block.bytes);
        CHECK(segment.is_expandable ? more < kHandle : more == 0);
        slack[number_of(block.tensor_class)] += static_cast<std::int64_t>(more);
      }
    ClassCount sum;
    for (std::size_t i = 0; i < kClasses; ++i) {
      const ClassCount& expected = counts_[static_cast<std::size_t>(number)][i];
      const ClassStats& actual = stats.by_class[i];
      CHECK_EQUAL(actual.allocation.current, expected.allocations);
      CHECK_EQUAL(actual.allocated_bytes.current, expected.allocated_bytes + slack[i]);
      CHECK_EQUAL(actual.requested_bytes.current, expected.requested_bytes);
      CHECK_EQUAL(actual.allocation.allocated, expected.born);
      CHECK_EQUAL(actual.allocation.freed, expected.died);
      sum.allocations += expected.allocations;
      sum.allocated_bytes += expected.allocated_bytes + slack[i];
      sum.requested_bytes += expected.requested_bytes;
    }
    CHECK_EQUAL(stats.allocation.all.current, sum.allocations);
    CHECK_EQUAL(stats.allocated_bytes.all.current, sum.allocated_bytes);
    CHECK_EQUAL(stats.requested_bytes.all.current, sum.requested_bytes);
    CHECK_EQUAL(stats.num_ooms, refusals_[static_cast<std::size_t>(number)].load());
    check_consistent(device);

    // Every live block is where, whose and what the shadow says.
    std::size_t seen = 0;
    for (const SegmentSnapshot& segment : segments)
      for (const BlockSnapshot& block : segment.blocks) {
        if (block.state != BlockState::live) continue;
        ++seen;
        const Held& held = live_.at(block.address).block;
        CHECK_EQUAL(held.device, number);
        CHECK_EQUAL(block.requested_bytes, held.bytes);
        CHECK_EQUAL(block.stream, held.stream);
        CHECK(segment.pool == held.pool);
        CHECK(block.tensor_class == held.tensor_class);
      }
    CHECK_EQUAL(seen, static_cast<std::size_t>(sum.allocations));
  }

 private:
  struct Live {
    std::uintptr_t end;
    Held block;
  };
  struct InUse {
    std::uintptr_t end;
    std::map<StreamId, std::uint64_t> marks;  // what the driver must have done of each stream
    StreamId home;                            // on which it was allocated
    std::map<DeviceStream, std::uint64_t> beside;  // what streams had to do when it was freed
  };

  void count(const Held& block, bool born) {
    auto& of_device = counts_[static_cast<std::size_t>(block.device)];
    ClassCount& of = of_device[number_of(block.tensor_class)];
    const int sign = born ? 1 : -1;
    of.allocations += sign;
    of.allocated_bytes += sign * static_cast<std::int64_t>(extent_bytes(block.bytes));
    of.requested_bytes += sign * static_cast<std::int64_t>(block.bytes);
    ++(born ? of.born : of.died);
  }

  FakeDriver& driver_;
  const FakeVirtualMemory* const mapped_;
  mutable std::mutex mutex_;
  std::map<std::uintptr_t, Live> live_;
  std::map<std::uintptr_t, InUse> in_use_;
  std::array<std::array<ClassCount, kClasses>, kDevices> counts_{};
  std::array<std::atomic<std::int64_t>, kDevices> refusals_{};
};

// Blocks that one thread leaves for another to free.
class Exchange {
 public:
  void leave(Held block) {
    const std::lock_guard lock(mutex_);
    blocks_.push_back(std::move(block));
  }
  std::vector<Held> take_all() {
    const std::lock_guard lock(mutex_);
    return std::exchange(blocks_, {});
  }

 private:
  std::mutex mutex_;
  std::vector<Held> blocks_;
};

class Worker {
 public:
  Worker(std::size_t number, std::uint64_t seed, Allocator& allocator, FakeDriver& driver,
         Shadow& shadow, Exchange& exchange)
      : random_(seed * kThreads + number),
        private_stream_(kFirstPrivateStream + number),
        private_pool_{1, number},
        allocator_(allocator),
        driver_(driver),
        shadow_(shadow),
        exchange_(exchange) {}

  void step() {
    // No segment goes back while a pool is begun on its device, so that must not be always so.
    if (pool_begun_ && below(20) == 0) end_pool();
    const std::size_t choice = below(1000);
    if (choice < 450 && held_.size() < kMaxHeldBlocks) {
      allocate();
    } else if (choice < 780) {
      if (!held_.empty()) free(take_any());
    } else if (choice < 820) {
      for (Held& block : exchange_.take_all()) free(std::move(block));
    } else if (choice < 860) {
      if (!held_.empty()) exchange_.leave(take_any());
    } else if (choice < 920) {
      record_stream();
    } else if (choice < 960) {
      retag();
    } else if (choice < 990) {
      driver_.finish(any_stream());
    } else if (choice < 998) {
      if (!pool_begun_) begin_pool();
    } else {
      allocator_.empty_cache();
    }
  }

  void finish() {
    while (!held_.empty()) free(take_any());
    for (Held& block : exchange_.take_all()) free(std::move(block));
    if (pool_begun_) end_pool();
    release_pool();
  }

 private:
  std::size_t below(std::size_t bound) { return random_() % bound; }

  std::size_t any_bytes() {
    switch (below(10)) {
      case 0:
        return 2 * MiB + below(46 * MiB);
      case 1:
      case 2:
        return MiB + below(4 * MiB);
      case 3:
        return kMinBlockBytes * (1 + below(4));  // sizes that recur
      case 4:
        return 8 * MiB * (1 + below(4));
      default:
        return 1 + below(std::size_t{1} << below(21));
    }
  }

  // Private streams are recorded and finished by all threads as well.
  StreamId any_stream() {
    const std::size_t choice = below(kCommonStreams + kThreads);
    return choice < kCommonStreams ? choice : kFirstPrivateStream + (choice - kCommonStreams);
  }

  TensorClass any_class() { return static_cast<TensorClass>(below(kClasses)); }

  Held take_any() {
    std::swap(held_[below(held_.size())], held_.back());
    Held block = std::move(held_.back());
    held_.pop_back();
    return block;
  }

  void allocate() {
    const bool in_pool = pool_begun_ && below(2) == 0;
    Held block{.address = 0,
               .bytes = any_bytes(),
               .device = in_pool ? pool_device_ : static_cast<int>(below(kDevices)),
               .stream = in_pool ? private_stream_ : below(kCommonStreams),
               .tensor_class = any_class(),
               .pool = in_pool ? private_pool_ : PoolId{},
               .recorded = {}};
    const std::uint64_t token = allocator_.classes().enter(block.tensor_class);
    try {
      block.address = reinterpret_cast<std::uintptr_t>(
          allocator_.allocate(block.bytes, block.device, block.stream));
    } catch (const OutOfMemory&) {
      shadow_.count_refusal(block.device);
    }
    CHECK(allocator_.classes().leave(token));
    if (block.address == 0) {
      while (held_.size() > kMaxHeldBlocks / 2) free(take_any());
      return;
    }
    CHECK_EQUAL(block.address % (block.bytes < kPageBytes ? kMinBlockBytes : kLargeStepBytes),
                0U);
    shadow_.add(block);
    held_.push_back(std::move(block));
  }

  void free(Held block) {
    shadow_.remove(block);
    CHECK(allocator_.device(block.device).free(block.address));
  }

  void record_stream() {
    if (held_.empty()) return;
    Held& block = held_[below(held_.size())];
    const StreamId stream = any_stream();
    CHECK(allocator_.record_stream(block.address, stream));
    block.recorded.push_back(stream);
  }

  void retag() {
    if (held_.empty()) return;
    Held& block = held_[below(held_.size())];
    const TensorClass tensor_class = any_class();
    CHECK(allocator_.retag(block.address, tensor_class));
    shadow_.retag(block, tensor_class);
  }

  // As two graphs that share a pool would; the next pool may be on the other device.
  void begin_pool() {
    if (pool_uses_ == 2) release_pool();
    if (pool_uses_ == 0) pool_device_ = static_cast<int>(below(kDevices));
    const auto holds = [mine = private_stream_](StreamId stream) { return stream == mine; };
    allocator_.device(pool_device_).begin_pool(private_pool_, holds);
    ++pool_uses_;
    pool_begun_ = true;
  }

  void end_pool() {
    allocator_.device(pool_device_).end_pool(private_pool_);
    pool_begun_ = false;
  }

  void release_pool() {
    for (; pool_uses_ > 0; --pool_uses_)
      allocator_.device(pool_device_).release_pool(private_pool_);
  }

  std::mt19937_64 random_;
  const StreamId private_stream_;
  const PoolId private_pool_;
  Allocator& allocator_;
  FakeDriver& driver_;
  Shadow& shadow_;
  Exchange& exchange_;
  std::vector<Held> held_;
  bool pool_begun_ = false;
  int pool_device_ = 0;
  std::size_t pool_uses_ = 0;
};

// Every kind of memory, differing advice, small blocks on the device, limits that are met at times.
// Where device memory is mapped, more classes have it, so that streams borrow from each other.
Config stress_config(bool virtual_memory) {
  Config config = config_of(MemoryKind::managed);
  config.classes[0].advice.read_mostly = true;
  config.classes[1].kind = MemoryKind::device;
  config.classes[2].min_bytes = MiB;
  config.classes[3] = {.kind = MemoryKind::pinned, .advice = {}};
  config.classes[4].min_bytes = 4 * MiB;
  config.classes[5].kind = MemoryKind::system;
  if (virtual_memory) config.classes[0].kind = config.classes[2].kind = MemoryKind::device;
  config.managed_limit_bytes = 2 * GiB;
  config.pinned_limit_bytes = 1 * GiB;
  config.device_budget_bytes = kBudgetBytes;
  return config;
}

void stress(std::size_t steps, std::uint64_t seed, std::size_t offset_bytes,
            bool virtual_memory = false) {
  const auto start = std::chrono::steady_clock::now();
  Machine machine({.config = stress_config(virtual_memory),
                   .devices = kDevices,
                   .capacity_bytes = 3 * GiB,
                   .offset_bytes = offset_bytes,
                   .virtual_memory = virtual_memory});
  FakeVirtualMemory* const mapped = machine.driver.virtual_memory();
  if (mapped != nullptr) mapped->set_capacity(1 * GiB);
  Allocator& allocator = machine.allocator;
  Shadow shadow(machine.driver);
  Exchange exchange;
  std::size_t peak_bytes = 0;

  // What the default stream uses, all GPUs' default streams use that have been used before; and only
  // streams that have had memory are waited for.
  for (std::size_t i = 0; i < kDevices * kCommonStreams; ++i) {
    const int number = static_cast<int>(i) % kDevices;
    const StreamId stream = i / kDevices;
    const std::uint64_t token = allocator.classes().enter(TensorClass::other);
    void* const address = allocator.allocate(1, number, stream);
    CHECK(allocator.classes().leave(token));
    const Held block{.address = reinterpret_cast<std::uintptr_t>(address),
                     .bytes = 1,
                     .device = number,
                     .stream = stream,
                     .tensor_class = TensorClass::other,
                     .pool = {},
                     .recorded = {}};
    shadow.add(block);
    shadow.remove(block);
    CHECK(allocator.device(number).free(block.address));
  }

  const auto check_at_rest = [&] {
    std::size_t reserved_bytes = 0;
    for (int number = 0; number < kDevices; ++number) {
      shadow.check(allocator.device(number), number);
      reserved_bytes +=
          static_cast<std::size_t>(allocator.device(number).stats().reserved_bytes.all.current);
    }
    const std::size_t mapped_bytes = mapped != nullptr ? mapped->held_bytes() : 0;
    const std::size_t held_bytes = machine.source.held_bytes() + mapped_bytes;
    for (int number = 0; number < kDevices && mapped != nullptr; ++number)
      for (const SegmentSnapshot& segment : allocator.device(number).segments())
        if (segment.is_expandable)
          CHECK(mapped->holds(segment.address, segment.bytes, {1 - number}));
    if (offset_bytes == 0) CHECK_EQUAL(reserved_bytes, held_bytes);
    CHECK(reserved_bytes <= held_bytes);  // less by what alignment costs
    CHECK(machine.source.held_bytes(MemoryKind::pinned) <= GiB);
    std::size_t budget_bytes = 0, spilled_bytes = 0;
    for (int number = 0; number < kDevices; ++number) {
      const DeviceStats stats = allocator.device(number).stats();
      // Live tensors do not leave for page tables of what the host serves: 2 MiB for a GiB.
      CHECK(stats.budget_bytes.peak <= static_cast<std::int64_t>(kBudgetBytes + 2 * MiB));
      budget_bytes += static_cast<std::size_t>(stats.budget_bytes.current);
      spilled_bytes += allocator.device(number).kind_stats()[0].spilled_bytes;
    }
    const std::size_t on_host_bytes =
        machine.source.held_bytes(MemoryKind::pinned) + spilled_bytes;
    if (offset_bytes == 0) CHECK_EQUAL(budget_bytes + on_host_bytes, held_bytes);
    CHECK_EQUAL(allocator.managed_bytes(), machine.source.held_bytes(MemoryKind::managed));
    peak_bytes = std::max(peak_bytes, held_bytes);
  };

  std::barrier rest(static_cast<std::ptrdiff_t>(kThreads), [&]() noexcept { check_at_rest(); });
  const std::size_t steps_of_round = steps / kThreads / kRounds;
  std::vector<std::thread> threads;
  for (std::size_t number = 0; number < kThreads; ++number)
    threads.emplace_back([&, number] {
      Worker worker(number, seed, allocator, machine.driver, shadow, exchange);
      for (std::size_t round = 0; round < kRounds; ++round) {
        for (std::size_t step = 0; step < steps_of_round; ++step) worker.step();
        rest.arrive_and_wait();
      }
      worker.finish();
      rest.arrive_and_wait();
    });
  for (std::thread& thread : threads) thread.join();

  std::int64_t refused = 0, retried = 0, allocations = 0;
  for (int number = 0; number < kDevices; ++number) {
    const DeviceStats stats = allocator.device(number).stats();
    refused += stats.num_ooms;
    retried += stats.num_alloc_retries;
    allocations += stats.allocation.all.allocated;
  }
  CHECK(machine.driver.synchronize(0));
  allocator.empty_cache();
  CHECK(allocator.live_blocks().empty());
  CHECK_EQUAL(machine.source.held_bytes(), 0U);
  CHECK_EQUAL(machine.source.held_segments(), 0U);
  CHECK_EQUAL(allocator.managed_bytes(), 0U);
  CHECK_EQUAL(machine.driver.events(), 0U);
  for (int number = 0; number < kDevices; ++number) {
    const DeviceAllocator& device = allocator.device(number);
    const DeviceStats stats = device.stats();
    CHECK(device.pool_stats().empty());
    CHECK(device.segments().empty());
    CHECK_EQUAL(stats.reserved_bytes.all.allocated, stats.reserved_bytes.all.freed);
    CHECK_EQUAL(stats.active_bytes.all.allocated, stats.active_bytes.all.freed);
    if (mapped == nullptr) CHECK_EQUAL(stats.num_device_alloc, stats.num_device_free);
  }
  CHECK_EQUAL(mapped != nullptr ? mapped->held_bytes() : 0, 0U);
  const std::chrono::duration<double> seconds = std::chrono::steady_clock::now() - start;
  std::cout << "passed: " << (virtual_memory ? "mapped" : "not mapped") << ", addresses at +"
            << offset_bytes << ": " << kThreads * kRounds * steps_of_round << " steps, "
            << allocations << " allocations, " << retried << " retries, " << refused
            << " out of memory, " << peak_bytes / MiB << " MiB held at most at rest, "
            << seconds.count() << " s" << std::endl;
}

}  // namespace
}  // namespace umem

int main(int argc, char** argv) {
  const std::size_t steps = argc > 1 ? std::stoull(argv[1]) : 100000;
  const std::uint64_t seed = argc > 2 ? std::stoull(argv[2]) : std::random_device{}();
  std::cout << "seed " << seed << std::endl;
  umem::stress(steps, seed, 0);
  umem::stress(steps, seed, 0, true);
  umem::stress(steps / 5, seed, 256);
}
