// SPDX-License-Identifier: Apache-2.0
// Updates that write what they change to a log: the same results, and a way back to the last bit.

#include <gtest/gtest.h>

#include <cstring>
#include <functional>
#include <string>
#include <vector>

#include "kernels/bit_equality.h"
#include "kernels/format_reference.h"

namespace spillway::test {
namespace {

using kernels::CpuKernels;
using kernels::Element;
using kernels::StateFormat;
using kernels::StateKind;
using kernels::UpdateArrays;
using kernels::UpdateLog;

constexpr std::size_t kCount = 3 * kernels::kGrain + 77;

/// Masters and states in one form.
struct LoggedModel {
  bool split;
  std::vector<float> p;
  std::vector<std::uint16_t> working, low, copy;
  PackedState states[2];

  LoggedModel(const Problem& problem, StateFormat format, bool splits)
      : split(splits),
        p(problem.p),
        working(kCount),
        low(kCount),
        copy(kCount),
        states{{format, StateKind::any_sign, kCount}, {format, StateKind::square, kCount}} {
    kernels::cpu_kernels().split_master(working.data(), low.data(), p.data(), static_cast<std::int64_t>(kCount));
    states[0].pack(problem.s0, 1, 0, 0);
    states[1].pack(problem.s1, 1, 0, 0);
  }

  kernels::MasterArray master() {
    return split ? kernels::MasterArray{nullptr, working.data(), low.data()}
                 : kernels::MasterArray{p.data(), nullptr, nullptr};
  }
  UpdateArrays arrays(const Typed& gradients) {
    UpdateArrays out;
    out.p = master();
    for (std::size_t k = 0; k < 2; ++k) out.states[k] = states[k].array(0);
    out.g = gradients.data();
    out.g_type = gradients.type;
    out.copy = copy.data();
    out.copy_type = Element::bf16;
    out.count = static_cast<std::int64_t>(kCount);
    out.key = kernels::rounding_key(5, 3);
    return out;
  }
  UpdateLog log() {
    UpdateLog out;
    out.p = master();
    for (std::size_t k = 0; k < 2; ++k) out.states[k] = states[k].array(0);
    return out;
  }
};

template <class T>
bool same_bytes(const std::vector<T>& a, const std::vector<T>& b) {
  return a.size() == b.size() && (a.empty() || std::memcmp(a.data(), b.data(), a.size() * sizeof(T)) == 0);
}

/// `states`: how many of them count.
bool same_model(const LoggedModel& a, const LoggedModel& b, int states) {
  bool same = a.split ? same_bytes(a.working, b.working) && same_bytes(a.low, b.low) : same_bytes(a.p, b.p);
  for (int k = 0; k < states; ++k) {
    const PackedState &x = a.states[k], &y = b.states[k];
    same = same && same_bytes(x.wide, y.wide) && same_bytes(x.halves, y.halves) && same_bytes(x.codes, y.codes) &&
           same_bytes(x.scales, y.scales);
  }
  return same;
}

struct Case {
  std::string name;
  int states;
  std::function<void(const CpuKernels&, const UpdateArrays&)> plain;
  std::function<void(const CpuKernels&, const UpdateArrays&, const UpdateLog&)> logged;
};

std::vector<Case> cases() {
  const auto adam = kernels::adam_scalars(1e-3, 0.9, 0.999, 1e-8, 0.01, true, 5, 0.5f);
  const auto sgd = kernels::sgd_scalars(1e-3, 0, 0, 0.01, false, 5, 0.5f);
  const auto momentum = kernels::sgd_scalars(1e-3, 0.9, 0, 0.01, true, 5, 0.5f);
  const auto adagrad = kernels::adagrad_scalars(1e-3, 0.1, 1e-8, 0, 5, 0.5f);
  const auto lion = kernels::lion_scalars(1e-3, 0.9, 0.99, 0.01, 0.5f);
  return {{"adam", 2, [=](const auto& k, const auto& a) { k.adam_packed(adam, a); },
           [=](const auto& k, const auto& a, const auto& l) { k.adam_logged(adam, a, l); }},
          {"sgd", 0, [=](const auto& k, const auto& a) { k.sgd_packed(sgd, a); },
           [=](const auto& k, const auto& a, const auto& l) { k.sgd_logged(sgd, a, l); }},
          {"momentum", 1, [=](const auto& k, const auto& a) { k.sgd_packed(momentum, a); },
           [=](const auto& k, const auto& a, const auto& l) { k.sgd_logged(momentum, a, l); }},
          {"lion", 1, [=](const auto& k, const auto& a) { k.lion_packed(lion, a); },
           [=](const auto& k, const auto& a, const auto& l) { k.lion_logged(lion, a, l); }},
          {"adagrad", 1, [=](const auto& k, const auto& a) { k.adagrad_packed(adagrad, a); },
           [=](const auto& k, const auto& a, const auto& l) { k.adagrad_logged(adagrad, a, l); }}};
}

TEST(LoggedUpdate, ComputesTheSameAndItsLogIsTheWayBack) {
  const Problem problem = ordinary_problem(kCount, 40);
  for (const Case& c : cases()) {
    for (StateFormat format : {StateFormat::f32, StateFormat::bf16, StateFormat::block8}) {
      for (bool split : {false, true}) {
        LoggedModel before(problem, format, split);
        // Adagrad's one state is a square: it takes the place of the first.
        if (c.name == "adagrad") std::swap(before.states[0], before.states[1]);
        const Typed gradients = round_to(split ? Element::bf16 : Element::f32, problem.g);
        for (const CpuKernels* set : kernel_sets()) {
          LoggedModel plain = before, logged = before, log(problem, format, split);
          if (c.name == "adagrad") std::swap(log.states[0], log.states[1]);
          c.plain(*set, plain.arrays(gradients));
          c.logged(*set, logged.arrays(gradients), log.log());
          EXPECT_TRUE(same_model(logged, plain, c.states)) << c.name << " on " << set->name;
          EXPECT_FALSE(same_model(logged, before, c.states)) << c.name << " on " << set->name << " changed nothing";
          EXPECT_TRUE(same_bytes(logged.copy, plain.copy)) << c.name << " on " << set->name;
          EXPECT_TRUE(same_model(log, before, c.states)) << c.name << " on " << set->name;
        }
      }
    }
  }
}

TEST(LoggedUpdate, TheLogMayStartAnywhere) {
  const Problem problem = ordinary_problem(kCount, 41);
  const Typed gradients = round_to(Element::bf16, problem.g);
  for (const CpuKernels* set : kernel_sets()) {
    for (std::size_t offset = 0; offset < 20; ++offset) {
      LoggedModel model(problem, StateFormat::f32, false);
      std::vector<float> p(kCount + 40, -1), m = p, v = p;
      UpdateLog log;
      log.p.f32 = p.data() + offset;
      log.states[0].data = m.data() + offset + 1;
      log.states[1].data = v.data() + offset + 2;
      cases()[0].logged(*set, model.arrays(gradients), log);
      EXPECT_TRUE(same_bits(std::span(p).subspan(offset, kCount), problem.p)) << set->name;
      EXPECT_TRUE(same_bits(std::span(m).subspan(offset + 1, kCount), problem.s0)) << set->name;
      EXPECT_TRUE(same_bits(std::span(v).subspan(offset + 2, kCount), problem.s1)) << set->name;
      EXPECT_EQ(p[offset + kCount], -1);
      EXPECT_TRUE(offset == 0 || p[offset - 1] == -1);
    }
  }
}

}  // namespace
}  // namespace spillway::test
