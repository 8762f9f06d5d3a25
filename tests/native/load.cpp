// 100,000 live blocks on 64 streams: four threads fill their blocks and check each byte before they
// free them, so a byte that two blocks share is seen. Fewer blocks under a sanitizer.
//
// Usage: load [blocks [seed]].
#include <barrier>
#include <random>
#include <thread>

#include "fake_driver.hpp"
#include "watched_source.hpp"

namespace umem {
namespace {

#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
constexpr std::size_t kBlocks = 8'000;
#else
constexpr std::size_t kBlocks = 100'000;
#endif
constexpr std::size_t kThreads = 4;
constexpr StreamId kStreams = 64;
constexpr std::size_t kBudgetBytes = 200 * MiB;  // less than the blocks take on the device

// Memory of every kind, which the budget keeps off the device in part.
Config load_config() {
  Config config;
  config.classes[1].kind = MemoryKind::device;
  config.classes[2].advice.placement = Placement::host;
  config.classes[3].kind = MemoryKind::pinned;
  config.classes[4].min_bytes = 1 * KiB;
  config.classes[5].kind = MemoryKind::system;
  config.device_budget_bytes = kBudgetBytes;
  return config;
}

class User {
 public:
  User(std::uint64_t seed, std::size_t blocks, Allocator& allocator, HintEngine& engine)
      : random_(seed), blocks_(blocks), allocator_(allocator), engine_(engine) {}

  void fill() {
    for (Block& block : blocks_) block = allocate();
  }

  void replace(std::size_t times) {
    for (; times != 0; --times) {
      Block& block = blocks_[below(blocks_.size())];
      if (below(4) == 0) hint(block);
      if (below(16) == 0) CHECK(allocator_.retag(block.address(), any_class()));
      free(block);
      block = allocate();
      if (below(4000) == 0) allocator_.empty_cache();
    }
  }

  void free_all() {
    for (const Block& block : blocks_) free(block);
  }

  std::uint64_t accepted = 0, refused = 0, asked_bytes = 0;  // hints

 private:
  struct Block {
    unsigned char* bytes = nullptr;
    std::size_t count = 0;
    unsigned char stamp = 0;
    std::uintptr_t address() const { return reinterpret_cast<std::uintptr_t>(bytes); }
  };

  std::size_t below(std::size_t end) { return random_() % end; }
  TensorClass any_class() { return static_cast<TensorClass>(below(kClasses)); }

  Block allocate() {
    Block block{.count = below(2000) == 0 ? kPageBytes + below(kPageBytes) : 1 + below(4 * KiB),
                .stamp = static_cast<unsigned char>(random_())};
    const std::uint64_t token = allocator_.classes().enter(any_class());
    block.bytes =
        static_cast<unsigned char*>(allocator_.allocate(block.count, 0, below(kStreams)));
    CHECK(allocator_.classes().leave(token));
    std::fill_n(block.bytes, block.count, block.stamp);
    return block;
  }

  void free(const Block& block) {
    CHECK(std::all_of(block.bytes, block.bytes + block.count,
                      [&](unsigned char byte) { return byte == block.stamp; }));
    if (below(4) == 0) CHECK(allocator_.record_stream(block.address(), below(kStreams)));
    CHECK(allocator_.device(0).free(block.address()));
  }

  // May be under way when the block is freed and its memory goes back.
  void hint(const Block& block) {
    const HintOp op = std::array{HintOp::prefetch, HintOp::evict, HintOp::advise}[below(3)];
    const Ticket ticket =
        engine_.submit({.op = op, .range = {block.address(), block.count}});
    ++(ticket != 0 ? accepted : refused);
    asked_bytes += ticket != 0 ? block.count : 0;
  }

  std::mt19937_64 random_;
  std::vector<Block> blocks_;
  Allocator& allocator_;
  HintEngine& engine_;
};

void run(std::size_t blocks, std::uint64_t seed) {
  HintMachine hints({.prefetch_workers = 3});
  Allocator allocator(load_config(), std::make_unique<WatchedSource>(hints.driver),
                      std::make_unique<HostDriver>(0, std::make_unique<HostVirtualMemory>(0)), 1);
  allocator.set_release_listener(hints.engine.release_listener());
  DeviceAllocator& device = allocator.device(0);
  std::vector<User> users;
  for (std::size_t number = 0; number < kThreads; ++number)
    users.emplace_back(seed * kThreads + number, blocks / kThreads, allocator, hints.engine);

  const auto check_at_rest = [&]() noexcept {
    check_consistent(device);
    CHECK_EQUAL(device.stats().allocation.all.current,
                static_cast<std::int64_t>(blocks / kThreads * kThreads));
    // Page tables of what is on the host are counted although nothing may leave for them.
    const std::size_t table_bytes =
        device.kind_stats()[number_of(MemoryKind::pinned)].reserved_bytes / 512;
    CHECK(static_cast<std::size_t>(device.stats().budget_bytes.peak) <= kBudgetBytes + table_bytes);
  };
  std::barrier rest(kThreads, check_at_rest);
  std::vector<std::thread> threads;
  for (User& user : users)
    threads.emplace_back([&] {
      user.fill();
      rest.arrive_and_wait();
      user.replace(2 * blocks / kThreads);
      rest.arrive_and_wait();
      user.free_all();
    });
  for (std::thread& thread : threads) thread.join();

  allocator.empty_cache();
  CHECK_EQUAL(device.stats().reserved_bytes.all.current, 0);
  CHECK(device.segments().empty());
  while (hints.engine.statistics().open_requests != 0) std::this_thread::yield();
  std::uint64_t accepted = 0, refused = 0, asked_bytes = 0;
  for (const User& user : users) {
    accepted += user.accepted;
    refused += user.refused;
    asked_bytes += user.asked_bytes;
  }
  expect_balanced(hints.engine.statistics(), accepted, refused, asked_bytes);
}

}  // namespace
}  // namespace umem

int main(int count, char** arguments) {
  const std::size_t blocks = count > 1 ? std::stoul(arguments[1]) : umem::kBlocks;
  umem::run(blocks, count > 2 ? std::stoul(arguments[2]) : 1);
  std::cout << "passed: " << blocks << " live blocks" << std::endl;
}
