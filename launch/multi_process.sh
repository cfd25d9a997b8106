#!/usr/bin/env bash
# bash launch/multi_process.sh FLAGS -- TRAIN FLAGS: several processes on this machine train together. See launch/README.md.
set -euo pipefail
# shellcheck source=launch/lib.sh
source "$(dirname -- "${BASH_SOURCE[0]}")/lib.sh"
# shellcheck source=launch/flags.sh
source "$root/launch/flags.sh"

flags "Makes .venv, installs, trains with several processes on this machine." <<'EOT'
processes number 2 how many
devices_per_process number - of each: on a CPU so many virtual ones, with CUDA the next so many GPUs
grace_seconds number 60 after one process has failed, for the others to stop before they are killed
EOT
parse_flags "$@"
must_match processes '^[1-9]' "1 or more"
must_match devices_per_process '^([1-9]|$)' "1 or more"
refuse_problems

each=${flag[devices_per_process]}
accelerator=$(find_accelerator)
extras=("$accelerator")
[[ $accelerator != cpu ]] || extras=()
dry || ensure_installed "${extras[@]}"

free_port() { # below the range that the kernel gives away by itself
  local port
  for ((port = 20000 + RANDOM % 12000; ; port++)); do
    (exec 3<>"/dev/tcp/127.0.0.1/$port") 2>/dev/null || { echo "$port" && return; }
  done
}
coordinator=127.0.0.1:$(free_port)

environment() { # of a process; one assignment a line
  printf '%s\n' "JAX_COORDINATOR_ADDRESS=$coordinator" "JAX_NUM_PROCESSES=${flag[processes]}" "JAX_PROCESS_ID=$1"
  case $accelerator:$each in
    *:) ;;
    cpu:*) echo "XLA_FLAGS=${XLA_FLAGS:+$XLA_FLAGS }--xla_force_host_platform_device_count=$each" ;;
    cuda:*) echo "JAX_LOCAL_DEVICE_IDS=$(seq -s, $(($1 * each)) $(($1 * each + each - 1)))" ;;
  esac
}

if dry; then
  note "each in the background, its output behind [its number]"
  for ((i = 0; i < flag[processes]; i++)); do
    mapfile -t variables < <(environment "$i")
    quoted env "${variables[@]}" "$python" -m angpt_jax.train "${train[@]}"
  done
  exit
fi

pids=() readers=() pipes=$(mktemp -d) asked='' deadline='' status=0
trap 'rm -rf -- "$pipes"' EXIT
end_all() { # signal; of those that still run
  local pid
  for pid in "${pids[@]}"; do kill "-$1" "$pid" 2>/dev/null || true; done
}

prefix() { # process; puts its number before each line of its output
  local line
  while IFS= read -r line || [[ -n $line ]]; do printf '[%s] %s\n' "$1" "$line"; done
}

trap '' TERM INT # the readers inherit this: they go on to the last line, also where the whole group is signalled
for ((i = 0; i < flag[processes]; i++)); do
  mkfifo "$pipes/$i"
  prefix "$i" <"$pipes/$i" &
  readers+=($!)
done
trap 'asked=true && end_all TERM' TERM INT # the processes do not hear SIGINT by themselves in the background
for ((i = 0; i < flag[processes]; i++)); do
  mapfile -t variables < <(environment "$i")
  env "${variables[@]}" "$python" -m angpt_jax.train "${train[@]}" </dev/null >"$pipes/$i" 2>&1 &
  pids[i]=$!
done
[[ -z $asked ]] || end_all TERM

while ((${#pids[@]})); do
  for i in "${!pids[@]}"; do
    kill -0 "${pids[i]}" 2>/dev/null && continue
    code=0 && wait "${pids[i]}" || code=$?
    unset "pids[$i]"
    ((code)) || continue
    say "process $i ended with exit code $code"
    # The first that failed counts; 75, stopped with a checkpoint, only when there is no other.
    ((status && (status != 75 || code == 75))) || status=$code
    [[ -n $deadline ]] || { deadline=$((SECONDS + flag[grace_seconds])) && end_all TERM; }
  done
  if [[ -n $deadline ]] && ((SECONDS > deadline)); then end_all KILL; fi
  sleep 0.1 || true # a signal to the group ends it
done
for ((i = 0; i < 10; i++)); do kill -0 "${readers[@]}" 2>/dev/null && sleep 0.1; done # a child of train may hold a pipe open
kill -KILL "${readers[@]}" 2>/dev/null || true
trap - TERM INT
exit "$status"
