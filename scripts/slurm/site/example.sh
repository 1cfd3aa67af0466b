# shellcheck shell=bash
# What your site needs before Python starts. Copy it to scripts/slurm/site/NAME.sh, then submit with
# DDLBENCH_SITE=NAME. It is sourced once, on the first node; srun hands the environment on to all ranks.
#
# module load python/3.11 cuda
# source "$HOME/venvs/ddlbench/bin/activate"
# export NCCL_SOCKET_IFNAME=ib0
