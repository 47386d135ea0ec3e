// SPDX-License-Identifier: Apache-2.0
// Accumulation and the copy against the speed of memory for the same reads and writes (against_memory.h).
#include <tuple>
#include <utility>

#include "benchmarks/against_memory.h"

int main(int argc, char** argv) {
  using namespace spillway::bench;
  using spillway::kernels::Element;
  add_against_memory("copy/f32", {4, 4, 0}, [](const auto& set, Arrays& arrays, int t) {
    set.widen(arrays.target<float>(t), arrays.source<void>(t), Element::f32, arrays.count(t));
  });
  for (const auto& [name, type, bytes] :
       {std::tuple("f32", Element::f32, 4), std::tuple("bf16", Element::bf16, 2), std::tuple("f16", Element::f16, 2)}) {
    add_against_memory(std::string("accumulate/") + name, {bytes, 0, 4},
                       [type = type](const auto& set, Arrays& arrays, int t) {
                         set.accumulate(arrays.target<float>(t), arrays.source<void>(t), type, arrays.count(t));
                       });
  }
  return run_all(argc, argv);
}
