#!/usr/bin/env bash
# bash launch/image.sh FLAGS: builds a container image that trains, and can push it. See launch/README.md.
set -euo pipefail
# shellcheck source=launch/lib.sh
source "$(dirname -- "${BASH_SOURCE[0]}")/lib.sh"
# shellcheck source=launch/flags.sh
source "$root/launch/flags.sh"

flags "Builds launch/Dockerfile.PLATFORM." <<'EOT'
platform text required cuda or tpu
tag text required name of the image, with the repository to push it to
user text angpt who runs train in it; root for xpk, where the TPU devices belong to root
push switch false push it as well
EOT
parse_flags "$@"
must_match platform '^(cuda|tpu)$' "cuda or tpu"
must_match user '^(angpt|root)$' "angpt or root"
((${#train[@]} == 0)) || wrong "--: an image takes no flags of train"
refuse_problems

run docker build --file "$root/launch/Dockerfile.${flag[platform]}" --build-arg "RUN_AS=${flag[user]}" --tag "${flag[tag]}" "$root"
[[ ${flag[push]} == false ]] || run docker push "${flag[tag]}"
