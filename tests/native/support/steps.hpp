// A machine under a device budget, and steps of trainings that repeat on it.
#pragma once

#include "fake_driver.hpp"

namespace umem {

// Streams of a program, and the pool of a graph that is captured on one of them.
inline constexpr StreamId kMain = 0, kCapture = 5, kSide = 7;
inline constexpr PoolId kPool{0, 1};

inline constexpr std::size_t kHost = 64 * GiB;  // available host memory

// Handles of expandable segments: of large blocks without a budget; of all others, under the budgets
// of most tests too.
inline constexpr std::size_t kHandle = 8 * MiB;
inline constexpr std::size_t kSmallHandle = 2 * MiB;

inline FakeVirtualMemory& mapped(const Machine& machine) {
  return *machine.driver.virtual_memory();
}

inline Config budget_config(std::size_t budget_bytes, MemoryKind kind = MemoryKind::device) {
  Config config = config_of(kind);
  config.device_budget_bytes = budget_bytes;
  return config;
}

// Plain device memory, in expandable segments or not.
inline Machine machine_of(std::size_t budget_bytes, bool virtual_memory = true) {
  return Machine({.config = budget_config(budget_bytes), .virtual_memory = virtual_memory});
}

inline KindStats pinned_stats(const Machine& machine) {
  return stats_of(machine, MemoryKind::pinned);
}

inline std::size_t budget_bytes(const Machine& machine) {
  return static_cast<std::size_t>(machine.device.stats().budget_bytes.current);
}

struct Request {
  std::size_t bytes;
  StreamId stream = kMain;
  TensorClass tensor_class = TensorClass::activations;
};

// Requests that live together, one phase after the other.
using Step = std::vector<std::vector<Request>>;

inline void run_step(Machine& machine, const Step& step) {
  for (const std::vector<Request>& phase : step) {
    std::vector<std::uintptr_t> live;
    for (const Request& request : phase)
      live.push_back(machine.allocate(request.bytes, request.stream, request.tensor_class));
    for (const std::uintptr_t address : live) machine.free(address);
  }
}

// Llama-2-7B in fp32 with autocast and checkpoints, 8,192 tokens: weights stay, gradients live to
// the end of the step. The logits are larger than what the gradients leave in one piece.
class Llama {
 public:
  explicit Llama(Machine& machine) : machine_(machine) {
    for (std::size_t layer = 0; layer < kLayers; ++layer)
      for (const std::size_t bytes : weights_)
        machine_.allocate(bytes, kMain, TensorClass::weights);
    for (int i = 0; i < 2; ++i) machine_.allocate(kTable, kMain, TensorClass::weights);
  }

  void step() {
    std::vector<std::uintptr_t> checkpoints, gradients;
    for (std::size_t layer = 0; layer < kLayers; ++layer) {
      const auto live = hold(of_layer_);
      checkpoints.push_back(machine_.allocate(kHidden));
      drop(live);
    }
    const auto logits = hold({kTokens * kWords * 2, kTokens * kWords * 4, kTokens * kWords * 4});
    gradients.push_back(machine_.allocate(kTable, kMain, TensorClass::gradients));
    drop(logits);
    for (std::size_t layer = kLayers; layer-- > 0;) {
      const auto live = hold(of_layer_), more = hold({kInner, kInner, kHidden});
      for (const std::size_t bytes : weights_) {
        const std::uintptr_t half = machine_.allocate(bytes / 2);
        gradients.push_back(machine_.allocate(bytes, kMain, TensorClass::gradients));
        machine_.free(half);
      }
      drop(more);
      drop(live);
      machine_.free(checkpoints[layer]);
    }
    gradients.push_back(machine_.allocate(kTable, kMain, TensorClass::gradients));
    drop(gradients);
  }

 private:
  static constexpr std::size_t kLayers = 32, kTokens = 8192, kWords = 32000;
  static constexpr std::size_t kWidth = 4096, kWide = 11008;
  static constexpr std::size_t kTable = kWords * kWidth * 4;
  static constexpr std::size_t kHidden = kTokens * kWidth * 2, kInner = kTokens * kWide * 2;
  static constexpr std::size_t kSquare = kWidth * kWidth * 2, kOblong = kWidth * kWide * 2;

  std::vector<std::uintptr_t> hold(const std::vector<std::size_t>& sizes) {
    std::vector<std::uintptr_t> held;
    for (const std::size_t bytes : sizes) held.push_back(machine_.allocate(bytes));
    return held;
  }
  void drop(const std::vector<std::uintptr_t>& held) {
    for (const std::uintptr_t address : held) machine_.free(address);
  }

  Machine& machine_;
  const std::vector<std::size_t> weights_ = {2 * kSquare, 2 * kSquare, 2 * kSquare,
                                             2 * kSquare, 2 * kOblong, 2 * kOblong,
                                             2 * kOblong, kWidth * 4,  kWidth * 4};
  const std::vector<std::size_t> of_layer_ = {
      kSquare, kHidden, kSquare, kHidden,     kSquare, kHidden, kSquare, kHidden, 2 * kHidden,
      kTokens, kHidden, kOblong, kInner, kOblong, kInner,  kOblong, kInner,  kInner};
};

}  // namespace umem
