#!/usr/bin/env bash
# bash launch/local.sh [train flags]: makes .venv, installs, trains here, prints samples. See launch/README.md.
set -euo pipefail
# shellcheck source=launch/lib.sh
source "$(dirname -- "${BASH_SOURCE[0]}")/lib.sh"

accelerator=$(find_accelerator)
if [[ $accelerator == cpu ]]; then ensure_installed; else ensure_installed "$accelerator"; fi

# What to sample from: --run.dir, else runs/ and the name of the last --config. A pair "--flag value" is read as "--flag=value".
name=default run_dir='' sample=true previous=''
for word; do
  case $previous in --config | --run.dir | --dry_run) word=$previous=$word ;; esac
  case $word in
    --config=*) name=${word##*[=/]} && name=${name%.yaml} && name=${name%.yml} && name=${name%.json} ;;
    --run.dir=*) run_dir=${word#*=} ;;
    --dry_run=[Tt][Rr][Uu][Ee] | --help | -h) sample=false ;;
  esac
  previous=$word
done

# Not in the foreground, because bash would keep a SIGTERM to itself until training has ended. Where a terminal or a
# scheduler signals both processes, train gets two: to it a second request to stop changes nothing.
trap 'end_child || exit 75' TERM INT
status=0
attend "$python" -m angpt_jax.train "$@" || status=$?
trap - TERM INT

[[ $status == 0 && $sample == true ]] || exit "$status"
say "samples from ${run_dir:=runs/$name}"
exec "$python" -m angpt_jax.sample --run.dir "$run_dir"
