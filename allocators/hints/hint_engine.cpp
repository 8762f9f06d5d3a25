#include "hints/hint_engine.hpp"

#include "hints/checks.hpp"
#include "hints/fork_guard.hpp"
#include "hints/hint_workers.hpp"

namespace umem {
namespace {

constexpr std::int64_t kPatienceNs = 10'000'000'000;  // for a driver call to end, at destruction

const HintSettings& checked(const HintSettings& settings) {
  require(settings.chunk_bytes >= kPageBytes, "chunk_bytes: at least 2 MiB, one block of pages");
  require(settings.in_flight_bytes >= kPageBytes, "in_flight_bytes: at least 2 MiB");
  require(settings.capacity > 0, "capacity: at least one request");
  require(settings.prefetch_workers > 0 && settings.prefetch_workers <= 16,
          "prefetch_workers: from 1 to 16");
  require(settings.poll_ns > 0, "poll_ns: more than 0");
  return settings;
}

}  // namespace

HintEngine::HintEngine(const HintSettings& settings, std::unique_ptr<HintDriver> driver)
    : workers_(std::make_shared<HintWorkers>(checked(settings), std::move(driver))) {
  watch_forks(*this);
}

HintEngine::~HintEngine() {
  unwatch_forks(*this);
  if (!shut_down_) shutdown(kPatienceNs);
}

void HintEngine::abandon() noexcept {
  forked_ = true;
  workers_->abandon();  // for its allocator, which still has it
  // Not destroyed here: the destructor ends threads that this process does not have.
  new std::shared_ptr<HintWorkers>(std::move(workers_));
}

void HintEngine::start(int device) {
  check_device(device);
  if (!forked()) workers_->start(device);
}

Ticket HintEngine::submit(const HintRequest& request) {
  check_request(request);
  if (!forked()) return workers_->submit(request);
  ++refused_in_child_;
  return 0;
}

void HintEngine::mark_needed(std::vector<Ticket> tickets) {
  if (!forked()) workers_->mark_needed(std::move(tickets));
}

TicketSpan HintEngine::submit_batch(HintBatch& batch, StreamId stream,
                                    std::span<const Ticket> after) {
  require(after.empty() || after.size() == batch.size(),
          "after: one ticket for each entry, or none");
  if (!forked()) return workers_->submit_batch(batch, stream, after);
  refused_in_child_ += batch.wanted();
  return {};
}

bool HintEngine::forget(Range range, std::int64_t timeout_ns) {
  check_range(range);
  return forked() || workers_->forget({&range, 1}, timeout_ns);
}

std::shared_ptr<ReleaseListener> HintEngine::release_listener() const {
  return forked() ? nullptr : workers_;
}

std::optional<Outcome> HintEngine::wait(Ticket ticket, std::int64_t timeout_ns) {
  return forked() ? std::nullopt : workers_->wait(ticket, timeout_ns);
}

std::optional<Outcome> HintEngine::ended(Ticket ticket) const noexcept {
  return forked() ? std::nullopt : workers_->ended(ticket);
}

HintStatistics HintEngine::statistics() {
  if (!forked()) return workers_->statistics();
  HintStatistics stats;
  stats.refused = refused_in_child_;
  return stats;
}

bool HintEngine::shutdown(std::int64_t timeout_ns) {
  shut_down_ = true;
  return forked() || workers_->shutdown(timeout_ns);
}

}  // namespace umem
