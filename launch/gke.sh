#!/usr/bin/env bash
# bash launch/gke.sh FLAGS -- TRAIN FLAGS: fills in gke_jobset.yaml and submits it to the current cluster. See launch/README.md.
set -euo pipefail
# shellcheck source=launch/lib.sh
source "$(dirname -- "${BASH_SOURCE[0]}")/lib.sh"
# shellcheck source=launch/flags.sh
source "$root/launch/flags.sh"

flags "Submits a JobSet that trains on TPU slices to the cluster that kubectl is set to." <<'EOT'
name text required of the JobSet, as angpt-1
image text required container image, built with launch/image.sh --platform tpu
tpu text required v4, v5e, v5p or v6e
topology text required of one slice, as 16x16
claim text required name of a PersistentVolumeClaim that many pods can write to
run_dir text required run directory: an absolute path below --mount
mount text /shared where the pods mount it
namespace text default of Kubernetes
slices number 1 how many
chips_per_host number 4 of the machine type of the node pool
restarts number 10 at most, after exit code 75, lost nodes and crashes
grace_seconds number 300 from SIGTERM to SIGKILL
EOT
parse_flags "$@"
check_name
must_match tpu '^(v4|v5e|v5p|v6e)$' "v4, v5e, v5p or v6e"
must_match topology '^[1-9][0-9]*x[1-9][0-9]*(x[1-9][0-9]*)?$' "chips by direction, as 16x16"
must_match claim '^[a-z0-9]([a-z0-9.-]*[a-z0-9])?$' "the name of a PersistentVolumeClaim"
must_match namespace '^[a-z0-9]([a-z0-9-]*[a-z0-9])?$' "the name of a namespace"
must_match image '^[A-Za-z0-9][A-Za-z0-9._/:@-]*$' "the name of an image"
must_match mount '^/[A-Za-z0-9._/-]+$' "an absolute path of letters, digits and ._/-"
check_run_dir
must_match run_dir "^${flag[mount]//./\\.}/." "a path below --mount ${flag[mount]}"
must_match slices '^[1-9]' "1 or more"
must_match chips_per_host '^[1-9]' "1 or more"
refuse_problems

declare -A accelerators=([v4]=tpu-v4-podslice [v5e]=tpu-v5-lite-podslice [v5p]=tpu-v5p-slice [v6e]=tpu-v6e-slice)
chips=$((${flag[topology]//x/*})) per_host=${flag[chips_per_host]}
((chips >= per_host)) || per_host=$chips
((chips % per_host == 0)) || stop 2 "--chips_per_host: must divide the $chips chips of --topology ${flag[topology]}, got $per_host"

json() { # words, as a list; Kubernetes would replace $(NAME)
  local word text=''
  for word; do
    word=${word//\\/\\\\} && word=${word//\"/\\\"}
    # shellcheck disable=SC2016
    text+=", \"${word//'$('/'$$('}\""
  done
  printf '[%s]\n' "${text#, }"
}

yaml=$(<"$root/launch/gke_jobset.yaml")
fill() { yaml=${yaml//"{{$1}}"/"$2"}; } # name, value
fill NAME "${flag[name]}"
fill NAMESPACE "${flag[namespace]}"
fill RESTARTS "${flag[restarts]}"
fill SLICES "${flag[slices]}"
fill HOSTS $((chips / per_host))
fill GRACE_SECONDS "${flag[grace_seconds]}"
fill ACCELERATOR "${accelerators[${flag[tpu]}]}"
fill TOPOLOGY "${flag[topology]}"
fill IMAGE "${flag[image]}"
fill CHIPS "$per_host"
fill MOUNT "${flag[mount]}"
fill CLAIM "${flag[claim]}"
fill ARGUMENTS "$(json "${train[@]}")" # last: they may hold anything

if dry; then
  printf "kubectl create -f - <<'END_OF_JOBSET'\n%s\nEND_OF_JOBSET\n" "$yaml"
else
  kubectl create -f - <<<"$yaml"
fi
