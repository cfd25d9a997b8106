#!/usr/bin/env bash
# bash launch/xpk.sh FLAGS -- TRAIN FLAGS: trains on a GKE cluster that xpk made. See launch/README.md.
set -euo pipefail
# shellcheck source=launch/lib.sh
source "$(dirname -- "${BASH_SOURCE[0]}")/lib.sh"
# shellcheck source=launch/flags.sh
source "$root/launch/flags.sh"

flags "Creates an xpk workload that trains on TPU slices." <<'EOT'
name text required of the workload, as angpt-1
cluster text required made with xpk cluster create
project text required Google Cloud project
zone text required as us-west4-a
tpu_type text required as v5litepod-256
image text required container image, built with launch/image.sh --platform tpu --user root
run_dir text required run directory: an absolute path on storage that all pods mount
num_slices number 1 how many
storage list - name of a storage made with xpk storage; repeatable
restarts number 10 at most, after exit code 75, lost nodes and crashes
grace_seconds number 300 from SIGTERM to SIGKILL
xpk_flag list - further flag of xpk workload create, as --xpk_flag=--priority=high; repeatable
EOT
parse_flags "$@"
check_name
must_match num_slices '^[1-9]' "1 or more"
check_run_dir
refuse_problems

mapfile -t storages < <(list storage)
mapfile -t more < <(list xpk_flag)
# Exit codes 42 and 127 to 255 always start it again; 1 is what a host sees when another one is lost. "exec", because xpk hands
# SIGTERM on to the shell that runs the command.
run xpk workload create --workload="${flag[name]}" --cluster="${flag[cluster]}" --project="${flag[project]}" \
  --zone="${flag[zone]}" --tpu-type="${flag[tpu_type]}" --num-slices="${flag[num_slices]}" --docker-image="${flag[image]}" \
  --max-restarts="${flag[restarts]}" --restart-on-exit-codes=1,75 --termination-grace-period-seconds="${flag[grace_seconds]}" \
  "${storages[@]/#/--storage=}" "${more[@]}" --command="exec python -m angpt_jax.train $(quoted "${train[@]}")"
