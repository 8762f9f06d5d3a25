// The driver interface of the hint engine. The CUDA side implements it; tests inject a fake.
#pragma once

#include <string>

#include "hints/request.hpp"

namespace umem {

// A worker's lane: its thread, and the streams and contexts that only this thread uses.
struct Lane {
  Direction direction = Direction::to_device;
  int number = 0;  // from 0, over both directions
};

// Every call returns 0 or the driver's error number, and none throws. All calls but record and
// recycle come from the lane's own thread, and may block it.
class HintDriver {
 public:
  virtual ~HintDriver() = default;

  // Records an event after the current work of `stream`; kNoEvent on failure. The only call that is
  // made from the training thread: it must not block.
  virtual EventId record(int device, StreamId stream) noexcept = 0;
  // The event is not queried any more. Makes no driver call.
  virtual void recycle(EventId event) noexcept = 0;

  // Called before the lane's first call for a device, and again after a failure.
  virtual int open(Lane lane, int device) noexcept = 0;
  // Called after open, for lanes to the host: makes a second context, from which evictions do not
  // hold up kernel launches. If it fails, the lane's calls use the primary context.
  virtual int separate(Lane lane, int device) noexcept = 0;
  // The lane's last call.
  virtual void close(Lane lane) noexcept = 0;

  virtual int query(Lane lane, int device, EventId event, bool& finished) noexcept = 0;
  virtual int prefetch(Lane lane, int device, Range range) noexcept = 0;
  virtual int evict(Lane lane, int device, Range range) noexcept = 0;
  virtual int advise(Lane lane, int device, Range range, Advice advice) noexcept = 0;
  // Waits for the lane's queued work on the device.
  virtual int synchronize(Lane lane, int device) noexcept = 0;

  // An error's name and meaning.
  virtual std::string describe(int error) const = 0;
};

}  // namespace umem
