#!/usr/bin/env bash
# What one GPU does with the headline models, in parts that each end within 8 minutes; then a Markdown table with device
# and versions.
#   scripts/gpu_check.sh [--dry-run] [PART|all] [RESULTS]     scripts/gpu_check.sh --list     STEPS=200 WORKERS=16
# It needs torch, torchvision, transformers, pandas, matplotlib and pyarrow. The rest may be carried in the folder that
# scripts/pack_for_gpu.sh makes. PYTHON, WHEELS and DDLBENCH_TINY: see scripts/gpu_common.sh.
# Measured on one H200: ResNet-50 4,400 images/s, GPT-2 small with a padded vocabulary 29 % MFU; on one H100
# GPT-2 small, compiled and without dropout, 31 % MFU (docs/first-gpu-session.md).
# shellcheck disable=SC2329 # parts are called by their names
set -uo pipefail
# shellcheck source=scripts/gpu_common.sh
source "$(dirname "${BASH_SOURCE[0]}")/gpu_common.sh"
limit_s=470 # ten seconds are left to end what runs
steps=${STEPS:-200}
common=(train.precision=bf16 train.epochs=1 train.warmup_steps=20 "train.steps=$steps" train.validate=false)
resnet50=(+model=resnet50 train.channels_last=true train.batch_per_gpu=256)
gpt2=(+model=gpt2_small train.batch_per_gpu=32 model.pad_vocab_to_multiple=128 loader=synthetic
  loader.train_samples=100000)

parts() {
  cat <<'PARTS'
resnet50    ResNet-50, one batch that lies on the GPU, without and with torch.compile
images      ResNet-50 on the sample images, read and decoded while it trains
gpt2        GPT-2 small, 1,024 tokens, without and with torch.compile, and without dropout
frameworks  each framework that runs on one GPU, 20 steps of GPT-2 small
PARTS
}

compiled() {
  for compile in false true; do
    bench "$1-compile-$compile" ok +framework=single "${common[@]}" "${@:2}" "train.compile=$compile"
  done
}

run_resnet50() {
  shrink images
  compiled synthetic "${resnet50[@]}" loader=synthetic loader.train_samples=1281167
}

run_images() {
  shrink images
  bench native ok +framework=single "${common[@]}" "${resnet50[@]}" "$images" \
    "loader.workers=${WORKERS:-16}" train.steps=50 train.warmup_steps=2
}

run_gpt2() {
  shrink text
  compiled synthetic "${gpt2[@]}"
  compiled no-dropout "${gpt2[@]}" model.dropout=0
}

run_frameworks() {
  shrink text
  for framework in single ddp local_sgd parameter_server horovod fsdp zero0 zero1 zero2 zero3; do
    bench "$framework" ok "+framework=$framework" "${common[@]}" "${gpt2[@]}" train.steps=20 train.warmup_steps=5
  done
}

[ "${1:-}" != --list ] || { parts && exit 0; }
[ "${1:-}" != --dry-run ] || { dry=1 && shift; }
chosen=${1:-all} results=${2:-results/gpu-check}
[ "$chosen" != all ] || chosen=$(parts | cut -d' ' -f1)
for each in $chosen; do
  parts | grep -q "^$each " || die "there is no part $each: choose $(parts | cut -d' ' -f1 | paste -sd' ') or all"
done
need_gpu
carry
[ -n "$dry" ] || mkdir -p "$results"
for each in $chosen; do begin "$each" $limit_s && "run_$each"; done
finish
