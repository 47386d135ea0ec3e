#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Sets up, builds and runs every test suite; then the core's suites again under the address, undefined and thread
# sanitizers; then a minute of libFuzzer on each reader of foreign files, where clang++ is there. Ends non-zero where
# anything failed or no test ran.
#
# Usage: scripts/test.sh [--fast] [--preset NAME]... [-R REGEX] [--help]
#   --fast          the release build alone, without sanitizers and fuzzing: for the loop of editing and testing
#   --preset NAME   only this preset of CMakePresets.json (may be given again); default: release asan tsan fuzz
#   -R REGEX        only the suites whose name matches, built alone where each is a program of its own
# Each suite has a time budget of its own (TIMEOUT in tests/*/CMakeLists.txt).
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/lib.sh"
cd "$root"

presets=()
filter=()
fast=no
while [ $# -gt 0 ]; do
  case $1 in
    --fast) fast=yes ;;
    --preset) presets+=("${2:?--preset needs a name}"); shift ;;
    -R) filter=(-R "${2:?-R needs a regular expression}"); shift ;;
    -h | --help) usage; exit 0 ;;
    *) die "Unknown option $1; see scripts/test.sh --help." ;;
  esac
  shift
done
if [ ${#presets[@]} = 0 ]; then
  presets=(release)
  if [ "$fast" = no ]; then presets+=(asan tsan fuzz); fi
fi
needs_torch() { case $1 in release | debug | soak-*) return 0 ;; *) return 1 ;; esac; }

rows=()       # the closing summary, a line a phase
suites=0
failed=0

# phase <name> <command>...: runs it, and notes its time and whether it failed.
phase() {
  local name=$1 start=$SECONDS status=0
  shift
  step "$name"
  "$@" </dev/null || status=$?
  local outcome="done"
  if [ $status != 0 ]; then outcome=FAILED failed=$((failed + 1)); fi
  rows+=("$(printf '%-28s %6d s   %s' "$name" $((SECONDS - start)) "$outcome")")
  return $status
}

configure() {
  local torch=()
  local unity=OFF
  if [ "${CI:-}" = true ]; then unity=ON; fi  # it builds everything, once
  if needs_torch "$1"; then torch=(-DSPILLWAY_TORCH=ON "-DSPILLWAY_UNITY=$unity"); fi
  cmake --preset "$1" "${torch[@]}"
}

# suites_of <preset> <selection>...: how many suites ctest would run.
suites_of() { ctest --test-dir "build/$1" -N "${@:2}" "${filter[@]}" | sed -n 's/^Total Tests: //p'; }

# run_suites <preset> <selection>...: ctest's own output and closing lines; several suites at a time.
run_suites() {
  local preset=$1 count status=0
  shift
  count=$(suites_of "$preset" "$@")
  if [ "$count" = 0 ]; then
    say "No suite matches here."
    return 0
  fi
  without_randomisation ctest --test-dir "build/$preset" -j "$jobs" --output-on-failure --no-tests=error \
    --output-junit junit.xml "$@" "${filter[@]}" || status=$?
  suites=$((suites + count))
  return $status
}

# suite_targets <preset> <selection>...: the suites that -R leaves there, where each is a target of its own. Fails where
# one is not (a check in Python, ranks of a program): what that needs is known to nobody here.
suite_targets() {
  local names known
  names=$(ctest --test-dir "build/$1" -N "${@:2}" "${filter[@]}" | sed -n 's/^ *Test *#[0-9]*: //p')
  [ -n "$names" ] || return 0
  known=$(cmake --build "build/$1" --target help | sed -n 's/: phony$//p')
  ! grep -qvxF -e "$known" <<<"$names" || return 1
  say "$names"
}

# test_alone <preset> <selection>...: with -R, where that is possible, builds the matching suites and runs them.
test_alone() {
  local preset=$1 targets
  shift
  if [ ${#filter[@]} = 0 ] || ! targets=$(suite_targets "$preset" "$@"); then return 1; fi
  if [ -n "$targets" ]; then
    # shellcheck disable=SC2086  # one word a target
    phase "$preset: build the suites" cmake --build "build/$preset" -j "$jobs" --target $targets || return 0
  fi
  phase "$preset: the suites" run_suites "$preset" "$@" || true
}

# The core and its suites come first: what is broken there shows in the first minutes. Where the build fails, the preset
# ends; where a suite fails, the others still run.
test_preset() {
  local preset=$1
  phase "$preset: configure" configure "$preset" || return 0
  if test_alone "$preset"; then return 0; fi
  phase "$preset: build the core" cmake --build "build/$preset" -j "$jobs" --target core_tests || return 0
  phase "$preset: core suites" run_suites "$preset" -L core || true
  phase "$preset: build the rest" cmake --build "build/$preset" -j "$jobs" || return 0
  phase "$preset: other suites" run_suites "$preset" -LE core || true
}

# The targets alone; what they found before is in build/fuzz/fuzz and is where they start.
test_fuzz() {
  if ! command -v clang++ >/dev/null; then
    rows+=("$(printf '%-28s %6d s   %s' "fuzz" 0 "left out: clang++ is missing (Debian: clang)")")
    return 0
  fi
  phase "fuzz: configure" cmake --preset fuzz -DSPILLWAY_FUZZ_SECONDS=60 || return 0
  if test_alone fuzz -L fuzz; then return 0; fi
  phase "fuzz: build" cmake --build build/fuzz -j "$jobs" --target fuzz || return 0
  phase "fuzz: a minute each" run_suites fuzz -L fuzz || true
}

setup=(scripts/setup.sh --core-only)
for preset in "${presets[@]}"; do
  if needs_torch "$preset"; then setup=(scripts/setup.sh); fi
done
if phase "setup" "${setup[@]}"; then
  for preset in "${presets[@]}"; do
    if [ "$preset" = fuzz ]; then test_fuzz; else test_preset "$preset"; fi
  done
fi

step "Summary"
printf '%s\n' "${rows[@]}"
say "$suites suites ran in $SECONDS s, presets: ${presets[*]}"
if [ "$failed" != 0 ]; then die "FAILED: $failed of the phases above."; fi
if [ "$suites" = 0 ]; then die "FAILED: no suite ran; the regular expression matches none."; fi
say "100% tests passed, 0 tests failed out of $suites"
