#include "core/host_mapping.hpp"

#include <sys/mman.h>
#include <unistd.h>

namespace umem {

std::size_t mapped_bytes(std::size_t bytes) {
  static const auto page_bytes = static_cast<std::size_t>(sysconf(_SC_PAGESIZE));
  return round_up(bytes, page_bytes);
}

Range map_host(std::size_t bytes) noexcept {
  const std::size_t whole_bytes = mapped_bytes(bytes), wide_bytes = whole_bytes + kPageBytes;
  void* wide =
      mmap(nullptr, wide_bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (wide == MAP_FAILED) return {};
  const auto begin = reinterpret_cast<std::uintptr_t>(wide);
  const std::uintptr_t address = round_up(begin, kPageBytes);
  const auto cut = [](std::uintptr_t from, std::uintptr_t to) {
    if (from != to) munmap(reinterpret_cast<void*>(from), to - from);
  };
  cut(begin, address);
  cut(address + whole_bytes, begin + wide_bytes);
  return {address, whole_bytes};
}

void unmap_host(Range range) noexcept {
  munmap(reinterpret_cast<void*>(range.address), mapped_bytes(range.bytes));
}

}  // namespace umem
