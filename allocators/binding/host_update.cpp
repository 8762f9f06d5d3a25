#include "binding/host_update.hpp"

#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <optional>
#include <tuple>

#include "host_update/workers.hpp"

namespace nb = nanobind;
using namespace nb::literals;

namespace umem {
namespace {

// Addresses of weights, gradients and both averages, and the number of elements.
using Span = std::tuple<std::uintptr_t, std::uintptr_t, std::uintptr_t, std::uintptr_t, std::size_t>;

template <class Enum>
Enum enum_of(int number, Enum last, const char* what) {
  if (number < 0 || number > static_cast<int>(last))
    throw nb::value_error((std::string(what) + ": " + std::to_string(number)).c_str());
  return static_cast<Enum>(number);
}

}  // namespace

void bind_host_update(nb::module_& module) {
  module.def("host_instructions", [] {
    std::vector<std::string> names;
    for (const Instructions& it : host_instructions()) names.emplace_back(it.name);
    return names;
  });

  nb::class_<HostForm>(module, "HostForm")
      .def(
          "__init__",
          [](HostForm* self, int decay, int first, int second, int ahead, int weight) {
            new (self) HostForm{enum_of(decay, Decay::gradient, "decay"),
                                enum_of(first, First::copied, "first"),
                                enum_of(second, Second::square, "second"),
                                enum_of(ahead, Ahead::separate, "ahead"),
                                enum_of(weight, Weight::addcmul, "weight")};
          },
          "decay"_a, "first"_a, "second"_a, "ahead"_a, "weight"_a);

  nb::class_<HostConstants>(module, "HostConstants")
      .def(
          "__init__",
          [](HostConstants* self, float decay, float b1, float o1, float b2, float o2, float rate,
             float root, float eps, bool negates, std::vector<float> factors,
             std::optional<float> scale) {
            new (self) HostConstants{{decay, b1, o1, b2, o2, rate, root, eps},
                                     negates,
                                     std::move(factors),
                                     scale.value_or(1.0F),
                                     scale.has_value()};
          },
          nb::kw_only(), "decay"_a = 0.0F, "b1"_a = 0.0F, "o1"_a = 0.0F, "b2"_a = 0.0F,
          "o2"_a = 0.0F, "rate"_a = 0.0F, "root"_a = 1.0F, "eps"_a = 0.0F, "negates"_a = false,
          "factors"_a = std::vector<float>(), "scale"_a = nb::none());

  nb::class_<HostWorkers>(module, "HostWorkers")
      .def(nb::init<int, const std::vector<int>&, const std::string&>(), "threads"_a,
           "cpus"_a = std::vector<int>(), "instructions"_a = "")
      .def(
          "update",
          [](HostWorkers& self, const HostForm& form, const HostConstants& constants,
             bool is_bfloat16, const std::vector<Span>& spans) {
            std::vector<HostSpan> made;
            made.reserve(spans.size());
            for (const auto& [weight, gradient, first, second, count] : spans)
              made.push_back({weight, gradient, first, second, count});
            const nb::gil_scoped_release no_gil;
            self.update(form, constants, is_bfloat16 ? HostType::bfloat16 : HostType::float32,
                        made);
          },
          "form"_a, "constants"_a, "is_bfloat16"_a, "spans"_a)
      .def_prop_ro("instructions", &HostWorkers::instructions)
      .def_prop_ro("threads", &HostWorkers::threads);
}

}  // namespace umem
