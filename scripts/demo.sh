#!/usr/bin/env bash
# The main job of `make run`: a small ResNet learns the sample images with one process and with two, then the table.
# REPEATS=3 repeats both runs; RESULTS names the folder.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
results=${RESULTS:-results/run-$(date +%Y%m%d-%H%M%S)}
export OMP_NUM_THREADS=1 # one thread for each rank; torchrun sets the same and prints a long notice
# One bottleneck in each stage instead of 3, 4, 6 and 3. AdamW needs fewer updates than SGD, and 4,800 images are few:
# crops of at least 0.6 of an image keep the figure that gives the class.
run=(+model=resnet50 'model.layers=[1,1,1,1]' model.image_size=64 model.num_classes=10
  data=sample_images 'data.crop_scale=[0.6,1.0]' data.val_limit=300 recipe=adamw recipe.optimizer.lr=1e-3
  train.epochs=5 train.steps=30 train.global_batch=32 "results_dir=$results")

for ((repeat = 0; repeat < ${REPEATS:-1}; repeat++)); do
  .venv/bin/python -m ddlbench +framework=single "${run[@]}" "train.repeat=$repeat"
  .venv/bin/torchrun --standalone --nproc-per-node=2 -m ddlbench +framework=ddp "${run[@]}" "train.repeat=$repeat"
done
.venv/bin/python -m ddlbench.report "$results" --out "$results/report"
