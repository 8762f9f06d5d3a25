// Conversion of Python's names and numbers to the core's, with errors for unknown ones.
#pragma once

#include <nanobind/nanobind.h>

#include <algorithm>
#include <array>
#include <string>

#include "core/types.hpp"

namespace umem {

inline constexpr std::array<const char*, 3> kPlacementNames = {"device", "host", "any"};

template <class Names>
std::size_t number_of(const Names& names, const std::string& name, const char* what) {
  const auto found = std::find(names.begin(), names.end(), name);
  if (found == names.end())
    throw nanobind::value_error((std::string(what) + ": " + name).c_str());
  return static_cast<std::size_t>(found - names.begin());
}

inline Placement placement_of(const std::string& name) {
  return static_cast<Placement>(number_of(kPlacementNames, name, "placement"));
}

inline TensorClass class_of(int number) {
  if (number < 0 || static_cast<std::size_t>(number) >= kClasses)
    throw nanobind::value_error(("tensor class: " + std::to_string(number)).c_str());
  return static_cast<TensorClass>(number);
}

}  // namespace umem
