#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# The CPU kernels of aarch64 (NEON): cross-compiled with their tests, which then run under qemu's user emulation. Speeds
# mean nothing there; bits do. Part of scripts/soak.sh; needs Debian's cross compiler, qemu and GoogleTest's sources.
#
# Usage: scripts/arm_check.sh [--help] [GoogleTest's flags...]
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/lib.sh"
cd "$root"
if [ "${1:-}" = -h ] || [ "${1:-}" = --help ]; then usage; exit 0; fi

compiler=aarch64-linux-gnu-g++
googletest=/usr/src/googletest/googletest
sysroot=/usr/aarch64-linux-gnu
needed=(g++-aarch64-linux-gnu qemu-user googletest)
if ! command -v $compiler >/dev/null || ! command -v qemu-aarch64 >/dev/null || [ ! -d $googletest ]; then
  command -v apt-get >/dev/null && [ "$(id -u)" = 0 ] ||
    die "This needs (Debian's names): ${needed[*]}. Install them, then start again."
  step "Installing Debian packages: ${needed[*]}"
  DEBIAN_FRONTEND=noninteractive apt-get -q install -y --no-install-recommends "${needed[@]}" </dev/null
fi

build=build/arm
mkdir -p $build/include
# Headers without a processor of their own; the others in their folder are this machine's.
for library in fmt nlohmann; do ln -sfn /usr/include/$library $build/include/$library; done

flags=(-std=c++20 -O2 -ffp-contract=off -DFMT_HEADER_ONLY "-DSPILLWAY_SOURCE_DIR=\"$root\"" -Iinclude -I. -Isrc -Itests
       -I$build/include -isystem $googletest/include -I$googletest)
loops=(-O3 -fno-math-errno -fno-trapping-math)   # as kernels/CMakeLists.txt gives them to the sets of kernels
sources=(kernels/*.cpp kernels/cpu/dispatch.cpp kernels/cpu/kernels_baseline.cpp tests/kernels/*.cpp
         src/formats/safetensors_{header,json,reader}.cpp src/formats/{mapped_file,file_kind}.cpp src/core/{dtype,strict_json,units}.cpp
         $googletest/src/gtest-all.cc $googletest/src/gtest_main.cc)

step "Compiling the kernels and their tests for aarch64"
object_of() { echo "$build/$(tr / _ <<<"$1").o"; }
objects=()
for source in "${sources[@]}"; do objects+=("$(object_of "$source")"); done
for source in "${sources[@]}"; do
  object=$(object_of "$source")
  extra=()
  case $source in
    kernels/cpu/kernels_*) extra=("${loops[@]}") ;;
    *cuda_body_test.cpp) extra=(-fno-strict-aliasing) ;;
  esac
  printf '%s\0' "$compiler ${flags[*]@Q} ${extra[*]@Q} -c ${source@Q} -o ${object@Q}"
done | xargs -0 -P "$jobs" -I{} bash -c '{}'
$compiler "${objects[@]}" -o $build/kernels_test -pthread

step "Running them under emulation (some minutes)"
qemu-aarch64 -L $sysroot $build/kernels_test --gtest_brief=1 "$@"
