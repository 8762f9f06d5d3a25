// Which heap serves a request: by the policy's rule for its class, by its size, and on the host for
// what the budget keeps off the device.
#pragma once

#include <array>
#include <utility>
#include <vector>

#include "core/heap.hpp"
#include "core/types.hpp"

namespace umem {

class Routes {
 public:
  explicit Routes(const std::array<ClassSetting, kClasses>& classes);

  // By number.
  std::size_t count() const { return routes_.size(); }
  const Route& operator[](std::uint8_t number) const { return routes_[number]; }
  const Profile& profile(std::uint8_t number) const { return profiles_[number]; }

  std::uint8_t route_for(TensorClass tensor_class, std::size_t bytes) const;
  std::uint8_t spill_route_for(TensorClass tensor_class, Tier tier) const;
  std::uint8_t large_pinned_spill() const { return pinned_spill_.large; }
  bool is_spill(const Heap& heap) const {
    return heap.profile == managed_spill_.profile || heap.profile == pinned_spill_.profile;
  }
  std::uint8_t managed_spill_profile() const { return managed_spill_.profile; }
  // Of large blocks.
  std::uint8_t profile_of(TensorClass tensor_class) const {
    return routes_[of_class_[static_cast<std::size_t>(tensor_class)].large].profile;
  }

  // As DeviceAllocator's. Returns what was left before.
  std::size_t set_device_room(TensorClass tensor_class, std::size_t bytes) {
    return std::exchange(device_room_[static_cast<std::size_t>(tensor_class)], bytes);
  }
  // Whether a request is served as one of class `other`.
  bool take_device_room(TensorClass tensor_class, std::size_t bytes);

 private:
  struct OfClass {
    std::uint8_t device_small, device_large, small, large;  // numbers of routes
  };
  struct Spill {
    std::uint8_t profile, small, large;  // the latter are numbers of routes
  };

  Spill add_spill(const Profile& profile);

  const std::array<ClassSetting, kClasses> classes_;
  std::vector<Profile> profiles_;
  std::vector<Route> routes_;
  std::array<OfClass, kClasses> of_class_{};
  Spill managed_spill_{}, pinned_spill_{};
  std::array<std::size_t, kClasses> device_room_{};
};

}  // namespace umem
