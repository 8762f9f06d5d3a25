// Compiled without contraction: what is fused is written so.
#include "host_update/update.hpp"

#include <algorithm>
#include <array>
#include <bit>

#ifdef __FAST_MATH__
#error "The bits of an update depend on strict floating-point arithmetic."
#endif

namespace umem {
namespace {

// Gradients that are read ahead of the rest.
constexpr std::size_t kBlock = 512;

// What a GPU gives where a result is not a number.
constexpr std::uint32_t kNotANumber = 0x7fffffff;

// Forms that are in force somewhere. Each has a loop of its own, which the compiler vectorises for
// the instructions at hand; one loop for all others looks the form up for each element.
constexpr std::array kLoops = [] {
  constexpr HostForm kFused{Decay::none, First::nested, Second::nested, Ahead::none,
                            Weight::quotient};
  constexpr HostForm kLists{Decay::none, First::lerp_fused, Second::square_fused, Ahead::none,
                            Weight::addcdiv_fused};
  constexpr HostForm kMomentum{Decay::none, First::right, Second::none, Ahead::none,
                               Weight::addcmul_fused};
  constexpr HostForm kNesterov{Decay::none, First::right, Second::none, Ahead::fused,
                               Weight::addcmul_fused};
  std::array all{kFused,    kFused,    kFused,    kLists,    kLists,
                 kLists,    kMomentum, kMomentum, kNesterov, kNesterov};
  for (const std::size_t i : {1, 4, 7, 9}) all[i].decay = Decay::gradient_fused;
  all[2].decay = Decay::weight_fused;
  all[5].decay = Decay::scaled;
  return all;
}();

#define UMEM_INLINE [[gnu::always_inline]] inline

UMEM_INLINE float fma(float a, float b, float c) { return __builtin_fmaf(a, b, c); }

// Elements as they are stored.
struct Float32 {
  using Stored = float;
  UMEM_INLINE static float load(float stored) { return stored; }
  UMEM_INLINE static float store(float value) {
    return value == value ? value : std::bit_cast<float>(kNotANumber);
  }
  UMEM_INLINE static float copy(float value) { return value; }
};

struct Bfloat16 {
  using Stored = std::uint16_t;
  UMEM_INLINE static float load(std::uint16_t stored) {
    return std::bit_cast<float>(static_cast<std::uint32_t>(stored) << 16);
  }
  UMEM_INLINE static std::uint16_t store(float value) {
    const auto bits = std::bit_cast<std::uint32_t>(value);
    const std::uint32_t rounded = bits + 0x7fff + ((bits >> 16) & 1);
    return static_cast<std::uint16_t>((value == value ? rounded : kNotANumber) >> 16);
  }
  UMEM_INLINE static std::uint16_t copy(float value) { return store(value); }
};

struct Element {
  float x, g, m, v;
};

UMEM_INLINE void decay(Decay form, const HostNumbers& c, Element& e) {
  switch (form) {
    case Decay::none:
      return;
    case Decay::weight_fused:
      e.x = fma(-c.decay, e.x, e.x);
      return;
    case Decay::weight:
      e.x = e.x - c.decay * e.x;
      return;
    case Decay::scaled:
      e.x = e.x * c.decay;
      return;
    case Decay::gradient_fused:
      e.g = fma(c.decay, e.x, e.g);
      return;
    case Decay::gradient:
      e.g = e.g + c.decay * e.x;
      return;
  }
}

UMEM_INLINE float first(First form, const HostNumbers& c, float m, float g) {
  switch (form) {
    case First::nested:
      return fma(c.b1, m, fma(-c.b1, g, g));
    case First::left:
      return fma(c.b1, m, c.o1 * g);
    case First::right:
      return fma(c.o1, g, c.b1 * m);
    case First::separate:
      return c.b1 * m + c.o1 * g;
    case First::lerp_fused:
      return fma(c.o1, g - m, m);
    case First::lerp:
      return m + c.o1 * (g - m);
    case First::back_fused:
      return fma(-(g - m), c.b1, g);
    case First::back:
      return g - (g - m) * c.b1;
    case First::copied:
      return g;
  }
  __builtin_unreachable();
}

UMEM_INLINE float second(Second form, const HostNumbers& c, float v, float g) {
  switch (form) {
    case Second::none:
      return v;
    case Second::nested:
      return fma(c.b2, v, fma(-c.b2, g * g, g * g));
    case Second::left:
      return fma(c.b2, v, (c.o2 * g) * g);
    case Second::right:
      return fma(c.o2 * g, g, c.b2 * v);
    case Second::separate:
      return c.b2 * v + (c.o2 * g) * g;
    case Second::square_fused:
      return fma(c.o2, g * g, c.b2 * v);
    case Second::square:
      return c.b2 * v + c.o2 * (g * g);
  }
  __builtin_unreachable();
}

UMEM_INLINE float ahead(Ahead form, const HostNumbers& c, float m, float g) {
  switch (form) {
    case Ahead::none:
      return m;
    case Ahead::fused:
      return fma(c.b1, m, g);
    case Ahead::separate:
      return g + c.b1 * m;
  }
  __builtin_unreachable();
}

UMEM_INLINE float weight(Weight form, const HostNumbers& c, float x, float a, float v) {
  const float below = __builtin_sqrtf(v) / c.root + c.eps;
  switch (form) {
    case Weight::quotient:
      return x - (c.rate * a) / below;
    case Weight::addcdiv_fused:
      return fma(c.rate, a / below, x);
    case Weight::addcdiv:
      return x + c.rate * (a / below);
    case Weight::addcmul_fused:
      return fma(c.rate, a, x);
    case Weight::addcmul:
      return x + c.rate * a;
  }
  __builtin_unreachable();
}

// Reads a block's gradients, and does to them what is due before all else.
template <class Type>
UMEM_INLINE void read_gradients(const HostConstants& c, typename Type::Stored* stored, float* g,
                                std::size_t count) {
  for (std::size_t i = 0; i < count; ++i) g[i] = Type::load(stored[i]);
  for (const float factor : c.factors)
    for (std::size_t i = 0; i < count; ++i) g[i] = Type::load(Type::store(g[i] * factor));
  if (c.unscales)
    for (std::size_t i = 0; i < count; ++i) {
      g[i] = Float32::store(g[i] / c.scale);
      stored[i] = Type::store(g[i]);
    }
  if (c.negates)
    for (std::size_t i = 0; i < count; ++i) g[i] = -g[i];
}

// Some elements of one block. `form()` is a constant, or not.
template <class Type, class Form, class Stored = typename Type::Stored>
UMEM_INLINE void update_block(Form form, const HostNumbers& c, const float* __restrict g,
                              Stored* __restrict x, Stored* __restrict m, Stored* __restrict v,
                              std::size_t count) {
  for (std::size_t i = 0; i < count; ++i) {
    Element e{Type::load(x[i]), g[i], Type::load(m[i]), 0};
    if (form().second != Second::none) e.v = Type::load(v[i]);
    decay(form().decay, c, e);
    e.m = first(form().first, c, e.m, e.g);
    e.v = second(form().second, c, e.v, e.g);
    e.x = weight(form().weight, c, e.x, ahead(form().ahead, c, e.m, e.g), e.v);
    x[i] = Type::store(e.x);
    // What no operation has made keeps its bits, also where it is no number.
    const bool is_copy = form().first == First::copied && form().decay == Decay::none;
    m[i] = is_copy ? Type::copy(e.m) : Type::store(e.m);
    if (form().second != Second::none) v[i] = Type::store(e.v);
  }
}

template <class Type, std::size_t kNumber = 0, class... Arguments>
UMEM_INLINE void choose_loop(const HostForm& form, Arguments... arguments) {
  if constexpr (kNumber == kLoops.size())
    update_block<Type>([&] { return form; }, arguments...);
  else if (form == kLoops[kNumber])
    update_block<Type>([] { return kLoops[kNumber]; }, arguments...);
  else
    choose_loop<Type, kNumber + 1>(form, arguments...);
}

template <class Type>
UMEM_INLINE void update_as(const HostForm& form, const HostConstants& constants,
                           const HostSpan& span, std::size_t begin, std::size_t end) {
  using Stored = typename Type::Stored;
  const auto array = [](std::uintptr_t address) { return reinterpret_cast<Stored*>(address); };
  float g[kBlock];
  for (std::size_t at = begin; at < end; at += kBlock) {
    const std::size_t count = std::min(kBlock, end - at);
    Stored* gradient = array(span.gradient) + at;
    read_gradients<Type>(constants, gradient, g, count);
    if (end - at > kBlock)
      for (std::size_t i = 0; i < kBlock; i += 64 / sizeof(Stored))
        __builtin_prefetch(gradient + kBlock + i);
    Stored* v = span.second == 0 ? nullptr : array(span.second) + at;
    choose_loop<Type>(form, static_cast<HostNumbers>(constants), g, array(span.weight) + at,
                      array(span.first) + at, v, count);
  }
}

UMEM_INLINE void update(const HostForm& form, const HostConstants& constants, HostType type,
                        const HostSpan& span, std::size_t begin, std::size_t end) {
  if (type == HostType::float32)
    update_as<Float32>(form, constants, span, begin, end);
  else
    update_as<Bfloat16>(form, constants, span, begin, end);
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

[[gnu::target("avx2,fma,avx512f,avx512bw,avx512dq,avx512vl")]] void update_avx512(
    const HostForm& form, const HostConstants& constants, HostType type, const HostSpan& span,
    std::size_t begin, std::size_t end) {
  update(form, constants, type, span, begin, end);
}
#endif

}  // namespace

const std::vector<Instructions>& host_instructions() {
  // Never destroyed: threads may use it until the process ends.
  static const std::vector<Instructions>& found = *[] {
    // NEON is part of 64-bit Arm, so that its plain code has it.
    auto& all = *new std::vector<Instructions>{{"plain", update_plain}};
#ifdef __x86_64__
    if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma"))
      all.push_back({"avx2", update_avx2});
    if (all.size() == 2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
        __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl"))
      all.push_back({"avx512", update_avx512});
#endif
    return &all;
  }();
  return found;
}

}  // namespace umem
