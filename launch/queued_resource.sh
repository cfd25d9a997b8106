# shellcheck shell=bash
# What tpu_pod.sh does with a queued resource but for its workers. Sourced by it, never run.

# shellcheck disable=SC2154,SC2034 # flag comes from flags.sh; made and phase are read by tpu_pod.sh

name=${flag[name]} here=(--project="${flag[project]}" --zone="${flag[zone]}" --quiet)
mapfile -t create_flags < <(list create_flag)
if ((flag[node_count] == 1)); then create_flags+=(--node-id="$name"); else create_flags+=(--node-count="${flag[node_count]}"); fi
[[ ${flag[spot]} == false ]] || create_flags+=(--spot)
now='' made='' phase=waiting # its state when last looked at; whether it is there; "creating", "training" or "waiting"

queued() { # verb, arguments. In a session of its own, so that a Ctrl-C here does not cut the connection to the workers.
  local command=(gcloud compute tpus queued-resources "$@" "${here[@]}")
  if dry; then quoted "${command[@]}"; else attend setsid "${command[@]}"; fi
}

state() { run gcloud compute tpus queued-resources describe "$name" "${here[@]}" --format='value(state.state)'; }

pause() { attend sleep "${flag[poll_seconds]}" || true; }

delete() { # patient, because one that is just being taken away may not be deleted yet
  local tries
  for ((tries = 0; tries < 3; tries++)); do
    if ((tries)); then pause; fi
    queued delete "$name" --force && made='' && return
  done
  return 1
}

look() { # sets now, the state; patient with a gcloud that fails for a while
  local tries
  for ((tries = 0; tries < 10; tries++)); do
    now=$(state) && [[ -n $now ]] && return
    pause
  done
  stop 1 "gcloud does not tell the state of $name (see above)"
}

create() {
  local status=0
  if [[ ${flag[keep]} == true ]] && ! dry && [[ -n $(state 2>/dev/null) ]]; then return; fi
  phase=creating
  queued create "$name" --accelerator-type="${flag[type]}" --runtime-version="${flag[runtime]}" \
    "${create_flags[@]}" || status=$?
  phase=waiting
  if ((status == 0 || status > 128)); then made=true; fi # a killed one may have got through
  ((status == 0)) || stop 1 "could not create $name (see above)"
  [[ -z $stopping ]] || exit 75
}

wait_until_active() { # fails when it is lost
  if dry; then note "every ${flag[poll_seconds]} s until it prints ACTIVE:" && state && return; fi
  while look; do
    case $now in
      ACTIVE) return ;;
      SUSPEND* | FAILED | DELETING) say "$name is $now" && return 1 ;;
      *) say "$name is $now" && pause ;;
    esac
  done
}

lost() { # looks twice, because the state lags behind what happens
  look
  [[ $now == ACTIVE ]] || return 0
  pause
  look
  [[ $now != ACTIVE ]]
}
