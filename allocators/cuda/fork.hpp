// What a forked child may do: nothing with CUDA.
#pragma once

namespace umem {

class Allocator;

// True in a child of a fork made after `guard_forks`: CUDA is unusable there.
bool in_forked_child() noexcept;

// Holds the allocator's locks across every fork, so that a child (a DataLoader worker, say) which
// drops a tensor finds them free.
void guard_forks(Allocator& allocator);

}  // namespace umem
