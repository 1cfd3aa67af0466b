#!/usr/bin/env bash
# Collect what a GPU machine without a network lacks: wheels beside a site's torch, torchvision, transformers, pandas,
# matplotlib and pyarrow. Run it where there is a network, carry the repository and the folder to the GPU machine; there
# scripts/gpu_check.sh and scripts/first_gpu.sh use the folder (WHEELS=FOLDER, default .whl).
#   PYTHON_VERSION=3.12 MACHINE=x86_64 scripts/pack_for_gpu.sh [FOLDER]
# PYTHON_VERSION and MACHINE are those of the GPU machine (python --version, uname -m), PYTHON is this machine's.
# DALI (425 MB) and Horovod (compiled for one torch) are not carried: their rows say `unavailable`.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
folder=${1:-.whl} machine=${MACHINE:-x86_64} version=${PYTHON_VERSION:-3.12}
python=${PYTHON:-$([ -x .venv/bin/python ] && echo .venv/bin/python || echo python3)}
limit_mb=60

fail() {
  echo "pack_for_gpu: $*" >&2
  exit 2
}

ours=(hydra-core omegaconf google-crc32c nvidia-ml-py timm psutil tqdm pyyaml packaging jinja2 markupsafe)
deepspeeds=(hjson einops msgpack ninja py-cpuinfo pydantic pydantic-core annotated-types typing-inspection
  typing-extensions)
tests=(pytest pytest-timeout iniconfig pluggy pygments)
sources=(antlr4-python3-runtime deepspeed) # no wheels are published; theirs are pure Python

[[ $version =~ ^3\.[0-9]+$ ]] || fail "PYTHON_VERSION=$version: give major and minor, such as 3.12"
case $machine in x86_64 | aarch64) ;; *) fail "MACHINE=$machine is unknown: x86_64 or aarch64" ;; esac
"$python" -m pip --version >/dev/null 2>&1 || fail "$python has no pip: set PYTHON"

platforms=()
for tag in manylinux_2_28 manylinux_2_27 manylinux_2_17 manylinux2014 manylinux_2_12 manylinux1; do
  platforms+=(--platform "${tag}_$machine")
done
mkdir -p "$folder"
rm -f "$folder"/*.whl # two versions of one package would stop the installation
pip=("$python" -m pip --quiet --disable-pip-version-check)
"${pip[@]}" download --no-deps --only-binary=:all: --implementation cp --python-version "$version" "${platforms[@]}" \
  --constraint constraints.txt --dest "$folder" "${ours[@]}" "${deepspeeds[@]}" "${tests[@]}"
"${pip[@]}" wheel --no-deps --constraint constraints.txt --wheel-dir "$folder" "${sources[@]}"
for name in "${sources[@]}"; do
  compgen -G "$folder/${name//-/_}-*-none-any.whl" >/dev/null || fail "the wheel of $name is not pure Python"
done

size=$(du -sm "$folder" | cut -f1) count=$(find "$folder" -type f -name '*.whl' | wc -l)
echo "pack_for_gpu: $count wheels for Python $version on $machine in $folder, $size MB"
((size <= limit_mb)) || fail "$folder has $size MB, more than $limit_mb MB"
