// Compiled without contraction: what is fused is written so.
#include "host_update/update.hpp"

#include <algorithm>
#include <bit>
#include <cstring>

#ifdef __FAST_MATH__
#error "The bits of an update depend on strict floating-point arithmetic."
#endif

namespace umem {
namespace {

// Elements that are updated at a time: what all parts keep of them stays in the first cache.
constexpr std::size_t kBlock = 512;

// What a GPU gives where a result is not a number.
constexpr std::uint32_t kNotANumber = 0x7fffffff;

#define UMEM_INLINE [[gnu::always_inline]] inline

UMEM_INLINE float fma(float a, float b, float c) { return __builtin_fmaf(a, b, c); }

// Each part is one loop over a block, which the compiler vectorises for the caller's instructions.
struct Block {
  alignas(64) float x[kBlock], g[kBlock], m[kBlock], v[kBlock];
};

// All of a block also where a span ends within it: the rest is of no use, and does no harm.
template <class Operation>
UMEM_INLINE void each(Operation operation) {
  for (std::size_t i = 0; i < kBlock; ++i) operation(i);
}

UMEM_INLINE std::uint16_t to_bfloat16(float value) {
  const auto bits = std::bit_cast<std::uint32_t>(value);
  const std::uint32_t rounded = bits + 0x7fff + ((bits >> 16) & 1);
  return static_cast<std::uint16_t>((value != value ? kNotANumber : rounded) >> 16);
}

UMEM_INLINE float from_bfloat16(std::uint16_t value) {
  return std::bit_cast<float>(static_cast<std::uint32_t>(value) << 16);
}

UMEM_INLINE void load(HostType type, std::uintptr_t from, std::size_t first, std::size_t count,
                      float* to) {
  if (type == HostType::float32) {
    std::memcpy(to, reinterpret_cast<const float*>(from) + first, count * sizeof(float));
  } else {
    const auto* source = reinterpret_cast<const std::uint16_t*>(from) + first;
    for (std::size_t i = 0; i < count; ++i) to[i] = from_bfloat16(source[i]);
  }
}

UMEM_INLINE void store(HostType type, const float* from, std::uintptr_t to, std::size_t first,
                       std::size_t count) {
  if (type == HostType::float32) {
    std::memcpy(reinterpret_cast<float*>(to) + first, from, count * sizeof(float));
  } else {
    auto* target = reinterpret_cast<std::uint16_t*>(to) + first;
    for (std::size_t i = 0; i < count; ++i) target[i] = to_bfloat16(from[i]);
  }
}

UMEM_INLINE void replace_not_a_number(float* values) {
  each([=](std::size_t i) {
    values[i] = values[i] == values[i] ? values[i] : std::bit_cast<float>(kNotANumber);
  });
}

UMEM_INLINE void scale_gradient(const HostConstants& c, HostType type, float* g) {
  for (const float factor : c.factors) {
    each([=](std::size_t i) { g[i] = g[i] * factor; });
    if (type == HostType::bfloat16)
      each([=](std::size_t i) { g[i] = from_bfloat16(to_bfloat16(g[i])); });
  }
  if (c.unscales) each([=, s = c.scale](std::size_t i) { g[i] = g[i] / s; });
}

UMEM_INLINE void decay(Decay form, const HostConstants& c, float* x, float* g) {
  const float by = c.decay;
  switch (form) {
    case Decay::none:
      return;
    case Decay::weight_fused:
      return each([=](std::size_t i) { x[i] = fma(-by, x[i], x[i]); });
    case Decay::weight:
      return each([=](std::size_t i) { x[i] = x[i] - by * x[i]; });
    case Decay::scaled:
      return each([=](std::size_t i) { x[i] = x[i] * by; });
    case Decay::gradient_fused:
      return each([=](std::size_t i) { g[i] = fma(by, x[i], g[i]); });
    case Decay::gradient:
      return each([=](std::size_t i) { g[i] = g[i] + by * x[i]; });
  }
}

UMEM_INLINE void first(First form, const HostConstants& c, float* m, const float* g) {
  const float b = c.b1, o = c.o1;
  switch (form) {
    case First::nested:
      return each([=](std::size_t i) { m[i] = fma(b, m[i], fma(-b, g[i], g[i])); });
    case First::left:
      return each([=](std::size_t i) { m[i] = fma(b, m[i], o * g[i]); });
    case First::right:
      return each([=](std::size_t i) { m[i] = fma(o, g[i], b * m[i]); });
    case First::separate:
      return each([=](std::size_t i) { m[i] = b * m[i] + o * g[i]; });
    case First::lerp_fused:
      return each([=](std::size_t i) { m[i] = fma(o, g[i] - m[i], m[i]); });
    case First::lerp:
      return each([=](std::size_t i) { m[i] = m[i] + o * (g[i] - m[i]); });
    case First::back_fused:
      return each([=](std::size_t i) { m[i] = fma(-(g[i] - m[i]), b, g[i]); });
    case First::back:
      return each([=](std::size_t i) { m[i] = g[i] - (g[i] - m[i]) * b; });
    case First::copied:
      return each([=](std::size_t i) { m[i] = g[i]; });
  }
}

UMEM_INLINE void second(Second form, const HostConstants& c, float* v, const float* g) {
  const float b = c.b2, o = c.o2;
  switch (form) {
    case Second::none:
      return;
    case Second::nested:
      return each([=](std::size_t i) {
        const float square = g[i] * g[i];
        v[i] = fma(b, v[i], fma(-b, square, square));
      });
    case Second::left:
      return each([=](std::size_t i) { v[i] = fma(b, v[i], (o * g[i]) * g[i]); });
    case Second::right:
      return each([=](std::size_t i) { v[i] = fma(o * g[i], g[i], b * v[i]); });
    case Second::separate:
      return each([=](std::size_t i) { v[i] = b * v[i] + (o * g[i]) * g[i]; });
    case Second::square_fused:
      return each([=](std::size_t i) { v[i] = fma(o, g[i] * g[i], b * v[i]); });
    case Second::square:
      return each([=](std::size_t i) { v[i] = b * v[i] + o * (g[i] * g[i]); });
  }
}

UMEM_INLINE void ahead(Ahead form, const HostConstants& c, float* g, const float* m) {
  const float b = c.b1;
  switch (form) {
    case Ahead::none:
      return;
    case Ahead::fused:
      return each([=](std::size_t i) { g[i] = fma(b, m[i], g[i]); });
    case Ahead::separate:
      return each([=](std::size_t i) { g[i] = g[i] + b * m[i]; });
  }
}

UMEM_INLINE void weight(Weight form, const HostConstants& c, float* x, const float* a,
                        const float* v) {
  const float rate = c.rate, root = c.root, eps = c.eps;
  const auto below = [=](std::size_t i) { return __builtin_sqrtf(v[i]) / root + eps; };
  switch (form) {
    case Weight::quotient:
      return each([=](std::size_t i) { x[i] = x[i] - (rate * a[i]) / below(i); });
    case Weight::addcdiv_fused:
      return each([=](std::size_t i) { x[i] = fma(rate, a[i] / below(i), x[i]); });
    case Weight::addcdiv:
      return each([=](std::size_t i) { x[i] = x[i] + rate * (a[i] / below(i)); });
    case Weight::addcmul_fused:
      return each([=](std::size_t i) { x[i] = fma(rate, a[i], x[i]); });
    case Weight::addcmul:
      return each([=](std::size_t i) { x[i] = x[i] + rate * a[i]; });
  }
}

UMEM_INLINE void update(const HostForm& form, const HostConstants& c, HostType type,
                        const HostSpan& span, std::size_t begin, std::size_t end) {
  Block block{};
  float *x = block.x, *g = block.g, *m = block.m, *v = block.v;
  for (std::size_t at = begin; at < end; at += kBlock) {
    const std::size_t n = std::min(kBlock, end - at);
    load(type, span.weight, at, n, x);
    load(type, span.gradient, at, n, g);
    load(type, span.first, at, n, m);
    if (form.second != Second::none) load(type, span.second, at, n, v);

    scale_gradient(c, type, g);
    if (c.unscales) {
      replace_not_a_number(g);
      store(type, g, span.gradient, at, n);
    }
    if (c.negates) each([=](std::size_t i) { g[i] = -g[i]; });
    decay(form.decay, c, x, g);
    first(form.first, c, m, g);
    second(form.second, c, v, g);
    ahead(form.ahead, c, g, m);
    weight(form.weight, c, x, form.ahead == Ahead::none ? m : g, v);

    replace_not_a_number(x);
    store(type, x, span.weight, at, n);
    if (form.first != First::copied) replace_not_a_number(m);
    store(type, m, span.first, at, n);
    if (form.second != Second::none) {
      replace_not_a_number(v);
      store(type, v, span.second, at, n);
    }
  }
}

void update_plain(const HostForm& form, const HostConstants& constants, HostType type,
                  const HostSpan& span, std::size_t begin, std::size_t end) {
  update(form, constants, type, span, begin, end);
}

#ifdef __x86_64__
[[gnu::target("avx2,fma")]] void update_avx2(const HostForm& form, const HostConstants& constants,
                                             HostType type, const HostSpan& span,
                                             std::size_t begin, std::size_t end) {
  update(form, constants, type, span, begin, end);
}

[[gnu::target("avx2,fma,avx512f,avx512bw,avx512dq,avx512vl,prefer-vector-width=512")]] void
update_avx512(const HostForm& form, const HostConstants& constants, HostType type,
              const HostSpan& span, std::size_t begin, std::size_t end) {
  update(form, constants, type, span, begin, end);
}
#endif

}  // namespace

const std::vector<Instructions>& host_instructions() {
  static const std::vector<Instructions> found = [] {
    // NEON is part of 64-bit Arm, so that its plain code has it.
    std::vector<Instructions> all{{"plain", update_plain}};
#ifdef __x86_64__
    if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma"))
      all.push_back({"avx2", update_avx2});
    if (all.size() == 2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
        __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl"))
      all.push_back({"avx512", update_avx512});
#endif
    return all;
  }();
  return found;
}

}  // namespace umem
