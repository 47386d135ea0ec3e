// SPDX-License-Identifier: Apache-2.0
#include "kernels/reference.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <utility>

namespace spillway::test {
namespace {

using kernels::CpuKernels;
using kernels::Element;
using kernels::StateKind;

// A 16-bit floating type: value = significand * 2^exponent with at most `precision` bits and exponent >= min_exponent.
struct Format {
  int precision;
  int min_exponent;
  int fraction_bits;
  int bias;
  double largest;
};

Format format_of(Element type) {
  if (type == Element::bf16) return {8, -133, 7, 127, std::ldexp(255.0, 120)};
  return {11, -24, 10, 15, 65504};
}

std::uint16_t encode(double magnitude, const Format& format) {
  if (magnitude == 0) return 0;
  int exponent = 0;
  std::frexp(magnitude, &exponent);
  const int unit = std::max(exponent - format.precision, format.min_exponent);
  const double significand = std::nearbyint(std::ldexp(magnitude, -unit));  // to nearest even
  if (std::ldexp(significand, unit) > format.largest) {
    return static_cast<std::uint16_t>((2 * format.bias + 1) << format.fraction_bits);
  }
  // The bits of a format count its values upwards, from one unit above zero.
  return static_cast<std::uint16_t>(static_cast<int>(significand) +
                                    ((unit - format.min_exponent) << format.fraction_bits));
}

float decay(double lr, double weight_decay) {
  return static_cast<float>(1 - lr * weight_decay);
}

template <bool kDecoupled>
void adam_reference(const Hyper& hyper, std::int64_t step, float f, std::span<float> p, std::span<float> m,
                    std::span<float> v, std::span<const float> g_in) {
  const double t = static_cast<double>(step);
  const float b1 = static_cast<float>(hyper.beta1), c1 = static_cast<float>(1 - hyper.beta1);
  const float b2 = static_cast<float>(hyper.beta2), c2 = static_cast<float>(1 - hyper.beta2);
  const float s = static_cast<float>(1 / std::sqrt(1 - std::pow(hyper.beta2, t)));
  const float a = static_cast<float>(hyper.lr / (1 - std::pow(hyper.beta1, t)));
  const float eps = static_cast<float>(hyper.eps), wd = static_cast<float>(hyper.weight_decay);
  for (std::size_t i = 0; i < p.size(); ++i) {
    float g = f * g_in[i];
    if (kDecoupled) p[i] = p[i] * decay(hyper.lr, hyper.weight_decay);
    if (!kDecoupled && wd != 0) g = g + wd * p[i];
    m[i] = b1 * m[i] + c1 * g;
    v[i] = b2 * v[i] + (c2 * g) * g;
    const float d = std::sqrt(v[i]) * s + eps;
    p[i] = p[i] - a * (m[i] / d);
  }
}

template <bool kDecoupled>
struct AdamCase {
  static kernels::AdamScalars scalars(const Hyper& h, std::int64_t step, float factor) {
    return kernels::adam_scalars(h.lr, h.beta1, h.beta2, h.eps, h.weight_decay, kDecoupled, step, factor);
  }
  static void kernel(const CpuKernels& set, const Hyper& hyper, std::int64_t step, float factor, float* p, float* s0,
                     float* s1, const void* g, Element g_type, void* copy, Element copy_type, std::int64_t count) {
    set.adam(scalars(hyper, step, factor), p, s0, s1, g, g_type, copy, copy_type, count);
  }
  static void packed(const CpuKernels& set, const Hyper& hyper, std::int64_t step, float factor,
                     const kernels::UpdateArrays& arrays) {
    set.adam_packed(scalars(hyper, step, factor), arrays);
  }
};

struct Plain {
  static Hyper of(Hyper hyper) { return hyper.momentum = 0, hyper; }
};
struct Momentum {
  static Hyper of(Hyper hyper) { return hyper; }
};
struct Dampened {
  static Hyper of(Hyper hyper) { return hyper.dampening = 0.3, hyper.weight_decay = 0, hyper; }
};
struct Nesterov {
  static Hyper of(Hyper hyper) { return hyper.nesterov = true, hyper; }
};

template <class Variant>
void sgd_reference(const Hyper& given, std::int64_t step, float f, std::span<float> p, std::span<float> b,
                   std::span<float>, std::span<const float> g_in) {
  const Hyper hyper = Variant::of(given);
  const float lr = static_cast<float>(hyper.lr), mu = static_cast<float>(hyper.momentum);
  const float c = static_cast<float>(1 - hyper.dampening), wd = static_cast<float>(hyper.weight_decay);
  for (std::size_t i = 0; i < p.size(); ++i) {
    float g = f * g_in[i];
    if (wd != 0) g = g + wd * p[i];
    float direction = g;
    if (mu != 0) {
      b[i] = step == 1 ? g : mu * b[i] + c * g;
      direction = hyper.nesterov ? g + mu * b[i] : b[i];
    }
    p[i] = p[i] - lr * direction;
  }
}

template <class Variant>
struct SgdCase {
  static kernels::SgdScalars scalars(const Hyper& given, std::int64_t step, float factor) {
    const Hyper h = Variant::of(given);
    return kernels::sgd_scalars(h.lr, h.momentum, h.dampening, h.weight_decay, h.nesterov, step, factor);
  }
  static void kernel(const CpuKernels& set, const Hyper& hyper, std::int64_t step, float factor, float* p, float* s0,
                     float*, const void* g, Element g_type, void* copy, Element copy_type, std::int64_t count) {
    const bool stateless = Variant::of(hyper).momentum == 0;
    set.sgd(scalars(hyper, step, factor), p, stateless ? nullptr : s0, g, g_type, copy, copy_type, count);
  }
  static void packed(const CpuKernels& set, const Hyper& hyper, std::int64_t step, float factor,
                     const kernels::UpdateArrays& arrays) {
    set.sgd_packed(scalars(hyper, step, factor), arrays);
  }
};

void adagrad_reference(const Hyper& hyper, std::int64_t step, float f, std::span<float> p, std::span<float> h,
                       std::span<float>, std::span<const float> g_in) {
  const float clr = static_cast<float>(hyper.lr / (1 + static_cast<double>(step - 1) * hyper.lr_decay));
  const float eps = static_cast<float>(hyper.eps), wd = static_cast<float>(hyper.weight_decay);
  for (std::size_t i = 0; i < p.size(); ++i) {
    float g = f * g_in[i];
    if (wd != 0) g = g + wd * p[i];
    h[i] = h[i] + g * g;
    p[i] = p[i] - clr * (g / (std::sqrt(h[i]) + eps));
  }
}

struct AdagradCase {
  static kernels::AdagradScalars scalars(const Hyper& h, std::int64_t step, float factor) {
    return kernels::adagrad_scalars(h.lr, h.lr_decay, h.eps, h.weight_decay, step, factor);
  }
  static void kernel(const CpuKernels& set, const Hyper& hyper, std::int64_t step, float factor, float* p, float* s0,
                     float*, const void* g, Element g_type, void* copy, Element copy_type, std::int64_t count) {
    set.adagrad(scalars(hyper, step, factor), p, s0, g, g_type, copy, copy_type, count);
  }
  static void packed(const CpuKernels& set, const Hyper& hyper, std::int64_t step, float factor,
                     const kernels::UpdateArrays& arrays) {
    set.adagrad_packed(scalars(hyper, step, factor), arrays);
  }
};

float sign(float u) {
  if (std::isnan(u)) return u;
  if (u == 0) return 0;
  return std::signbit(u) ? -1.0f : 1.0f;
}

void lion_reference(const Hyper& hyper, std::int64_t, float f, std::span<float> p, std::span<float> m, std::span<float>,
                    std::span<const float> g_in) {
  const float b1 = static_cast<float>(hyper.beta1), c1 = static_cast<float>(1 - hyper.beta1);
  const float b2 = static_cast<float>(hyper.beta2), c2 = static_cast<float>(1 - hyper.beta2);
  const float lr = static_cast<float>(hyper.lr);
  for (std::size_t i = 0; i < p.size(); ++i) {
    const float g = f * g_in[i];
    const float u = b1 * m[i] + c1 * g;
    p[i] = p[i] * decay(hyper.lr, hyper.weight_decay);
    p[i] = p[i] - lr * sign(u);
    m[i] = b2 * m[i] + c2 * g;
  }
}

struct LionCase {
  static kernels::LionScalars scalars(const Hyper& h, float factor) {
    return kernels::lion_scalars(h.lr, h.beta1, h.beta2, h.weight_decay, factor);
  }
  static void kernel(const CpuKernels& set, const Hyper& hyper, std::int64_t, float factor, float* p, float* s0, float*,
                     const void* g, Element g_type, void* copy, Element copy_type, std::int64_t count) {
    set.lion(scalars(hyper, factor), p, s0, g, g_type, copy, copy_type, count);
  }
  static void packed(const CpuKernels& set, const Hyper& hyper, std::int64_t, float factor,
                     const kernels::UpdateArrays& arrays) {
    set.lion_packed(scalars(hyper, factor), arrays);
  }
};

template <class Case>
Optimizer optimizer(const char* name, std::vector<StateKind> states, Optimizer::Reference reference) {
  return {name, std::move(states), Case::kernel, Case::packed, reference};
}

std::vector<Optimizer> all_optimizers() {
  const std::vector<StateKind> moments{StateKind::any_sign, StateKind::square}, one{StateKind::any_sign};
  return {
      optimizer<AdamCase<true>>("adamw", moments, adam_reference<true>),
      optimizer<AdamCase<false>>("adam", moments, adam_reference<false>),
      optimizer<SgdCase<Plain>>("sgd", {}, sgd_reference<Plain>),
      optimizer<SgdCase<Momentum>>("momentum", one, sgd_reference<Momentum>),
      optimizer<SgdCase<Dampened>>("dampened", one, sgd_reference<Dampened>),
      optimizer<SgdCase<Nesterov>>("nesterov", one, sgd_reference<Nesterov>),
      optimizer<AdagradCase>("adagrad", {StateKind::square}, adagrad_reference),
      optimizer<LionCase>("lion", one, lion_reference),
  };
}

}  // namespace

float widen_reference(std::uint16_t value, Element type) {
  const Format format = format_of(type);
  const int fraction = value & ((1 << format.fraction_bits) - 1);
  const int exponent = (value & 0x7fff) >> format.fraction_bits;
  double magnitude;
  if (exponent == 2 * format.bias + 1) {
    magnitude = fraction == 0 ? HUGE_VAL : std::numeric_limits<double>::quiet_NaN();
  } else if (exponent == 0) {
    magnitude = std::ldexp(fraction, format.min_exponent);
  } else {
    magnitude = std::ldexp(fraction + (1 << format.fraction_bits), format.min_exponent + exponent - 1);
  }
  return static_cast<float>((value & 0x8000) != 0 ? -magnitude : magnitude);
}

std::uint16_t narrow_reference(float value, Element type) {
  const Format format = format_of(type);
  const std::uint16_t sign = std::signbit(value) ? 0x8000 : 0;
  if (std::isnan(value)) return sign | 0x7fff;
  if (std::isinf(value)) return static_cast<std::uint16_t>(sign | (2 * format.bias + 1) << format.fraction_bits);
  return sign | encode(std::fabs(static_cast<double>(value)), format);
}

std::span<const Optimizer> optimizers() {
  static const std::vector<Optimizer> all = all_optimizers();
  return all;
}

}  // namespace spillway::test
