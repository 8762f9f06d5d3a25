// Fork safety: a forked child must not use CUDA.
#pragma once

namespace umem {

class Allocator;

// True in a child of a fork made after `guard_forks`: CUDA is unusable there.
bool in_forked_child() noexcept;

// Holds the allocator's locks across every fork, so that they are free in a child, such as a
// DataLoader worker that drops a tensor.
void guard_forks(Allocator& allocator);

}  // namespace umem
