// The host's memory, of which the fake hint driver knows what has been given back.
#pragma once

#include <atomic>

#include "core/host.hpp"
#include "fake_hint_driver.hpp"

namespace umem {

// A hint on what has been given back would fail in the fake driver.
class WatchedSource final : public SegmentSource {
 public:
  explicit WatchedSource(FakeHintDriver& hints) : hints_(hints) {}

  void* allocate(MemoryKind kind, int device, std::size_t bytes) override {
    void* const address = host_.allocate(kind, device, bytes);
    hints_.map_again({reinterpret_cast<std::uintptr_t>(address), bytes});
    return address;
  }
  void deallocate(MemoryKind kind, int device, void* address,
                  std::size_t bytes) noexcept override {
    hints_.unmap({reinterpret_cast<std::uintptr_t>(address), bytes});
    host_.deallocate(kind, device, address, bytes);
    ++given_back;
  }

  std::atomic<int> given_back{0};

 private:
  HostSource host_{0};
  FakeHintDriver& hints_;
};

}  // namespace umem
