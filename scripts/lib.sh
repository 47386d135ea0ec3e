# shellcheck shell=bash disable=SC2034
# SPDX-License-Identifier: Apache-2.0
# Shared by the scripts of this folder: where the project is, how to speak, how many jobs to run.

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
jobs=$(nproc 2>/dev/null || echo 2)

say() { printf '%s\n' "$*"; }
step() { printf '\n==> %s\n' "$*"; }
die() {
  printf '%s\n' "$*" >&2
  exit 1
}

# The comment at the head of the calling script is its help text.
usage() { awk 'NR > 2 && !/^#/ { exit } NR > 2 { sub(/^# ?/, ""); print }' "$0"; }

# Prints LibTorch's folder, searched for as cmake/FindLibTorch.cmake does; nothing where there is none.
find_libtorch() {
  local candidate
  for candidate in ${Torch_DIR:+"$Torch_DIR/../../.."} $(prefix_candidates) "$root"/.venv/lib/python3*/site-packages/torch; do
    is_libtorch "$candidate" && { (cd "$candidate" && pwd); return; }
  done
  candidate=$(python3 -c 'import importlib.util as u
s = u.find_spec("torch")
print(s.submodule_search_locations[0] if s else "")' 2>/dev/null) || return 0
  if is_libtorch "$candidate"; then say "$candidate"; fi
}

prefix_candidates() {
  local prefix prefixes=${CMAKE_PREFIX_PATH:-}
  for prefix in ${prefixes//[:;]/ }; do printf '%s\n' "$prefix" "$prefix/../.."; done
}

is_libtorch() {
  [ -n "$1" ] && [ -f "$1/include/torch/csrc/api/include/torch/torch.h" ] && [ -f "$1/lib/libtorch_cpu.so" ]
}

# The thread sanitizer of older compilers cannot map its shadow where address randomisation uses more than 28 bits.
without_randomisation() {
  local bits
  bits=$(cat /proc/sys/vm/mmap_rnd_bits 2>/dev/null || echo 28)
  if [ "$bits" -gt 28 ] && setarch "$(uname -m)" -R true 2>/dev/null; then
    setarch "$(uname -m)" -R "$@"
  else
    "$@"
  fi
}
