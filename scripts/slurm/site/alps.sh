# shellcheck shell=bash
# CSCS Alps (clusters daint and clariden): four GH200 a node, Slingshot network. NOT RUN THERE.
#
#   python -m ddlbench.sweep STUDY --slurm --site alps --sbatch="--account=PROJECT --uenv=prgenv-gnu/VERSION:v1" \
#       gpus_per_node=4
#
# Sources: https://docs.cscs.ch/software/communication/nccl (NCCL_*, FI_*: the site's values for its uenvs),
# https://docs.cscs.ch/software/ml/pytorch (uenv and container), https://docs.cscs.ch/running/slurm (72 cores a GPU).
# With the site's container engine (--environment=FILE.toml) its AWS OFI hook sets the same variables.
#
# Four tasks share the 288 cores of a node.
#SBATCH --exclusive --cpus-per-task=72

# An environment made within the uenv (python -m venv --system-site-packages).
if [ -n "${DDLBENCH_VENV:-}" ]; then
  # shellcheck source=/dev/null
  source "$DDLBENCH_VENV/bin/activate"
fi

# Fail rather than fall back to TCP, which would be measured as if it were Slingshot. Not on one node: the manufacturer
# of the network warns that NCCL then uses it between the GPUs of a node, too (github.com/HewlettPackard/shs-ccl-docs).
if [ "${SLURM_JOB_NUM_NODES:-1}" -gt 1 ]; then
  export NCCL_NET="AWS Libfabric"
fi
export NCCL_NET_GDR_LEVEL=PHB   # RDMA where GPU and network card are on one NUMA node
export NCCL_CROSS_NIC=1
# LL128 is new in NCCL 2.27 and slower on Slingshot; with GPUDirect on GH200 it can corrupt data
# (github.com/NVIDIA/nccl/issues/2001, https://documentation.sigma2.no/hpc_machines/olivia/nccl.html).
export NCCL_PROTO=^LL128
export FI_CXI_DEFAULT_CQ_SIZE=131072 FI_CXI_DEFAULT_TX_SIZE=32768
export FI_CXI_DISABLE_HOST_REGISTER=1 FI_CXI_RX_MATCH_MODE=software FI_MR_CACHE_MONITOR=userfaultfd
export NCCL_SOCKET_IFNAME=hsn GLOO_SOCKET_IFNAME=hsn0 # the Slingshot interfaces (names as in shs-ccl-docs)
# Cray MPICH with GPU buffers beside NCCL can deadlock; ddlbench uses MPI nowhere but in some builds of Horovod.
export MPICH_GPU_SUPPORT_ENABLED=0
