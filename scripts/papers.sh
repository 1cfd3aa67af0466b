#!/usr/bin/env bash
# `make papers`: the laptop studies of the papers, their figures and tables, and one archive of all records.
# A cell that has run is not run again, so the next call continues an interrupted one. REPEATS=2 runs each cell twice.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
export OMP_NUM_THREADS=1
studies=(gusak2022_laptop kahira2021_laptop aach2023_laptop lin2022_laptop aach2023_batch_laptop)

.venv/bin/python -m ddlbench.predict --calibrate-network # for the predictions beside the measured steps
for study in "${studies[@]}"; do
  code=0
  .venv/bin/python -m ddlbench.sweep "$study" ${REPEATS:+repeats=$REPEATS} --local || code=$?
  [ "$code" != 130 ] || exit 130 # Ctrl-C
  [ "$code" = 0 ] || echo "papers: some cells of $study failed: their rows are in the tables" >&2
  .venv/bin/python -m ddlbench.report "results/$study" --study "$study" --predict local --out "results/papers/$study" ||
    echo "papers: the report of $study says what is missing" >&2
done
tar -C results --exclude=.sweep --exclude=report -cJf results/papers/records.tar.xz "${studies[@]}"
