# Sourced by gpu_check.sh and first_gpu.sh: carried packages, runs with a limit, and a line for each of what came of it.
# From the environment:
#   PYTHON            the Python that has torch (default: python)
#   WHEELS            the folder that scripts/pack_for_gpu.sh made (default: .whl), used where it exists
#   DDLBENCH_TINY=1   models and batches that a CPU finishes in seconds: tries the scripts, measures nothing
# shellcheck shell=bash
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
cd "$root" || exit
python=${PYTHON:-python} tiny=${DDLBENCH_TINY:-} dry='' failed=0 deadline=0 launcher=() smaller=()
results=results/gpu # of the script that sources this
# Sample images: epochs much longer than what the loader's workers read ahead, else the rows have the mark `read ahead`.
# shellcheck disable=SC2034 # the scripts that source this use it
images=data.sample_train=13000

die() {
  echo "$(basename "$0" .sh): $*" >&2
  exit 2
}

need_gpu() {
  [ -z "$dry$tiny" ] || return 0
  local said
  said=$("$python" -c 'import torch; print(f"torch.cuda.is_available() is {torch.cuda.is_available()}")' 2>&1)
  grep -q "is_available() is True$" <<<"$said" || die "no usable GPU: $(tail -n 1 <<<"$said")" # beside it: warnings
}

# The packages that are missing here, from a folder: no network, no root, nothing of the site's is changed.
carry() {
  export PYTHONPATH=$root/src:$root${PYTHONPATH:+:$PYTHONPATH}
  local wheels=${WHEELS:-.whl}
  [ -z "$dry${DDLBENCH_CARRIED:-}" ] && compgen -G "$wheels/*.whl" >/dev/null || return 0
  DDLBENCH_CARRIED=$(mktemp -d -p "$root" .carried.XXXXXX) # where all nodes see it
  export DDLBENCH_CARRIED
  # shellcheck disable=SC2064 # the folder of now
  trap "rm -rf '$DDLBENCH_CARRIED'" EXIT
  "$python" -m pip install --quiet --disable-pip-version-check --no-index --no-deps --no-compile \
    --target "$DDLBENCH_CARRIED" "$wheels"/*.whl ||
    die "the wheels of $wheels do not fit $("$python" --version) on $(uname -m): see scripts/pack_for_gpu.sh"
  PYTHONPATH=$DDLBENCH_CARRIED:$PYTHONPATH
}

begin() { # part, its limit in seconds
  part=$1 deadline=$((SECONDS + $2))
  echo "== $part (at most $2 s)"
}

# Run a command within what is left of the part's limit. SIGTERM first, so that a record can say `killed`. `timeout` and its
# command are a process group of their own, which a terminal does not interrupt: Ctrl-C is passed on.
limited() {
  printf '%q ' "$@" && echo
  [ -z "$dry" ] || return 0
  local left=$((deadline - SECONDS))
  ((left > 0)) || return 124
  timeout --kill-after=10 "$left" "$@" &
  wait "$!"
}
trap 'kill -INT "$!" && wait "$!"; exit 130' INT

note() { # name, what came of it, since when
  printf '%-36s %-24s %5d s\n' "$part/$1" "$2" $((SECONDS - $3))
  printf '%s\t%s\t%d\n' "$part/$1" "$2" $((SECONDS - $3)) >>"$results/checks.tsv"
}

# A command that passes with exit code 0.
check() { # name, command
  local name=$1 began=$SECONDS code=0
  shift
  limited "$@" || code=$?
  [ -z "$dry" ] || return 0
  case $code in
    0) note "$name" passed "$began" ;;
    124) note "$name" "FAILED: over its limit" "$began" ;;
    *) note "$name" "FAILED: exit code $code" "$began" ;;
  esac
  ((code == 0)) || failed=$((failed + 1))
}

# A run of ddlbench, which passes with the status in its record. A library that is missing here is no failure.
program=(-m ddlbench)
bench() { # name, wanted status (a regular expression), arguments
  local name=$1 wanted=$2 began=$SECONDS folder=$results/$part/$1 start status
  start=$(date -u +%FT%T.000+00:00) # in the format of a record's times
  shift 2
  limited ${launcher[@]+"${launcher[@]}"} "$python" "${program[@]}" "$@" "${smaller[@]}" "results_dir=$folder"
  [ -z "$dry" ] || return 0
  status=$("$python" scripts/measurements.py --status "$folder" "$start")
  if [[ $status =~ ^($wanted)$ ]]; then
    note "$name" "passed: $status" "$began"
  elif [ "$status" = unavailable ]; then
    note "$name" unavailable "$began"
  else
    note "$name" "FAILED: $status" "$began"
    failed=$((failed + 1))
  fi
}

# Arguments that come last and shrink a run, with DDLBENCH_TINY only.
shrink() { # images | text | nothing
  smaller=()
  [ -n "$tiny" ] || return 0
  smaller=(train.batch_per_gpu=4 train.steps=3 train.warmup_steps=1 train.compile=false)
  case ${1:-} in
    images) smaller+=('model.layers=[1,1,1,1]' model.width_per_group=8 model.image_size=32 data.sample_train=3000) ;;
    text) smaller+=(model.n_layer=2 model.n_embd=32 model.n_head=4 model.seq_len=32) ;;
  esac
}

finish() {
  [ -z "$dry" ] || exit 0
  "$python" scripts/measurements.py "$results"
  exit $((failed > 0))
}
