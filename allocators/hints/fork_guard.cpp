#include "hints/fork_guard.hpp"

#include <pthread.h>

#include <mutex>
#include <utility>
#include <vector>

#include "hints/hint_engine.hpp"

namespace umem {
namespace {

struct Watched {
  Watched() {
    pthread_atfork([] { all().mutex.lock(); }, [] { all().mutex.unlock(); },
                   [] {
                     // Once: a child of this child sees empty lists.
                     for (HintEngine* engine : std::exchange(all().engines, {}))
                       engine->abandon();
                     all().mutex.unlock();
                   });
  }
  // Never destroyed: a fork may happen during static destruction.
  static Watched& all() {
    static Watched* const watched = new Watched;
    return *watched;
  }

  std::mutex mutex;
  std::vector<HintEngine*> engines;
};

}  // namespace

void watch_forks(HintEngine& engine) {
  Watched& watched = Watched::all();
  const std::lock_guard lock(watched.mutex);
  watched.engines.push_back(&engine);
}

void unwatch_forks(HintEngine& engine) {
  Watched& watched = Watched::all();
  const std::lock_guard lock(watched.mutex);
  std::erase(watched.engines, &engine);
}

}  // namespace umem
