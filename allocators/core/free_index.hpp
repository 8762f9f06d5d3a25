// Best fit: one list of cached blocks for every size up to 256 MiB (2 MiB in slabs), and a bitmap
// over the lists, so the search takes the same time however much is cached. Larger ones are in a
// tree.
#pragma once

#include <array>
#include <bit>
#include <cstdint>
#include <memory>
#include <set>

#include "core/block.hpp"

namespace umem {

class FreeIndex {
 public:
  // Block sizes are multiples of `granule_bytes`; up to kBins granules have a list of their own.
  explicit FreeIndex(std::size_t granule_bytes)
      : shift_(static_cast<unsigned>(std::countr_zero(granule_bytes))) {}

  void insert(Block* block) {
    const std::size_t bin = block->bytes >> shift_;
    if (bin >= kBins) {
      oversize_.insert(block);
      return;
    }
    Block*& head = heads_[bin];
    block->bin_previous = nullptr;
    block->bin_next = head;
    if (head != nullptr) head->bin_previous = block;
    head = block;
    words_[bin / 64] |= std::uint64_t{1} << (bin % 64);
    summary_ |= std::uint64_t{1} << (bin / 64);
  }

  void remove(Block* block) {
    const std::size_t bin = block->bytes >> shift_;
    if (bin >= kBins) {
      oversize_.erase(block);
      return;
    }
    if (block->bin_previous != nullptr)
      block->bin_previous->bin_next = block->bin_next;
    else
      heads_[bin] = block->bin_next;
    if (block->bin_next != nullptr) block->bin_next->bin_previous = block->bin_previous;
    if (heads_[bin] == nullptr) {
      words_[bin / 64] &= ~(std::uint64_t{1} << (bin % 64));
      if (words_[bin / 64] == 0) summary_ &= ~(std::uint64_t{1} << (bin / 64));
    }
  }

  // The smallest block of at least `bytes`, the most recently freed of its size; or nullptr.
  Block* best_fit(std::size_t bytes) const {
    const std::size_t bin = bytes >> shift_;
    if (bin < kBins) {
      const std::size_t word = bin / 64;
      if (const std::uint64_t here = words_[word] >> (bin % 64); here != 0)
        return heads_[bin + static_cast<std::size_t>(std::countr_zero(here))];
      if (word + 1 < kWords)
        if (const std::uint64_t above = summary_ >> (word + 1) << (word + 1); above != 0) {
          const auto first = static_cast<std::size_t>(std::countr_zero(above));
          return heads_[first * 64 + static_cast<std::size_t>(std::countr_zero(words_[first]))];
        }
    }
    Block key;
    key.bytes = bytes;
    const auto found = oversize_.lower_bound(&key);
    return found == oversize_.end() ? nullptr : *found;
  }

 private:
  static constexpr std::size_t kWords = 64;
  static constexpr std::size_t kBins = kWords * 64;

  struct BySizeThenAddress {
    bool operator()(const Block* a, const Block* b) const {
      return a->bytes != b->bytes ? a->bytes < b->bytes : a->address < b->address;
    }
  };

  unsigned shift_;
  std::uint64_t summary_ = 0;
  std::array<std::uint64_t, kWords> words_{};
  std::array<Block*, kBins> heads_{};
  std::set<Block*, BySizeThenAddress> oversize_;
};

}  // namespace umem
