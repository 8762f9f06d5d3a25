// Page-locked host memory: how it is mapped, touched and locked, and that all of it is undone.
#include "core/pinned_memory.hpp"

#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <map>
#include <mutex>
#include <thread>
#include <vector>

#include "check.hpp"

namespace umem {
namespace {

// For each page of a range whether it has memory; empty when it is not mapped.
std::vector<unsigned char> resident_pages(Range range) {
  std::vector<unsigned char> pages(round_up(range.bytes, kHostPageBytes) / kHostPageBytes);
  if (mincore(reinterpret_cast<void*>(range.address), range.bytes, pages.data()) != 0) {
    CHECK_EQUAL(errno, ENOMEM);
    return {};
  }
  return pages;
}

class FakeLocker final : public PageLocker {
 public:
  ~FakeLocker() override { CHECK(locked_.empty()); }

  bool lock(Range range) noexcept override {
    const std::lock_guard lock(mutex_);
    const std::vector<unsigned char> pages = resident_pages(range);
    CHECK(!pages.empty());
    resident_ = std::all_of(pages.begin(), pages.end(),
                            [](unsigned char page) { return (page & 1) != 0; });
    last_ = range;
    if (refuses_) return false;
    CHECK(locked_.emplace(range.address, range.bytes).second);
    return true;
  }
  void unlock(Range range) noexcept override {
    const std::lock_guard lock(mutex_);
    CHECK(!resident_pages(range).empty());  // while it is mapped
    const auto found = locked_.find(range.address);
    CHECK(found != locked_.end());
    CHECK_EQUAL(found->second, range.bytes);
    locked_.erase(found);
  }

  void refuse(bool refuses) { refuses_ = refuses; }
  Range last() const { return last_; }
  bool was_resident() const { return resident_; }
  std::size_t locked() const { return locked_.size(); }

 private:
  std::mutex mutex_;
  std::map<std::uintptr_t, std::size_t> locked_;
  std::atomic<bool> refuses_ = false;
  Range last_;
  bool resident_ = false;
};

struct Host {
  explicit Host(std::unique_ptr<FakeLocker> owner = std::make_unique<FakeLocker>())
      : locker(*owner), memory(std::move(owner)) {}

  FakeLocker& locker;
  PinnedMemory memory;
};

TEST(memory_is_aligned_and_zeroed) {
  Host host;
  for (const std::size_t bytes :
       {std::size_t{1}, kHostPageBytes, kHostPageBytes + KiB, 2 * MiB, 3 * MiB, 80 * MiB}) {
    auto* address = static_cast<char*>(host.memory.allocate(bytes, PinnedMemory::kAnyNode));
    CHECK(address != nullptr);
    CHECK_EQUAL(reinterpret_cast<std::uintptr_t>(address) % kPageBytes, 0U);
    CHECK_EQUAL(host.locker.last().address, reinterpret_cast<std::uintptr_t>(address));
    CHECK_EQUAL(host.locker.last().bytes, round_up(bytes, kHostPageBytes));
    CHECK(std::all_of(address, address + bytes, [](char value) { return value == 0; }));
    std::fill(address, address + bytes, char{1});
    const Range range = host.locker.last();
    host.memory.deallocate(address, bytes);
    CHECK_EQUAL(host.locker.locked(), 0U);
    CHECK(resident_pages(range).empty());
  }
}

// The locker faults in what is small; large memory is there before, to the last page.
TEST(large_memory_is_touched_first) {
  Host host;
  for (const std::size_t bytes : {64 * MiB, 66 * MiB, 101 * MiB + kHostPageBytes}) {
    void* address = host.memory.allocate(bytes, PinnedMemory::kAnyNode);
    CHECK(host.locker.was_resident());
    host.memory.deallocate(address, bytes);
  }
  void* small = host.memory.allocate(2 * MiB, PinnedMemory::kAnyNode);
  CHECK(!host.locker.was_resident());
  host.memory.deallocate(small, 2 * MiB);
}

TEST(a_refused_lock_leaves_nothing) {
  Host host;
  host.locker.refuse(true);
  for (const std::size_t bytes : {std::size_t{1}, 2 * MiB, 80 * MiB}) {
    CHECK(host.memory.allocate(bytes, PinnedMemory::kAnyNode) == nullptr);
    CHECK(resident_pages(host.locker.last()).empty());
  }
  host.locker.refuse(false);
  void* address = host.memory.allocate(2 * MiB, PinnedMemory::kAnyNode);
  CHECK(address != nullptr);
  host.memory.deallocate(address, 2 * MiB);
}

TEST(more_than_there_is_address_space) {
  Host host;
  for (const std::size_t bytes : {SIZE_MAX / 2, std::size_t{1} << 60})
    CHECK(host.memory.allocate(bytes, PinnedMemory::kAnyNode) == nullptr);
}

TEST(any_node_will_do) {
  Host host;
  for (const int node : {0, 1000, 1 << 20}) {
    void* address = host.memory.allocate(4 * MiB, node);
    CHECK(address != nullptr);
    host.memory.deallocate(address, 4 * MiB);
  }
}

// The kernel copies nothing from an address that the process does not have.
bool is_mapped(const void* address) {
  int ends[2];
  CHECK_EQUAL(pipe(ends), 0);
  const bool readable = write(ends[1], address, 1) == 1;
  close(ends[0]);
  close(ends[1]);
  return readable;
}

TEST(a_child_has_no_locked_memory) {
  Host host;
  void* address = host.memory.allocate(4 * MiB, PinnedMemory::kAnyNode);
  CHECK(is_mapped(address));
  const pid_t child = fork();
  if (child == 0) _exit(is_mapped(address) ? EXIT_FAILURE : EXIT_SUCCESS);
  CHECK(child > 0);
  int status = 0;
  CHECK_EQUAL(waitpid(child, &status, 0), child);
  CHECK(WIFEXITED(status));
  CHECK_EQUAL(WEXITSTATUS(status), EXIT_SUCCESS);
  host.memory.deallocate(address, 4 * MiB);
}

TEST(threads_may_allocate_together) {
  Host host;
  std::vector<std::thread> threads;
  for (std::size_t number = 0; number < 4; ++number)
    threads.emplace_back([&host, number] {
      for (std::size_t i = 0; i < 8; ++i) {
        const std::size_t bytes = (i == 3 ? 64 : 1 + number) * MiB;
        auto* address = static_cast<char*>(host.memory.allocate(bytes, 0));
        CHECK(address != nullptr);
        address[bytes - 1] = 1;
        host.memory.deallocate(address, bytes);
      }
    });
  for (std::thread& thread : threads) thread.join();
  CHECK_EQUAL(host.locker.locked(), 0U);
}

}  // namespace
}  // namespace umem
