#!/usr/bin/env bash
# bash launch/test.sh [pytest flags]: makes .venv, installs with the test extra, runs every check. See launch/README.md.
set -euo pipefail
# shellcheck source=launch/lib.sh
source "$(dirname -- "${BASH_SOURCE[0]}")/lib.sh"

accelerator=$(find_accelerator)
extras=(test) not_run=()
[[ $accelerator == cpu ]] || extras+=("$accelerator")
[[ $accelerator == cuda ]] || not_run+=("GPU tests (no NVIDIA GPU)")
if compgen -G "$root/tests/test_compile*.py" >/dev/null; then # the pod tests
  if [[ ${ANGPT_TPU_COMPILER:-} == 1 ]]; then extras+=(tpu); else not_run+=("pod tests (set ANGPT_TPU_COMPILER=1)"); fi
fi
ensure_installed "${extras[@]}"

failed=()
check() { # name, command
  printf '== %s\n' "$1"
  "${@:2}" || failed+=("$1")
}

cd -- "$root"
check "ruff check" "$python" -m ruff check .
check "ruff format" "$python" -m ruff format --check .
check pyright env PYRIGHT_PYTHON_IGNORE_WARNINGS=1 "$python" -m pyright
if ((${#not_run[@]})); then
  printf 'not run here: %s' "${not_run[0]}"
  ((${#not_run[@]} == 1)) || printf ', %s' "${not_run[@]:1}"
  echo
fi
check pytest "$python" -m pytest -n 2 "$@"

((${#failed[@]} == 0)) || stop 1 "failed: $(IFS=, && echo "${failed[*]}")"
