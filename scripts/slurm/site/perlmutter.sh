# shellcheck shell=bash
# NERSC Perlmutter: four A100 a node, Slingshot network. NOT RUN THERE.
#
#   python -m ddlbench.sweep STUDY --slurm --site perlmutter --sbatch="--account=PROJECT" gpus_per_node=4
#
# Sources
#   nodes               https://docs.nersc.gov/beginner-guide (one EPYC 7763 and four A100)
#   network variables   https://github.com/HewlettPackard/shs-ccl-docs (nccl/nccl_tuning_guide.md), of the network's
#                       manufacturer; FI_MR_CACHE_MONITOR also https://github.com/NERSC/sc22-dl-tutorial
#   modules, options    https://docs.nersc.gov (machinelearning/pytorch, jobs), from memory, to be checked
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

# The control messages and the bootstrap of NCCL go over the Slingshot interfaces (four on a GPU node).
export NCCL_SOCKET_IFNAME=hsn GLOO_SOCKET_IFNAME=hsn0
export FI_MR_CACHE_MONITOR=userfaultfd # libfabric's default monitor of registered memory has made NCCL hang
export NCCL_NET_GDR_LEVEL=PHB          # RDMA between GPU and network card
export NCCL_CROSS_NIC=1
export FI_CXI_DISABLE_HOST_REGISTER=1 # against deadlocks
export FI_CXI_DEFAULT_CQ_SIZE=131072
# Not set: the manufacturer's FI_CXI_RDZV_*, which go with --network=disable_rdzv_get of srun.
