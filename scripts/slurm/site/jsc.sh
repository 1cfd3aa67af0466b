# shellcheck shell=bash
# Julich Supercomputing Centre: JUWELS Booster, JURECA DC, JUPITER. NOT RUN THERE. The sources are from 2025; check
# module versions with `module spider PyTorch`.
#
#   python -m ddlbench.sweep STUDY --slurm --site jsc --sbatch="--account=PROJECT --partition=booster" gpus_per_node=4
#   (JUWELS and JUPITER: --partition=booster; JURECA: --partition=dc-gpu; all have four GPUs a node)
#
# Sources
#   nodes, GPUs, cores   https://apps.fz-juelich.de/jsc/hps/juwels/booster-overview.html (4 x A100, 2 x 24 cores),
#                        https://apps.fz-juelich.de/jsc/hps/jupiter/configuration.html (4 x GH200, 4 x 72 cores)
#   partitions           https://apps.fz-juelich.de/jsc/hps/juwels/batchsystem.html; JURECA's from memory, to be checked
#   host name suffix     https://github.com/pytorch/pytorch/issues/73656, https://github.com/HelmholtzAI-FZJ/torchrun_jsc
#   interface ib0        https://github.com/interTwin-eu/itwinai (its juwels.sh)

# Modules: PyTorch of the site, built with its CUDA and NCCL. With an environment of your own set DDLBENCH_VENV.
module --force purge
module load Stages/2025 GCC OpenMPI CUDA PyTorch torchvision
if [ -n "${DDLBENCH_VENV:-}" ]; then
  # shellcheck source=/dev/null
  source "$DDLBENCH_VENV/bin/activate"
fi

# A node's plain name is on the Ethernet, which does not join all cells; with an "i" after it, it is on InfiniBand.
# To be checked on JUPITER; DDLBENCH_JSC_SUFFIX= (empty) leaves the plain name.
if [ -n "${SLURM_JOB_NODELIST:-}" ]; then
  MASTER_ADDR=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)${DDLBENCH_JSC_SUFFIX-i}
  export MASTER_ADDR
fi

# Both libraries would otherwise look for an interface themselves, and may find the Ethernet.
export NCCL_SOCKET_IFNAME=ib0 GLOO_SOCKET_IFNAME=ib0
