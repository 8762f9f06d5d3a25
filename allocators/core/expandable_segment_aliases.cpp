// Aliases: which addresses, for which handles, and back.
#include <algorithm>
#include <utility>

#include "core/expandable_segment.hpp"

namespace umem {
namespace {

// Requests of ever other sizes would leave shadows without end, which cost time to unmap.
constexpr std::size_t kMostAliases = 32;

struct PlaceRun {
  std::size_t first, count;
};

// Adds the places from `first` to `end` of which `holds`, adjacent ones as one run.
void add_runs(const std::vector<bool>& holds, std::size_t first, std::size_t end,
              std::vector<PlaceRun>& runs) {
  bool goes_on = false;
  for (std::size_t i = first; i < end; ++i) {
    if (holds[i] && goes_on)
      ++runs.back().count;
    else if (holds[i])
      runs.push_back({i, 1});
    goes_on = holds[i];
  }
}

// `count` places of those in `runs`: of the smallest run that is enough, or else of the largest.
std::vector<std::size_t> take_places(std::vector<PlaceRun> runs, std::size_t count) {
  std::sort(runs.begin(), runs.end(),
            [](const PlaceRun& a, const PlaceRun& b) { return a.count < b.count; });
  std::vector<std::size_t> places;
  while (places.size() < count) {
    auto enough = std::find_if(runs.begin(), runs.end(), [&](const PlaceRun& run) {
      return run.count >= count - places.size();
    });
    if (enough == runs.end()) --enough;
    const std::size_t taken = std::min(enough->count, count - places.size());
    for (std::size_t i = enough->count - taken; i < enough->count; ++i)
      places.push_back(enough->first + i);
    runs.erase(enough);
  }
  return places;
}

}  // namespace

// The first `count` places of aliases, side by side, where nothing is mapped; those behind all
// others if no gap is left. Where aliases ended long ago, their handles have gone elsewhere since.
std::size_t ExpandableSegment::first_gap(std::size_t count) const {
  std::size_t first = first_alias_;
  for (std::size_t i = first; i < std::min(end_of_aliases_, first + count); ++i)
    if (places_[i].owned != 0 || places_[i].shadow != 0) first = i + 1;
  return first;
}

// The addresses that cost least, without sources: those of an alias that has ended, or new ones.
std::optional<AliasPlan> ExpandableSegment::cheapest_alias(
    std::size_t count, const std::vector<bool>& is_free,
    const std::function<bool(std::uintptr_t)>& is_busy) const {
  std::optional<AliasPlan> cheapest;
  std::size_t ended = 0;
  for (const Alias& alias : aliases_) {
    if (!alias.homes.empty()) continue;
    ++ended;
    if (alias.count < count) continue;
    AliasPlan plan;
    plan.first = alias.first;
    for (std::size_t i = alias.first; i < alias.first + count; ++i) {
      const HandleId shadow = places_[i].shadow;
      if (shadow != 0 && is_free[handles_.at(shadow).place]) continue;
      plan.cost += shadow == 0 ? kMapCost : kMapCost + kUnmapCost;
      plan.unmaps = plan.unmaps || shadow != 0;
    }
    if (plan.unmaps && is_busy(range_of(alias.first, 1).address)) plan.cost += kWaitCost;
    if (!cheapest || plan.cost < cheapest->cost) cheapest = std::move(plan);
  }
  const bool may_be_new =
      !cheapest || (ended < kMostAliases && count * kMapCost < cheapest->cost);
  const std::size_t gap = may_be_new ? first_gap(count) : 0;
  if (may_be_new && gap + count <= addresses_.bytes / handle_bytes_) {
    cheapest.emplace();
    cheapest->first = gap;
    cheapest->cost = count * kMapCost;
  }
  return cheapest;
}

std::optional<AliasPlan> ExpandableSegment::plan_alias(
    std::size_t count, const std::vector<Range>& free,
    const std::function<bool(std::uintptr_t)>& is_busy) const {
  std::vector<bool> is_free(places_.size());
  std::size_t free_count = 0;
  for (const Range& range : free) {
    const std::size_t first = number_of(range.address), more = range.bytes / handle_bytes_;
    std::fill_n(is_free.begin() + static_cast<std::ptrdiff_t>(first), more, true);
    free_count += more;
  }
  if (free_count < count) return std::nullopt;
  std::optional<AliasPlan> plan = cheapest_alias(count, is_free, is_busy);
  if (!plan) return std::nullopt;

  plan->sources.resize(count);
  std::vector<std::size_t> missing;  // places of the plan
  for (std::size_t i = 0; i < count; ++i) {
    const std::size_t place = plan->first + i;
    const HandleId shadow = place < places_.size() ? places_[place].shadow : 0;
    if (shadow != 0 && is_free[handles_.at(shadow).place]) {
      plan->sources[i] = handles_.at(shadow).place;
      is_free[plan->sources[i]] = false;
    } else {
      missing.push_back(i);
    }
  }
  if (missing.empty()) return plan;
  // Of `free` only: a card has tens of thousands of places.
  std::vector<PlaceRun> runs;
  for (const Range& range : free)
    add_runs(is_free, number_of(range.address), number_of(range.address + range.bytes), runs);
  const std::vector<std::size_t> others = take_places(std::move(runs), missing.size());
  for (std::size_t i = 0; i < missing.size(); ++i) plan->sources[missing[i]] = others[i];
  return plan;
}

std::vector<Range> ExpandableSegment::sources_of(const AliasPlan& plan,
                                                 const std::vector<Range>& free) const {
  const std::vector<Range> taken = ranges_of(plan.sources);
  std::vector<Range> sources;
  for (const Range& range : free)
    for (const Range& part : taken) {
      const std::uintptr_t from = std::max(range.address, part.address);
      const std::uintptr_t to =
          std::min(range.address + range.bytes, part.address + part.bytes);
      if (from < to) sources.push_back({from, to - from});
    }
  return sources;
}

bool ExpandableSegment::map_alias(const AliasPlan& plan) {
  const std::size_t count = plan.sources.size(), end = plan.first + count;
  if (places_.size() < end) places_.resize(end);
  std::vector<std::size_t> missing;
  std::vector<HandleId> handles;  // that belong there
  for (std::size_t i = 0; i < count; ++i) {
    const HandleId handle = places_[plan.sources[i]].owned;
    if (places_[plan.first + i].shadow == handle) continue;
    unmap_shadow(plan.first + i);
    missing.push_back(plan.first + i);
    handles.push_back(handle);
  }
  if (!missing.empty() &&
      !memory_.map(device_, ranges_of(std::move(missing)), handle_bytes_, handles))
    return false;
  for (std::size_t i = 0; i < count; ++i) {
    const HandleId handle = places_[plan.sources[i]].owned;
    leave(plan.sources[i]);
    own(plan.first + i, handle);
  }
  const auto ended = std::find_if(aliases_.begin(), aliases_.end(), [&](const Alias& alias) {
    return alias.first == plan.first && alias.count >= count;
  });
  if (ended != aliases_.end()) {
    ended->homes = plan.sources;
    return true;
  }
  // Of aliases there, one may be in use, whose last places are not.
  std::erase_if(aliases_, [&](Alias& alias) {
    if (alias.first >= end || plan.first >= alias.first + alias.count) return false;
    alias.count = alias.homes.size();
    return alias.count == 0;
  });
  aliases_.push_back({plan.first, count, plan.sources});
  end_of_aliases_ = std::max(end_of_aliases_, end);
  return true;
}

std::vector<Range> ExpandableSegment::end_alias(Range range) {
  const std::size_t first = number_of(range.address);
  const auto alias = std::find_if(aliases_.begin(), aliases_.end(),
                                  [&](const Alias& it) { return it.first == first; });
  const std::vector<std::size_t> homes = std::exchange(alias->homes, {});
  std::vector<std::size_t> places;
  bool all_return = true;
  for (std::size_t i = 0; i < homes.size(); ++i) {
    const HandleId handle = places_[first + i].owned;
    const bool returns = places_[homes[i]].shadow == handle;
    all_return = all_return && returns;
    places.push_back(returns ? homes[i] : first + i);
    if (!returns) continue;
    leave(first + i);
    own(homes[i], handle);
  }
  if (!all_return) keep_alias(range);
  return ranges_of(std::move(places));
}

void ExpandableSegment::keep_alias(Range range) {
  std::erase_if(aliases_,
                [&](const Alias& alias) { return alias.first == number_of(range.address); });
}

}  // namespace umem
