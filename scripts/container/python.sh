#!/bin/bash
# Python inside a container, in the place of `python` for run.sbatch and scaling.sh:
#
#   export DDLBENCH_PYTHON=$PWD/scripts/container/python.sh DDLBENCH_IMAGE=/path/image.sif
#
#   DDLBENCH_IMAGE  the image (scripts/container/ddlbench.def makes one)
#   DDLBENCH_GPU    nvidia, rocm or none: what of the node's driver goes into the container (default: what the node has)
#   DDLBENCH_BIND   folders to bind, as for --bind; the home folder, the working folder and /tmp always are
#
# Slurm's and NCCL's variables go into the container as they are. srun must start one container a task, not mpirun inside.
set -euo pipefail

die() {
  echo "python.sh: $*" >&2
  exit 2
}

[ -r "${DDLBENCH_IMAGE:-}" ] || die "DDLBENCH_IMAGE=${DDLBENCH_IMAGE:-} is no file: give the image (scripts/container)"
runtime=$(command -v apptainer || command -v singularity) || die "no apptainer and no singularity here: load its module"

gpu=${DDLBENCH_GPU:-}
if [ -z "$gpu" ]; then
  if [ -e /dev/nvidiactl ]; then gpu=nvidia; elif [ -e /dev/kfd ]; then gpu=rocm; else gpu=none; fi
fi
case $gpu in
  nvidia) flags=(--nv) ;;
  rocm) flags=(--rocm) ;;
  none) flags=() ;;
  *) die "DDLBENCH_GPU=$gpu: nvidia, rocm or none" ;;
esac

exec "$runtime" exec ${flags[@]+"${flags[@]}"} ${DDLBENCH_BIND:+--bind "$DDLBENCH_BIND"} "$DDLBENCH_IMAGE" python "$@"
