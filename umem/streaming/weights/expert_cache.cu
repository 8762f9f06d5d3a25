// Keeps the experts of a table that were used last on the device. Compiled by NVRTC.
//
// `state` is slot_of[experts], holder[slots], used[slots], and then the number of the last call, of
// hits and of misses. -1 stands for no slot and for no expert.

namespace {

constexpr long long kNone = -1;
constexpr long long kWritten = -2;  // the row of another place is the same, and is written with it

}  // namespace

// Decides where each row comes from, and which slots the missing experts get: those that were used
// longest ago, and not by this call. By one warp. For each place, `plan` gets the slot to read or
// kNone for the home, and the slot to fill or kNone; or kWritten, and the place that has the same row.
extern "C" __global__ void choose(const long long* chosen, int count, int experts, int slots,
                                  long long* state, long long* plan) {
  long long* const slot_of = state;
  long long* const holder = slot_of + experts;
  long long* const used = holder + slots;
  long long* const counts = used + slots;
  const long long now = counts[0] + 1;
  const int lane = threadIdx.x;

  for (int place = lane; place < count; place += 32) {
    const long long expert = chosen[place];
    if (expert < -experts || expert >= experts) __trap();  // as torch's own kernel does
    const long long slot = slot_of[expert < 0 ? expert + experts : expert];
    plan[2 * place] = slot;
    plan[2 * place + 1] = kNone;
    if (slot != kNone) used[slot] = now;
  }
  __syncwarp();

  int misses = 0;
  for (int place = 0; place < count; ++place) {
    if (plan[2 * place] != kNone) continue;
    const long long expert = chosen[place] < 0 ? chosen[place] + experts : chosen[place];
    if (slot_of[expert] != kNone) {  // it came into the cache at an earlier place
      if (lane == 0) {
        int first = 0;
        while (plan[2 * first] != kNone || plan[2 * first + 1] != slot_of[expert]) ++first;
        plan[2 * place] = kWritten;
        plan[2 * place + 1] = first;
      }
      __syncwarp();
      continue;
    }
    ++misses;
    long long oldest = now;
    int victim = slots;
    for (int slot = lane; slot < slots; slot += 32)
      if (used[slot] < oldest) oldest = used[slot], victim = slot;
    for (int distance = 16; distance != 0; distance /= 2) {
      const long long other = __shfl_xor_sync(0xffffffff, oldest, distance);
      const int its = __shfl_xor_sync(0xffffffff, victim, distance);
      if (other < oldest || (other == oldest && its < victim)) oldest = other, victim = its;
    }
    if (lane == 0 && victim < slots) {
      if (holder[victim] != kNone) slot_of[holder[victim]] = kNone;
      holder[victim] = expert;
      slot_of[expert] = victim;
      used[victim] = now;
      plan[2 * place + 1] = victim;
    }
    __syncwarp();
  }
  if (lane == 0) {
    counts[0] = now;
    counts[1] += count - misses;
    counts[2] += misses;
  }
}

namespace {

// Four loads are in flight at a time: one would wait for the memory most of the time.
__device__ void copy(uint4* __restrict__ to, const uint4* __restrict__ from, long long words) {
  const long long step = static_cast<long long>(gridDim.x) * blockDim.x;
  long long word = static_cast<long long>(blockIdx.x) * blockDim.x + threadIdx.x;
  for (; word + 3 * step < words; word += 4 * step) {
    const uint4 a = from[word], b = from[word + step], c = from[word + 2 * step],
                d = from[word + 3 * step];
    to[word] = a;
    to[word + step] = b;
    to[word + 2 * step] = c;
    to[word + 3 * step] = d;
  }
  for (; word < words; word += step) to[word] = from[word];
}

}  // namespace

// Copies rows of `words` as planned. The y of a block is a place.
extern "C" __global__ void gather(const long long* chosen, int count, int experts,
                                  const long long* plan, const uint4* home, uint4* cache, uint4* out,
                                  long long words) {
  const int place = blockIdx.y;
  const long long slot = plan[2 * place], filled = plan[2 * place + 1];
  if (slot == kWritten) return;
  const long long expert = chosen[place] < 0 ? chosen[place] + experts : chosen[place];
  uint4* const row = out + place * words;
  copy(row, slot != kNone ? cache + slot * words : home + expert * words, words);
  if (slot != kNone || filled == kNone) return;
  // Each thread reads what it has written itself.
  copy(cache + filled * words, row, words);
  for (int other = place + 1; other < count; ++other)
    if (plan[2 * other] == kWritten && plan[2 * other + 1] == place)
      copy(out + other * words, row, words);
}
