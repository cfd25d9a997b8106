#!/usr/bin/env bash
# bash launch/worker.sh install | train [flags] | stop: what tpu_pod.sh has every TPU worker do. Training goes on without the
# connection that started it; "train" again follows the one that runs, because gcloud calls again when a connection breaks.
set -euo pipefail
# shellcheck source=launch/lib.sh
source "$(dirname -- "${BASH_SOURCE[0]}")/lib.sh"
here=$root/runs/worker # log, train (its pid), shell (of the one around it), in the end status

install() {
  if [[ -e $here/shell ]] && kill -0 "$(<"$here/shell")" 2>/dev/null; then stop 2 "train runs here already"; fi
  rm -rf -- "$here"
  if ! (find_python) &>/dev/null; then
    sudo apt-get update -qq
    sudo apt-get install -qq -y -o DPkg::Lock::Timeout=600 python3.11 python3.11-venv
  fi
  ensure_installed tpu
}

train() { # flags
  local lines=20
  mkdir -p "$root/runs"
  if mkdir "$here" 2>/dev/null; then # only one of several calls succeeds
    lines=+1
    : >"$here/log" # there before anybody follows it
    # shellcheck disable=SC2016
    setsid bash -c '"${@:2}" & echo $! >"$1/train"; wait $!; echo $? >"$1/status"' \
      bash "$here" "$python" -m angpt_jax.train "$@" </dev/null >>"$here/log" 2>&1 &
    echo $! >"$here/shell.new" && mv "$here/shell.new" "$here/shell"
  fi
  while [[ ! -e $here/shell ]]; do sleep 0.1; done
  tail -s 0.2 -n "$lines" -f --pid="$(<"$here/shell")" "$here/log" | sed -u "s/^/[${HOSTNAME%%.*}] /"
  [[ -e $here/status ]] || stop 1 "train ended without an exit code"
  exit "$(<"$here/status")"
}

case ${1:-} in
  install) install ;;
  train) train "${@:2}" ;;
  stop) kill -TERM "$(cat "$here/train")" 2>/dev/null || true ;;
  *) stop 2 "${1:-}: must be install, train or stop" ;;
esac
