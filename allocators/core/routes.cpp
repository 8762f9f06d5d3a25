#include "core/routes.hpp"

#include <algorithm>

namespace umem {
namespace {

constexpr Profile kDeviceProfile{.kind = MemoryKind::device, .advice = {}};
// Beyond the budget, memory stays on the host and the device uses it in place: managed memory by
// its advice, all other memory as page-locked host memory.
constexpr Profile kManagedSpillProfile{
    .kind = MemoryKind::managed,
    .advice = {.placement = Placement::host, .accessed_by_device = true, .read_mostly = false}};
constexpr Profile kPinnedSpillProfile{.kind = MemoryKind::pinned, .advice = {}};

template <class Item>
std::uint8_t add(std::vector<Item>& to, const Item& item) {
  to.push_back(item);
  return static_cast<std::uint8_t>(to.size() - 1);
}

// The number of an item, which is added if it is new.
template <class Item>
std::uint8_t number_of(std::vector<Item>& items, const Item& item) {
  const auto found = std::find(items.begin(), items.end(), item);
  return found == items.end() ? add(items, item)
                              : static_cast<std::uint8_t>(found - items.begin());
}

}  // namespace

Routes::Routes(const std::array<ClassSetting, kClasses>& classes) : classes_(classes) {
  const std::uint8_t device_profile = number_of(profiles_, kDeviceProfile);
  const std::uint8_t device_small = number_of(routes_, {device_profile, Tier::small});
  const std::uint8_t device_large = number_of(routes_, {device_profile, Tier::large});
  for (std::size_t i = 0; i < kClasses; ++i) {
    const ClassSetting& setting = classes_[i];
    // Memory without advice is the same for every policy: one heap serves all classes.
    const std::uint8_t profile = number_of(
        profiles_, {setting.kind, takes_advice(setting.kind) ? setting.advice : Advice{}});
    of_class_[i] = {device_small, device_large, device_small,
                    number_of(routes_, {profile, Tier::large})};
    // Every class has its own small route, even if another class has the same profile. Only plain
    // device memory never moves, so that classes may share its pages.
    if (setting.kind != MemoryKind::device)
      of_class_[i].small = add(routes_, {profile, Tier::small});
  }
  managed_spill_ = add_spill(kManagedSpillProfile);
  pinned_spill_ = add_spill(kPinnedSpillProfile);
}

// A profile of its own, even if a policy maps a class in the same way: memory that was spilled
// because of the budget is counted separately.
Routes::Spill Routes::add_spill(const Profile& profile) {
  const std::uint8_t number = add(profiles_, profile);
  return {number, add(routes_, {number, Tier::small}), add(routes_, {number, Tier::large})};
}

std::uint8_t Routes::route_for(TensorClass tensor_class, std::size_t bytes) const {
  const auto number = static_cast<std::size_t>(tensor_class);
  const OfClass& routes = of_class_[number];
  const bool too_small = bytes < classes_[number].min_bytes;
  if (bytes >= kPageBytes) return too_small ? routes.device_large : routes.large;
  return too_small ? routes.device_small : routes.small;
}

std::uint8_t Routes::spill_route_for(TensorClass tensor_class, Tier tier) const {
  const bool is_managed =
      classes_[static_cast<std::size_t>(tensor_class)].kind == MemoryKind::managed;
  const Spill& spill = is_managed ? managed_spill_ : pinned_spill_;
  return tier == Tier::small ? spill.small : spill.large;
}

bool Routes::take_device_room(TensorClass tensor_class, std::size_t bytes) {
  std::size_t& room = device_room_[static_cast<std::size_t>(tensor_class)];
  if (room < bytes) {
    room = 0;  // later requests do not pass this one
    return false;
  }
  room -= bytes;
  return true;
}

}  // namespace umem
