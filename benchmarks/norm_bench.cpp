// SPDX-License-Identifier: Apache-2.0
// Sums of squares, which are the finite check too, against the speed of memory for the same reads (against_memory.h).
#include "benchmarks/against_memory.h"

int main(int argc, char** argv) {
  using namespace spillway::bench;
  add_against_memory("norm_and_finite_check/f32", {4, 0, 0}, [](const auto& set, Arrays& arrays, int t) {
    // The sums are a thousandth of what is read.
    set.grain_square_sums(arrays.target<double>(t), arrays.source<float>(t), arrays.count(t));
  });
  return run_all(argc, argv);
}
