#!/bin/bash
# A scaling study: one job a GPU count and repeat, each through run.sbatch.
set -euo pipefail

usage() {
  cat <<'USAGE'
scripts/slurm/scaling.sh --gpus "1 2 4 8" --gpus-per-node 4 --scaling weak|strong --batch N [options] -- ARGS
  --gpus LIST          GPU counts; above --gpus-per-node they must be multiples of it
  --gpus-per-node N    GPUs of a node, as many tasks run there
  --scaling weak       --batch is the batch of a GPU:  train.batch_per_gpu
  --scaling strong     --batch is the global batch:    train.global_batch
  --batch N
  --repeats N          whole runs of each count, train.repeat=0..N-1 (default 1)
  --seed N             of the order of the jobs, which is random (default 0)
  --together           let Slurm run jobs at the same time; else each waits for the one before, so that the order
                       is kept and no job disturbs another on a node they share
  --sbatch OPTIONS     further options of sbatch, e.g. "--partition=gpu --account=me --time=30 --exclusive";
                       "--gpus-per-node=0" on a cluster without GPUs
  --dry-run            print the commands, submit nothing
  --no-check           submit without asking ddlbench first (dryrun=true for each GPU count, here, with DDLBENCH_SITE
                       and DDLBENCH_PYTHON as in run.sbatch) whether it would run
  ARGS                 for ddlbench: +framework=ddp +model=resnet50 [key=value ...]
USAGE
}

die() {
  echo "scaling.sh: $*" >&2
  exit 2
}

number() { # option, value
  [[ $2 =~ ^[1-9][0-9]*$ ]] || die "$1 $2: a whole number from 1 on, please"
}

gpus='' per_node='' scaling='' batch='' repeats=1 seed=0 together='' dry='' checked=1 extra=()
while [ $# -gt 0 ]; do
  case $1 in
    --help | -h) usage && exit 0 ;;
    --together) together=1 && shift && continue ;;
    --dry-run) dry=1 && shift && continue ;;
    --no-check) checked='' && shift && continue ;;
    --) shift && break ;;
    --*) [ $# -gt 1 ] || die "$1 needs a value (--help shows all options)" ;;
  esac
  case $1 in
    --gpus) gpus=$2 ;;
    --gpus-per-node) per_node=$2 ;;
    --scaling) scaling=$2 ;;
    --batch) batch=$2 ;;
    --repeats) repeats=$2 ;;
    --seed) seed=$2 ;;
    --sbatch) mapfile -t extra < <(xargs -r -n 1 printf '%s\n' <<<"$2") ;; # quoted words stay whole
    *) die "unknown option $1 (--help shows all; what is for ddlbench comes after --)" ;;
  esac
  shift 2
done

for option in gpus:"$gpus" gpus-per-node:"$per_node" scaling:"$scaling" batch:"$batch"; do
  [ -n "${option#*:}" ] || die "--${option%%:*} is missing (--help shows all options)"
done
[[ " $* " == *" +framework="* && " $* " == *" +model="* ]] || die "after -- must come +framework=NAME +model=NAME"
for key in train.global_batch train.batch_per_gpu train.repeat; do
  [[ " $* " != *" $key="* ]] || die "$key=... is what --scaling, --batch and --repeats set: leave it out"
done
number --gpus-per-node "$per_node"
number --batch "$batch"
number --repeats "$repeats"
[[ $seed =~ ^[0-9]+$ ]] || die "--seed $seed: a whole number, please"
case $scaling in
  weak) size=train.batch_per_gpu=$batch ;;
  strong) size=train.global_batch=$batch ;;
  *) die "--scaling $scaling: weak or strong" ;;
esac
seen=' '
for count in $gpus; do
  number --gpus "$count"
  ((count <= per_node || count % per_node == 0)) || die "--gpus $count does not fill nodes of $per_node GPUs"
  [[ $seen != *" $count "* ]] || die "--gpus names $count twice: use --repeats for several runs of one count"
  seen+="$count "
  [[ " $* " != *" +framework=single "* ]] || ((count == 1)) ||
    die "--gpus $count: +framework=single is one process: give --gpus 1, or another framework"
done

# Park and Miller's generator, not awk's or bash's own: a seed gives the same order everywhere.
shuffled() {
  for count in $gpus; do for ((repeat = 0; repeat < repeats; repeat++)); do echo "$count $repeat"; done; done |
    awk -v s="$seed" 'BEGIN { s = s % 2147483646 + 1; for (i = 0; i < 9; i++) s = s * 16807 % 2147483647 }
                      { s = s * 16807 % 2147483647; print s, $0 }' | sort -n | cut -d' ' -f2-
}

results=results
for arg in "$@"; do [[ $arg != results_dir=* ]] || results=${arg#results_dir=}; done
results=${results#[\"\']} results=${results%[\"\']} # Hydra's own quotes around a path with spaces
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
# run.sbatch would look for a site's NAME below the folder of submission, which may be any.
case ${DDLBENCH_SITE:-} in '' | */*) ;; *) export DDLBENCH_SITE=$here/site/$DDLBENCH_SITE.sh ;; esac
# Of a job in which this script runs: srun of the new jobs refuses it beside their own.
unset SLURM_MEM_PER_CPU SLURM_MEM_PER_GPU SLURM_MEM_PER_NODE

kind=cuda
[[ " ${extra[*]-} " != *" --gpus-per-node=0 "* ]] || kind=cpu

# What ddlbench says of one GPU count, on this machine: nothing is started. Its exit code, the reason on stderr.
dryrun() { # GPU count, tasks on a node, ARGS
  # shellcheck disable=SC2069 # stderr is the answer, stdout holds the configuration
  (
    if [ -n "${DDLBENCH_SITE:-}" ]; then
      set +u
      # shellcheck source=/dev/null
      source "$DDLBENCH_SITE" || exit 1
      set -u
    fi
    export RANK=0 WORLD_SIZE=$1 LOCAL_RANK=0 LOCAL_WORLD_SIZE=$2 MASTER_ADDR=localhost MASTER_PORT=29500
    export TORCHELASTIC_RUN_ID=dryrun DDLBENCH_PLAN=$kind
    shift 2
    [[ " $* " == *" cluster="* ]] || set -- "$@" cluster=slurm
    exec "${DDLBENCH_PYTHON:-python}" -m ddlbench "$@" dryrun=true
  ) 2>&1 >/dev/null
}

if [ -n "$checked" ] && [ -z "$dry" ]; then
  for count in $gpus; do
    code=0
    said=$(dryrun "$count" $((count < per_node ? count : per_node)) "$@" "$size") || code=$?
    said=${said##*$'\n'}
    case $code in
      0) ;;
      2 | 3) die "$count GPUs would not run, nothing is submitted (--no-check submits): ${said#ddlbench: }" ;;
      *) echo "scaling.sh: $count GPUs could not be checked on this machine: ${said:-exit code $code}" >&2 ;;
    esac
  done
fi

echo "$scaling scaling, $size, order of seed $seed"
jobs=() before=''
while read -r count repeat; do
  nodes=$(((count + per_node - 1) / per_node))
  tasks=$((count < per_node ? count : per_node))
  command=(sbatch --parsable "--job-name=ddlbench-$scaling-$count" "--nodes=$nodes" "--ntasks-per-node=$tasks"
    "--gpus-per-node=$tasks" ${before:+"--dependency=afterany:$before"} ${extra[@]+"${extra[@]}"}
    "$here/run.sbatch" "$@" "$size" "train.repeat=$repeat")
  if [ -n "$dry" ]; then
    printf '%q ' "${command[@]}" && echo
    [ -n "$together" ] || before=PREVIOUS
    continue
  fi
  job=$("${command[@]}") || die "sbatch refused the job for $count GPUs (${#jobs[@]} submitted before: ${jobs[*]-none})"
  job=${job%%;*}
  jobs+=("$job")
  [ -n "$together" ] || before=$job
  echo "job $job: GPUs $count, nodes $nodes, repeat $repeat"
done < <(shuffled)

[ -n "$dry" ] || echo "cancel: scancel ${jobs[*]}"
printf 'report, when they are done: python -m ddlbench.report %q --out %q\n' "$results" "$results/report"
