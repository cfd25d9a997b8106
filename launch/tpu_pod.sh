#!/usr/bin/env bash
# bash launch/tpu_pod.sh FLAGS -- TRAIN FLAGS: trains on Cloud TPU slices through a queued resource. See launch/README.md.
set -euo pipefail
# shellcheck source=launch/lib.sh
source "$(dirname -- "${BASH_SOURCE[0]}")/lib.sh"
# shellcheck source=launch/flags.sh
source "$root/launch/flags.sh"

flags "Creates a TPU queued resource, waits for it, installs, trains on all workers, tries again after a preemption, deletes it." <<'EOT'
name text required of the queued resource, as angpt-1
project text required Google Cloud project
zone text required as us-west4-a
type text required accelerator type, as v5litepod-256
runtime text required software of the TPU VMs, as v2-alpha-tpuv5-lite
run_dir text required run directory: an absolute path on storage that all workers mount
node_count number 1 slices
spot switch false Spot VMs: cheaper, can be taken away at any time
retries number 5 how often to create it again after it was lost
poll_seconds number 30 time between two looks at its state
setup text - shell command for every worker before the installation, as one that mounts the shared storage
keep switch false use it if it is there already, do not delete it at the end
create_flag list - further flag of gcloud ... create, as --create_flag=--reserved; repeatable
ssh_flag list - further flag of gcloud ... ssh and scp, as --ssh_flag=--tunnel-through-iap; repeatable
EOT
parse_flags "$@"
check_name
must_match type '^[a-z0-9]+-[0-9]+$' "an accelerator type, as v5litepod-256"
must_match node_count '^[1-9]' "1 or more"
check_run_dir
refuse_problems

# shellcheck source=launch/queued_resource.sh
source "$root/launch/queued_resource.sh"
archive=$root/build/$name.tar.gz stopping='' retry=0
mapfile -t ssh_flags < <(list ssh_flag)
# All at once: the default, 64 at a time, would wait for ever for a training that waits for the others.
workers=(--worker=all --node=all --batch-size=all "${ssh_flags[@]}")

on_workers() { queued ssh "$name" "${workers[@]}" --command="$1"; } # a shell line

# shellcheck disable=SC2329 # a trap calls it
clean_up() {
  local status=$?
  trap - EXIT
  trap '' TERM INT HUP
  rm -f -- "$archive"
  [[ -n $made && ${flag[keep]} == false ]] || exit "$status"
  say "deleting $name"
  delete && exit "$status"
  say "could not delete $name (see above); it costs money until this works: gcloud compute tpus queued-resources delete" \
    "$name --force $(quoted "${here[@]}")"
  exit $((status ? status : 1))
}

# shellcheck disable=SC2329 # a trap calls it
ask_to_stop() {
  case $phase:$stopping in
    creating:*) stopping=true ;;
    training:)
      stopping=true
      say "asking the workers to stop with a checkpoint; a second signal gives up and deletes"
      (on_workers "bash angpt/launch/worker.sh stop" &) # in a subshell: attend may be just before its look at $!
      ;;
    *)
      end_child || true
      exit 75
      ;;
  esac
}

install() {
  local unpack="mkdir -p angpt && tar -xzf $name.tar.gz -C angpt && bash angpt/launch/worker.sh install"
  queued scp "$archive" "$name:" "${workers[@]}" && on_workers "${flag[setup]:+${flag[setup]} && }$unpack"
}

count_retry() {
  ((++retry <= flag[retries])) ||
    stop 75 "gave up after ${flag[retries]} retries; the same command goes on from the last checkpoint"
  say "retry $retry of ${flag[retries]}"
}

train_there() { # returns when it is worth another queued resource, exits when it is not
  local status
  while :; do
    status=0 phase=training
    on_workers "bash angpt/launch/worker.sh train $(quoted "${train[@]}")" || status=$?
    phase=waiting
    if dry; then return; fi
    say "train ended with exit code $status"
    case $status:$stopping in [0234]:* | *:true) exit "$status" ;; 75:) break ;; esac
    if lost; then break; fi
    ((status == 255)) || exit "$status"
    count_retry # only the connection broke: train goes on there, and the next call follows it
  done
}

if ! dry; then
  trap clean_up EXIT
  trap ask_to_stop TERM INT HUP
fi
run mkdir -p "$root/build"
run tar -C "$root" --exclude=__pycache__ -czf "$archive" angpt_jax configs launch pyproject.toml constraints.txt README.md
while :; do
  create
  if wait_until_active; then
    if install; then train_there; elif ! lost; then stop 1 "the installation on the workers failed (see above)"; fi
  fi
  if dry; then break; fi
  count_retry
  delete || stop 1 "could not delete $name (see above)"
done
note "exit code 75, or SUSPENDED or FAILED instead of ACTIVE: delete, create again and so on, at most ${flag[retries]} times; in the end:"
[[ ${flag[keep]} == true ]] || delete
run rm -f -- "$archive"
