// What the hint engine asks of the machine. The CUDA side implements it; tests inject their own.
#pragma once

#include <string>

#include "hints/request.hpp"

namespace umem {

// One worker's place: a thread, and the streams and contexts that only this thread uses.
struct Lane {
  Direction direction = Direction::to_device;
  int number = 0;  // from 0, over both directions
};

// Every call returns 0 or the driver's error number, and none throws. All but record and recycle
// are made from the lane's own thread, and may block it.
class HintDriver {
 public:
  virtual ~HintDriver() = default;

  // Marks the end of the work that `stream` holds now; kNoEvent when no event can be had. The one
  // call that is made from the thread that trains: it must not block.
  virtual EventId record(int device, StreamId stream) noexcept = 0;
  // The event is asked about no more. Makes no driver call.
  virtual void recycle(EventId event) noexcept = 0;

  // Before the lane's first call for a device; again after it failed.
  virtual int open(Lane lane, int device) noexcept = 0;
  // After open: what copies fast. When it fails, copies go another way.
  virtual int load(Lane lane, int device) noexcept = 0;
  // The lane's last call.
  virtual void close(Lane lane) noexcept = 0;

  virtual int query(Lane lane, int device, EventId event, bool& finished) noexcept = 0;
  virtual int prefetch(Lane lane, int device, Range range) noexcept = 0;
  virtual int evict(Lane lane, int device, Range range) noexcept = 0;
  // The range is of whole pages.
  virtual int discard(Lane lane, int device, Range range) noexcept = 0;
  virtual int copy(Lane lane, int device, std::uintptr_t to, std::uintptr_t from,
                   std::size_t bytes) noexcept = 0;
  virtual int advise(Lane lane, int device, Range range, Advice advice) noexcept = 0;
  // Waits for what the lane has asked for on the device.
  virtual int synchronize(Lane lane, int device) noexcept = 0;

  // An error's name and meaning.
  virtual std::string describe(int error) const = 0;
};

}  // namespace umem
