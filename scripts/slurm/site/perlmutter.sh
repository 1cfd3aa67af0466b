# shellcheck shell=bash
# NERSC Perlmutter: four A100 a node, Slingshot network. NOT RUN THERE. From memory of https://docs.nersc.gov
# (systems/perlmutter, machinelearning/pytorch, jobs/affinity), to be checked against it.
#
#   python -m ddlbench.sweep STUDY --slurm --site perlmutter --sbatch="--account=PROJECT" gpus_per_node=4
#
#SBATCH --constraint=gpu --qos=regular
# Each of the four tasks of a node gets a quarter of the 64 cores with two hardware threads.
#SBATCH --cpus-per-task=32

# The site's PyTorch module brings NCCL with the plugin for Slingshot (aws-ofi-nccl); without it NCCL falls back to
# TCP. With a PyTorch of your own: module load nccl-plugin, and DDLBENCH_VENV.
if [ -n "${DDLBENCH_VENV:-}" ]; then
  module load cudatoolkit nccl-plugin
  # shellcheck source=/dev/null
  source "$DDLBENCH_VENV/bin/activate"
else
  module load pytorch
fi

# The control messages and the bootstrap of NCCL go over the first of the four Slingshot interfaces.
export NCCL_SOCKET_IFNAME=hsn GLOO_SOCKET_IFNAME=hsn0
# libfabric's default monitor of registered memory has made NCCL hang in runs of several nodes
# (nersc/sc22-dl-tutorial and later, export_DDP_vars.sh and submit_pm.sh).
export FI_MR_CACHE_MONITOR=userfaultfd
# GPU and network card talk to each other directly where they share a PCIe host bridge.
export NCCL_NET_GDR_LEVEL=PHB
