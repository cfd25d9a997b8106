# shellcheck shell=bash
# Shared by the scripts: finds Python, makes .venv, installs what is missing, runs a command and heeds signals. Sourced, never run.

script_name=${script_name:-${0##*/}}

root=$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.." && pwd -P)
venv=$root/.venv
python=$venv/bin/python
stamps=$venv/stamps # one file per installed part (base, test, cuda, tpu); it holds the fingerprint it was installed with
owner=$venv/made-for # the folder that .venv was made for; "unfinished" while it is being made

say() { printf 'launch/%s: %s\n' "$script_name" "$*" >&2; }

stop() { # exit code, message
  say "${*:2}"
  exit "$1"
}

find_python() { # prints the first Python >= 3.11 that can make a virtual environment
  local name version problem="none on the PATH"
  for name in python3 python3.13 python3.12 python3.11; do
    version=$("$name" -c 'import sys; print("%d.%d.%d" % sys.version_info[:3])' 2>/dev/null) || continue
    if ! "$name" -c 'import sys; sys.exit(sys.version_info < (3, 11))'; then
      [[ $problem == none* ]] && problem="$name is $version"
    elif ! "$name" -c 'import venv, ensurepip' 2>/dev/null; then
      problem="$name is $version but lacks the venv module (on Debian and Ubuntu: apt install python3-venv)"
    else
      echo "$name"
      return
    fi
  done
  stop 2 "needs Python 3.11 or newer with the venv module: $problem"
}

find_accelerator() { # prints cuda, tpu or cpu
  case ${ANGPT_ACCELERATOR:-} in
    cuda | tpu | cpu) echo "$ANGPT_ACCELERATOR" ;;
    ?*) stop 2 "ANGPT_ACCELERATOR=$ANGPT_ACCELERATOR: must be cpu, cuda or tpu, or be unset" ;;
    *) if [[ $(timeout 30 nvidia-smi -L 2>/dev/null) == "GPU "* ]]; then
      echo cuda
    elif compgen -G '/dev/accel[0-9]*' >/dev/null ||
      { compgen -G '/dev/vfio/[0-9]*' && grep -qsx 0x1ae0 /sys/bus/pci/devices/*/vendor; } >/dev/null; then
      echo tpu # 0x1ae0 is Google
    else
      echo cpu
    fi ;;
  esac
}

fingerprint() { # of everything that an installation depends on
  {
    printf '%s\n' "$root"
    "$python" -c 'import sys; print(sys.version)'
    cat -- "$root/pyproject.toml" "$root/constraints.txt"
  } | sha256sum
}

venv_works() {
  [[ ! -e $owner || $(<"$owner") == "$root" ]] &&
    "$python" -c 'import sys, pip; sys.exit(sys.version_info < (3, 11))' 2>/dev/null
}

make_venv() {
  local base
  base=$(find_python) || exit
  say "making .venv with $base"
  # In two steps, so that an interruption can't leave half a pip behind that looks whole.
  if "$base" -m venv --clear --without-pip "$venv" && echo unfinished >"$owner" &&
    "$python" -m ensurepip --default-pip >/dev/null; then
    echo "$root" >"$owner"
  else
    stop 1 "could not make .venv (see above)"
  fi
}

up_to_date() { # parts
  local part now
  now=$(fingerprint)
  for part; do
    [[ -e $stamps/$part && $(<"$stamps/$part") == "$now" ]] || return 1
  done
}

install_parts() { # "base" and extras
  local part extras
  extras=$(IFS=, && echo "${*:2}")
  venv_works || make_venv
  up_to_date "$@" && return
  up_to_date base || rm -rf -- "$stamps"
  mkdir -p -- "$stamps"
  (cd -- "$stamps" && rm -f -- "$@") # so that an interruption leaves no stamp
  say "installing into .venv (extras: ${extras:-none}); a first time takes one to a few minutes, ten with cuda"
  (cd -- "$root" && "$python" -m pip install -qq --no-input -c constraints.txt -e ".${extras:+[$extras]}") ||
    stop 1 "the installation failed (see above); run the same command again when that is solved"
  for part; do fingerprint >"$stamps/$part"; done
  say "installed after $SECONDS s"
}

ensure_installed() { # extras; quick when nothing changed. The lock is for two scripts that start together.
  (
    flock -n 9 || { say "waiting for another installation into .venv" && flock 9; } || say "no lock here, going on"
    install_parts base "$@"
  ) 9<"$root/pyproject.toml" || exit
}

attend() { # command; waits for it in such a way that traps run at once; returns its exit code
  local status=0 child
  "$@" <&0 &
  child=$!
  while kill -0 "$child" 2>/dev/null; do wait "$child" || true; done # a signal cuts a wait short
  wait "$child" || status=$?
  return "$status"
}

end_child() { # for a trap: SIGTERM to the command that attend waits for and to its session; fails where none runs
  local pid status=1
  for pid in $(jobs -pr); do # not a variable of attend: a trap may run before it is set
    { kill -TERM -- "-$pid" || kill -TERM "$pid"; } 2>/dev/null && status=0
  done
  return "$status"
}
