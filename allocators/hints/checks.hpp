// Checks on requests before the engine accepts them.
#pragma once

#include <stdexcept>

#include "hints/request.hpp"

namespace umem {

inline void require(bool condition, const char* message) {
  if (!condition) throw std::invalid_argument(message);
}

inline void check_device(int device) {
  require(device >= 0, "a device's number cannot be negative");
}

inline void check_range(Range range) {
  require(range.address != 0, "a hint's address cannot be 0");
  require(range.bytes != 0, "a hint's range cannot be empty");
  require(range.bytes <= UINTPTR_MAX - range.address, "a hint's range ends beyond all addresses");
}

inline void check_request(const HintRequest& request) {
  require(static_cast<std::size_t>(request.op) < kHintOps, "no such operation");
  require(static_cast<std::size_t>(request.tensor_class) < kClasses, "no such tensor class");
  check_device(request.device);
  check_range(request.range);
}

}  // namespace umem
