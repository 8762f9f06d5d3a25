// Threads that share the elements of updates.
#pragma once

#include <memory>
#include <span>
#include <string>
#include <vector>

#include "host_update/update.hpp"

namespace umem {

class HostWorkers {
 public:
  // `cpus` are those the threads run on; empty for the caller's own. `instructions` is a name of
  // host_instructions(), empty for the fastest. Throws std::system_error where there are no threads,
  // and std::invalid_argument where a number or a name makes no sense.
  HostWorkers(int threads, const std::vector<int>& cpus, const std::string& instructions = "");
  HostWorkers(const HostWorkers&) = delete;
  HostWorkers& operator=(const HostWorkers&) = delete;
  ~HostWorkers();

  // Returns when all spans are updated; calls from several threads take turns. The spans overlap
  // nowhere. Throws std::runtime_error in a forked child, which has none of the threads.
  void update(const HostForm& form, const HostConstants& constants, HostType type,
              std::span<const HostSpan> spans);

  const char* instructions() const noexcept;
  int threads() const noexcept;

 private:
  struct Shared;
  std::unique_ptr<Shared> shared_;
};

}  // namespace umem
