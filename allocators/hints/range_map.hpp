// A map by address range that finds what overlaps a range.
#pragma once

#include <bit>
#include <cstdint>
#include <limits>
#include <map>
#include <set>
#include <utility>

#include "hints/request.hpp"

namespace umem {

// Ranges are ordered by address within a class of lengths, each up to twice the one before. An
// overlapping range of a class starts at most its longest length below, so that a long range makes
// no search among short ones longer.
template <class Value>
class RangeMap {
 public:
  Value& operator[](Range range) {
    return classes_[class_of(range.bytes)][{range.address, range.bytes}];
  }
  Value* find(Range range) {
    const auto of_class = classes_.find(class_of(range.bytes));
    if (of_class == classes_.end()) return nullptr;
    const auto found = of_class->second.find({range.address, range.bytes});
    return found == of_class->second.end() ? nullptr : &found->second;
  }
  const Value* find(Range range) const { return const_cast<RangeMap*>(this)->find(range); }
  void erase(Range range) {
    const auto of_class = classes_.find(class_of(range.bytes));
    if (of_class == classes_.end()) return;
    of_class->second.erase({range.address, range.bytes});
    if (of_class->second.empty()) classes_.erase(of_class);
  }
  bool empty() const { return classes_.empty(); }

  // Calls visit(range, value) for each range that overlaps. It must not change the map.
  template <class Visit>
  void visit_overlapping(Range range, Visit&& visit) const {
    if (range.bytes == 0) return;
    for (const auto& [length, ranges] : classes_) {
      const std::uintptr_t longest =
          std::numeric_limits<std::uintptr_t>::max() >>
          (std::numeric_limits<std::uintptr_t>::digits - length);
      const std::uintptr_t from = range.address > longest ? range.address - longest : 0;
      for (auto next = ranges.lower_bound({from, 0});
           next != ranges.end() && next->first.first < end_of(range); ++next)
        if (const Range found{next->first.first, next->first.second}; overlap(found, range))
          visit(found, next->second);
    }
  }

  // The same for each range that starts at `address`.
  template <class Visit>
  void visit_starting_at(std::uintptr_t address, Visit&& visit) const {
    for (const auto& [length, ranges] : classes_)
      for (auto next = ranges.lower_bound({address, 0});
           next != ranges.end() && next->first.first == address; ++next)
        visit(Range{address, next->first.second}, next->second);
  }

 private:
  static int class_of(std::size_t bytes) { return std::bit_width(bytes); }

  std::map<int, std::map<std::pair<std::uintptr_t, std::size_t>, Value>> classes_;
};

// The tickets of requests by their ranges.
class TicketsByRange {
 public:
  void add(Range range, Ticket ticket) { tickets_[range].insert(ticket); }
  void remove(Range range, Ticket ticket) {
    std::set<Ticket>& tickets = *tickets_.find(range);
    tickets.erase(ticket);
    if (tickets.empty()) tickets_.erase(range);
  }

  // The newest ticket below `ticket` whose range is `range`; 0 for none.
  Ticket newest_of(Range range, Ticket ticket) const {
    const std::set<Ticket>* const tickets = tickets_.find(range);
    return tickets == nullptr ? 0 : newest_below(*tickets, ticket);
  }
  // The newest ticket below `ticket` whose range overlaps; 0 for none.
  Ticket newest_overlapping(Range range, Ticket ticket) const {
    Ticket newest = 0;
    tickets_.visit_overlapping(range, [&](Range, const std::set<Ticket>& tickets) {
      newest = std::max(newest, newest_below(tickets, ticket));
    });
    return newest;
  }

 private:
  static Ticket newest_below(const std::set<Ticket>& tickets, Ticket ticket) {
    const auto next = tickets.lower_bound(ticket);
    return next == tickets.begin() ? 0 : *std::prev(next);
  }

  RangeMap<std::set<Ticket>> tickets_;
};

}  // namespace umem
