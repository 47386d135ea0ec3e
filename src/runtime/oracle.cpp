// SPDX-License-Identifier: Apache-2.0
#include "spillway/runtime/oracle.h"

#include <fmt/format.h>

#include <cmath>
#include <limits>
#include <random>
#include <utility>

#include "spillway/core/error.h"

namespace spillway {
namespace {

class SeededOracle final : public Oracle {
 public:
  explicit SeededOracle(OracleOptions options) : options_(std::move(options)), random_(options_.seed) {}

  GradientNorm gradient_norm(const std::function<GradientNorm()>&) override {
    if (asked_ < options_.first.size()) return options_.first[asked_++];
    const double finite = uniform(), place = uniform();  // both always: answers do not depend on those before
    if (finite < options_.not_finite) return {std::numeric_limits<double>::infinity(), false};
    const double norm = options_.norm * (1 + options_.spread * (2 * place - 1));
    return {norm * norm, true};
  }

 private:
  // In [0, 1). The standard's distributions differ between libraries, its generators do not.
  double uniform() { return static_cast<double>(random_() >> 11) * 0x1p-53; }

  const OracleOptions options_;
  std::mt19937_64 random_;
  std::size_t asked_ = 0;
};

}  // namespace

std::unique_ptr<Oracle> make_seeded_oracle(OracleOptions options) {
  require(std::isfinite(options.norm) && options.norm >= 0,
          fmt::format("a gradient norm of {} was asked for; expected a finite number, zero or more", options.norm));
  require(options.spread >= 0 && options.spread <= 1,
          fmt::format("a spread of gradient norms of {} was asked for; expected 0 to 1", options.spread));
  require(options.not_finite >= 0 && options.not_finite <= 1,
          fmt::format("a probability of {} was asked for; expected 0 to 1", options.not_finite));
  return std::make_unique<SeededOracle>(std::move(options));
}

}  // namespace spillway
