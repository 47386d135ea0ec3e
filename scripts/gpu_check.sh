#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Checks a build on one GPU: kernels, lanes, schedules and the engine, bit for bit; curves against the references; the
# speed of copies. Installs nothing, builds nothing, uses no network; takes under ten minutes.
#
# Usage: scripts/gpu_check.sh [--build FOLDER] [--libtorch FOLDER] [--output FILE] [--seconds N] [--help]
#   --build FOLDER      a finished build with CUDA and LibTorch [build/release]
#   --libtorch FOLDER   .../torch of the LibTorch to run with [the one the build was linked with]; other libraries that
#                       the machine lacks may lie in lib/ of the build's folder
#   --output FILE       results as one JSON object [FOLDER/gpu_check.json]
#   --seconds N         time limit of the whole check [570]
# Ends with 0 where everything passed, 1 where something failed, 77 where there is no usable GPU.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/lib.sh"
cd "$root"

build=build/release
libtorch=
output=
limit=570
while [ $# -gt 0 ]; do
  case $1 in
    --build) build=${2:?--build needs a folder}; shift ;;
    --libtorch) libtorch=${2:?--libtorch needs a folder}; shift ;;
    --output) output=${2:?--output needs a file}; shift ;;
    --seconds) limit=${2:?--seconds needs a number}; shift ;;
    -h | --help) usage; exit 0 ;;
    *) die "Unknown option $1; see scripts/gpu_check.sh --help." ;;
  esac
  shift
done
[ -d "$build" ] || die "There is no folder $build: give a finished build with --build."
build=$(cd "$build" && pwd)
output=${output:-$build/gpu_check.json}
[ -x "$build/tests/cuda_test" ] || die "$build holds no tests/cuda_test: build with CUDA (SPILLWAY_CUDA=ON) and the tests."

if [ -n "$libtorch" ]; then
  is_libtorch "$libtorch" || die "$libtorch is no LibTorch: expected include/ and lib/libtorch_cpu.so in it."
  # Where the build's own LibTorch is missing here; a folder that is there comes first, by the programs' run path.
  for folder in "$libtorch/lib" "$libtorch"/../nvidia/*/lib; do
    if [ -d "$folder" ]; then LD_LIBRARY_PATH=$folder:${LD_LIBRARY_PATH:-}; fi
  done
fi
# Of a build that was brought along: other libraries that this machine may lack.
if [ -d "$build/lib" ]; then LD_LIBRARY_PATH=$build/lib:${LD_LIBRARY_PATH:-}; fi
export LD_LIBRARY_PATH=${LD_LIBRARY_PATH:-}
for program in tests/cuda_test tests/cuda_engine_test examples/finetune benchmarks/offload_bench; do
  [ -x "$build/$program" ] || continue
  lacking=$(ldd "$build/$program" 2>/dev/null | awk '/not found/ {print $1}' | sort -u | tr '\n' ' ' || true)
  [ -z "$lacking" ] || die "$program finds no $lacking: give LibTorch with --libtorch, and put other libraries into $build/lib."
done
export OMP_NUM_THREADS=1
export CUBLAS_WORKSPACE_CONFIG=:4096:8  # what deterministic matrix products need

if ! reason=$(timeout 120 "$build/tests/cuda_test" --gtest_filter='CudaMachine.Pinned*' 2>&1); then
  say "$reason"
  die "The first test on the GPU failed."
fi
if grep -q "no usable GPU" <<<"$reason"; then
  grep -m1 "no usable GPU" <<<"$reason"
  exit 77
fi

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
rows=()     # the table
records=()  # JSON objects, one a check
failed=0

quoted() { python3 -c 'import json, sys; print(json.dumps(sys.argv[1]))' "$1"; }

share=100   # percent of the time left that a check may take; with less than all, to run out of it is no fault

# check <name> <command>...: runs it in its share of the time left; 77 counts as skipped.
check() {
  local name=$1 start=$SECONDS status=0 left=$((limit - SECONDS)) outcome=passed
  shift
  step "$name"
  if [ "$left" -lt 5 ]; then
    status=124
    say "No time is left for it."
  else
    timeout $((left * share / 100)) "$@" 2>&1 | tee "$work/log" || status=${PIPESTATUS[0]}
  fi
  if [ "$status" = 77 ] || { [ "$status" = 124 ] && [ "$share" -lt 100 ]; }; then
    outcome=skipped
  elif [ "$status" != 0 ]; then
    outcome=FAILED
    failed=$((failed + 1))
  fi
  rows+=("$(printf '%-34s %6d s   %s' "$name" $((SECONDS - start)) "$outcome")")
  records+=("{\"name\": $(quoted "$name"), \"outcome\": \"$outcome\", \"status\": $status, \"seconds\": $((SECONDS - start)), \"end_of_log\": $(quoted "$(tail -c 2000 "$work/log" 2>/dev/null || true)")}")
}
skip() {
  rows+=("$(printf '%-34s %8s   skipped: %s' "$1" "" "$2")")
  records+=("{\"name\": $(quoted "$1"), \"outcome\": \"skipped\", \"why\": $(quoted "$2")}")
}

check "kernels" "$build/tests/cuda_test" --gtest_brief=1 --gtest_filter='Kernels.*'
check "machine and schedules" "$build/tests/cuda_test" --gtest_brief=1 --gtest_filter='-Kernels.*'
if [ -x "$build/tests/cuda_engine_test" ]; then
  check "engine" "$build/tests/cuda_engine_test" --gtest_brief=1
  if [ -x "$build/tests/cuda_ranks_test" ]; then
    check "ranks through NCCL" "$build/tests/cuda_ranks_test" --gtest_brief=1
  fi
  check "one runtime of each kind" "$build/tests/process_test" --gtest_brief=1
else
  skip "engine" "this is a build without LibTorch"
fi

if [ -x "$build/examples/finetune" ]; then
  check "curves of the references" python3 scripts/gpu_curves.py --finetune "$build/examples/finetune"
else
  skip "curves of the references" "this build has no examples/finetune"
fi

if [ -x "$build/benchmarks/offload_bench" ]; then
  check "offload_bench" "$build/benchmarks/offload_bench" --quick --device cuda --json "$work/bench.json"
else
  skip "offload_bench" "this build has none"
fi

# A case each, in half of the time that is left: it is many times slower than the tests.
share=50
if ! command -v compute-sanitizer >/dev/null; then
  skip "compute-sanitizer" "it is not installed"
else
  check "compute-sanitizer: memory" compute-sanitizer --error-exitcode 1 "$build/tests/cuda_test" --gtest_brief=1 \
    --gtest_filter='Kernels.GrainSquareSums:Kernels.Lion:CudaMachine.Pinned*:All/CudaSchedules.End*resident*'
  check "compute-sanitizer: uninitialised" compute-sanitizer --tool initcheck --error-exitcode 1 \
    "$build/tests/cuda_test" --gtest_brief=1 --gtest_filter='All/CudaSchedules.End*resident*'
fi

bench=null
if [ -s "$work/bench.json" ]; then bench=$(cat "$work/bench.json"); fi
gpu=$(nvidia-smi --query-gpu=name,driver_version,memory.total --format=csv,noheader 2>/dev/null | head -1 || true)
{
  printf '{"schema": "spillway.gpu_check.1", "gpu": %s, "failed": %d, "seconds": %d,\n "checks": [\n  ' "$(quoted "$gpu")" \
    "$failed" "$SECONDS"
  (IFS=$'\n'; printf '%s' "${records[*]/%/,}" | sed '$ s/,$//')
  printf '\n ],\n "offload_bench": %s}\n' "$bench"
} >"$output"
python3 -c 'import json, sys; json.load(open(sys.argv[1]))' "$output" || die "The results in $output are no JSON."

step "Summary${gpu:+: $gpu}"
printf '%s\n' "${rows[@]}"
say "Results: $output"
if [ "$failed" != 0 ]; then die "FAILED: $failed of the checks above."; fi
