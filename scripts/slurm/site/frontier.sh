# shellcheck shell=bash
# OLCF Frontier: four AMD MI250X a node, Slingshot network. NOT RUN THERE, and ddlbench has not run on any AMD GPU.
#
#   python -m ddlbench.sweep STUDY --slurm --site frontier --sbatch="--account=PROJECT" gpus_per_node=8
#
# docs/clusters.md says what differs on AMD GPUs. An MI250X is two GPUs (GCDs): 8 ranks a node.
#
# Sources: https://docs.olcf.ornl.gov/systems/frontier_user_guide.html (nodes, core 0 of each L3 region is reserved) and
# https://docs.olcf.ornl.gov/software/analytics/pytorch_frontier.html (modules, plugin, interfaces, master address).
#
# Whole nodes; seven cores a rank (an eighth is the system's); the network protocol that RCCL is faster with.
#SBATCH --partition=batch --cpus-per-task=7 --network=disable_rdzv_get

module load PrgEnv-gnu rocm/7.1.1 craype-accel-amd-gfx90a miniforge3
# RCCL's plugin for Slingshot, with the variables that the site recommends (FI_*, NCCL_*): without it RCCL uses TCP.
module load rccl-net-plugin
if [ -n "${DDLBENCH_VENV:-}" ]; then
  # A conda environment with torch of https://download.pytorch.org/whl/rocm7.1 (2.11 or newer).
  # shellcheck source=/dev/null
  source activate "$DDLBENCH_VENV"
fi

# Each rank sees only the GPU that is next to its cores: GPU numbers do not follow core numbers on these nodes.
export SLURM_GPUS_PER_TASK=1 SLURM_GPU_BIND=closest
export NCCL_SOCKET_IFNAME=hsn0,hsn1,hsn2,hsn3 # the site: if runs hang, hsn0 alone
export GLOO_SOCKET_IFNAME=hsn0
if [ -n "${SLURM_JOB_NODELIST:-}" ]; then
  MASTER_ADDR=$(hostname -i | cut -d' ' -f1) # this file is sourced on the first node
  export MASTER_ADDR
fi

# MIOpen keeps compiled kernels in a database: one for each job and node, because many ranks cannot share one in $HOME.
export MIOPEN_USER_DB_PATH=/tmp/miopen-${USER:-}-${SLURM_JOB_ID:-login}
export MIOPEN_CUSTOM_CACHE_DIR=$MIOPEN_USER_DB_PATH
