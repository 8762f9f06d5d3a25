#include "hints/hint_queue.hpp"

namespace umem {

void HintQueue::add(const Piece& piece) {
  pieces_[{piece.range.address, piece.ticket}] = piece;
  if (piece.ready)
    ready_[index_of(piece.direction)].emplace(piece.ticket, piece.range.address);
  longest_bytes_ = std::max(longest_bytes_, piece.range.bytes);
  bytes_ += piece.range.bytes;
}

void HintQueue::remove(const Piece& piece) {
  pieces_.erase({piece.range.address, piece.ticket});
  ready_[index_of(piece.direction)].erase({piece.ticket, piece.range.address});
  bytes_ -= piece.range.bytes;
  if (pieces_.empty()) longest_bytes_ = 0;
}

void HintQueue::set_ready(Ticket ticket, Range whole) {
  for (const Piece& found : overlapping(whole)) {
    if (found.ticket != ticket) continue;
    pieces_.at({found.range.address, ticket}).ready = true;
    ready_[index_of(found.direction)].emplace(ticket, found.range.address);
  }
}

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

std::vector<Piece> HintQueue::overlapping(Range range) const {
  std::vector<Piece> found;
  const std::uintptr_t from =
      range.address > longest_bytes_ ? range.address - longest_bytes_ : 0;
  for (auto next = pieces_.lower_bound({from, 0});
       next != pieces_.end() && next->first.first < end_of(range); ++next)
    if (overlap(next->second.range, range)) found.push_back(next->second);
  return found;
}

std::vector<Piece> HintQueue::starting_at(std::uintptr_t address) const {
  std::vector<Piece> found;
  for (auto next = pieces_.lower_bound({address, 0});
       next != pieces_.end() && next->first.first == address; ++next)
    found.push_back(next->second);
  return found;
}

std::vector<Piece> HintQueue::ending_at(std::uintptr_t address) const {
  std::vector<Piece> found = overlapping({address - 1, 1});
  std::erase_if(found, [&](const Piece& piece) { return end_of(piece.range) != address; });
  return found;
}

Piece HintQueue::piece(Ticket ticket, std::uintptr_t address) const {
  return pieces_.at({address, ticket});
}

}  // namespace umem
