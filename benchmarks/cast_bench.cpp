// SPDX-License-Identifier: Apache-2.0
// Casts both ways against the speed of memory for the same reads and writes (against_memory.h).
#include <utility>

#include "benchmarks/against_memory.h"

int main(int argc, char** argv) {
  using namespace spillway::bench;
  using spillway::kernels::Element;
  for (const auto& [name, type] : {std::pair("bf16", Element::bf16), std::pair("f16", Element::f16)}) {
    add_against_memory(std::string("narrow/") + name, {4, 2, 0}, [type = type](const auto& set, Arrays& arrays, int t) {
      set.narrow(arrays.target<void>(t), type, arrays.source<float>(t), arrays.count(t));
    });
    add_against_memory(std::string("widen/") + name, {2, 4, 0}, [type = type](const auto& set, Arrays& arrays, int t) {
      set.widen(arrays.target<float>(t), arrays.source<void>(t), type, arrays.count(t));
    });
  }
  return run_all(argc, argv);
}
