// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <vector>

namespace spillway {

/// The squared L2 norm of the accumulated gradients, as they came (before any factor).
struct GradientNorm {
  double squared = 0;
  bool finite = true;

  bool operator==(const GradientNorm&) const = default;
};

/// Answers what depends on data, for the decisions of a run. This one asks memory; a virtual machine's makes its
/// answers up.
class Oracle {
 public:
  virtual ~Oracle() = default;
  /// `read` finds the answer in memory.
  virtual GradientNorm gradient_norm(const std::function<GradientNorm()>& read) { return read(); }
};

/// What a virtual machine's gradients are like.
struct OracleOptions {
  std::vector<GradientNorm> first = {};  // the first answers, of a run that was recorded; then they are drawn
  double norm = 1;                       // norms are drawn evenly from norm x (1 - spread) to norm x (1 + spread)
  double spread = 0;
  double not_finite = 0;  // the probability of gradients that are not finite
  std::uint64_t seed = 0;
};

/// The same options give the same answers, everywhere. Throws: InvalidArgument for a norm, spread or probability that
/// is none.
std::unique_ptr<Oracle> make_seeded_oracle(OracleOptions options);

}  // namespace spillway
