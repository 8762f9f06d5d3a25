#include "binding/hints.hpp"

#include <nanobind/stl/map.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <stdexcept>

#include "binding/names.hpp"
#include "hints/hint_engine.hpp"
#include "hints/host_hint_driver.hpp"
#ifdef UMEM_HAS_CUDA
#include "cuda/cuda_hint_driver.hpp"
#endif

namespace nb = nanobind;
using namespace nb::literals;

namespace umem {
namespace {

// A wait of hundreds of years stands for an endless one; more would overflow the clock.
constexpr double kLongestWaitSeconds = 1e9;

std::int64_t nanoseconds(double seconds, const std::string& name = "timeout_s") {
  if (!(seconds >= 0))
    throw nb::value_error((name + ": a number of seconds, not below 0").c_str());
  return static_cast<std::int64_t>(std::min(seconds, kLongestWaitSeconds) * 1e9);
}

double seconds(std::int64_t ns) { return static_cast<double>(ns) / 1e9; }

// `advise` is a separate method.
HintOp op_of(int number) {
  if (number < 0 || number >= static_cast<int>(HintOp::advise))
    throw nb::value_error(("operation: " + std::to_string(number)).c_str());
  return static_cast<HintOp>(number);
}

nb::dict to_dict(const HintCounts& counts) {
  nb::dict dict, requests;
  for (std::size_t i = 0; i < kOutcomes; ++i) requests[kOutcomeNames[i]] = counts.requests[i];
  dict["requests"] = requests;
  dict["asked_bytes"] = counts.asked_bytes;
  dict["moved_bytes"] = counts.moved_bytes;
  dict["wasted_bytes"] = counts.wasted_bytes;
  dict["calls"] = counts.calls;
  dict["driver_s"] = seconds(counts.driver_ns);
  dict["late"] = counts.late;
  dict["late_s"] = seconds(counts.late_ns);
  dict["early"] = counts.early;
  dict["missed"] = counts.missed;
  return dict;
}

nb::dict to_dict(const HintStatistics& stats) {
  nb::dict counts;
  for (std::size_t op = 0; op < kHintOps; ++op)
    for (std::size_t number = 0; number < kClasses; ++number)
      if (const HintCounts& of = stats.counts[op][number]; of.asked_bytes != 0)
        counts[nb::make_tuple(op, number)] = to_dict(of);
  nb::list failures;
  for (const HintFailure& failure : stats.failures)
    failures.append(
        nb::make_tuple(failure.call, failure.error, failure.text, failure.count));
  nb::dict dict;
  dict["counts"] = counts;
  dict["failures"] = failures;
  dict["refused"] = stats.refused;
  dict["open_requests"] = stats.open_requests;
  return dict;
}

HintBatch* make_batch(const std::vector<int>& ops, const std::vector<std::uintptr_t>& addresses,
                      const std::vector<std::size_t>& sizes, const std::vector<int>& classes,
                      int device) {
  if (addresses.size() != ops.size() || sizes.size() != ops.size() || classes.size() != ops.size())
    throw nb::value_error("a batch's ops, addresses, sizes and classes: of the same length");
  std::vector<HintRequest> requests;
  for (std::size_t i = 0; i < ops.size(); ++i)
    requests.push_back({.op = op_of(ops[i]),
                        .range = {addresses[i], sizes[i]},
                        .tensor_class = class_of(classes[i])});
  return new HintBatch(device, std::move(requests));
}

Without without_of(const std::vector<std::string>& names) {
  Without without;
  for (const std::string& name : names) {
    if (name == "second_context")
      without.second_context = true;
    else if (name == "prefetch")
      without.prefetch = true;
    else if (name == "advice")
      without.advice = true;
    else
      throw nb::value_error(("without: no such call: " + name).c_str());
  }
  return without;
}

std::unique_ptr<HintDriver> cuda_driver([[maybe_unused]] const HintSettings& settings) {
#ifdef UMEM_HAS_CUDA
  return std::make_unique<CudaHintDriver>(settings.prefetch_workers + 1);
#else
  throw std::runtime_error("this build of umem has no CUDA side");
#endif
}

}  // namespace

void bind_hints(nb::module_& module) {
  nb::class_<HintSettings>(module, "HintSettings")
      .def(
          "__init__",
          [](HintSettings* self, std::size_t chunk_bytes, std::size_t in_flight_bytes,
             std::size_t capacity, int prefetch_workers, double poll_s,
             const std::vector<std::string>& without) {
            new (self) HintSettings{.chunk_bytes = chunk_bytes,
                                    .in_flight_bytes = in_flight_bytes,
                                    .capacity = capacity,
                                    .prefetch_workers = prefetch_workers,
                                    .poll_ns = nanoseconds(poll_s, "poll_s"),
                                    .without = without_of(without)};
          },
          "chunk_bytes"_a = HintSettings{}.chunk_bytes,
          "in_flight_bytes"_a = HintSettings{}.in_flight_bytes,
          "capacity"_a = HintSettings{}.capacity,
          "prefetch_workers"_a = HintSettings{}.prefetch_workers,
          "poll_s"_a = seconds(HintSettings{}.poll_ns),
          "without"_a = std::vector<std::string>());

  nb::class_<HintBatch>(module, "HintBatch")
      .def("set_address", &HintBatch::set_address, "index"_a, "address"_a)
      .def("tickets", [](const HintBatch& self) {
        const TicketSpan span = self.tickets();
        return std::make_tuple(span.first, span.last + 1);
      });

  // submit and mark_needed keep the interpreter lock: they wait for no thread that needs
  // it, and releasing it would take longer than the calls.
  nb::class_<HintEngine>(module, "HintEngine")
      .def_static(
          "on_host",
          [](const HintSettings& settings, int devices, double bytes_per_s,
             const std::map<std::string, std::int64_t>& fail) {
            return new HintEngine(settings,
                                  std::make_unique<HostHintDriver>(devices, bytes_per_s, fail));
          },
          "settings"_a, "devices"_a = 1, "bytes_per_s"_a = 0.0, "fail"_a = nb::dict())
      .def_static(
          "on_cuda",
          [](const HintSettings& settings) {
            return new HintEngine(settings, cuda_driver(settings));
          },
          "settings"_a)
      .def("start", &HintEngine::start, "device"_a = 0, nb::call_guard<nb::gil_scoped_release>())
      .def(
          "submit",
          [](HintEngine& self, int op, std::uintptr_t address, std::size_t size_bytes, int device,
             int tensor_class) {
            return self.submit({.op = op_of(op),
                                .range = {address, size_bytes},
                                .device = device,
                                .tensor_class = class_of(tensor_class)});
          },
          "op"_a, "address"_a, "size_bytes"_a, "device"_a = 0,
          "tensor_class"_a = static_cast<int>(TensorClass::other))
      .def(
          "advise",
          [](HintEngine& self, std::uintptr_t address, std::size_t size_bytes,
             const std::string& placement, bool accessed_by_device, bool read_mostly, int device,
             int tensor_class) {
            return self.submit({.op = HintOp::advise,
                                .range = {address, size_bytes},
                                .device = device,
                                .tensor_class = class_of(tensor_class),
                                .advice = {.placement = placement_of(placement),
                                           .accessed_by_device = accessed_by_device,
                                           .read_mostly = read_mostly}});
          },
          "address"_a, "size_bytes"_a, "placement"_a, "accessed_by_device"_a = false,
          "read_mostly"_a = false, "device"_a = 0,
          "tensor_class"_a = static_cast<int>(TensorClass::other))
      .def_static("batch", &make_batch, "ops"_a, "addresses"_a, "sizes"_a, "classes"_a, "device"_a)
      .def(
          "fire",
          [](HintEngine& self, HintBatch& batch, StreamId stream,
             const std::vector<Ticket>& after) -> Ticket {
            const TicketSpan span = self.submit_batch(batch, stream, after);
            return span.last < span.first ? 0 : span.last;
          },
          "batch"_a, "stream"_a, "after"_a = nb::list(), nb::call_guard<nb::gil_scoped_release>())
      .def("mark_needed", &HintEngine::mark_needed, "tickets"_a)
      .def(
          "forget",
          [](HintEngine& self, std::uintptr_t address, std::size_t size_bytes, double timeout_s) {
            const std::int64_t timeout_ns = nanoseconds(timeout_s);
            const nb::gil_scoped_release released;
            return self.forget({address, size_bytes}, timeout_ns);
          },
          "address"_a, "size_bytes"_a, "timeout_s"_a)
      .def(
          "wait",
          [](HintEngine& self, Ticket ticket, double timeout_s) -> std::optional<int> {
            const std::int64_t timeout_ns = nanoseconds(timeout_s);
            std::optional<Outcome> outcome = self.ended(ticket);
            if (!outcome) {
              const nb::gil_scoped_release released;
              outcome = self.wait(ticket, timeout_ns);
            }
            return outcome ? std::optional(static_cast<int>(*outcome)) : std::nullopt;
          },
          "ticket"_a, "timeout_s"_a)
      .def("statistics", [](HintEngine& self) { return to_dict(self.statistics()); })
      .def(
          "shutdown",
          [](HintEngine& self, double timeout_s) {
            const std::int64_t timeout_ns = nanoseconds(timeout_s);
            const nb::gil_scoped_release released;
            return self.shutdown(timeout_ns);
          },
          "timeout_s"_a);
}

}  // namespace umem
