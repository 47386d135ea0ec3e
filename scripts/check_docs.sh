#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# The long checks of the documentation: makes the reference with doxygen, and runs the commands of the pages that take too
# long for scripts/test.sh. About ten minutes once everything is built; scripts/soak.sh runs it.
#
# Usage: scripts/check_docs.sh [--help]
# Doxygen, with clang's libraries too large for scripts/setup.sh, is installed where Debian's package manager may be used.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/lib.sh"
cd "$root"

while [ $# -gt 0 ]; do
  case $1 in
    -h | --help) usage; exit 0 ;;
    *) die "Unknown option $1; see scripts/check_docs.sh --help." ;;
  esac
done

if ! command -v doxygen >/dev/null && command -v apt-get >/dev/null && [ "$(id -u)" = 0 ]; then
  step "Installing doxygen"
  DEBIAN_FRONTEND=noninteractive apt-get -q install -y --no-install-recommends doxygen </dev/null ||
    say "It could not be installed: the reference is left out."
fi

step "Build"
cmake --preset release -DSPILLWAY_TORCH=ON >/dev/null
cmake --build build/release -j "$jobs"

step "Reference"
if command -v doxygen >/dev/null; then
  cmake --build build/release --target docs
  say "The reference is in build/release/reference/html."
else
  say "Left out: doxygen is not installed."
fi

step "Long commands of the pages"
python3 tests/project/docs_commands_test.py soak build/release
