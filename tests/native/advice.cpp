// The driver gets the advice of a block's class, once for each change.
#include <map>
#include <random>

#include "fake_driver.hpp"

namespace umem {
namespace {

constexpr Advice kOnDevice{.placement = Placement::device};
constexpr Advice kDuplicated{.placement = Placement::device, .read_mostly = true};
constexpr Advice kOnHost{.placement = Placement::host};

// Frozen weights are read-mostly, optimizer state lives on the host, the rest on the device.
Config mixed_config() {
  Config config = config_of(MemoryKind::managed, kOnDevice);
  setting_of(config, TensorClass::frozen_weights).advice = kDuplicated;
  setting_of(config, TensorClass::optimizer_state).advice = kOnHost;
  return config;
}

// What the driver was last told of each page.
std::map<std::uintptr_t, Advice> advice_by_page(const Machine& machine) {
  std::map<std::uintptr_t, Advice> by_page;
  for (const auto& [range, advice] : machine.driver.advice())
    for (std::uintptr_t page = range.address; page < range.address + range.bytes;
         page += kLargeStepBytes)
      by_page[page] = advice;
  return by_page;
}

// As with a driver that has neither call.
TEST(advice_and_prefetches_can_be_left_out) {
  Config config = mixed_config();
  config.advises = config.prefetches = false;
  Machine machine({.config = config});
  machine.allocate(3 * MiB);
  machine.allocate(3 * MiB, 0, TensorClass::optimizer_state);
  CHECK_EQUAL(machine.driver.advice().size(), 0U);
  CHECK_EQUAL(machine.driver.populated().size(), 0U);
  CHECK_EQUAL(machine.device.stats().num_failed_hints, 3);
}

TEST(a_new_segment_is_advised_and_populated) {
  Machine machine({.config = mixed_config()});
  const std::uintptr_t address = machine.allocate(3 * MiB);
  const std::vector<AdviceCall> calls = machine.driver.advice();
  CHECK_EQUAL(calls.size(), 1U);
  CHECK_EQUAL(calls[0].range.address, address);
  CHECK_EQUAL(calls[0].range.bytes, 20 * MiB);
  CHECK(calls[0].advice == kOnDevice);
  CHECK_EQUAL(machine.driver.populated().size(), 1U);
  CHECK_EQUAL(machine.driver.populated()[0].bytes, 20 * MiB);

  machine.allocate(3 * MiB);  // from the same segment
  CHECK_EQUAL(machine.driver.advice().size(), 1U);
  CHECK_EQUAL(machine.device.stats().num_failed_hints, 0);
}

TEST(memory_on_the_host_is_not_populated) {
  Machine machine({.config = mixed_config()});
  machine.allocate(3 * MiB, 0, TensorClass::optimizer_state);
  CHECK(machine.driver.advice().at(0).advice == kOnHost);
  CHECK(machine.driver.populated().empty());
}

TEST(no_advice_where_the_policy_has_none) {
  Machine machine({.config = config_of(MemoryKind::managed, Advice{.placement = Placement::any})});
  machine.free(machine.allocate(3 * MiB));
  machine.allocate(3 * MiB);
  CHECK(machine.driver.advice().empty());
  CHECK(machine.driver.populated().empty());
}

TEST(system_memory_takes_advice_and_others_do_not) {
  for (const MemoryKind kind : {MemoryKind::device, MemoryKind::system, MemoryKind::pinned}) {
    Config config = config_of(kind, kOnDevice);
    setting_of(config, TensorClass::weights).advice = kDuplicated;
    Machine machine({.config = config});
    const std::uintptr_t address = machine.allocate(3 * MiB);
    CHECK(machine.device.retag(address, TensorClass::weights));
    CHECK_EQUAL(machine.driver.advice().size(), kind == MemoryKind::system ? 2U : 0U);
    CHECK(machine.driver.populated().empty());
    machine.free(address);
    machine.allocate(3 * MiB);
    CHECK_EQUAL(machine.driver.advice().size(), kind == MemoryKind::system ? 3U : 0U);
  }
}

TEST(a_retagged_block_is_advised_and_its_next_owner_too) {
  Machine machine({.config = mixed_config()});
  const std::uintptr_t address = machine.allocate(3 * MiB + 1, 0, TensorClass::weights);
  CHECK(machine.device.retag(address, TensorClass::frozen_weights));
  CHECK(machine.device.retag(address, TensorClass::frozen_weights));
  std::vector<AdviceCall> calls = machine.driver.advice();
  CHECK_EQUAL(calls.size(), 2U);  // the segment's, and one for the change
  CHECK_EQUAL(calls[1].range.address, address);
  CHECK_EQUAL(calls[1].range.bytes, 3 * MiB + 64 * KiB);
  CHECK(calls[1].advice == kDuplicated);
  CHECK(machine.allocator.live_blocks().at(0).tensor_class == TensorClass::frozen_weights);

  machine.free(address);
  CHECK_EQUAL(machine.allocate(4 * MiB, 0, TensorClass::gradients), address);
  calls = machine.driver.advice();
  CHECK_EQUAL(calls.size(), 3U);
  CHECK(calls[2].advice == kOnDevice);
  CHECK_EQUAL(calls[2].range.bytes, 4 * MiB);
}

TEST(a_class_with_the_same_advice_needs_no_call) {
  Machine machine({.config = mixed_config()});
  const std::uintptr_t address = machine.allocate(3 * MiB, 0, TensorClass::weights);
  CHECK(machine.device.retag(address, TensorClass::gradients));
  CHECK_EQUAL(machine.driver.advice().size(), 1U);
}

// Small blocks share their page with others that are of another class.
TEST(small_blocks_keep_the_advice_of_their_segment) {
  Machine machine({.config = mixed_config()});
  const std::uintptr_t address = machine.allocate(MiB + MiB / 2, 0, TensorClass::weights);
  CHECK(machine.device.retag(address, TensorClass::frozen_weights));
  CHECK_EQUAL(machine.driver.advice().size(), 1U);
  CHECK(machine.allocator.live_blocks().at(0).tensor_class == TensorClass::frozen_weights);
  machine.free(address);
  machine.allocate(MiB + MiB / 2, 0, TensorClass::weights);
  CHECK_EQUAL(machine.driver.advice().size(), 1U);
}

// Its memory stays what it is until it is freed.
TEST(a_kind_is_not_changed_by_a_tag) {
  Config config = mixed_config();
  setting_of(config, TensorClass::gradients).kind = MemoryKind::device;
  Machine machine({.config = config});
  const std::uintptr_t address = machine.allocate(3 * MiB, 0, TensorClass::weights);
  CHECK(machine.device.retag(address, TensorClass::gradients));
  CHECK_EQUAL(machine.driver.advice().size(), 1U);
  CHECK(machine.allocator.live_blocks().at(0).kind == MemoryKind::managed);
}

TEST(parts_of_a_merged_block_are_advised_anew) {
  Machine machine({.config = mixed_config()});
  const std::uintptr_t left = machine.allocate(4 * MiB), right = machine.allocate(4 * MiB);
  CHECK(machine.device.retag(right, TensorClass::frozen_weights));
  machine.free(left, right);
  const std::size_t before = machine.driver.advice().size();
  CHECK_EQUAL(machine.allocate(6 * MiB - 64 * KiB), left);
  CHECK_EQUAL(machine.driver.advice().size(), before + 1);
  CHECK_EQUAL(machine.driver.advice().back().range.bytes, 6 * MiB - 64 * KiB);
  CHECK_EQUAL(machine.allocate(2 * MiB + 1), left + 6 * MiB - 64 * KiB);  // the rest was mixed too
  CHECK_EQUAL(machine.driver.advice().size(), before + 2);
  for (const auto& [page, advice] : advice_by_page(machine))
    if (page < left + 8 * MiB) CHECK(advice == kOnDevice);
}

TEST(every_live_page_carries_its_class_advice) {
  const Config config = mixed_config();
  Machine machine({.config = config});
  std::mt19937_64 random(3);
  std::map<std::uintptr_t, TensorClass> live;
  const auto any_class = [&] { return static_cast<TensorClass>(random() % kClasses); };
  for (int step = 0; step < 4000; ++step) {
    const std::size_t choice = random() % 4;
    if (choice < 2 && live.size() < 60) {
      const TensorClass tensor_class = any_class();
      live[machine.allocate(2 * MiB + random() % (10 * MiB), 0, tensor_class)] = tensor_class;
    } else if (!live.empty()) {
      const auto chosen =
          std::next(live.begin(), static_cast<std::ptrdiff_t>(random() % live.size()));
      if (choice == 2) {
        chosen->second = any_class();
        CHECK(machine.device.retag(chosen->first, chosen->second));
      } else {
        machine.free(chosen->first);
        live.erase(chosen);
      }
    }
  }
  const std::map<std::uintptr_t, Advice> by_page = advice_by_page(machine);
  CHECK(!live.empty());
  for (const LiveBlock& block : machine.allocator.live_blocks()) {
    CHECK(live.at(block.address) == block.tensor_class);
    const Advice& expected = config.classes[number_of(block.tensor_class)].advice;
    for (std::uintptr_t page = block.address; page < block.address + block.bytes;
         page += kLargeStepBytes)
      CHECK(by_page.at(page) == expected);
  }
}

TEST(refused_hints_are_counted_and_harmless) {
  Machine machine({.config = mixed_config()});
  machine.driver.refuse_hints(true);
  const std::uintptr_t address = machine.allocate(3 * MiB, 0, TensorClass::weights);
  CHECK(address != 0);
  CHECK_EQUAL(machine.device.stats().num_failed_hints, 2);  // advice and population of one segment
  CHECK(machine.device.retag(address, TensorClass::frozen_weights));
  CHECK_EQUAL(machine.device.stats().num_failed_hints, 3);
  machine.driver.refuse_hints(false);
  machine.allocate(3 * MiB, 0, TensorClass::weights);
  CHECK_EQUAL(machine.device.stats().num_failed_hints, 3);
}

}  // namespace
}  // namespace umem
