#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# The long checks: everything, LibTorch's part included, under the address, undefined and thread sanitizers, each suite
# run several times in a shuffled order; libFuzzer on each reader of foreign files (clang); the kernels of aarch64 under
# emulation; and every model family held against Hugging Face transformers, which is installed into build/transformers
# for it. Takes two hours or more; not part of scripts/test.sh.
#
# Usage: scripts/soak.sh [--repeat N] [--preset NAME]... [--seconds N] [-R REGEX] [--help]
#   --repeat N      how often each suite runs (default 5); it stops at a suite's first failure
#   --preset NAME   soak-asan, soak-tsan or fuzz; default all three
#   --seconds N     how long each fuzz target runs (default 600)
#   -R REGEX        only the suites whose name matches, and nothing else
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/lib.sh"
cd "$root"

repeat=5
seconds=600
presets=()
filter=()
while [ $# -gt 0 ]; do
  case $1 in
    --repeat) repeat=${2:?--repeat needs a number}; shift ;;
    --preset) presets+=("${2:?--preset needs a name}"); shift ;;
    --seconds) seconds=${2:?--seconds needs a number}; shift ;;
    -R) filter=(-R "${2:?-R needs a regular expression}"); shift ;;
    -h | --help) usage; exit 0 ;;
    *) die "Unknown option $1; see scripts/soak.sh --help." ;;
  esac
  shift
done
if [ ${#presets[@]} = 0 ]; then presets=(soak-asan soak-tsan fuzz); fi

scripts/setup.sh
failed=()
export GTEST_SHUFFLE=1   # GoogleTest prints the seed of an order that failed
for preset in "${presets[@]}"; do
  if [ "$preset" = fuzz ]; then
    step "fuzz: building"
    cmake --preset fuzz -DSPILLWAY_FUZZ_SECONDS="$seconds"
    cmake --build build/fuzz -j "$jobs" --target fuzz
    step "fuzz: $seconds seconds each"
    ctest --test-dir build/fuzz -j "$jobs" --output-on-failure --no-tests=error -L fuzz "${filter[@]}" </dev/null || failed+=(fuzz)
    continue
  fi
  step "$preset: building (ten minutes or more)"
  cmake --preset "$preset"
  cmake --build "build/$preset" -j "$jobs"
  step "$preset: each suite up to $repeat times"
  without_randomisation ctest --test-dir "build/$preset" -j "$jobs" --output-on-failure --no-tests=error \
    --repeat until-fail:"$repeat" --schedule-random "${filter[@]}" </dev/null || failed+=("$preset")
done
if [ ${#filter[@]} = 0 ]; then
  scripts/check_docs.sh || failed+=(docs)
  scripts/arm_check.sh </dev/null || failed+=(arm)
  step "transformers: building what it is held against"
  cmake --preset release
  cmake --build build/release -j "$jobs" --target finetune model_answers
  python3 tools/check_transformers.py --build build/release </dev/null || failed+=(transformers)
fi
step "Summary: ${presets[*]} in $SECONDS s"
if [ ${#failed[@]} != 0 ]; then die "FAILED: ${failed[*]}"; fi
say "100% tests passed"
