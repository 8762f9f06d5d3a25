// The tensor class of new blocks: the phase of the process, and overrides by thread.
#include <future>
#include <thread>

#include "check.hpp"
#include "core/class_context.hpp"

namespace umem {
namespace {

TensorClass current_in_another_thread(const ClassContext& classes) {
  return std::async(std::launch::async, [&] { return classes.current(); }).get();
}

TEST(the_phase_is_everywhere) {
  ClassContext classes;
  CHECK(classes.current() == TensorClass::weights);  // before the first forward
  classes.set_phase(TensorClass::activations);
  CHECK(classes.phase() == TensorClass::activations);
  CHECK(classes.current() == TensorClass::activations);
  CHECK(current_in_another_thread(classes) == TensorClass::activations);
}

TEST(an_override_reaches_threads_without_their_own) {
  ClassContext classes;
  classes.set_phase(TensorClass::activations);
  const std::uint64_t token = classes.enter(TensorClass::other);
  CHECK(classes.current() == TensorClass::other);
  CHECK(current_in_another_thread(classes) == TensorClass::other);
  CHECK(classes.phase() == TensorClass::activations);
  CHECK(classes.leave(token));
  CHECK(classes.current() == TensorClass::activations);
  CHECK(current_in_another_thread(classes) == TensorClass::activations);
}

TEST(a_thread_keeps_its_own_override) {
  ClassContext classes;
  classes.set_phase(TensorClass::activations);
  const std::uint64_t mine = classes.enter(TensorClass::weights);
  std::thread([&] {
    const std::uint64_t theirs = classes.enter(TensorClass::gradients);
    CHECK(classes.current() == TensorClass::gradients);
    CHECK(current_in_another_thread(classes) == TensorClass::gradients);  // the latest entered
    CHECK(!classes.leave(mine));  // another thread's
    CHECK(classes.leave(theirs));
  }).join();
  CHECK(classes.current() == TensorClass::weights);
  CHECK(current_in_another_thread(classes) == TensorClass::weights);
  CHECK(classes.leave(mine));
  CHECK(classes.current() == TensorClass::activations);
}

TEST(overrides_nest) {
  ClassContext classes;
  const std::uint64_t outer = classes.enter(TensorClass::gradients);
  const std::uint64_t inner = classes.enter(TensorClass::other);
  CHECK(classes.current() == TensorClass::other);
  CHECK(classes.leave(inner));
  CHECK(classes.current() == TensorClass::gradients);
  CHECK(classes.leave(outer));
  CHECK(!classes.leave(outer));
  CHECK(classes.current() == TensorClass::weights);
}

// Generators may end their contexts in any order.
TEST(overrides_may_end_out_of_order) {
  ClassContext classes;
  const std::uint64_t first = classes.enter(TensorClass::gradients);
  const std::uint64_t second = classes.enter(TensorClass::other);
  const std::uint64_t third = classes.enter(TensorClass::activations);
  CHECK(classes.leave(first));
  CHECK(classes.current() == TensorClass::activations);
  CHECK(classes.leave(third));
  CHECK(classes.current() == TensorClass::other);
  CHECK(current_in_another_thread(classes) == TensorClass::other);
  CHECK(classes.leave(second));
  CHECK(classes.current() == TensorClass::weights);
}

TEST(a_phase_set_within_an_override_shows_after_it) {
  ClassContext classes;
  const std::uint64_t token = classes.enter(TensorClass::other);
  classes.set_phase(TensorClass::optimizer_state);
  CHECK(classes.current() == TensorClass::other);
  CHECK(current_in_another_thread(classes) == TensorClass::other);
  CHECK(classes.leave(token));
  CHECK(classes.current() == TensorClass::optimizer_state);
  CHECK(current_in_another_thread(classes) == TensorClass::optimizer_state);
}

TEST(contexts_do_not_mix) {
  ClassContext first, second;
  const std::uint64_t token = first.enter(TensorClass::gradients);
  const std::uint64_t other_token = second.enter(TensorClass::other);
  CHECK(first.current() == TensorClass::gradients);
  CHECK(second.current() == TensorClass::other);
  CHECK(first.leave(token));
  CHECK(second.current() == TensorClass::other);
  CHECK(first.current() == TensorClass::weights);
  CHECK(second.leave(other_token));
}

TEST(too_deep_a_nest_is_an_error) {
  ClassContext classes;
  std::vector<std::uint64_t> tokens;
  for (int depth = 0; depth < 32; ++depth) tokens.push_back(classes.enter(TensorClass::other));
  CHECK_THROWS(std::length_error, classes.enter(TensorClass::weights));
  CHECK(classes.current() == TensorClass::other);
  for (const std::uint64_t token : tokens) CHECK(classes.leave(token));
  CHECK(classes.current() == TensorClass::weights);
}

TEST(many_threads_agree_in_the_end) {
  ClassContext classes;
  classes.set_phase(TensorClass::activations);
  std::vector<std::thread> threads;
  for (std::size_t number = 0; number < 4; ++number)
    threads.emplace_back([&classes, number] {
      const auto own = static_cast<TensorClass>(number);
      for (int i = 0; i < 2000; ++i) {
        const std::uint64_t token = classes.enter(own);
        CHECK(classes.current() == own);
        CHECK(classes.leave(token));
        CHECK(static_cast<std::size_t>(classes.current()) < kClasses);
      }
    });
  for (std::thread& thread : threads) thread.join();
  CHECK(classes.current() == TensorClass::activations);
}

}  // namespace
}  // namespace umem
