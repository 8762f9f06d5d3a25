// The text of an out-of-memory: what was asked for, what holds the memory, and the remedy.
#include "core/device_allocator.hpp"
#include "core/format_bytes.hpp"

namespace umem {

// What holds the budget, for the error's text.
std::string DeviceAllocator::budget_use() const {
  std::array<std::size_t, kClasses> of_class{};
  std::size_t cached_bytes = 0;
  for (const auto& [address, segment] : segments_) {
    if (!segment.heap->on_device) continue;
    for (const Block* block = segment.first; block != nullptr; block = block->next)
      (block->state == BlockState::cached
           ? cached_bytes
           : of_class[static_cast<std::size_t>(block->tensor_class)]) += block->bytes;
  }
  std::string text;
  for (std::size_t i = 0; i < kClasses; ++i)
    if (of_class[i] != 0)
      text.append(kClassNames[i]).append(" ").append(format_bytes(of_class[i])).append(", ");
  return text + "cached " + format_bytes(cached_bytes) + ", page tables of page-locked memory " +
         format_bytes(budget_.page_table_bytes());
}

void DeviceAllocator::throw_out_of_memory(std::size_t bytes, TensorClass tensor_class,
                                          Shortage shortage) {
  const MemoryInfo memory = driver_.memory(device_);
  const std::lock_guard lock(locks_.books);
  ++stats_.num_ooms;
  const auto held = [](const Stat& stat) {
    return format_bytes(static_cast<std::size_t>(stat.current));
  };
  std::string text = "CUDA out of memory. Tried to allocate " + format_bytes(bytes) + " for " +
                     kClassNames[static_cast<std::size_t>(tensor_class)] + " on GPU " +
                     std::to_string(device_) + ", which has " + format_bytes(memory.total_bytes) +
                     " of which " + format_bytes(memory.free_bytes) + " is free. umem holds " +
                     held(stats_.reserved_bytes.all) + ", " + held(stats_.allocated_bytes.all) +
                     " of it in tensors. ";
  if (shortage.over_budget)
    text += "The device budget, " + format_bytes(budget_.limit_bytes()) + ", is spent (" +
            budget_use() + "), and the host serves no more in its place. Raise device_budget or "
            "UMEM_DEVICE_BUDGET. ";
  switch (shortage.limit) {
    case Limit::source:
    case Limit::device_budget:
      text += shortage.over_budget
                  ? "No more host memory could be allocated for the device: free some."
                  : "The memory resource has no more: use a smaller batch, or a policy that "
                    "places less on the device.";
      break;
    case Limit::pinned:
      text += "The limit on page-locked host memory, " +
              format_bytes(limits_.pinned.limit_bytes()) + ", holds " +
              format_bytes(limits_.pinned.held_bytes()) +
              " already: use a smaller batch, or a host with more memory.";
      break;
    case Limit::managed:
      text += "The cap on managed memory, " + format_bytes(limits_.managed.limit_bytes()) +
              ", holds " + format_bytes(limits_.managed.held_bytes()) +
              " already: raise UMEM_MANAGED_LIMIT or the policy's limits.managed_bytes, as far as "
              "the machine's memory allows.";
      break;
    case Limit::memory_fraction:
      text += "set_per_process_memory_fraction(" + std::to_string(budget_.fraction()) +
              ") allows no more: raise it.";
      break;
  }
  throw OutOfMemory(text);
}

}  // namespace umem
