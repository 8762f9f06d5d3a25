#include "core/budget.hpp"

namespace umem {
namespace {

// The driver keeps page tables on the card for page-locked memory: 2 MiB for each GiB, measured.
constexpr std::size_t kMappedBytesPerTableByte = 512;

}  // namespace

std::size_t Budget::excess_bytes(std::size_t more_bytes) const {
  const std::size_t bytes = static_cast<std::size_t>(held_.current) + more_bytes;
  return limit_bytes_ == 0 || bytes <= limit_bytes_ ? 0 : bytes - limit_bytes_;
}

std::optional<Limit> Budget::take(const Heap& heap, std::size_t bytes, std::size_t total_bytes,
                                  std::size_t reserved_bytes) {
  if (fraction_ < 1.0 && reserved_bytes + bytes > static_cast<std::size_t>(
                                                      fraction_ * static_cast<double>(total_bytes)))
    return Limit::memory_fraction;
  if (excludes(heap, bytes)) return Limit::device_budget;  // by what alignment costs
  if (SharedLimit* limit = shared_.of(heap.kind); limit != nullptr && !limit->take(bytes))
    return heap.kind == MemoryKind::managed ? Limit::managed : Limit::pinned;
  return std::nullopt;
}

std::size_t Budget::page_table_bytes(std::size_t locked_bytes) const {
  const std::size_t mapped_bytes = locked_bytes + static_cast<std::size_t>(others_locked_bytes_);
  return mapped_bytes / kMappedBytesPerTableByte / kPageBytes * kPageBytes;
}

void Budget::set_page_table_bytes(std::size_t bytes) {
  if (bytes > page_table_bytes_)
    held_.increase(bytes - page_table_bytes_);
  else
    held_.decrease(page_table_bytes_ - bytes);
  page_table_bytes_ = bytes;
}

}  // namespace umem
