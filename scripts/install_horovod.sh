#!/usr/bin/env bash
# Build Horovod 0.28.1 for the torch of an environment and install it there. Quick when nothing changed.
#   PYTHON=.venv/bin/python scripts/install_horovod.sh [gloo|mpi|nccl|nccl-mpi]
# gloo: CPUs, without MPI. mpi: CPUs under mpirun or srun --mpi=pmix; Adasum needs it. nccl: GPUs, without MPI.
# nccl-mpi: GPUs under mpirun or srun --mpi=pmix; Adasum on GPUs needs it. The last two need the CUDA toolkit that torch
# was built with, take the NCCL of torch's wheel unless HOROVOD_NCCL_HOME names another, and take
# HOROVOD_BUILD_CUDA_CC_LIST=80,90 for the GPUs to build for. The build takes ten minutes of one core; its wheel
# is kept below $DDLBENCH_HOME (else ~/.cache/ddlbench), one a flavour, torch, Python and processor. DDLBENCH_WHEELS
# names another folder: take one for each MPI or NCCL.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
flavour=${1:-gloo} python=${PYTHON:-.venv/bin/python}
wheels=${DDLBENCH_WHEELS:-${DDLBENCH_HOME:-$HOME/.cache/ddlbench}/wheels}
version=0.28.1 # of 2023, the last: nothing newer builds against torch 2.1 and above by itself
sha256=92a43f5a94c43907a56805bad15f19700c62ffc83b7ca483f9e104e229f67ef0
pip=("$python" -m pip --quiet --disable-pip-version-check)

fail() {
  echo "install_horovod: $*" >&2
  exit 2
}

# C++14 -> C++20, which torch's headers ask for. For nvcc C++11 -> C++17: the headers of GCC 14 and above fail with C++11
# (horovod#4313). Its one CUDA file compiles so with nvcc 13.0 and GCC 12; the whole build with CUDA is not tested.
# Without CUDA, a CUDA build of torch must not ask for a toolkit.
patch_source() {
  local cuda=$1/horovod/common/ops/cuda/CMakeLists.txt
  sed -i 's/set(CMAKE_CUDA_STANDARD 11)/set(CMAKE_CUDA_STANDARD 17)/' "$cuda"
  grep -q '^set(CMAKE_CUDA_STANDARD 17)$' "$cuda" || fail "Horovod's CMakeLists.txt for CUDA is not as expected"
  sed -i 's/set(CMAKE_CXX_STANDARD 14)/set(CMAKE_CXX_STANDARD 20)/' "$1/CMakeLists.txt" "$1/horovod/torch/CMakeLists.txt"
  [ "$(cat "$1/CMakeLists.txt" "$1/horovod/torch/CMakeLists.txt" | grep -c 'CXX_STANDARD 20')" = 2 ] ||
    fail "Horovod's CMakeLists.txt are not as expected"
  [[ $flavour == nccl* ]] && return
  local find_torch=$1/cmake/Modules/FindPytorch.cmake
  # shellcheck disable=SC2016 # CMake's variable
  sed -i 's/^string(TOUPPER "${Pytorch_CUDA}" Pytorch_CUDA)$/set(Pytorch_CUDA FALSE)/' "$find_torch"
  grep -q '^set(Pytorch_CUDA FALSE)$' "$find_torch" || fail "Horovod's FindPytorch.cmake is not as expected"
}

choose_flavour() {
  export HOROVOD_WITH_PYTORCH=1 HOROVOD_WITHOUT_TENSORFLOW=1 HOROVOD_WITHOUT_MXNET=1 HOROVOD_WITH_GLOO=1
  case $flavour in
    gloo) export HOROVOD_WITHOUT_MPI=1 HOROVOD_WITHOUT_NVTX=1 HOROVOD_CPU_OPERATIONS=GLOO ;;
    mpi) export HOROVOD_WITH_MPI=1 HOROVOD_WITHOUT_NVTX=1 HOROVOD_CPU_OPERATIONS=MPI ;;
    nccl) export HOROVOD_WITHOUT_MPI=1 HOROVOD_CPU_OPERATIONS=GLOO ;;
    nccl-mpi) export HOROVOD_WITH_MPI=1 HOROVOD_CPU_OPERATIONS=MPI ;;
  esac
  [[ $flavour != nccl* ]] || choose_nccl
}

# Linked by its soname, libnccl.so.2: at run time that is the NCCL that torch has loaded already. CMake and
# torch look for the toolkit beside nvcc, which may be a wrapper elsewhere: nvcc itself says where its toolkit is.
choose_nccl() {
  export HOROVOD_GPU_OPERATIONS=NCCL HOROVOD_NCCL_LINK=SHARED
  export HOROVOD_CUDA_HOME=${HOROVOD_CUDA_HOME:-$(nvcc --dryrun -x cu -c /dev/null 2>&1 | sed -n 's/^#\$ TOP=//p')}
  export CUDA_HOME=${CUDA_HOME:-$HOROVOD_CUDA_HOME}
  [ -z "${HOROVOD_NCCL_HOME:-}" ] || return 0
  export HOROVOD_NCCL_HOME=$wheels/$name.nccl # kept: its path is in the library that is built
  "$python" scripts/nccl_home.py "$HOROVOD_NCCL_HOME" || fail "NCCL was not found"
}

need_tools() {
  for tool in c++ cmake make; do
    command -v $tool >/dev/null || fail "$tool is missing: apt-get install g++ cmake make (or load your site's modules)"
  done
  [[ $flavour != *mpi ]] || command -v mpicxx >/dev/null || fail "mpicxx is missing: apt-get install libopenmpi-dev"
  [[ $flavour != nccl* ]] || command -v "${HOROVOD_CUDA_HOME:+$HOROVOD_CUDA_HOME/bin/}nvcc" >/dev/null ||
    fail "nvcc is missing: load your site's CUDA, or set HOROVOD_CUDA_HOME to its folder"
}

build_wheel() {
  local work source
  need_tools
  work=$(mktemp -d)
  # shellcheck disable=SC2064 # the folder of now
  trap "rm -rf '$work'" EXIT
  echo "install_horovod: building $name, which takes a few minutes; log in $wheels/$name.log" >&2
  # torch and its headers are in this environment: no isolated build: Horovod's build script looks for them here.
  "${pip[@]}" install --constraint constraints.txt setuptools wheel cffi cloudpickle packaging psutil pyyaml
  "${pip[@]}" download --no-deps --no-build-isolation --no-binary horovod --dest "$work" "horovod==$version"
  echo "$sha256  $work/horovod-$version.tar.gz" | sha256sum --check --quiet
  tar xzf "$work/horovod-$version.tar.gz" -C "$work"
  source=$work/horovod-$version
  patch_source "$source"
  choose_flavour
  export HOROVOD_LOCAL_VERSION=$tag MAKEFLAGS=-j${HOROVOD_BUILD_JOBS:-$(nproc)}
  export CMAKE_POLICY_VERSION_MINIMUM=3.5                 # the bundled gloo asks for 2.8.12, which CMake 4 refuses
  export CXXFLAGS="-fno-strict-aliasing ${CXXFLAGS:-}"    # its half-precision code reads integers as floats by pointers
  export LDFLAGS="-Wl,--strip-debug ${LDFLAGS:-}"
  "$python" -m pip wheel --verbose --no-deps --no-build-isolation --no-cache-dir --wheel-dir "$work" "$source" \
    >"$wheels/$name.log" 2>&1 || {
    tail -n 20 "$wheels/$name.log" >&2
    fail "the build failed: see $wheels/$name.log"
  }
  mv "$work/$name"-*.whl "$wheels/"
}

case $flavour in
  gloo | mpi | nccl | nccl-mpi) ;;
  *) fail "flavour $flavour is unknown: choose gloo, mpi, nccl or nccl-mpi" ;;
esac
torch=$("$python" -c 'import torch; print(torch.__version__.replace("+", "."))') || fail "$python has no torch"
tag=${flavour/-/.}.torch$torch # in the wheel's name: it works with this torch alone
name=horovod-$version+$tag
abi=$("$python" -c 'import sys; print(f"cp{sys.version_info.major}{sys.version_info.minor}")')
installed=$("$python" -c 'from importlib.metadata import version; print(version("horovod"))' 2>/dev/null || true)
[ "horovod-$installed" != "$name" ] || exit 0

mkdir -p "$wheels"
compgen -G "$wheels/$name-$abi-*_$(uname -m).whl" >/dev/null || build_wheel
"${pip[@]}" install --constraint constraints.txt cffi cloudpickle packaging psutil pyyaml
"${pip[@]}" install --no-deps --force-reinstall "$wheels/$name-$abi"-*_"$(uname -m)".whl
"$python" -c 'import horovod.torch.mpi_ops' # the compiled part; without it `import horovod.torch` merely prints
