// The free index against a plain list of the blocks that it holds.
#include <algorithm>
#include <deque>
#include <random>
#include <vector>

#include "check.hpp"
#include "core/free_index.hpp"

namespace umem {
namespace {

// Of the listed blocks, in the order of insertion: the smallest that is large enough.
std::size_t least_bytes(const std::vector<Block*>& listed, std::size_t bytes) {
  std::size_t least = 0;
  for (const Block* block : listed)
    if (block->bytes >= bytes && (least == 0 || block->bytes < least)) least = block->bytes;
  return least;
}

void random_operations(std::size_t granule_bytes, std::size_t max_granules, std::size_t held) {
  std::mt19937_64 random(granule_bytes + max_granules);
  FreeIndex index(granule_bytes);
  std::deque<Block> blocks;
  std::vector<Block*> listed, unlisted;
  for (std::size_t i = 0; i < held * 2; ++i) {
    Block& block = blocks.emplace_back();
    block.address = (i + 1) << 30;
    unlisted.push_back(&block);
  }
  const auto pick = [&](std::vector<Block*>& from) {
    const auto chosen = from.begin() + static_cast<std::ptrdiff_t>(random() % from.size());
    Block* block = *chosen;
    from.erase(chosen);
    return block;
  };

  for (int step = 0; step < 20000; ++step) {
    if (!unlisted.empty() && (listed.size() < held || random() % 2 == 0)) {
      Block* block = pick(unlisted);
      // Few sizes as well as many, so that lists of one size grow long.
      const std::size_t granules = random() % 2 == 0 ? 1 + random() % 4 : random() % max_granules;
      block->bytes = std::max<std::size_t>(granules, 1) * granule_bytes;
      index.insert(block);
      listed.push_back(block);
    } else if (!listed.empty()) {
      Block* block = pick(listed);
      index.remove(block);
      unlisted.push_back(block);
    }
    const std::size_t wanted = (1 + random() % (max_granules + 10)) * granule_bytes;
    const Block* best = index.best_fit(wanted);
    CHECK_EQUAL(best == nullptr ? 0 : best->bytes, least_bytes(listed, wanted));
    if (best != nullptr) CHECK(std::find(listed.begin(), listed.end(), best) != listed.end());
  }

  while (!listed.empty()) index.remove(pick(listed));
  CHECK(index.best_fit(granule_bytes) == nullptr);
}

TEST(small_blocks) { random_operations(kMinBlockBytes, 4096, 200); }
TEST(few_blocks_of_many_sizes) { random_operations(kMinBlockBytes, 4096, 3); }
TEST(beyond_the_lists) { random_operations(kMinBlockBytes, 20000, 200); }
TEST(large_blocks) { random_operations(kLargeStepBytes, 8192, 200); }

// Warm in the caches, and the order that torch's users are used to.
TEST(last_freed_first) {
  FreeIndex index(kMinBlockBytes);
  std::array<Block, 3> blocks;
  for (Block& block : blocks) {
    block.bytes = 4096;
    index.insert(&block);
  }
  for (std::size_t i = blocks.size(); i-- > 0;) {
    CHECK(index.best_fit(4096) == &blocks[i]);
    index.remove(&blocks[i]);
  }
}

TEST(first_and_last_lists) {
  for (const std::size_t granules : {1, 63, 64, 65, 4031, 4032, 4095, 4096, 4097}) {
    FreeIndex index(kMinBlockBytes);
    Block block;
    block.bytes = granules * kMinBlockBytes;
    index.insert(&block);
    CHECK(index.best_fit(kMinBlockBytes) == &block);
    CHECK(index.best_fit(block.bytes) == &block);
    CHECK(index.best_fit(block.bytes + kMinBlockBytes) == nullptr);
    index.remove(&block);
    CHECK(index.best_fit(kMinBlockBytes) == nullptr);
  }
}

}  // namespace
}  // namespace umem
