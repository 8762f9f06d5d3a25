// The parts of a range that lie in one allocation each.
#pragma once

#include "hints/request.hpp"

namespace umem {

// Adjacent segments are separate allocations, and no call of the driver may span two of them.
// `find(address, allocation)` returns 0 and sets the allocation that an address lies in, or else an
// error: then the address is no allocation of the driver's but pageable memory, of which a call may
// span any. `call(part)` returns 0 or an error, which ends the walk and is returned.
template <class Find, class Call>
auto for_each_allocation(Range range, Find find, Call call) -> decltype(call(range)) {
  while (range.bytes != 0) {
    Range allocation{};
    const bool is_known = find(range.address, allocation) == 0;
    const Range part = is_known ? common(range, allocation) : range;
    if (const auto error = call(part)) return error;
    range = {end_of(part), end_of(range) - end_of(part)};
  }
  return {};
}

}  // namespace umem
