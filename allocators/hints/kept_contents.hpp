// Contents that copies to the host did not take off the device.
#pragma once

#include <set>
#include <utility>
#include <vector>

#include "hints/range_map.hpp"

namespace umem {

// Parts of copy_outs that never ended: the device has the contents, and the host block has none.
class KeptContents {
 public:
  // In place of those that lie in `range`.
  void add(Range range, std::uintptr_t host_address) {
    for (const Part& part : overlapping(range))
      if (lies_in(part.range, range)) erase(part);
    insert({range, host_address});
  }

  // The contents of `range` have left the device.
  void drop(Range range) {
    for (const Part& part : overlapping(range)) {
      erase(part);
      const auto keep = [&](std::uintptr_t start, std::uintptr_t end) {
        if (start < end)
          insert({{start, end - start}, part.host_address + (start - part.range.address)});
      };
      keep(part.range.address, range.address);
      keep(end_of(range), end_of(part.range));
    }
  }

  // Host memory in `range` was freed.
  void drop_host(Range range) {
    std::vector<Part> gone;
    by_host_.visit_overlapping(range, [&](Range host, const Addresses& addresses) {
      for (const std::uintptr_t address : addresses)
        gone.push_back({{address, host.bytes}, host.address});
    });
    for (const Part& part : gone) erase(part);
  }

  bool overlaps(Range range) const { return !overlapping(range).empty(); }
  bool holds(Range range, std::uintptr_t host_address) const {
    const Addresses* const hosts = by_range_.find(range);
    return hosts != nullptr && hosts->contains(host_address);
  }

 private:
  struct Part {
    Range range{};
    std::uintptr_t host_address = 0;
  };
  using Addresses = std::set<std::uintptr_t>;

  std::vector<Part> overlapping(Range range) const {
    std::vector<Part> parts;
    by_range_.visit_overlapping(range, [&](Range found, const Addresses& hosts) {
      for (const std::uintptr_t host : hosts) parts.push_back({found, host});
    });
    return parts;
  }
  void insert(const Part& part) {
    by_range_[part.range].insert(part.host_address);
    by_host_[{part.host_address, part.range.bytes}].insert(part.range.address);
  }
  void erase(const Part& part) {
    erase(by_range_, part.range, part.host_address);
    erase(by_host_, {part.host_address, part.range.bytes}, part.range.address);
  }
  static void erase(RangeMap<Addresses>& from, Range range, std::uintptr_t other) {
    Addresses& addresses = *from.find(range);
    addresses.erase(other);
    if (addresses.empty()) from.erase(range);
  }

  RangeMap<Addresses> by_range_;  // host addresses
  RangeMap<Addresses> by_host_;   // device addresses
};

}  // namespace umem
