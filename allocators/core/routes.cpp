#include "core/routes.hpp"

namespace umem {
namespace {

constexpr Profile kDeviceProfile{.kind = MemoryKind::device, .advice = {}};
// Beyond the budget, memory stays on the host and the device uses it in place: managed memory by
// its advice, all other memory as page-locked host memory.
constexpr Profile kManagedSpillProfile{
    .kind = MemoryKind::managed,
    .advice = {.placement = Placement::host, .accessed_by_device = true, .read_mostly = false}};
constexpr Profile kPinnedSpillProfile{.kind = MemoryKind::pinned, .advice = {}};

}  // namespace

Routes::Routes(const std::array<ClassSetting, kClasses>& classes) : classes_(classes) {
  const std::uint8_t device_profile = profile_number(kDeviceProfile);
  const std::uint8_t device_small = route_number({device_profile, Tier::small});
  const std::uint8_t device_large = route_number({device_profile, Tier::large});
  for (std::size_t i = 0; i < kClasses; ++i) {
    const ClassSetting& setting = classes_[i];
    // Memory without advice is the same for every policy: one heap serves all classes.
    const std::uint8_t profile = profile_number(
        {setting.kind, takes_advice(setting.kind) ? setting.advice : Advice{}});
    of_class_[i] = {device_small, device_large, device_small,
                    route_number({profile, Tier::large})};
    // Every class has its own small route, even if another class has the same profile. Only plain
    // device memory never moves, so that classes may share its pages.
    if (setting.kind != MemoryKind::device)
      of_class_[i].small = add_route({profile, Tier::small});
  }
  managed_spill_ = add_spill(kManagedSpillProfile);
  pinned_spill_ = add_spill(kPinnedSpillProfile);
}

// A profile of its own, even if a policy maps a class in the same way: memory that was spilled
// because of the budget is counted separately.
Routes::Spill Routes::add_spill(const Profile& profile) {
  profiles_.push_back(profile);
  const auto number = static_cast<std::uint8_t>(profiles_.size() - 1);
  return {number, add_route({number, Tier::small}), add_route({number, Tier::large})};
}

std::uint8_t Routes::profile_number(const Profile& profile) {
  for (std::size_t i = 0; i < profiles_.size(); ++i)
    if (profiles_[i] == profile) return static_cast<std::uint8_t>(i);
  profiles_.push_back(profile);
  return static_cast<std::uint8_t>(profiles_.size() - 1);
}

std::uint8_t Routes::route_number(const Route& route) {
  for (std::size_t i = 0; i < routes_.size(); ++i)
    if (routes_[i] == route) return static_cast<std::uint8_t>(i);
  return add_route(route);
}

std::uint8_t Routes::add_route(const Route& route) {
  routes_.push_back(route);
  return static_cast<std::uint8_t>(routes_.size() - 1);
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
