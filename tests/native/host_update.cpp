// Updates on the host: all instructions give the same bits, whatever the lengths and places in
// memory, and threads that share spans update each element once.
#include <sys/wait.h>
#include <unistd.h>

#include <bit>
#include <cstring>
#include <random>
#include <thread>

#include "check.hpp"
#include "host_update/workers.hpp"

namespace umem {
namespace {

constexpr HostForm kAdam{.first = First::nested, .second = Second::nested};

HostConstants constants() {
  HostConstants made;
  made.decay = 1e-3F;
  made.b1 = 0.9F, made.o1 = 0.1F, made.b2 = 0.95F, made.o2 = 0.05F;
  made.rate = 0.01F, made.root = 0.3F, made.eps = 1e-8F;
  return made;
}

// Four arrays with other memory around each.
struct Arrays {
  Arrays(std::size_t count, std::size_t offset, HostType type)
      : size(type == HostType::float32 ? 4 : 2),
        bytes(4, std::vector<unsigned char>((count + 64) * size)),
        offset_bytes(offset * size),
        count(count) {
    std::mt19937 random(count);
    for (auto& array : bytes)
      for (std::size_t i = 0; i + size <= array.size(); i += size) {
        const auto value = std::bit_cast<std::uint32_t>(
            static_cast<float>(1 + random() % 1000) * (random() % 2 ? 1e-3F : 1e-4F));
        const std::uint32_t bits = size == 4 ? value : value >> 16;
        std::memcpy(&array[i], &bits, size);
      }
  }

  HostSpan span(std::size_t begin, std::size_t end) {
    const auto at = [&](std::size_t n) {
      return reinterpret_cast<std::uintptr_t>(bytes[n].data()) + offset_bytes + begin * size;
    };
    return {at(0), at(1), at(2), at(3), end - begin};
  }

  const std::size_t size;
  std::vector<std::vector<unsigned char>> bytes;
  const std::size_t offset_bytes, count;
};

std::vector<HostForm> forms() {
  std::vector<HostForm> all;
  const auto vary = [&](auto HostForm::*part, auto last) {
    for (int i = 0; i <= static_cast<int>(last); ++i) {
      all.push_back(kAdam);
      all.back().*part = static_cast<decltype(last)>(i);
    }
  };
  vary(&HostForm::decay, Decay::gradient);
  vary(&HostForm::first, First::copied);
  vary(&HostForm::second, Second::square);
  vary(&HostForm::weight, Weight::addcmul);
  vary(&HostForm::ahead, Ahead::separate);
  return all;
}

TEST(all_instructions_give_the_same_bits_and_write_nothing_else) {
  for (const HostType type : {HostType::float32, HostType::bfloat16})
    for (const HostForm& form : forms())
      for (const auto& [count, offset] : {std::pair{1, 0}, {7, 1}, {511, 3}, {1027, 2}}) {
        Arrays plain(count, offset, type);
        const auto before = plain.bytes;
        host_instructions()[0].update(form, constants(), type, plain.span(0, count), 0, count);
        CHECK(plain.bytes != before);
        for (std::size_t n = 0; n < 4; ++n) {  // nothing around
          const auto end = plain.offset_bytes + count * plain.size;
          CHECK(std::equal(before[n].begin(), before[n].begin() + plain.offset_bytes,
                           plain.bytes[n].begin()));
          CHECK(std::equal(before[n].begin() + end, before[n].end(), plain.bytes[n].begin() + end));
        }
        CHECK(plain.bytes[1] == before[1]);  // gradients
        for (const Instructions& instructions : host_instructions()) {
          Arrays other(count, offset, type);
          // In two parts, of which one ends amid a vector.
          const std::size_t cut = count / 3;
          instructions.update(form, constants(), type, other.span(0, count), 0, cut);
          instructions.update(form, constants(), type, other.span(0, count), cut, count);
          CHECK(other.bytes == plain.bytes);
        }
      }
}

TEST(what_is_no_number_is_a_gpus) {
  for (const Instructions& instructions : host_instructions()) {
    float x = 1, g = std::bit_cast<float>(0xffc12345U), m = 0, v = 0;
    const auto at = [](float& value) { return reinterpret_cast<std::uintptr_t>(&value); };
    const HostSpan span{at(x), at(g), at(m), at(v), 1};
    instructions.update(kAdam, constants(), HostType::float32, span, 0, 1);
    for (const float value : {x, m, v}) CHECK_EQUAL(std::bit_cast<std::uint32_t>(value), 0x7fffffffU);
  }
}

TEST(threads_share_the_spans) {
  constexpr std::size_t kCount = 300'007;
  Arrays alone(kCount, 0, HostType::float32);
  host_instructions().back().update(kAdam, constants(), HostType::float32, alone.span(0, kCount), 0,
                                    kCount);
  HostWorkers workers(3, {0, -1, 1 << 20});
  CHECK_EQUAL(workers.threads(), 3);
  CHECK_EQUAL(std::string(workers.instructions()), host_instructions().back().name);
  Arrays shared(kCount, 0, HostType::float32);
  const std::vector<HostSpan> spans{shared.span(0, 5), shared.span(5, 5), shared.span(5, 150'000),
                                    shared.span(150'000, kCount)};
  workers.update(kAdam, constants(), HostType::float32, spans);
  CHECK(shared.bytes == alone.bytes);
  workers.update(kAdam, constants(), HostType::float32, {});
  CHECK(shared.bytes == alone.bytes);
}

TEST(callers_take_turns) {
  HostWorkers workers(2, {});
  std::vector<std::thread> callers;
  for (std::size_t caller = 0; caller < 3; ++caller)
    callers.emplace_back([&workers, caller] {
      Arrays own(70'000 + caller, 0, HostType::bfloat16), expected(70'000 + caller, 0,
                                                                   HostType::bfloat16);
      for (int i = 0; i < 5; ++i) {
        const std::vector<HostSpan> spans{own.span(0, own.count)};
        workers.update(kAdam, constants(), HostType::bfloat16, spans);
        host_instructions().back().update(kAdam, constants(), HostType::bfloat16,
                                          expected.span(0, own.count), 0, own.count);
      }
      CHECK(own.bytes == expected.bytes);
    });
  for (std::thread& caller : callers) caller.join();
}

TEST(a_child_refuses) {
  auto workers = std::make_unique<HostWorkers>(2, std::vector<int>{});
  const pid_t child = fork();
  if (child == 0) {
    alarm(20);  // kills the child, and so fails the test
    Arrays own(10, 0, HostType::float32);
    const std::vector<HostSpan> spans{own.span(0, 10)};
    CHECK_THROWS(std::runtime_error,
                 workers->update(kAdam, constants(), HostType::float32, spans));
    workers.reset();
    _exit(EXIT_SUCCESS);
  }
  int status = 0;
  CHECK_EQUAL(waitpid(child, &status, 0), child);
  CHECK(WIFEXITED(status));
  CHECK_EQUAL(WEXITSTATUS(status), EXIT_SUCCESS);
}

TEST(bad_arguments_throw) {
  CHECK_THROWS(std::invalid_argument, HostWorkers(0, {}));
  CHECK_THROWS(std::invalid_argument, HostWorkers(1, {}, "sse9"));
}

}  // namespace
}  // namespace umem
