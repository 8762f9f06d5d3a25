// Notifies engines in a forked child.
#pragma once

namespace umem {

class HintEngine;

// From watch to unwatch, a fork calls the engine's abandon() in the child.
void watch_forks(HintEngine& engine);
void unwatch_forks(HintEngine& engine);

}  // namespace umem
