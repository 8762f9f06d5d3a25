// Virtual memory management without a GPU, which checks how the core treats it.
#pragma once

#include <functional>
#include <map>
#include <memory>
#include <set>
#include <span>
#include <utility>

#include "check.hpp"
#include "core/driver.hpp"
#include "faults.hpp"
#include "locked.hpp"
#include "slow_calls.hpp"

namespace umem {

// Physical memory that is handed out in handles, and addresses that they are mapped into, each at as
// many as the core wants. Nothing may be mapped over, unmapped, released or given to a peer that is
// not as the core says.
class FakeVirtualMemory final : public VirtualMemory, Locked {
 public:
  explicit FakeVirtualMemory(std::shared_ptr<Faults> faults) : faults_(std::move(faults)) {}
  ~FakeVirtualMemory() override;

  std::size_t granularity(int) noexcept override { return kPageBytes; }
  std::uintptr_t reserve(int, std::size_t bytes, std::size_t alignment) noexcept override;
  void unreserve(Range range) noexcept override;
  HandleId create(int device, std::size_t bytes) noexcept override;
  void release(HandleId id) noexcept override;
  bool map(int device, std::span<const Range> ranges, std::size_t handle_bytes,
           std::span<const HandleId> handles) noexcept override;
  void unmap(Range range, std::size_t handle_bytes) noexcept override;
  bool add_peer(int device, int peer, std::span<const Range> mapped) noexcept override;

  void set_capacity(std::size_t bytes) { set(capacity_bytes_, bytes); }  // 0: no bound
  void refuse_addresses(bool refuse) { set(refuses_addresses_, refuse); }
  void refuse_maps(bool refuse) { set(refuses_maps_, refuse); }
  void refuse_peers(bool refuse) { set(refuses_peers_, refuse); }
  void on_unmap(std::function<void()> hook) { on_unmap_ = std::move(hook); }
  std::size_t held_bytes() const { return read(held_bytes_); }  // of all handles, mapped or not
  std::size_t peak_bytes() const { return read(peak_bytes_); }
  std::size_t created() const { return read(created_); }
  std::size_t maps() const { return read(maps_); }
  std::size_t unmaps() const { return read(unmaps_); }
  struct Mapping {
    HandleId handle = 0;  // 0: none
    std::uintptr_t address = 0;  // of its first byte
  };
  Mapping mapping_at(std::uintptr_t address) const;
  bool is_mapped(std::uintptr_t address) const { return mapping_at(address).handle != 0; }
  // Whether each byte is mapped, for the GPU itself and for `peers`.
  bool holds(std::uintptr_t address, std::size_t bytes, const std::set<int>& peers = {}) const;

  SlowCalls slow;  // reserve, create, release, map, unmap, add_peer

 private:
  struct Handle {
    int device;
    std::size_t bytes;
    std::size_t mappings;
  };
  struct Reserved {
    std::size_t bytes;
    void* raw;
    std::size_t raw_bytes;
  };

  const std::shared_ptr<Faults> faults_;
  std::size_t capacity_bytes_ = 0;
  bool refuses_addresses_ = false;
  bool refuses_maps_ = false;
  bool refuses_peers_ = false;
  std::size_t held_bytes_ = 0, peak_bytes_ = 0, created_ = 0, maps_ = 0, unmaps_ = 0;
  HandleId last_handle_ = 0;
  std::map<HandleId, Handle> handles_;
  std::map<std::uintptr_t, HandleId> mapped_;
  std::map<std::uintptr_t, std::set<int>> accessible_;
  std::map<int, std::set<int>> peers_;
  std::map<std::uintptr_t, Reserved> reserved_;
  std::function<void()> on_unmap_;
};

}  // namespace umem
