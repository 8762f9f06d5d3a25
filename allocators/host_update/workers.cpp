#include "host_update/workers.hpp"

#include <pthread.h>
#include <sched.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cfenv>
#include <condition_variable>
#include <mutex>
#include <stdexcept>
#include <thread>

#include "core/signals_blocked.hpp"

namespace umem {
namespace {

// Elements that a thread takes at a time: 1 MiB of four arrays, small beside what a step updates.
constexpr std::size_t kChunk = std::size_t{1} << 16;

const Instructions& find_instructions(const std::string& name) {
  const std::vector<Instructions>& all = host_instructions();
  if (name.empty()) return all.back();
  const auto found =
      std::find_if(all.begin(), all.end(), [&](const Instructions& it) { return it.name == name; });
  if (found == all.end()) throw std::invalid_argument("instructions: this processor has no " + name);
  return *found;
}

// Those of the CPUs that the process may use. None of them: the threads run where it may.
void run_on(const std::vector<int>& cpus) {
  cpu_set_t set;
  CPU_ZERO(&set);
  for (const int cpu : cpus)
    if (cpu >= 0 && cpu < CPU_SETSIZE) CPU_SET(cpu, &set);
  pthread_setaffinity_np(pthread_self(), sizeof set, &set);
}

}  // namespace

struct HostWorkers::Shared {
  explicit Shared(const Instructions& chosen) : instructions(chosen) {}

  const Instructions& instructions;
  const pid_t process = getpid();
  std::mutex turn;  // of the callers
  std::mutex mutex;
  std::condition_variable begun, ended;
  // The update that runs, which its caller keeps.
  const HostForm* form = nullptr;
  const HostConstants* constants = nullptr;
  HostType type = HostType::float32;
  std::span<const HostSpan> spans;
  std::vector<std::size_t> first_chunks;  // of each span, and one behind all
  std::atomic<std::size_t> next_chunk{0};
  std::uint64_t number = 0;  // of updates
  int working = 0;
  bool stops = false;
  std::vector<std::thread> threads;

  void run(const std::vector<int>& cpus) {
    if (!cpus.empty()) run_on(cpus);
    // A thread inherits its maker's, which may flush small numbers to zero.
    std::fesetenv(FE_DFL_ENV);
    std::unique_lock lock(mutex);
    for (std::uint64_t seen = 0;;) {
      begun.wait(lock, [&] { return stops || number != seen; });
      if (stops) return;
      seen = number;
      lock.unlock();
      update_chunks();
      lock.lock();
      if (--working == 0) ended.notify_all();
    }
  }

  void update_chunks() {
    std::size_t span = 0;
    for (;;) {
      const std::size_t chunk = next_chunk.fetch_add(1, std::memory_order_relaxed);
      if (chunk >= first_chunks.back()) return;
      while (chunk >= first_chunks[span + 1]) ++span;
      const std::size_t begin = (chunk - first_chunks[span]) * kChunk;
      const std::size_t end = std::min(spans[span].count, begin + kChunk);
      instructions.update(*form, *constants, type, spans[span], begin, end);
    }
  }

  void stop() {
    {
      const std::lock_guard lock(mutex);
      stops = true;
    }
    begun.notify_all();
    for (std::thread& thread : threads) thread.join();
  }
};

HostWorkers::HostWorkers(int threads, const std::vector<int>& cpus,
                         const std::string& instructions) {
  if (threads < 1) throw std::invalid_argument("threads: at least 1");
  shared_ = std::make_unique<Shared>(find_instructions(instructions));
  shared_->threads.reserve(static_cast<std::size_t>(threads));
  try {
    const SignalsBlocked blocked;
    for (int i = 0; i < threads; ++i)
      shared_->threads.emplace_back([shared = shared_.get(), cpus] { shared->run(cpus); });
  } catch (...) {
    shared_->stop();
    throw;
  }
}

HostWorkers::~HostWorkers() {
  if (getpid() == shared_->process)
    shared_->stop();
  else  // its threads did not come along, and to destroy what they wait on would wait for them
    static_cast<void>(shared_.release());
}

void HostWorkers::update(const HostForm& form, const HostConstants& constants, HostType type,
                         std::span<const HostSpan> spans) {
  if (getpid() != shared_->process)
    throw std::runtime_error("an update in a forked child: its threads are in the parent");
  const std::lock_guard turn(shared_->turn);
  std::vector<std::size_t> first_chunks{0};
  for (const HostSpan& span : spans)
    first_chunks.push_back(first_chunks.back() + (span.count + kChunk - 1) / kChunk);
  if (first_chunks.back() == 0) return;
  std::unique_lock lock(shared_->mutex);
  shared_->form = &form;
  shared_->constants = &constants;
  shared_->type = type;
  shared_->spans = spans;
  shared_->first_chunks = std::move(first_chunks);
  shared_->next_chunk = 0;
  shared_->working = threads();
  ++shared_->number;
  shared_->begun.notify_all();
  shared_->ended.wait(lock, [&] { return shared_->working == 0; });
}

const char* HostWorkers::instructions() const noexcept { return shared_->instructions.name; }

int HostWorkers::threads() const noexcept { return static_cast<int>(shared_->threads.size()); }

}  // namespace umem
