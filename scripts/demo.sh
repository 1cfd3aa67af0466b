#!/usr/bin/env bash
# The main job of `make run`: the full ResNet-50 on the sample images with one process and with two, then the table.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
results=${RESULTS:-results/run-$(date +%Y%m%d-%H%M%S)}
export OMP_NUM_THREADS=1 # one thread for each rank; torchrun sets the same and prints a long notice
run=(+model=resnet50 model.image_size=64 model.num_classes=10 data=sample_images data.val_limit=500
  train.epochs=2 train.steps=12 train.global_batch=32 "results_dir=$results")

.venv/bin/python -m ddlbench +framework=single "${run[@]}"
.venv/bin/torchrun --standalone --nproc-per-node=2 -m ddlbench +framework=ddp "${run[@]}"
.venv/bin/python -m ddlbench.report "$results" --out "$results/report"
