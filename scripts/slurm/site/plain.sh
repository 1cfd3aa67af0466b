# shellcheck shell=bash
# A plain cluster: nothing but a virtual environment. Copy this file to scripts/slurm/site/NAME.sh and add what your
# site needs; the other files of this folder show what that may be.
#
# How a site file is used: run.sbatch sources it once, on the first node of the job, and srun hands the environment on to
# all ranks; scaling.sh sources it on the login node too, for its check before it submits. The lines that begin with
# #SBATCH are options of sbatch, and `python -m ddlbench.sweep STUDY --slurm --site NAME` gives them to sbatch (before
# those of --sbatch, which win). sbatch itself does not read them here: without the sweep give them by hand.
# Nothing here may name a credential: the record keeps NCCL_*, SLURM_* and similar variables.

# An environment with PyTorch and ddlbench: DDLBENCH_VENV=FOLDER. Its Python becomes `python`.
if [ -n "${DDLBENCH_VENV:-}" ]; then
  # shellcheck source=/dev/null
  source "$DDLBENCH_VENV/bin/activate"
fi

# Where nodes have several networks, all libraries need the name of the fast one (`ip -brief address` lists them):
# gloo carries ddlbench's own messages (and all data without GPUs), NCCL the gradients.
# export GLOO_SOCKET_IFNAME=ib0 NCCL_SOCKET_IFNAME=ib0
