#include "hints/hint_engine.hpp"

#include <stdexcept>

#include "hints/fork_guard.hpp"
#include "hints/hint_crew.hpp"

namespace umem {
namespace {

constexpr std::int64_t kPatienceNs = 10'000'000'000;  // for a driver call to end, at destruction

void require(bool condition, const char* message) {
  if (!condition) throw std::invalid_argument(message);
}

const HintSettings& checked(const HintSettings& settings) {
  require(settings.chunk_bytes >= kPageBytes, "chunk_bytes: at least 2 MiB, one block of pages");
  require(settings.in_flight_bytes >= kPageBytes, "in_flight_bytes: at least 2 MiB");
  require(settings.capacity > 0, "capacity: at least one request");
  require(settings.prefetch_workers > 0 && settings.prefetch_workers <= 16,
          "prefetch_workers: from 1 to 16");
  require(settings.poll_ns > 0, "poll_ns: more than 0");
  return settings;
}

void check_range(Range range) {
  require(range.address != 0, "a hint's address cannot be 0");
  require(range.bytes != 0, "a hint's range cannot be empty");
  require(range.bytes <= UINTPTR_MAX - range.address, "a hint's range ends beyond all addresses");
}

void check_request(const HintRequest& request) {
  require(static_cast<std::size_t>(request.op) < kHintOps, "no such operation");
  require(static_cast<std::size_t>(request.tensor_class) < kClasses, "no such tensor class");
  require(request.device >= 0, "a device's number cannot be negative");
  check_range(request.range);
  if (request.op == HintOp::copy_in || request.op == HintOp::copy_out)
    check_range({request.host_address, request.range.bytes});
}

}  // namespace

HintEngine::HintEngine(const HintSettings& settings, std::unique_ptr<HintDriver> driver)
    : crew_(std::make_shared<HintCrew>(checked(settings), std::move(driver))) {
  watch_forks(*this);
}

HintEngine::~HintEngine() {
  unwatch_forks(*this);
  shutdown(kPatienceNs);
}

void HintEngine::abandon() noexcept {
  forked_ = true;
  // Never destroyed here: it ends threads that this process does not have.
  new std::shared_ptr<HintCrew>(std::move(crew_));
}

void HintEngine::start(int device) {
  require(device >= 0, "a device's number cannot be negative");
  if (!forked()) crew_->start(device);
}

Ticket HintEngine::submit(const HintRequest& request) {
  check_request(request);
  if (!forked()) return crew_->submit(request);
  ++refused_in_child_;
  return 0;
}

void HintEngine::mark_needed(Ticket ticket) {
  if (forked() || ticket == 0) return;
  crew_->tell({.kind = Message::Kind::needed, .ticket = ticket, .now_ns = monotonic_ns()});
}

EventId HintEngine::record(int device, StreamId stream) {
  require(device >= 0, "a device's number cannot be negative");
  return forked() ? kNoEvent : crew_->record(device, stream);
}

void HintEngine::release(EventId event) {
  if (!forked()) crew_->tell({.kind = Message::Kind::release, .request = {.event = event}});
}

void HintEngine::set_budget(int device, std::size_t bytes) {
  require(device >= 0, "a device's number cannot be negative");
  if (!forked())
    crew_->tell({.kind = Message::Kind::budget,
                 .request = {.range = {.address = 0, .bytes = bytes}, .device = device}});
}

void HintEngine::set_resident(int device, Range range, bool resident) {
  require(device >= 0, "a device's number cannot be negative");
  check_range(range);
  if (!forked())
    crew_->tell({.kind = resident ? Message::Kind::resident : Message::Kind::absent,
                 .request = {.range = range, .device = device}});
}

bool HintEngine::forget(Range range, std::int64_t timeout_ns) {
  check_range(range);
  return forked() || crew_->forget(range, timeout_ns);
}

std::optional<Outcome> HintEngine::wait(Ticket ticket, std::int64_t timeout_ns) {
  return forked() ? std::nullopt : crew_->wait(ticket, timeout_ns);
}

std::optional<HintRecord> HintEngine::find(Ticket ticket) {
  return forked() ? std::nullopt : crew_->find(ticket);
}

HintStatistics HintEngine::statistics() {
  if (!forked()) return crew_->statistics();
  HintStatistics stats;
  stats.refused = refused_in_child_;
  return stats;
}

bool HintEngine::shutdown(std::int64_t timeout_ns) {
  return forked() || crew_->shutdown(timeout_ns);
}

}  // namespace umem
