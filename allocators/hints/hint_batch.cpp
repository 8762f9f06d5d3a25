#include "hints/hint_batch.hpp"

#include "hints/checks.hpp"

namespace umem {
namespace {

void check_entry(const HintRequest& request) {
  require(request.op != HintOp::advise, "a batch holds no advice: submit it");
  HintRequest checked = request;
  if (checked.range.address == 0) checked.range.address = 1;  // the address is not known yet
  check_request(checked);
}

}  // namespace

HintBatch::HintBatch(int device, std::vector<HintRequest> requests)
    : device_(device), requests_(std::move(requests)) {
  check_device(device);
  for (HintRequest& request : requests_) {
    request.device = device;
    check_entry(request);
    wanted_ += request.range.address != 0;
  }
}

void HintBatch::set_address(std::size_t index, std::uintptr_t address) {
  const std::lock_guard lock(mutex_);
  HintRequest changed = requests_.at(index);
  changed.range.address = address;
  check_entry(changed);
  wanted_ += changed.range.address != 0;
  wanted_ -= requests_[index].range.address != 0;
  requests_[index] = changed;
}

TicketSpan HintBatch::tickets() const {
  const std::lock_guard lock(mutex_);
  return tickets_;
}

}  // namespace umem
