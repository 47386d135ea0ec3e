#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Installs what Spillway needs to build and test, and only what is missing. Safe to run again: a second run takes
# seconds, and an installation that was interrupted is repaired.
#
# Usage: scripts/setup.sh [--core-only] [--help]
#   --core-only   no LibTorch and no Python packages: enough for the planner, the simulator and the core's tests
#
# Packages come from Debian or Ubuntu's package manager, where this may use it (as root, or with sudo that asks for no
# password); otherwise the command to run is printed. On other systems the list of what is needed is printed.
# LibTorch is the one that Torch_DIR or CMAKE_PREFIX_PATH name, else the one in .venv, else the one python3 imports;
# where there is none, PyPI's torch is installed into .venv with pip, under pip's own settings (about 2.5 GB to
# download, 5 GB on disk).
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/lib.sh"

torch_version=2.11.0
venv=$root/.venv
marker=$venv/.spillway-complete   # written last: a folder without it was left half done
needed_kb=$((6 * 1024 * 1024))

# What is needed: Debian's name, then how to recognise it where it did not come from there (a command or a header).
packages() {
  cat <<'LIST'
g++ command g++
cmake command cmake
ninja-build command ninja
python3-venv python venv
libgtest-dev header gtest/gtest.h
libbenchmark-dev header benchmark/benchmark.h
libfmt-dev header fmt/format.h
libspdlog-dev header spdlog/spdlog.h
nlohmann-json3-dev header nlohmann/json.hpp
libcli11-dev header CLI/CLI.hpp
liburing-dev header liburing.h
libxxhash-dev header xxhash.h
libopenmpi-dev command mpicxx
openmpi-bin command mpirun
LIST
}
optional_packages="ccache clang clang-format"   # faster rebuilds; fuzzing; only for those who change the code

# True where the thing is here although Debian's package is not: installed by hand, or another system.
is_present() {
  case $1 in
    command) command -v "$2" >/dev/null ;;
    python) pick_python >/dev/null ;;
    header) command -v g++ >/dev/null && g++ -std=c++20 -E -x c++ - <<<"#include <$2>" >/dev/null 2>&1 ;;
  esac
}

# The first python3 that can make a virtual environment.
pick_python() {
  local candidate
  for candidate in python3 /usr/bin/python3; do
    if "$candidate" -c 'import ensurepip, sys, venv; sys.exit(sys.version_info < (3, 10))' 2>/dev/null; then
      say "$candidate"
      return 0
    fi
  done
  return 1
}

missing_packages() {
  local installed="" package kind what
  if command -v dpkg-query >/dev/null; then
    # shellcheck disable=SC2016
    installed=$(packages | cut -d' ' -f1 | xargs dpkg-query -W -f='${Package} ${db:Status-Status}\n' 2>/dev/null || true)
  fi
  while read -r package kind what; do
    grep -qx "$package installed" <<<"$installed" || is_present "$kind" "$what" || printf '%s ' "$package"
  done < <(packages)
}

install_packages() {
  local missing runner=()
  read -ra missing <<<"$(missing_packages)"
  if [ ${#missing[@]} = 0 ]; then
    say "Packages: nothing is missing."
    return
  fi
  if ! command -v apt-get >/dev/null; then
    die "Missing: ${missing[*]}
These are Debian's names; install your system's packages of the same libraries (g++ 12 or clang 14 and later,
CMake 3.25 and later, Ninja, Python 3.10 and later with venv, GoogleTest, Google Benchmark, fmt, spdlog,
nlohmann-json, CLI11, liburing, xxHash, Open MPI), then run this again."
  fi
  if [ "$(id -u)" != 0 ]; then
    sudo -n true 2>/dev/null || die "Missing: ${missing[*]}
This needs an administrator. Run this, then start again:
  sudo apt-get update && sudo apt-get install -y --no-install-recommends ${missing[*]}"
    runner=(sudo -n)
  fi
  step "Installing Debian packages (about half a minute): ${missing[*]}"
  local apt=("${runner[@]}" env DEBIAN_FRONTEND=noninteractive apt-get -q -o DPkg::Lock::Timeout=300) package
  "${apt[@]}" update </dev/null || say "The package lists could not be refreshed; trying with those at hand."
  local chosen=("${missing[@]}")
  for package in $optional_packages; do
    if ! command -v "$package" >/dev/null && apt-cache show "$package" >/dev/null 2>&1; then chosen+=("$package"); fi
  done
  "${apt[@]}" install -y --no-install-recommends "${chosen[@]}" </dev/null ||
    die "The packages could not be installed (see above). Once mended, run this again; what is needed: ${missing[*]}"
}

# ---- Python and LibTorch ---------------------------------------------------------------------------------------------

requirements() {
  if [ "$1" = with_torch ]; then say "torch==$torch_version"; fi
  printf '%s\n' numpy safetensors tokenizers jinja2   # the last two: scripts/prepare_data.py
}

venv_python_runs() { "$venv/bin/python" -c 'import pip' >/dev/null 2>&1; }

# True where .venv holds, whole, what is asked. Without the marker the packages are loaded once, which takes seconds.
venv_is_complete() {
  [ -x "$venv/bin/python" ] || return 1
  if [ "$1" = with_torch ] && ! is_libtorch "$(echo "$venv"/lib/python3*/site-packages/torch)"; then return 1; fi
  if [ -f "$marker" ] && [ "$(cat "$marker")" = "$(requirements "$1")" ]; then
    venv_python_runs
    return
  fi
  "$venv/bin/python" -c '
import importlib, importlib.metadata as metadata, sys
for line in sys.stdin.read().split():
    name, _, version = line.partition("==")
    importlib.import_module(name)
    if version and metadata.version(name).split("+")[0] != version: sys.exit(1)' <<<"$(requirements "$1")" >/dev/null 2>&1 || return 1
  requirements "$1" >"$marker"
}

require_space() {
  local free_kb
  free_kb=$(df -Pk "$root" | awk 'NR == 2 { print $4 }')
  [ "$free_kb" -ge "$needed_kb" ] || die "LibTorch needs about $((needed_kb / 1024 / 1024)) GB under $root, and \
$((free_kb / 1024 / 1024)) GB are free. Make room, or name a LibTorch that is already there with Torch_DIR, or build the \
core alone: scripts/setup.sh --core-only."
}

# Half an installation cannot be told from a whole one package by package: it is made anew. Only a whole one that was
# made for other requirements is kept and added to.
remove_broken_venv() {
  [ -e "$venv" ] || return 0
  if [ -f "$marker" ] && [ "$(cat "$marker")" != "$(requirements "$1")" ] && venv_python_runs; then return 0; fi
  say "Removing .venv: an earlier installation did not finish, or was damaged since."
  rm -rf "$venv"
}

install_python_packages() {
  local wanted=$1 python
  if venv_is_complete "$wanted"; then
    say "Python: .venv is complete."
    return
  fi
  remove_broken_venv "$wanted"
  if [ "$wanted" = with_torch ]; then require_space; fi
  if [ ! -d "$venv" ]; then
    python=$(pick_python) || die "No python3 of version 3.10 or later that can make a virtual environment was found."
    step "Making .venv with $("$python" --version)"
    "$python" -m venv "$venv" </dev/null
  fi
  if [ "$wanted" = with_torch ]; then
    step "Installing LibTorch $torch_version into .venv (about 2.5 GB to download: one to ten minutes)"
  else
    step "Installing $(requirements "$wanted" | tr '\n' ' ')into .venv"
  fi
  rm -f "$marker"
  # shellcheck disable=SC2046
  "$venv/bin/python" -m pip install --progress-bar off $(requirements "$wanted") </dev/null ||
    die "pip could not install: $(requirements "$wanted" | tr '\n' ' '). Mend what it reports above and run this again."
  venv_is_complete "$wanted" || die "pip finished, but .venv does not load its packages: see  .venv/bin/python -c 'import \
numpy, safetensors, tokenizers, jinja2, torch'"
}

install_torch() {
  local found
  found=$(find_libtorch)
  if [ -z "$found" ] || [[ $found == "$venv"/* ]]; then
    install_python_packages with_torch
    found=$(find_libtorch)
  else
    install_python_packages without_torch
  fi
  say "LibTorch: $found"
}

core_only=no
for argument in "$@"; do
  case $argument in
    --core-only) core_only=yes ;;
    -h | --help) usage; exit 0 ;;
    *) die "Unknown option $argument; see scripts/setup.sh --help." ;;
  esac
done

exec 9<"$root"
if command -v flock >/dev/null; then flock 9; fi   # two runs at once would spoil .venv
install_packages
if [ "$core_only" = no ]; then install_torch; fi
say "Ready."
