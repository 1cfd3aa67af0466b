# shellcheck shell=bash
# LUMI-G: four AMD MI250X (eight GCDs) a node, Slingshot network. NOT RUN THERE. docs/clusters.md says
# what differs on AMD GPUs.
#
#   export DDLBENCH_IMAGE=/scratch/PROJECT/ddlbench-rocm.sif    # scripts/container; a ROCm image as base
#   python -m ddlbench.sweep STUDY --slurm --site lumi --sbatch="--account=PROJECT" gpus_per_node=8
#
# Sources: https://docs.lumi-supercomputer.eu (software/packages/pytorch; runjobs/scheduled-jobs/distribution-binding)
# and https://github.com/Lumi-supercomputer/Getting_Started_with_AI_workshop (bonus_material: modules, binding mask,
# MIOpen, NCCL_*); for the monitor https://github.com/Lumi-supercomputer/LUMI-AI-Guide/pull/118.
# A hang that others met there: RCCL's first operation in a second process group, on 4 nodes
# (https://github.com/lumi-ai-factory/laifs-container-recipes/issues/44). It would concern frameworks with several groups
# (tensor, pipelines, hybrid, fsdp with replicas); such a run ends as `timeout` after train.timeout_s.
#
#SBATCH --partition=standard-g --cpus-per-task=7 --mem=480G

# The site asks for containers: a Python environment is ten thousands of small files, which Lustre is slow with.
# The modules bind the file systems and the libraries of Slingshot into the container.
module load LUMI partition/G singularity-userfilesystems singularity-CPEbits
if [ -n "${DDLBENCH_IMAGE:-}" ]; then
  DDLBENCH_PYTHON=$(cd "$(dirname "${BASH_SOURCE[0]}")/../../container" && pwd)/python.sh
  export DDLBENCH_PYTHON DDLBENCH_GPU=rocm
fi

# Rank i of a node on the seven cores next to GCD i; the first core of each group of eight is the system's.
export SLURM_CPU_BIND=mask_cpu:0xfe000000000000,0xfe00000000000000,0xfe0000,0xfe000000,0xfe,0xfe00,0xfe00000000,0xfe0000000000
export NCCL_SOCKET_IFNAME=hsn0,hsn1,hsn2,hsn3 GLOO_SOCKET_IFNAME=hsn0 # RCCL does not find them by itself
export NCCL_NET_GDR_LEVEL=PHB                                         # RDMA between network card and GPU
export FI_MR_CACHE_MONITOR=userfaultfd                                # libfabric's default monitor has made RCCL hang
export MIOPEN_USER_DB_PATH=/tmp/miopen-${USER:-}-${SLURM_JOB_ID:-login}
export MIOPEN_CUSTOM_CACHE_DIR=$MIOPEN_USER_DB_PATH # as on Frontier
