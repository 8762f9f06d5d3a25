// The resident addresses of a device, as disjoint ranges.
#pragma once

#include <iterator>
#include <map>

#include "hints/request.hpp"

namespace umem {

class ResidentSet {
 public:
  void insert(Range range) {
    if (range.bytes == 0) return;
    std::uintptr_t start = range.address, end = end_of(range);
    // Neighbours that touch are joined, so that a steady step makes no new entries.
    auto next = ends_.upper_bound(start);
    if (next != ends_.begin() && std::prev(next)->second >= start) --next;
    while (next != ends_.end() && next->first <= end) {
      start = std::min(start, next->first);
      end = std::max(end, next->second);
      bytes_ -= next->second - next->first;
      next = ends_.erase(next);
    }
    ends_[start] = end;
    bytes_ += end - start;
  }

  void erase(Range range) {
    if (range.bytes == 0) return;
    const std::uintptr_t start = range.address, end = end_of(range);
    auto next = ends_.upper_bound(start);
    if (next != ends_.begin() && std::prev(next)->second > start) --next;
    while (next != ends_.end() && next->first < end) {
      const auto [first, last] = *next;
      next = ends_.erase(next);
      bytes_ -= last - first;
      if (first < start) ends_[first] = start, bytes_ += start - first;
      if (last > end) ends_[end] = last, bytes_ += last - end;
    }
  }

  std::size_t covered_bytes(Range range) const {
    std::size_t covered = 0;
    auto next = ends_.upper_bound(range.address);
    if (next != ends_.begin()) --next;
    for (; next != ends_.end() && next->first < end_of(range); ++next)
      covered += common(range, {next->first, next->second - next->first}).bytes;
    return covered;
  }

  std::size_t bytes() const { return bytes_; }
  std::size_t pieces() const { return ends_.size(); }

 private:
  std::map<std::uintptr_t, std::uintptr_t> ends_;  // by start
  std::size_t bytes_ = 0;
};

}  // namespace umem
