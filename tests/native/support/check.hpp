// What a native test fails by: the place and the values on stderr, and exit status 1.
#pragma once

#include <unistd.h>

#include <cstddef>
#include <cstdio>
#include <cstdlib>
#include <iostream>
#include <sstream>
#include <string>
#include <vector>

namespace umem {
inline constexpr std::size_t KiB = std::size_t{1} << 10;
inline constexpr std::size_t MiB = std::size_t{1} << 20;
inline constexpr std::size_t GiB = std::size_t{1} << 30;
// 4 KiB on x86-64; 64 KiB on many kernels for Arm.
inline const auto kHostPageBytes = static_cast<std::size_t>(sysconf(_SC_PAGESIZE));

// In an array that has an entry for each value.
template <class Enum>
constexpr std::size_t number_of(Enum value) {
  return static_cast<std::size_t>(value);
}
}  // namespace umem

namespace check {

// Other threads may still run, so nothing is unwound and no destructor is called.
[[noreturn]] inline void fail(const char* file, int line, const std::string& what) {
  std::fprintf(stderr, "%s:%d: %s\n", file, line, what.c_str());
  std::fflush(nullptr);
  std::_Exit(EXIT_FAILURE);
}

template <class Actual, class Expected>
void equal(const char* file, int line, const char* text, const Actual& actual,
           const Expected& expected) {
  if (actual == static_cast<Actual>(expected)) return;
  std::ostringstream what;
  what << text << " is " << actual << ", expected " << static_cast<Actual>(expected);
  fail(file, line, what.str());
}

struct Test {
  const char* name;
  void (*run)();
};

// The tests of this program, in the order of its file; main() of support/main.cpp runs them.
inline std::vector<Test>& tests() {
  static std::vector<Test> all;
  return all;
}
struct Added {
  explicit Added(const Test& test) { tests().push_back(test); }
};

}  // namespace check

#define CHECK(condition) \
  ((condition) ? void() : check::fail(__FILE__, __LINE__, "not so: " #condition))
#define CHECK_EQUAL(actual, expected) \
  check::equal(__FILE__, __LINE__, #actual, (actual), (expected))
#define CHECK_THROWS(Error, expression)                                              \
  do {                                                                               \
    bool thrown = false;                                                             \
    try {                                                                            \
      (void)(expression);                                                            \
    } catch (const Error&) {                                                         \
      thrown = true;                                                                 \
    }                                                                                \
    if (!thrown) check::fail(__FILE__, __LINE__, #expression " threw no " #Error);   \
  } while (false)
#define TEST(name)                                  \
  void name();                                      \
  const check::Added name##_added({#name, name});   \
  void name()
