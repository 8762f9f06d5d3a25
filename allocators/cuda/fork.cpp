#include "cuda/fork.hpp"

#include <pthread.h>

#include "core/allocator.hpp"

namespace umem {
namespace {

Allocator* guarded = nullptr;
bool forked = false;

}  // namespace

bool in_forked_child() noexcept { return forked; }

void guard_forks(Allocator& allocator) {
  guarded = &allocator;
  pthread_atfork([] { guarded->lock_all(); }, [] { guarded->unlock_all(); },
                 [] {
                   forked = true;
                   guarded->unlock_all();
                 });
}

}  // namespace umem
