// Ranges that wait for a worker: looked up by address, issued in order of submission.
#pragma once

#include <array>
#include <compare>
#include <map>
#include <optional>
#include <set>
#include <utility>
#include <vector>

#include "hints/range_map.hpp"
#include "hints/request.hpp"

namespace umem {

// A part of a request that was not issued yet. Parts of different requests may overlap.
struct Piece {
  Ticket ticket = 0;
  Range range{};
  HintOp op = HintOp::prefetch;
  int device = 0;
  bool ready = false;  // its event has completed
};

// What a ready piece waits for: an older request, or the call that a lane is making.
struct Blocker {
  Ticket ticket = 0;
  int lane = -1;

  auto operator<=>(const Blocker&) const = default;
};

// Ready pieces with the same range, operation and device are issued one by one: only the oldest is
// offered, so that no search passes the others.
class HintQueue {
 public:
  using Order = std::set<std::pair<Ticket, std::uintptr_t>>;  // ticket, address

  // A cut may split a piece. Beyond `max_pieces`, the part behind the cut is dropped as well.
  explicit HintQueue(std::size_t max_pieces) : max_pieces_(max_pieces) {}

  void add(const Piece& piece);
  void set_ready(Ticket ticket);
  // Removes `range` from the piece. Returns the bytes that are no longer queued.
  std::size_t cut(const Piece& piece, Range range);

  std::vector<Piece> of(Ticket ticket) const;
  std::vector<Piece> overlapping(Range range) const;
  // Those older than `ticket`, of the operations and devices for which takes(op, device) holds.
  template <class Takes>
  std::vector<Piece> older_overlapping(Range range, Ticket ticket, Takes&& takes) const {
    std::vector<Piece> found;
    for (const auto& [kind, groups] : groups_)
      if (takes(kind.first, kind.second)) append_overlapping(groups, range, ticket, found);
    return found;
  }
  Piece piece(Ticket ticket, std::uintptr_t address) const;

  // Offered pieces, which wait for nothing known: the oldest one, but for devices in `without`.
  std::optional<Piece> first_ready(Direction direction, const std::vector<int>& without) const;
  const Order& ready(Direction direction, int device) const;
  bool any_ready(Direction direction) const { return !ready_[index_of(direction)].empty(); }
  std::vector<Piece> ready_starting_at(HintOp op, int device, std::uintptr_t address) const;
  std::vector<Piece> ready_ending_at(HintOp op, int device, std::uintptr_t address) const;
  // Takes an offered piece out until the blocker is gone.
  void park(const Piece& piece, Blocker blocker);
  void unpark(Blocker blocker);

  std::size_t pieces() const { return pieces_.size(); }
  std::size_t bytes() const { return bytes_; }

 private:
  // The pieces of one range, operation and device.
  struct Group {
    std::set<Ticket> waiting, ready;  // for their events, and no longer
    Ticket offered = 0;               // the oldest of `ready`
    std::optional<Blocker> parked{};
  };
  using Kind = std::pair<HintOp, int>;  // operation, device
  using Groups = RangeMap<Group>;

  void remove(const Piece& piece);
  void offer_oldest(const Piece& of, Group& group);
  void list(const Piece& of, const Group& group);
  void unlist(const Piece& of, const Group& group);
  Group& group_of(const Piece& piece) {
    return *groups_.at({piece.op, piece.device}).find(piece.range);
  }
  void append_overlapping(const Groups& groups, Range range, Ticket below,
                          std::vector<Piece>& to) const;

  const std::size_t max_pieces_;
  std::map<std::pair<Ticket, std::uintptr_t>, Piece> pieces_;
  std::map<Kind, Groups> groups_;
  std::array<std::map<int, Order>, kDirections> ready_;  // offered, by device
  std::map<Blocker, Order> parked_;
  std::size_t bytes_ = 0;
};

}  // namespace umem
