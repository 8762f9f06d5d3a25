// A machine without a GPU, which checks how the core treats it.
#pragma once

#include <array>
#include <cstdint>
#include <map>
#include <memory>
#include <set>
#include <string>
#include <vector>

#include "check.hpp"
#include "core/allocator.hpp"
#include "fake_virtual_memory.hpp"
#include "locked.hpp"
#include "slow_calls.hpp"

namespace umem {

// Hands out reserved address space: the core owns addresses and must never touch their contents,
// so a touch faults, and gigabytes cost nothing. What is given back must be what was given.
class FakeSource final : public SegmentSource, Locked {
 public:
  FakeSource(std::shared_ptr<Faults> faults, std::size_t capacity_bytes,
             std::size_t offset_bytes);
  ~FakeSource() override;

  void* allocate(MemoryKind kind, int device, std::size_t bytes) override;
  void deallocate(MemoryKind kind, int device, void* address,
                  std::size_t bytes) noexcept override;

  void set_capacity(std::size_t bytes) { set(capacity_bytes_, bytes); }  // 0: no bound
  void set_capacity(MemoryKind kind, std::size_t bytes) {  // of this kind; 0: no bound
    set(capacity_of_kind_[number_of(kind)], bytes);
  }
  void set_throws(bool throws) { set(throws_, throws); }
  std::size_t held_bytes() const { return read(held_bytes_); }
  std::size_t held_bytes(MemoryKind kind) const { return read(held_of_kind_[number_of(kind)]); }
  std::size_t held_segments() const { return read(held_).size(); }
  std::size_t requests() const { return read(requests_); }
  bool holds(std::uintptr_t address, std::size_t bytes) const;

  SlowCalls slow;  // allocate, deallocate

 private:
  struct Piece {
    MemoryKind kind;
    int device;
    std::size_t bytes;
    void* mapped;
    std::size_t mapped_bytes;
  };

  const std::shared_ptr<Faults> faults_;
  std::size_t capacity_bytes_;
  const std::size_t offset_bytes_;  // from a page boundary
  bool throws_ = false;
  std::size_t requests_ = 0;
  std::size_t held_bytes_ = 0;
  std::array<std::size_t, kKinds> held_of_kind_{};
  std::array<std::size_t, kKinds> capacity_of_kind_{};
  std::map<std::uintptr_t, Piece> held_;
};

struct AdviceCall {
  Range range;
  Advice advice;
};

struct Fill {
  DeviceStream stream;
  Range range;
  std::uint64_t mark;  // of the stream's work that it is
};

// Streams whose work is done when the test says so, or when the core waits for it. Every event must
// be asked about until it is done, and never again after that.
class FakeDriver final : public Driver, Locked {
 public:
  FakeDriver(std::shared_ptr<Faults> faults, std::size_t total_bytes,
             std::unique_ptr<FakeVirtualMemory> virtual_memory);
  ~FakeDriver() override;

  EventId record(int device, StreamId stream) noexcept override;
  EventId record_all(int device, std::span<const StreamId> streams) noexcept override;
  bool finished(EventId id) noexcept override;
  void wait(EventId id) noexcept override;
  bool order(int device, StreamId stream, EventId id) noexcept override;
  bool capturing(StreamId stream) noexcept override { return read(capturing_).contains(stream); }
  bool advise(int, Range range, Advice advice) noexcept override;
  bool populate(int, Range range) noexcept override;
  MemoryInfo memory(int) noexcept override;
  bool synchronize(int) noexcept override;
  // Counts only: the memory of the fakes cannot be accessed. One side must be mapped.
  bool copy(int, std::uintptr_t to, std::uintptr_t from, std::size_t bytes) noexcept override;
  void fill(int device, StreamId stream, Range range, unsigned char value) noexcept override;
  bool evict(int, Range range) noexcept override;
  FakeVirtualMemory* virtual_memory() noexcept override { return virtual_memory_.get(); }

  // Gives a stream work. Returns the mark that done() reaches when that work is over. The device is
  // that of the default stream: other streams have numbers of their own.
  std::uint64_t launch(StreamId stream, int device = 0);
  void finish(StreamId stream, int device = 0);
  std::uint64_t done(StreamId stream);
  std::uint64_t launched(DeviceStream stream);
  // Whether work that `later` gets now starts behind the work of `earlier` that `mark` stands for.
  bool runs_behind(DeviceStream later, DeviceStream earlier, std::uint64_t mark);
  void begin_capture(StreamId stream);
  void end_capture(StreamId stream);
  void refuse_hints(bool refuse) { set(refuses_hints_, refuse); }
  void refuse_events(bool refuse) { set(refuses_events_, refuse); }
  void refuse_copies(bool refuse) { set(refuses_copies_, refuse); }
  std::size_t copied_bytes() const { return read(copied_bytes_); }
  std::vector<Range> evicted() const { return read(evicted_); }
  // Fills since the last call.
  std::vector<Fill> take_fills();
  std::size_t events() const { return read(events_).size(); }
  std::vector<AdviceCall> advice() const { return read(advice_); }
  std::vector<Range> populated() const { return read(populated_); }

  SlowCalls slow;  // record, wait, order, advise, populate, memory, synchronize, copy, evict

 private:
  struct Mark {
    DeviceStream stream;
    std::uint64_t mark;
  };
  // What a stream has been told to wait for, by order(), before its work behind `after`.
  struct Wait {
    std::uint64_t after;
    Mark mark;
  };
  struct Stream {
    std::uint64_t launched = 0;
    std::uint64_t done = 0;
    std::vector<Wait> waits;
  };

  bool is_over(const Mark& mark) { return streams_[mark.stream].done >= mark.mark; }
  void complete(const Mark& mark);
  static DeviceStream key(StreamId stream, int device) { return {stream == 0 ? device : 0, stream}; }

  const std::shared_ptr<Faults> faults_;
  const std::size_t total_bytes_;
  const std::unique_ptr<FakeVirtualMemory> virtual_memory_;
  EventId last_event_ = 0;
  std::map<EventId, std::vector<Mark>> events_;  // one for each stream
  std::map<DeviceStream, Stream> streams_;
  std::set<StreamId> capturing_;
  bool refuses_hints_ = false;
  bool refuses_events_ = false;
  bool refuses_copies_ = false;
  std::size_t copied_bytes_ = 0;
  std::vector<Range> evicted_;
  std::vector<AdviceCall> advice_;
  std::vector<Range> populated_;
  std::vector<Fill> fills_;
};

struct MachineSettings {
  Config config;
  int devices = 1;
  std::size_t device_bytes = 64 * GiB;  // what the driver says a device has
  std::size_t capacity_bytes = 0;       // what the source gives at most, 0 for no bound
  std::size_t offset_bytes = 0;         // of the source's addresses from a page boundary
  bool virtual_memory = false;          // plain device memory in expandable segments
};

// What every snapshot must satisfy, and the figures of the statistics that follow from it.
void check_consistent(const DeviceAllocator& device);

// An allocator over the fakes, and shorthand for its first device. In the end that
// must be consistent.
class Machine {
 public:
  explicit Machine(const MachineSettings& settings = {});
  ~Machine() {
    if (!device.is_paused()) check_consistent(device);
  }

  std::uintptr_t allocate(std::size_t bytes, StreamId stream = 0,
                          TensorClass tensor_class = TensorClass::activations);
  std::uintptr_t allocate_on(int number, std::size_t bytes, StreamId stream = 0) {
    return reinterpret_cast<std::uintptr_t>(allocator.allocate(bytes, number, stream));
  }
  template <class... Addresses>
  void free(Addresses... addresses) {
    (CHECK(device.free(addresses)), ...);
  }
  // Another stream than the block's uses it, too.
  void free_used(std::uintptr_t address, StreamId stream) {
    CHECK(device.record_stream(address, stream));
    free(address);
  }

 private:
  Machine(const MachineSettings& settings, const std::shared_ptr<Faults>& its_faults);
  Machine(const MachineSettings& settings, const std::shared_ptr<Faults>& its_faults,
          std::unique_ptr<FakeSource> source_owner, std::unique_ptr<FakeDriver> driver_owner);

 public:
  const std::shared_ptr<Faults> faults;
  FakeSource& source;
  FakeDriver& driver;
  Allocator allocator;
  DeviceAllocator& device;
};

// All classes on one kind of memory, with one advice.
Config config_of(MemoryKind kind, Advice advice = {.placement = Placement::device});

inline ClassSetting& setting_of(Config& config, TensorClass tensor_class) {
  return config.classes[number_of(tensor_class)];
}

inline KindStats stats_of(const Machine& machine, MemoryKind kind) {
  return machine.device.kind_stats()[number_of(kind)];
}

std::string out_of_memory_text(Machine& machine, std::size_t bytes);
bool contains(const std::string& text, const char* part);

}  // namespace umem
