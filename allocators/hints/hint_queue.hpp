// Ranges that wait for a worker: looked up by address, issued in order of submission.
#pragma once

#include <array>
#include <map>
#include <set>
#include <utility>
#include <vector>

#include "hints/request.hpp"

namespace umem {

// A part of a request that was not issued yet. Parts of different requests may overlap.
struct Piece {
  Ticket ticket = 0;
  Range range{};
  Direction direction = Direction::to_device;
  bool ready = false;  // its event has completed
};

class HintQueue {
 public:
  using Order = std::set<std::pair<Ticket, std::uintptr_t>>;  // ticket, address

  // A cut may split a piece. Beyond `max_pieces`, the part behind the cut is dropped as well.
  explicit HintQueue(std::size_t max_pieces) : max_pieces_(max_pieces) {}

  void add(const Piece& piece);
  void set_ready(Ticket ticket, Range whole);
  // Removes `range` from the piece. Returns the bytes that are no longer queued.
  std::size_t cut(const Piece& piece, Range range);

  std::vector<Piece> overlapping(Range range) const;
  std::vector<Piece> starting_at(std::uintptr_t address) const;
  std::vector<Piece> ending_at(std::uintptr_t address) const;
  Piece piece(Ticket ticket, std::uintptr_t address) const;
  const Order& ready(Direction direction) const { return ready_[index_of(direction)]; }
  std::size_t pieces() const { return pieces_.size(); }
  std::size_t bytes() const { return bytes_; }

 private:
  using Key = std::pair<std::uintptr_t, Ticket>;

  void remove(const Piece& piece);

  const std::size_t max_pieces_;
  std::map<Key, Piece> pieces_;
  std::array<Order, kDirections> ready_;
  std::size_t longest_bytes_ = 0;  // no piece is longer: how far back an overlap may start
  std::size_t bytes_ = 0;
};

}  // namespace umem
