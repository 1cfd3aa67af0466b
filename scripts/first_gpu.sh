#!/usr/bin/env bash
# The first session on GPUs, as docs/first-gpu-session.md describes it.
#   scripts/first_gpu.sh [--dry-run] [PART|all] [RESULTS]             on one GPU
#   scripts/first_gpu.sh [--dry-run] two-nodes [PART|all] [RESULTS]   on two nodes: outside a Slurm job it submits one
#   scripts/first_gpu.sh --list
# For two nodes: GPUS=4 (per node), CPUS=8 (cores per rank), SBATCH_OPTIONS="--partition=gpu --account=me".
# PYTHON, WHEELS and DDLBENCH_TINY: see scripts/gpu_common.sh. At the end come the tables for docs/measurements.
# shellcheck disable=SC2329 # parts are called by their names
set -uo pipefail
# shellcheck source=scripts/gpu_common.sh
source "$(dirname "${BASH_SOURCE[0]}")/gpu_common.sh"
gpus=${GPUS:-4} cpus=${CPUS:-8} workers=${WORKERS:-8}
dp=$((gpus > 1 ? gpus / 2 : 1)) # of the frameworks that split a model: 4 ranks a replica
short=(train.precision=bf16 train.epochs=1 train.warmup_steps=20 train.steps=60 train.validate=false)
resnet50=(+model=resnet50 train.channels_last=true train.batch_per_gpu=256)
synthetic=(loader=synthetic loader.train_samples=1281167)
gpt2=(+model=gpt2_small train.batch_per_gpu=16 "${synthetic[@]}")

# name, limit in seconds, what it shows
one_gpu() {
  cat <<'PARTS'
tests       480  the tests that need a GPU, the one for waits of the host within a step included
resnet50    480  gpu_check.sh: ResNet-50, 4,400 images/s on an H200
images      480  gpu_check.sh: the same while images are read and decoded
gpt2        480  gpu_check.sh: GPT-2 small, 29 % MFU on an H200; on an H100 31 %, compiled and without dropout
frameworks  480  gpu_check.sh: every framework that runs on one GPU
choices     480  activation, vocabulary, levers of memory, choice of convolutions, memory layout: what each is worth
loaders     480  native and DALI against the batch that lies on the GPU
shared      480  frameworks over NCCL: two ranks share the GPU and must have the losses of one
records     300  out of memory, Ctrl-C and a rank that hangs: each must leave its status in the record
PARTS
}

two_nodes() {
  cat <<'PARTS'
frameworks  3000  every framework, 20 steps
faults      600   a rank that dies and a rank that hangs: the record must say so, and every process must end
visible     600   ranks that see one GPU each (--gpus-per-task=1)
buckets     900   bucket sizes of DDP and of ZeRO
overlap     1500  communication beside the backward pass or after it, weights gathered once or twice
cores       900   CPU cores of a rank
PARTS
}

# Their files alone: others may import what is not here.
run_tests() {
  local files
  mapfile -t files < <(grep -rlE --include='test_*.py' '(@|marks=)pytest.mark.gpu' tests | sort)
  check gpu-marked "$python" -m pytest -q -m gpu -p no:cacheprovider "${files[@]}"
}

# They end within their own limit; their table joins the others.
from_gpu_check() {
  if [ -n "$dry" ]; then
    scripts/gpu_check.sh --dry-run "$part" "$results/gpu_check"
  else
    check gpu_check scripts/gpu_check.sh "$part" "$results/gpu_check"
  fi
}
run_resnet50() { from_gpu_check; }
run_images() { from_gpu_check; }
run_gpt2() { from_gpu_check; }
run_frameworks() { from_gpu_check; }

run_choices() {
  check activation "$python" benchmarks/activation.py ${tiny:+--samples 1 --tokens 8 --repeats 1}
  shrink text
  for multiple in 1 128; do
    bench "vocabulary-$multiple" ok +framework=single "${gpt2[@]}" "${short[@]}" "model.pad_vocab_to_multiple=$multiple"
  done
  for lever in train.checkpoint_activations=blocks train.offload_activations=blocks recipe=adamw8bit; do
    bench "${lever/=/-}" ok +framework=single "${gpt2[@]}" "${short[@]}" "$lever"
  done
  shrink images
  for layout in true false; do
    bench "channels-last-$layout" ok +framework=single "${resnet50[@]}" "${synthetic[@]}" "${short[@]}" \
      "train.channels_last=$layout"
  done
  for choice in true false; do
    bench "cudnn-benchmark-$choice" ok +framework=single "${resnet50[@]}" "${synthetic[@]}" "${short[@]}" \
      "train.cudnn_benchmark=$choice"
  done
}

run_loaders() { # 203 batches: ten times as many as eight workers read ahead
  shrink images
  local few=(+framework=single "${resnet50[@]}" "${short[@]}" train.batch_per_gpu=64 train.steps=200
    "$images")
  bench synthetic ok "${few[@]}" loader=synthetic
  bench native ok "${few[@]}" loader=native "loader.workers=$workers"
  bench native-alone ok "${few[@]}" loader=native "loader.workers=$workers" mode=loader
  bench dali ok "${few[@]}" loader=dali "loader.threads=$workers"
  bench dali-alone ok "${few[@]}" loader=dali "loader.threads=$workers" mode=loader
}

run_shared() {
  local few=(+model=gpt2_small model.n_layer=8 model.n_embd=128 model.n_head=4 model.seq_len=64 model.dropout=0 train.epochs=1
    train.steps=8 train.warmup_steps=2 train.global_batch=16 train.validate=false)
  local micro=train.micro_batch=2 two=framework.virtual_stages=2 words name
  smaller=()
  bench single ok +framework=single "${few[@]}"
  [ -n "$tiny" ] || few+=(backend=cuda:nccl)
  for line in ddp fsdp zero0 zero1 zero2 zero3 parameter_server tensor "local_sgd framework.local_steps=1" \
    "hybrid framework.tp=2" "gpipe $micro" "1f1b $micro" "interleaved $micro $two" "looped_bfs $micro $two" \
    "zero_bubble $micro" "zbv $micro" "dualpipev $micro"; do
    read -r -a words <<<"$line"
    name=${words[0]}
    launcher=("$python" -m torch.distributed.run --standalone --nproc-per-node=2 --no-python)
    bench "$name" ok "+framework=$name" "${words[@]:1}" "${few[@]}"
    launcher=()
    check "$name-same-losses" "$python" scripts/measurements.py --same-losses "$results/$part/"{single,"$name"}
  done
}

broken() { # how; the rest as bench: DDP that fails at its third step on its last rank
  local program=(-m tests.support.planted "framework.how=$1" --)
  shift
  bench "$@" +framework=ddp +model=resnet50 loader=synthetic "${short[@]}"
}

run_records() {
  shrink images
  local long=(+framework=single +model=resnet50 "${synthetic[@]}" "${short[@]}" train.steps=1000000)
  if [ -n "$tiny" ]; then # a machine's whole memory is not to be filled only to try this script
    broken memory out-of-memory oom
  else
    # Tokens: 67 MB on the host, and logits of 421 GB and more on the GPU.
    bench out-of-memory oom +framework=single "${gpt2[@]}" "${short[@]}" train.batch_per_gpu=4096
  fi
  broken hang hang timeout "train.timeout_s=${HANG_S:-30}" # it also makes the sample images, which takes a minute
  smaller+=(${tiny:+train.steps=1000000})
  launcher=(timeout --preserve-status --signal=INT "${INTERRUPT_AFTER_S:-60}")
  bench ctrl-c killed "${long[@]}" train.batch_per_gpu=64
  launcher=()
}

# Two nodes, one task a GPU. --kill-on-bad-exit ends the other tasks when one fails, --wait those that outlive it.
ranks() { # cores of a rank, the tasks' GPUs
  launcher=(srun --nodes=2 "--ntasks-per-node=$gpus" "--cpus-per-task=$1"
    "${2:---gpus-per-node=$gpus}" --kill-on-bad-exit=1 --wait=60)
}

run_two_frameworks() {
  shrink text
  local few=("${gpt2[@]}" "${short[@]}" train.steps=20 train.warmup_steps=5 train.timeout_s=120)
  for framework in ddp local_sgd parameter_server horovod fsdp zero0 zero1 zero2 zero3; do
    bench "$framework" ok "+framework=$framework" "${few[@]}"
  done
  bench fsdp-hybrid ok +framework=fsdp framework.replicate=2 "${few[@]}"
  bench tensor ok +framework=tensor "framework.dp=$dp" "${few[@]}"
  bench megatron ok +framework=megatron "framework.dp=$dp" "${few[@]}"
  for framework in gpipe 1f1b interleaved looped_bfs zero_bubble zbv dualpipev pipedream_2bw; do
    bench "$framework" ok "+framework=$framework" "framework.dp=$dp" "${few[@]}" train.micro_batch=2
  done
  bench pipedream ok +framework=pipedream "framework.dp=$dp" "${few[@]}" train.micro_batch=2 model.tie_weights=false
  bench hybrid ok +framework=hybrid "framework.dp=$dp" framework.tp=2 "${few[@]}" train.micro_batch=2
  shrink images
  few=("${resnet50[@]}" "${synthetic[@]}" "${short[@]}" train.steps=20 train.warmup_steps=5 train.timeout_s=120)
  bench channel ok +framework=channel "framework.dp=$dp" "${few[@]}"
  smaller+=(${tiny:+model.image_size=64}) # no layer has fewer rows than ranks
  bench spatial ok +framework=spatial "framework.dp=$dp" "${few[@]}"
}

run_two_faults() {
  shrink images
  broken exit rank-dies 'error|killed' "train.timeout_s=${HANG_S:-60}"
  broken hang rank-hangs timeout "train.timeout_s=${HANG_S:-60}"
}

run_two_visible() {
  shrink text
  ranks "$cpus" --gpus-per-task=1
  for framework in ddp fsdp zero3; do
    bench "$framework" ok "+framework=$framework" "${gpt2[@]}" "${short[@]}" train.steps=20 train.warmup_steps=5
  done
}

run_two_buckets() {
  shrink text
  bench ddp-default ok +framework=ddp "${gpt2[@]}" "${short[@]}"
  for mb in 1 25 100; do
    bench "ddp-$mb" ok +framework=ddp "framework.bucket_cap_mb=$mb" "${gpt2[@]}" "${short[@]}"
    bench "zero1-$mb" ok +framework=zero1 "framework.reduce_bucket_mb=$mb" "${gpt2[@]}" "${short[@]}"
  done
}

run_two_overlap() {
  shrink text
  for framework in zero1 zero2 zero3 zero1-compiled zero2-compiled; do
    local words=("+framework=${framework%-compiled}" "${gpt2[@]}" "${short[@]}")
    [ "$framework" = "${framework%-compiled}" ] || words+=(train.compile=true)
    for choice in true false; do
      bench "$framework-overlap-$choice" ok "${words[@]}" "framework.overlap_comm=$choice"
    done
    check "$framework-same-losses" "$python" scripts/measurements.py --same-losses \
      "$results/$part/$framework-overlap-"{true,false}
  done
  for choice in true false; do
    bench "fsdp-reshard-$choice" ok +framework=fsdp "framework.reshard_after_forward=$choice" "${gpt2[@]}" "${short[@]}"
  done
  for choice in autocast policy; do
    bench "fsdp-$choice" ok +framework=fsdp "framework.mixed_precision=$choice" "${gpt2[@]}" "${short[@]}"
  done
}

run_two_cores() {
  shrink images
  for cores in 1 2 4 8; do
    ((cores <= cpus)) || continue
    ranks "$cores"
    bench "cores-$cores" ok +framework=ddp "${resnet50[@]}" "${short[@]}" train.batch_per_gpu=32 train.steps=50 \
      train.warmup_steps=2 "$images" "loader.workers=$((cores > 2 ? cores - 2 : 1))"
  done
}

[ "${1:-}" != --list ] || { printf 'one GPU:\n%s\ntwo-nodes:\n%s\n' "$(one_gpu)" "$(two_nodes)" && exit 0; }
[ "${1:-}" != --dry-run ] || { dry=1 && shift; }
list=one_gpu prefix=run_
[ "${1:-}" != two-nodes ] || { list=two_nodes prefix=run_two_ && shift; }
chosen=${1:-all} results=${2:-results/first-gpu}
[ "$chosen" != all ] || chosen=$($list | cut -d' ' -f1)
for each in $chosen; do
  $list | grep -q "^$each " || die "there is no part $each: choose $($list | cut -d' ' -f1 | paste -sd' ') or all"
done

if [ $list = two_nodes ] && [ -z "$dry${SLURM_JOB_ID:-}" ]; then
  command -v sbatch >/dev/null || die "two-nodes needs Slurm: there is no sbatch here (--dry-run prints the commands)"
  read -r -a options <<<"${SBATCH_OPTIONS:-}"
  # --wrap: Slurm would run a copy of this script from a folder of its own.
  exec sbatch --job-name=first-gpu --nodes=2 "--ntasks-per-node=$gpus" "--gpus-per-node=$gpus" "--cpus-per-task=$cpus" \
    --no-requeue --time=2:15:00 ${options[@]+"${options[@]}"} --wrap "scripts/first_gpu.sh two-nodes ${1:-all} ${results@Q}"
fi
[ $list = two_nodes ] || need_gpu
carry
[ -n "$dry" ] || mkdir -p "$results"
for each in $chosen; do
  begin "$each" "$($list | awk -v part="$each" '$1 == part { print $2 }')"
  [ $list = one_gpu ] || ranks "$cpus"
  "$prefix$each"
done
finish
