// Blocks and segments: the pieces that the allocator hands out, and what they are cut from.
#pragma once

#include <vector>

#include "core/statistics.hpp"
#include "core/types.hpp"

namespace umem {

struct Block;
struct Heap;

// One piece of memory from a source, or a run of mapped handles in its heap's expandable segment.
struct Segment {
  std::uintptr_t address = 0;  // of the first block
  std::size_t bytes = 0;       // of all blocks together
  void* raw = nullptr;         // as the source gave it; `address` may be aligned up from it
  std::size_t raw_bytes = 0;
  Heap* heap = nullptr;
  Block* first = nullptr;
  Block* last = nullptr;
  std::size_t device_bytes = 0;  // kind system: from here on, its pages stay on the host
  bool room_was_made = false;    // others were given back for it
  bool is_expandable = false;
  bool is_alias = false;  // one block, at addresses where its handles are mapped a second time
};

enum class BlockState : std::uint8_t {
  cached,   // free, in its heap's index
  live,     // a tensor's
  pending,  // freed by its owner, still another stream's
};

struct Block {
  std::uintptr_t address = 0;
  std::size_t bytes = 0;
  std::size_t requested_bytes = 0;
  Segment* segment = nullptr;
  Block* previous = nullptr;  // neighbours by address, in the same segment
  Block* next = nullptr;
  Block* bin_previous = nullptr;  // neighbours in the free index's list
  Block* bin_next = nullptr;
  Block* spare_previous = nullptr;  // neighbours in the allocator's list of spares
  Block* spare_next = nullptr;
  BlockState state = BlockState::cached;
  TensorClass tensor_class = TensorClass::other;
  std::uint8_t advice = 0;               // profile whose advice its pages carry, or kMixedAdvice
  std::uint32_t pending_events = 0;
  Heap* borrower = nullptr;  // whose stream uses it, if not its segment's
  std::vector<DeviceStream> other_streams;  // recorded by record_stream since its birth

  bool is_split() const { return previous != nullptr || next != nullptr; }
};

// A merged block whose parts carry different advice: it is advised anew when it is next used.
inline constexpr std::uint8_t kMixedAdvice = 0xFF;

}  // namespace umem
