// The Python side of the native library. Its contract is umem/runtime/_native.pyi.
#include <nanobind/nanobind.h>
#include <nanobind/stl/map.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include "binding/copies.hpp"
#include "binding/hints.hpp"
#include "binding/host_update.hpp"
#include "binding/names.hpp"
#include "core/allocator.hpp"
#include "core/host.hpp"
#include "hints/hint_engine.hpp"
#ifdef UMEM_HAS_CUDA
#include <cuda_runtime_api.h>

#include "torch/entry_points.hpp"
#endif

namespace nb = nanobind;
using namespace nb::literals;

namespace umem {
namespace {

// A context manager of C++: with one of Python's, an interrupt may come between its begin and the
// block, and leave the override to the program.
class ClassOverride {
 public:
  ClassOverride(ClassContext& classes, TensorClass tensor_class)
      : classes_(&classes), tensor_class_(tensor_class) {}

  void enter() {
    if (is_entered_) throw nb::value_error("class_override: the block has begun already");
    token_ = classes_->enter(tensor_class_);
    is_entered_ = true;
  }

  void leave() {
    if (!is_entered_ || !classes_->leave(token_))
      throw nb::value_error("class_override: this thread has begun no such block");
    is_entered_ = false;
  }

 private:
  ClassContext* classes_;
  TensorClass tensor_class_;
  std::uint64_t token_ = 0;
  bool is_entered_ = false;
};

// Calls a Python function for each block. It may be called by any thread, within an exception too.
class PythonListener final : public BlockListener {
 public:
  explicit PythonListener(nb::object function) : function_(std::move(function)) {}

  void block_changes(const LiveBlock& block, StreamId stream, bool is_born) noexcept override {
    if (!nb::is_alive()) return;
    const nb::gil_scoped_acquire gil;
    const nb::error_scope error_of_caller;
    try {
      function_(is_born, block.address, block.bytes, block.requested_bytes,
                static_cast<int>(block.tensor_class), block.device,
                kKindNames[static_cast<std::size_t>(block.kind)], stream);
    } catch (nb::python_error& error) {
      error.discard_as_unraisable("umem's record of memory");
    }
  }

 private:
  nb::object function_;
};

constexpr std::array<const char*, 3> kStateNames = {"inactive", "active_allocated",
                                                    "active_awaiting_free"};

ClassSetting class_setting(const std::string& kind, const std::string& placement,
                           bool accessed_by_device, bool read_mostly, std::size_t min_bytes) {
  return {.kind = static_cast<MemoryKind>(number_of(kKindNames, kind, "kind of memory")),
          .advice = {.placement = placement_of(placement),
                     .accessed_by_device = accessed_by_device,
                     .read_mostly = read_mostly},
          .min_bytes = min_bytes};
}

nb::dict to_dict(const Stat& stat) {
  nb::dict dict;
  dict["current"] = stat.current;
  dict["peak"] = stat.peak;
  dict["allocated"] = stat.allocated;
  dict["freed"] = stat.freed;
  return dict;
}

nb::dict to_dict(const TieredStat& stat) {
  nb::dict dict;
  dict["all"] = to_dict(stat.all);
  dict["small_pool"] = to_dict(stat.small_pool);
  dict["large_pool"] = to_dict(stat.large_pool);
  return dict;
}

// The form of torch._C._cuda_memoryStats. Figures that umem does not have (oversize blocks) are 0.
nb::dict to_dict(const DeviceStats& stats) {
  nb::dict dict;
  dict["allocation"] = to_dict(stats.allocation);
  dict["segment"] = to_dict(stats.segment);
  dict["active"] = to_dict(stats.active);
  dict["inactive_split"] = to_dict(stats.inactive_split);
  dict["allocated_bytes"] = to_dict(stats.allocated_bytes);
  dict["reserved_bytes"] = to_dict(stats.reserved_bytes);
  dict["active_bytes"] = to_dict(stats.active_bytes);
  dict["inactive_split_bytes"] = to_dict(stats.inactive_split_bytes);
  dict["requested_bytes"] = to_dict(stats.requested_bytes);
  dict["budget_bytes"] = to_dict(stats.budget_bytes);
  dict["highest_bytes"] = stats.highest_bytes;
  dict["locked_ahead_bytes"] = stats.locked_ahead_bytes;
  dict["oversize_allocations"] = to_dict(Stat{});
  dict["oversize_segments"] = to_dict(Stat{});
  dict["max_split_size"] = -1;
  dict["num_alloc_retries"] = stats.num_alloc_retries;
  dict["num_ooms"] = stats.num_ooms;
  dict["num_sync_all_streams"] = stats.num_sync_all_streams;
  dict["num_device_alloc"] = stats.num_device_alloc;
  dict["num_device_free"] = stats.num_device_free;
  dict["num_failed_hints"] = stats.num_failed_hints;
  nb::dict served;
  for (std::size_t i = 0; i < kRungs; ++i) served[kRungNames[i]] = stats.served[i];
  dict["served"] = served;
  return dict;
}

nb::list class_stats(const DeviceStats& stats) {
  nb::list all;
  for (const ClassStats& of_class : stats.by_class) {
    nb::dict dict;
    dict["allocation"] = to_dict(of_class.allocation);
    dict["allocated_bytes"] = to_dict(of_class.allocated_bytes);
    dict["requested_bytes"] = to_dict(of_class.requested_bytes);
    all.append(dict);
  }
  return all;
}

// The form of torch._C._cuda_memorySnapshot, with tensor class and kind of memory added.
nb::list segments(Allocator& allocator, int device) {
  nb::list all;
  for (const SegmentSnapshot& segment : allocator.device(device).segments()) {
    nb::list blocks;
    std::size_t allocated = 0, active = 0, requested = 0;
    for (const BlockSnapshot& block : segment.blocks) {
      nb::dict dict;
      dict["address"] = block.address;
      dict["size"] = block.bytes;
      dict["requested_size"] = block.state == BlockState::cached ? 0 : block.requested_bytes;
      dict["state"] = kStateNames[static_cast<std::size_t>(block.state)];
      dict["frames"] = nb::list();
      if (block.state == BlockState::live) {
        allocated += block.bytes;
        requested += block.requested_bytes;
        dict["tensor_class"] = kClassNames[static_cast<std::size_t>(block.tensor_class)];
      }
      if (block.state != BlockState::cached) active += block.bytes;
      blocks.append(dict);
    }
    nb::dict dict;
    dict["device"] = device;
    dict["address"] = segment.address;
    dict["total_size"] = segment.bytes;
    dict["allocated_size"] = allocated;
    dict["active_size"] = active;
    dict["requested_size"] = requested;
    dict["stream"] = segment.stream;
    dict["segment_type"] = segment.tier == Tier::small ? "small" : "large";
    dict["segment_pool_id"] = nb::make_tuple(segment.pool.first, segment.pool.second);
    dict["is_expandable"] = segment.is_expandable;
    dict["frames"] = nb::list();
    dict["memory_kind"] = kKindNames[static_cast<std::size_t>(segment.kind)];
    dict["blocks"] = blocks;
    all.append(dict);
  }
  return all;
}

nb::list pool_stats(Allocator& allocator, int device) {
  nb::list all;
  for (const PoolStats& pool : allocator.device(device).pool_stats()) {
    nb::dict dict;
    dict["id"] = nb::make_tuple(pool.id.first, pool.id.second);
    dict["reserved_bytes"] = pool.reserved_bytes;
    dict["allocated_bytes"] = pool.allocated_bytes;
    dict["in_use"] = pool.in_use;
    all.append(dict);
  }
  return all;
}

nb::dict kind_stats(Allocator& allocator, int device) {
  nb::dict all;
  const auto stats = allocator.device(device).kind_stats();
  for (std::size_t kind = 0; kind < kKinds; ++kind) {
    nb::dict dict;
    dict["reserved_bytes"] = stats[kind].reserved_bytes;
    dict["spilled_bytes"] = stats[kind].spilled_bytes;
    all[kKindNames[kind]] = dict;
  }
  return all;
}

nb::list listed(const std::vector<LiveBlock>& blocks) {
  nb::list all;
  for (const LiveBlock& block : blocks)
    all.append(nb::make_tuple(block.address, block.requested_bytes, block.bytes,
                              static_cast<int>(block.tensor_class), block.device,
                              kKindNames[static_cast<std::size_t>(block.kind)]));
  return all;
}

// An interned name, so that Python does not look it up for every call.
PyObject* interned(const char* name) { return PyUnicode_InternFromString(name); }

nb::object checked(PyObject* result) {
  if (result == nullptr) throw nb::python_error();
  return nb::steal(result);
}

// Called once for every parameter in every backward pass, hence in C++.
void tag_gradient(Allocator& allocator, nb::handle parameter, nb::handle wrapped) {
  static PyObject* const grad = interned("grad");
  static PyObject* const is_sparse = interned("is_sparse");
  static PyObject* const data_ptr = interned("data_ptr");
  static PyObject* const untyped_storage = interned("untyped_storage");
  static PyObject* const tensor_flatten = interned("__tensor_flatten__");

  if (allocator.classes().phase() != TensorClass::activations)
    allocator.classes().set_phase(TensorClass::activations);  // also after a step that raised
  const nb::object gradient = checked(PyObject_GetAttr(parameter.ptr(), grad));
  if (gradient.is_none()) return;
  // A sparse gradient has no storage of its own to tag.
  if (checked(PyObject_GetAttr(gradient.ptr(), is_sparse)).is(Py_True)) return;
  const auto address_of = [](nb::handle object) {
    return nb::cast<std::uintptr_t>(checked(PyObject_CallMethodNoArgs(object.ptr(), data_ptr)));
  };
  // A wrapper around other tensors has no address: 0, an error, or a mere offset, as FSDP2's
  // sharded gradients. To ask it for its storage would be an error too, which takes 8 us.
  try {
    if (const std::uintptr_t address = address_of(gradient); address != 0) {
      if (allocator.retag(address, TensorClass::gradients)) return;
      // A view into a larger buffer (DDP's buckets): the buffer is the block.
      if (PyObject_HasAttr(gradient.type().ptr(), tensor_flatten) == 0) {
        allocator.retag(
            address_of(checked(PyObject_CallMethodNoArgs(gradient.ptr(), untyped_storage))),
            TensorClass::gradients);
        return;
      }
    }
  } catch (const nb::python_error& error) {
    if (!error.matches(PyExc_Exception)) throw;  // it would end a backward pass
  }
  wrapped(gradient);
}

}  // namespace
}  // namespace umem

NB_MODULE(_native, module) {
  using namespace umem;

  // The process's allocator outlives the interpreter on purpose (torch/entry_points.hpp).
  nb::set_leak_warnings(false);
  nb::register_exception_translator([](const std::exception_ptr& error, void*) {
    try {
      std::rethrow_exception(error);
    } catch (const OutOfMemory& out_of_memory) {
      PyErr_SetString(PyExc_MemoryError, out_of_memory.what());
    }
  });

#ifdef UMEM_HAS_CUDA
  module.attr("HAS_CUDA") = true;
  module.attr("RMM_VERSION") = UMEM_RMM_VERSION;
  module.attr("CUDA_VERSION") =
      std::to_string(CUDART_VERSION / 1000) + "." + std::to_string(CUDART_VERSION % 1000 / 10);
#else
  module.attr("HAS_CUDA") = false;
  module.attr("RMM_VERSION") = "";
  module.attr("CUDA_VERSION") = "";
#endif

  nb::class_<ClassOverride>(module, "ClassOverride")
      .def("__enter__", &ClassOverride::enter)
      .def("__exit__", [](ClassOverride& self, const nb::args&) { self.leave(); });

  nb::class_<ClassSetting>(module, "ClassSetting")
      .def(
          "__init__",
          [](ClassSetting* self, const std::string& kind, const std::string& placement,
             bool accessed_by_device, bool read_mostly, std::size_t min_bytes) {
            new (self) ClassSetting(
                class_setting(kind, placement, accessed_by_device, read_mostly, min_bytes));
          },
          "kind"_a = "managed", "placement"_a = "device", "accessed_by_device"_a = false,
          "read_mostly"_a = false, "min_bytes"_a = 0);

  nb::class_<Config>(module, "Config")
      .def(
          "__init__",
          [](Config* self, const std::vector<ClassSetting>& classes,
             std::size_t managed_limit_bytes, std::size_t device_budget_bytes,
             std::size_t system_headroom_bytes, std::size_t pinned_limit_bytes,
             const std::vector<std::size_t>& managed_bytes_of_device, bool advises,
             bool prefetches, bool poisons) {
            if (classes.size() != kClasses)
              throw nb::value_error("classes: one ClassSetting for each of the six classes");
            new (self) Config{.classes = {},
                              .managed_limit_bytes = managed_limit_bytes,
                              .managed_bytes_of_device = managed_bytes_of_device,
                              .pinned_limit_bytes = pinned_limit_bytes,
                              .device_budget_bytes = device_budget_bytes,
                              .system_headroom_bytes = system_headroom_bytes,
                              .advises = advises,
                              .prefetches = prefetches,
                              .poisons = poisons};
            std::copy(classes.begin(), classes.end(), self->classes.begin());
          },
          "classes"_a, "managed_limit_bytes"_a = 0, "device_budget_bytes"_a = 0,
          "system_headroom_bytes"_a = 0, "pinned_limit_bytes"_a = 0,
          "managed_bytes_of_device"_a = std::vector<std::size_t>(), "advises"_a = true,
          "prefetches"_a = true, "poisons"_a = false);

  // malloc, free and empty_cache may wait for the GPU and for hints: they release the interpreter
  // lock.
  nb::class_<Allocator>(module, "Allocator")
      .def_static(
          "on_host",
          [](const Config& config, std::size_t device_total_bytes, int devices, bool expandable) {
            auto virtual_memory =
                expandable ? std::make_unique<HostVirtualMemory>(device_total_bytes) : nullptr;
            return new Allocator(
                config, std::make_unique<HostSource>(device_total_bytes),
                std::make_unique<HostDriver>(device_total_bytes, std::move(virtual_memory)),
                devices);
          },
          "config"_a, "device_total_bytes"_a = 0, "devices"_a = 1, "expandable"_a = false)
      .def(
          "malloc",
          [](Allocator& self, std::size_t bytes, int device, StreamId stream) {
            return reinterpret_cast<std::uintptr_t>(self.allocate(bytes, device, stream));
          },
          "bytes"_a, "device"_a = 0, "stream"_a = 0, nb::call_guard<nb::gil_scoped_release>())
      .def(
          "free",
          [](Allocator& self, std::uintptr_t address, int device) {
            if (address != 0 && !self.free(address, device, 0))
              throw nb::value_error("free: no live block starts at this address on this device");
          },
          "address"_a, "device"_a = 0, nb::call_guard<nb::gil_scoped_release>())
      .def(
          "record_stream",
          [](Allocator& self, std::uintptr_t address, StreamId stream, int device) {
            if (!self.device(device).record_stream(address, stream))
              throw nb::value_error(
                  "record_stream: no live block starts at this address on this device");
          },
          "address"_a, "stream"_a, "device"_a = 0)
      .def("empty_cache", &Allocator::empty_cache, nb::call_guard<nb::gil_scoped_release>())
      .def(
          "pause",
          [](Allocator& self, int device, std::size_t host_available_bytes) {
            const PauseReport report = self.pause(device, host_available_bytes);
            return std::make_tuple(report.returned_bytes, report.kept_bytes, report.evicted_bytes,
                                   report.host_bytes);
          },
          "device"_a, "host_available_bytes"_a, nb::call_guard<nb::gil_scoped_release>())
      .def(
          "resume", [](Allocator& self, int device) { self.device(device).resume(); }, "device"_a,
          nb::call_guard<nb::gil_scoped_release>())
      .def(
          "is_paused", [](Allocator& self, int device) { return self.device(device).is_paused(); },
          "device"_a)
      .def(
          "set_memory_fraction",
          [](Allocator& self, double fraction, int device) {
            if (!(fraction >= 0 && fraction <= 1))
              throw nb::value_error("set_memory_fraction: a fraction is between 0 and 1");
            self.device(device).set_memory_fraction(fraction);
          },
          "fraction"_a, "device"_a)
      .def(
          "memory_fraction",
          [](Allocator& self, int device) { return self.device(device).memory_fraction(); },
          "device"_a)
      .def(
          "base_allocation",
          [](const Allocator& self, std::uintptr_t address) {
            const auto base = self.base_allocation(address);
            if (!base) throw nb::key_error("base_allocation: no segment holds this address");
            return std::make_pair(base->address, base->bytes);
          },
          "address"_a)
      .def(
          "begin_pool",
          [](Allocator& self, int device, PoolId pool) {
            self.device(device).begin_pool(pool, [](StreamId) { return true; });
          },
          "device"_a, "pool"_a, nb::call_guard<nb::gil_scoped_release>())
      .def(
          "end_pool",
          [](Allocator& self, int device, PoolId pool) { self.device(device).end_pool(pool); },
          "device"_a, "pool"_a, nb::call_guard<nb::gil_scoped_release>())
      .def(
          "release_pool",
          [](Allocator& self, int device, PoolId pool) { self.device(device).release_pool(pool); },
          "device"_a, "pool"_a, nb::call_guard<nb::gil_scoped_release>())
      .def(
          "retag",
          [](Allocator& self, std::uintptr_t address, int tensor_class) {
            return self.retag(address, class_of(tensor_class));
          },
          "address"_a, "tensor_class"_a)
      .def(
          "set_phase",
          [](Allocator& self, int tensor_class) {
            self.classes().set_phase(class_of(tensor_class));
          },
          "tensor_class"_a)
      .def("phase", [](Allocator& self) { return static_cast<int>(self.classes().phase()); })
      .def(
          "class_override",
          [](Allocator& self, int tensor_class) {
            return ClassOverride(self.classes(), class_of(tensor_class));
          },
          "tensor_class"_a, nb::keep_alive<0, 1>())
      .def(
          "stats",
          [](Allocator& self, int device) { return to_dict(self.device(device).stats()); },
          "device"_a)
      .def(
          "class_stats",
          [](Allocator& self, int device) { return class_stats(self.device(device).stats()); },
          "device"_a)
      .def("pool_stats", &pool_stats, "device"_a)
      .def("kind_stats", &kind_stats, "device"_a)
      .def(
          "reset_peak_stats",
          [](Allocator& self, int device) { self.device(device).reset_peak_stats(); }, "device"_a)
      .def(
          "reset_accumulated_stats",
          [](Allocator& self, int device) { self.device(device).reset_accumulated_stats(); },
          "device"_a)
      .def("segments", &segments, "device"_a)
      .def("live_blocks", [](const Allocator& self) { return listed(self.live_blocks()); })
      .def(
          "unspill",
          [](Allocator& self, int device) {
            std::vector<LiveBlock> moved;
            {
              const nb::gil_scoped_release no_gil;  // one driver call per block
              moved = self.device(device).unspill();
            }
            return listed(moved);
          },
          "device"_a)
      .def(
          "set_device_budget",
          [](Allocator& self, int device, std::size_t bytes) {
            self.device(device).set_device_budget(bytes);
          },
          "device"_a, "bytes"_a, nb::call_guard<nb::gil_scoped_release>())
      .def(
          "set_device_room",
          [](Allocator& self, int device, int tensor_class, std::size_t bytes) {
            return self.device(device).set_device_room(class_of(tensor_class), bytes);
          },
          "device"_a, "tensor_class"_a, "bytes"_a)
      .def(
          "lock_ahead",
          [](Allocator& self, int device, std::size_t bytes, StreamId stream) {
            self.device(device).lock_ahead(bytes, stream);
          },
          "device"_a, "bytes"_a, "stream"_a, nb::call_guard<nb::gil_scoped_release>())
      .def(
          "end_locking_ahead",
          [](Allocator& self, int device) { self.device(device).end_locking_ahead(); }, "device"_a,
          nb::call_guard<nb::gil_scoped_release>())
      .def(
          "count_page_locked",
          [](Allocator& self, int device, std::ptrdiff_t bytes) {
            self.device(device).count_page_locked(bytes);
          },
          "device"_a, "bytes"_a, nb::call_guard<nb::gil_scoped_release>())
      .def(
          "add_own_stream",
          [](Allocator& self, int device, std::uintptr_t stream) {
            self.device(device).add_own_stream(stream);
          },
          "device"_a, "stream"_a)
      .def(
          "take_peak_bytes",
          [](Allocator& self, int device) { return self.device(device).take_peak_bytes(); },
          "device"_a)
      .def(
          "set_release_listener",
          [](Allocator& self, const HintEngine* engine) {
            std::shared_ptr<ReleaseListener> listener;
            if (engine != nullptr) listener = engine->release_listener();
            const nb::gil_scoped_release released;
            self.set_release_listener(listener);
          },
          "engine"_a.none())
      .def(
          "set_block_listener",
          [](Allocator& self, nb::object listener) {
            self.set_block_listener(listener.is_none() ? nullptr : new PythonListener(listener));
          },
          "listener"_a.none())
      .def("managed_bytes", &Allocator::managed_bytes)
      .def("uncached_ns", &Allocator::uncached_ns)
      .def("pinned_room_bytes", &Allocator::pinned_room_bytes)
      .def("set_pinned_room", &Allocator::set_pinned_room, "bytes"_a)
      .def("device_count", &Allocator::device_count);

  bind_hints(module);
  bind_copies(module);
  bind_host_update(module);

  module.def(
      "gradient_hook",
      [](nb::object allocator, nb::object wrapped) {
        auto& native = nb::cast<Allocator&>(allocator);
        // The closure keeps the Python object, and with it the allocator, alive.
        return nb::cpp_function(
            [allocator, &native, wrapped](nb::handle parameter) {
              tag_gradient(native, parameter, wrapped);
            },
            "parameter"_a);
      },
      "allocator"_a, "wrapped"_a);

#ifdef UMEM_HAS_CUDA
  module.def("install", &install, "config"_a, nb::rv_policy::reference);
  module.def("installed", &installed, nb::rv_policy::reference);
  module.def("torch_entry_points", &entry_points);
#else
  module.def(
      "install",
      [](const Config&) -> Allocator* {
        throw std::runtime_error("this build of umem has no CUDA side");
      },
      "config"_a, nb::rv_policy::reference);
  module.def("installed", []() -> Allocator* { return nullptr; }, nb::rv_policy::reference);
  module.def("torch_entry_points", [] { return std::map<std::string, std::uintptr_t>{}; });
#endif
}
