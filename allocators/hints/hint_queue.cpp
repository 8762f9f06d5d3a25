#include "hints/hint_queue.hpp"

#include <algorithm>

namespace umem {

void HintQueue::add(const Piece& piece) {
  pieces_[{piece.ticket, piece.range.address}] = piece;
  bytes_ += piece.range.bytes;
  Group& group = groups_[{piece.op, piece.device}][piece.range];
  (piece.ready ? group.ready : group.waiting).insert(piece.ticket);
  offer_oldest(piece, group);
}

void HintQueue::remove(const Piece& piece) {
  bytes_ -= piece.range.bytes;
  const auto groups = groups_.find({piece.op, piece.device});
  Group& group = *groups->second.find(piece.range);
  (piece.ready ? group.ready : group.waiting).erase(piece.ticket);
  offer_oldest(piece, group);
  if (group.waiting.empty() && group.ready.empty()) {
    groups->second.erase(piece.range);
    if (groups->second.empty()) groups_.erase(groups);
  }
  pieces_.erase({piece.ticket, piece.range.address});
}

void HintQueue::set_ready(Ticket ticket) {
  for (auto next = pieces_.lower_bound({ticket, 0});
       next != pieces_.end() && next->first.first == ticket; ++next) {
    Piece& piece = next->second;
    piece.ready = true;
    Group& group = group_of(piece);
    group.ready.insert(group.waiting.extract(ticket));
    offer_oldest(piece, group);
  }
}

// ---- the order of issue ----

void HintQueue::offer_oldest(const Piece& of, Group& group) {
  const Ticket oldest = group.ready.empty() ? 0 : *group.ready.begin();
  if (oldest == group.offered) return;
  if (group.offered != 0) unlist(of, group);
  group.offered = oldest;
  group.parked.reset();
  if (oldest != 0) list(of, group);
}

void HintQueue::list(const Piece& of, const Group& group) {
  Order& order = group.parked ? parked_[*group.parked]
                              : ready_[index_of(direction_of(of.op))][of.device];
  order.emplace(group.offered, of.range.address);
}

void HintQueue::unlist(const Piece& of, const Group& group) {
  const auto take_from = [&](auto& orders, const auto& key) {
    const auto order = orders.find(key);
    order->second.erase({group.offered, of.range.address});
    if (order->second.empty()) orders.erase(order);
  };
  if (group.parked)
    take_from(parked_, *group.parked);
  else
    take_from(ready_[index_of(direction_of(of.op))], of.device);
}

void HintQueue::park(const Piece& piece, Blocker blocker) {
  Group& group = group_of(piece);
  unlist(piece, group);
  group.parked = blocker;
  list(piece, group);
}

void HintQueue::unpark(Blocker blocker) {
  const auto parked = parked_.extract(blocker);
  if (parked.empty()) return;
  for (const auto& [ticket, address] : parked.mapped()) {
    const Piece& piece = pieces_.at({ticket, address});
    Group& group = group_of(piece);
    group.parked.reset();
    list(piece, group);
  }
}

std::optional<Piece> HintQueue::first_ready(Direction direction,
                                            const std::vector<int>& without) const {
  const std::pair<Ticket, std::uintptr_t>* first = nullptr;
  for (const auto& [device, order] : ready_[index_of(direction)])
    if (std::find(without.begin(), without.end(), device) == without.end() &&
        (first == nullptr || *order.begin() < *first))
      first = &*order.begin();
  return first == nullptr ? std::nullopt : std::optional(pieces_.at(*first));
}

const HintQueue::Order& HintQueue::ready(Direction direction, int device) const {
  static const Order none;
  const auto found = ready_[index_of(direction)].find(device);
  return found == ready_[index_of(direction)].end() ? none : found->second;
}

std::vector<Piece> HintQueue::ready_starting_at(HintOp op, int device,
                                                std::uintptr_t address) const {
  std::vector<Piece> found;
  if (const auto groups = groups_.find({op, device}); groups != groups_.end())
    groups->second.visit_starting_at(address, [&](Range range, const Group& group) {
      if (group.offered != 0 && !group.parked) found.push_back(piece(group.offered, range.address));
    });
  return found;
}

std::vector<Piece> HintQueue::ready_ending_at(HintOp op, int device,
                                              std::uintptr_t address) const {
  std::vector<Piece> found;
  if (const auto groups = groups_.find({op, device}); groups != groups_.end())
    groups->second.visit_overlapping({address - 1, 1}, [&](Range range, const Group& group) {
      if (group.offered != 0 && !group.parked && end_of(range) == address)
        found.push_back(piece(group.offered, range.address));
    });
  return found;
}

// ---- by address ----

std::size_t HintQueue::cut(const Piece& piece, Range range) {
  const Range gone = common(piece.range, range);
  if (gone.bytes == 0) return 0;
  remove(piece);
  std::size_t kept_bytes = 0;
  const auto keep = [&](std::uintptr_t start, std::uintptr_t end) {
    if (start == end || pieces_.size() >= max_pieces_) return;
    Piece rest = piece;
    rest.range = {start, end - start};
    add(rest);
    kept_bytes += rest.range.bytes;
  };
  keep(piece.range.address, gone.address);
  keep(end_of(gone), end_of(piece.range));
  return piece.range.bytes - kept_bytes;
}

std::vector<Piece> HintQueue::of(Ticket ticket) const {
  std::vector<Piece> found;
  for (auto next = pieces_.lower_bound({ticket, 0});
       next != pieces_.end() && next->first.first == ticket; ++next)
    found.push_back(next->second);
  return found;
}

std::vector<Piece> HintQueue::overlapping(Range range) const {
  return older_overlapping(range, ~Ticket{0}, [](HintOp, int) { return true; });
}

void HintQueue::append_overlapping(const Groups& groups, Range range, Ticket below,
                                   std::vector<Piece>& to) const {
  groups.visit_overlapping(range, [&](Range found, const Group& group) {
    for (const std::set<Ticket>* tickets : {&group.waiting, &group.ready})
      for (const Ticket ticket : *tickets) {
        if (ticket >= below) break;
        to.push_back(piece(ticket, found.address));
      }
  });
}

Piece HintQueue::piece(Ticket ticket, std::uintptr_t address) const {
  return pieces_.at({ticket, address});
}

}  // namespace umem
