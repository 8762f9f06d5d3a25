#include "core/allocator.hpp"

#include <cstdio>
#include <utility>

namespace umem {

Allocator::Allocator(const Config& config, std::unique_ptr<SegmentSource> source,
                     std::unique_ptr<Driver> driver, int devices)
    : source_(std::move(source)),
      driver_(std::move(driver)),
      limits_{.managed = SharedLimit(config.managed_limit_bytes),
              .pinned = SharedLimit(config.pinned_limit_bytes)},
      managed_bytes_of_device_(config.managed_bytes_of_device),
      used_(static_cast<std::size_t>(devices)) {
  for (int device = 0; device < devices; ++device)
    devices_.push_back(
        std::make_unique<DeviceAllocator>(device, config, *source_, *driver_, limits_));
}

void* Allocator::allocate(std::size_t bytes, int device_number, StreamId stream) {
  try {
    DeviceAllocator& chosen = device(device_number);
    if (!used_[static_cast<std::size_t>(device_number)].load()) introduce(device_number);
    void* address = allocate_on(chosen, bytes, stream);
    tell(chosen, reinterpret_cast<std::uintptr_t>(address), stream, true);
    return address;
  } catch (const OutOfMemory&) {
    // See Note [Classes] in class_context.hpp.
    if (classes_.phase() != TensorClass::weights) classes_.set_phase(TensorClass::activations);
    throw;
  }
}

bool Allocator::free(std::uintptr_t address, int device_number, StreamId stream) {
  DeviceAllocator& holder = device(device_number);
  tell(holder, address, stream, false);  // afterwards the address may be another block's
  return holder.free(address);
}

void Allocator::tell(DeviceAllocator& device, std::uintptr_t address, StreamId stream,
                     bool is_born) {
  BlockListener* listener = block_listener_.load();
  if (listener == nullptr) return;
  if (const auto block = device.live_block(address))
    listener->block_changes(*block, stream, is_born);
}

void* Allocator::allocate_on(DeviceAllocator& device, std::size_t bytes, StreamId stream) {
  const TensorClass tensor_class = classes_.current();
  if (devices_.size() > 1) {
    if (void* address = device.try_allocate(bytes, stream, tensor_class)) return address;
    // All devices share the caps on managed and pinned memory: the others' caches count too.
    if (bytes != 0) empty_cache();
  }
  return device.allocate(bytes, stream, tensor_class);
}

// A rank of several sees all GPUs of the host and uses one: caps go by those that it uses.
void Allocator::introduce(int device_number) {
  const std::lock_guard lock(used_mutex_);
  const auto number = static_cast<std::size_t>(device_number);
  if (used_[number].load()) return;
  if (number < managed_bytes_of_device_.size())
    limits_.managed.raise(managed_bytes_of_device_[number]);
  for (int other = 0; other < device_count(); ++other) {
    if (other == device_number || !used_[static_cast<std::size_t>(other)].load()) continue;
    DeviceAllocator& first = *devices_[static_cast<std::size_t>(other)];
    DeviceAllocator& second = *devices_[number];
    if (first.add_peer(device_number) && second.add_peer(other)) continue;
    first.stop_mapping();
    second.stop_mapping();
    std::fprintf(stderr,
                 "umem: GPUs %d and %d may not access each other's mapped memory: new tensors "
                 "there are cudaMalloc's, as torch's own are. Copies of older ones may fail: use "
                 "both GPUs before the first tensor.\n",
                 other, device_number);
  }
  used_[number].store(true);
}

bool Allocator::record_stream(std::uintptr_t address, StreamId stream) {
  for (int holder = 0; holder < device_count(); ++holder) {
    DeviceAllocator& device = *devices_[static_cast<std::size_t>(holder)];
    if (!device.record_stream(address, {holder, stream})) continue;
    for (int other = 0; stream == 0 && other < device_count(); ++other)
      if (other != holder && used_[static_cast<std::size_t>(other)].load())
        device.record_stream(address, {other, stream});
    return true;
  }
  return false;
}

bool Allocator::retag(std::uintptr_t address, TensorClass tensor_class) {
  for (const auto& device : devices_)
    if (device->retag(address, tensor_class)) return true;
  return false;
}

std::optional<Range> Allocator::base_allocation(std::uintptr_t address) const {
  for (const auto& device : devices_)
    if (const auto range = device->base_allocation(address)) return range;
  return std::nullopt;
}

void Allocator::empty_cache() {
  for (const auto& device : devices_) device->empty_cache();
}

PauseReport Allocator::pause(int device_number, std::size_t host_available_bytes) {
  DeviceAllocator& paused = device(device_number);
  for (int other = 0; other < device_count(); ++other)
    if (other != device_number && used_[static_cast<std::size_t>(other)].load() &&
        !driver_->synchronize(other))
      throw PauseError("the work of GPU " + std::to_string(other) +
                       " cannot be waited for: an earlier CUDA call of the program has failed, or "
                       "a CUDA graph is being captured");
  return paused.pause(host_available_bytes);
}

std::vector<LiveBlock> Allocator::live_blocks() const {
  std::vector<LiveBlock> all;
  for (const auto& device : devices_) device->append_live_blocks(all);
  return all;
}

std::int64_t Allocator::uncached_ns() const {
  std::int64_t total_ns = 0;
  for (const auto& device : devices_) total_ns += device->stats().uncached_ns;
  return total_ns;
}

void Allocator::set_release_listener(const std::shared_ptr<ReleaseListener>& listener) {
  for (const auto& device : devices_) device->set_release_listener(listener);
}

void Allocator::lock_all() {
  classes_.mutex().lock();
  used_mutex_.lock();
  for (const auto& device : devices_) device->lock();
}

void Allocator::unlock_all() {
  for (const auto& device : devices_) device->unlock();
  used_mutex_.unlock();
  classes_.mutex().unlock();
}

}  // namespace umem
