#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# The main job: sets up, builds, and trains a language model whose states do not fit in the device's memory on real text.
#
# Usage: scripts/finetune.sh [--text FILE_OR_FOLDER] [--output FOLDER] [--steps N] [--device NAME] [--device-memory SIZE]
#                           [--help]
#   --text PATH           what to learn, byte by byte; default: the C++ headers that come with LibTorch
#   --output FOLDER       where the data, the log, the timeline and the trained model go (default: out/finetune)
#   --steps N             optimizer steps (default: 250)
#   --device NAME         emulated, cuda or cuda:N (default: emulated, which needs no GPU)
#   --device-memory SIZE  how much of the device may be used (default: 128MiB emulated, all of a GPU)
#
# The model is a Llama of ten million parameters with random weights (examples/tiny_llama.json). With its gradients and
# optimizer states it does not fit: the first run, with everything resident, is refused. The second keeps masters,
# gradients and optimizer states on the host, and trains. About two minutes on two cores once everything is built.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/lib.sh"
cd "$root"

text=
output=out/finetune
steps=250
device=emulated
device_memory=
while [ $# -gt 0 ]; do
  case $1 in
    --text) text=${2:?--text needs a file or a folder}; shift ;;
    --output) output=${2:?--output needs a folder}; shift ;;
    --steps) steps=${2:?--steps needs a number}; shift ;;
    --device) device=${2:?--device needs a name}; shift ;;
    --device-memory) device_memory=${2:?--device-memory needs a size}; shift ;;
    -h | --help) usage; exit 0 ;;
    *) die "Unknown option $1; see scripts/finetune.sh --help." ;;
  esac
  shift
done
[ -z "$text" ] || [ -e "$text" ] || die "--text $text: there is no such file or folder."
case $device in
  emulated) device_memory=${device_memory:-128MiB} ;;
  cuda | cuda:[0-9]*) ;;
  *) die "--device $device: expected emulated, cuda or cuda:N." ;;
esac

step "Set-up"
scripts/setup.sh

step "Build"
cmake --preset release -DSPILLWAY_TORCH=ON >/dev/null
cmake --build build/release -j "$jobs" --target finetune
finetune=build/release/examples/finetune

step "Text to tokens"
mkdir -p "$output"
if [ -z "$text" ]; then
  text=$(find_libtorch)/include/ATen
  say "Learning the C++ headers that come with LibTorch; --text takes any other."
fi
python3 scripts/prepare_data.py --output "$output/tokens.bin" --suffixes .h,.hpp,.cuh,.cpp,.py,.txt,.md \
  --validation-fraction 0.02 "$text"

# The same job for both runs; the first only shows whether it fits, with one step if it does. A GPU's own link is as fast
# as it is; the emulated one's is a model.
job=(--init examples/tiny_llama.json --data "$output/tokens.bin" --eval-data "$output/tokens.validation.bin"
  --seq-len 64 --batch-size 4 --lr 1e-3 --clip-norm 1.0
  --weight-decay 0.1 --betas 0.9,0.95 --device "$device"
  --seed 1 --output "$output/model" --log "$output/log.jsonl")
if [ -n "$device_memory" ]; then job+=(--device-memory "$device_memory"); fi
if [ "$device" = emulated ]; then job+=(--link-bandwidth 12GB/s); fi

# Here LibTorch's threads share the cores with the copies and the optimizer: without this they spin for each other, and
# on a busy machine a step takes many times as long.
export OMP_WAIT_POLICY=${OMP_WAIT_POLICY:-passive}

step "Everything resident on a device of ${device_memory:-all its memory}"
status=0
"$finetune" "${job[@]}" --preset resident --steps 1 --eval-batches 1 --progress-every 0 || status=$?
case $status in
  3) ;;
  0) say "It fits after all: the device is large enough for everything. Training offloaded all the same." ;;
  *) die "finetune ended with $status." ;;
esac

step "States offloaded: trains on the same device"
"$finetune" "${job[@]}" --preset zero_offload --steps "$steps" --lr-schedule cosine \
  --warmup-steps $((steps / 10)) --trace "$output/timeline.json" --progress-every 25 \
  --generate 160 --prompt "#include <"
say "The model is in $output/model, the log in $output/log.jsonl, the timeline (ui.perfetto.dev) in $output/timeline.json."
