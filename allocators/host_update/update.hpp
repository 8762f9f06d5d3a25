// An optimizer's update on the host's cores, in the arithmetic of torch's CUDA kernels.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

namespace umem {

// A form is how each part of an update is rounded. The names are of x, the weight; g, its gradient; m
// and v, its averages; a, what the weight moves by. umem/streaming/host_share/forms.py has the same
// names in the same order, and says what takes which.
enum class Decay : std::uint8_t {
  none,
  weight_fused,    // x = fma(-decay, x, x)
  weight,          // x = x - decay * x
  scaled,          // x = x * decay
  gradient_fused,  // g = fma(decay, x, g)
  gradient,        // g = g + decay * x
};
enum class First : std::uint8_t {
  nested,      // m = fma(b1, m, fma(-b1, g, g))
  left,        // m = fma(b1, m, o1 * g)
  right,       // m = fma(o1, g, b1 * m)
  separate,    // m = b1 * m + o1 * g
  lerp_fused,  // m = fma(o1, g - m, m)
  lerp,        // m = m + o1 * (g - m)
  back_fused,  // m = fma(-(g - m), b1, g)
  back,        // m = g - (g - m) * b1
  copied,      // m = g
};
enum class Second : std::uint8_t {
  none,
  nested,        // v = fma(b2, v, fma(-b2, g * g, g * g))
  left,          // v = fma(b2, v, (o2 * g) * g)
  right,         // v = fma(o2 * g, g, b2 * v)
  separate,      // v = b2 * v + (o2 * g) * g
  square_fused,  // v = fma(o2, g * g, b2 * v)
  square,        // v = b2 * v + o2 * (g * g)
};
enum class Ahead : std::uint8_t {
  none,      // a = m
  fused,     // a = fma(b1, m, g)
  separate,  // a = g + b1 * m
};
enum class Weight : std::uint8_t {
  quotient,        // x = x - (rate * a) / d, where d = sqrt(v) / root + eps
  addcdiv_fused,   // x = fma(rate, a / d, x)
  addcdiv,         // x = x + rate * (a / d)
  addcmul_fused,   // x = fma(rate, a, x)
  addcmul,         // x = x + rate * a
};

struct HostForm {
  Decay decay = Decay::none;
  First first = First::nested;
  Second second = Second::none;
  Ahead ahead = Ahead::none;
  Weight weight = Weight::quotient;

  constexpr bool operator==(const HostForm&) const = default;
};

struct HostNumbers {
  float decay = 0, b1 = 0, o1 = 0, b2 = 0, o2 = 0, rate = 0, root = 1, eps = 0;
};

struct HostConstants : HostNumbers {
  bool negates = false;  // the gradient, behind what follows
  // Of the gradient, one after the other; each product is rounded as gradients are stored.
  std::vector<float> factors;
  float scale = 1;        // by which the gradient is divided, if
  bool unscales = false;  // which also stores the quotient as the gradient
};

enum class HostType : std::uint8_t { float32, bfloat16 };

// Elements of one parameter, all of one type. `second` is 0 where the form has none.
struct HostSpan {
  std::uintptr_t weight = 0, gradient = 0, first = 0, second = 0;
  std::size_t count = 0;
};

// Updates the elements [begin, end) of a span. Exact under the default floating-point environment.
using UpdateElements = void (*)(const HostForm&, const HostConstants&, HostType, const HostSpan&,
                                std::size_t begin, std::size_t end);

struct Instructions {
  const char* name;
  UpdateElements update;
};

// What this processor has, slowest first: "plain", then "avx2", "avx512". All give the same bits.
const std::vector<Instructions>& host_instructions();

}  // namespace umem
