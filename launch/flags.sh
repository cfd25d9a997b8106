# shellcheck shell=bash
# Shared by the scripts that have flags of their own: reads "--name value", "--name=value" and bare switches up to "--";
# what follows "--" is for train. Sourced after lib.sh, never run.

declare -A flag=() bad=() kind=() default=() meaning=()
names=() train=() problems=()
about=''

wrong() { problems+=("$*"); }

wrong_flag() { # flag, what is wrong; only the first time
  [[ -n ${bad[$1]:-} ]] || wrong "--$1: $2"
  bad[$1]=true
}

refuse_problems() { # one line for each, exit code 2
  local problem
  ((${#problems[@]})) || return 0
  for problem in "${problems[@]}"; do say "$problem"; done
  exit 2
}

flags() { # what the script does; stdin: lines of name, kind (text, number, switch, list), default or "required", meaning
  local name kind_ default_ meaning_
  about=$1
  while read -r name kind_ default_ meaning_; do
    names+=("$name")
    kind[$name]=$kind_ default[$name]=${default_#-} meaning[$name]=$meaning_
  done < <(cat && echo 'dry_run switch false print the commands, run nothing')
}

usage() {
  local name
  printf 'bash launch/%s FLAGS [-- TRAIN FLAGS]\n%s\n\n' "${script_name:?}" "$about"
  for name in "${names[@]}"; do
    printf '  --%-18s %s (%s%s)\n' "$name" "${meaning[$name]}" "${kind[$name]}" "${default[$name]:+, ${default[$name]}}"
  done
}

set_flag() { # name, value
  case ${kind[$1]} in
    number) [[ $2 =~ ^(0|[1-9][0-9]{0,8})$ ]] || wrong_flag "$1" "must be a whole number, got '$2'" ;;
    switch) [[ $2 == true || $2 == false ]] || wrong_flag "$1" "must be true or false, got '$2'" ;;
  esac
  [[ -n $2 || ${default[$1]} != required ]] || wrong_flag "$1" "must not be empty; ${meaning[$1]}"
  [[ $2 != *$'\n'* ]] || wrong_flag "$1" "must be one line, got ${2@Q}"
  if [[ ${kind[$1]} == list && -n ${flag[$1]} ]]; then flag[$1]+=$'\n'$2; else flag[$1]=$2; fi
}

parse_flags() { # words of the command line; fills flag and train
  local name value
  for name in "${names[@]}"; do flag[$name]=${default[$name]}; done
  while (($#)); do
    name=${1%%=*} && name=${name#--}
    case $1 in
      --help | -h) usage && exit ;;
      --) train=("${@:2}") && break ;;
      --*) [[ $name =~ ^[a-z_]+$ && -n ${kind[$name]:-} ]] || {
        wrong "--$name: is not a flag; flags are ${names[*]/#/--}, and train's after a lone --" && shift
        [[ ${1:---} == --* ]] || shift
        continue
      } ;;
      *) wrong "'$1': is not a flag; flags begin with --, and train's follow a lone --" && shift && continue ;;
    esac
    if [[ $1 == *=* ]]; then
      value=${1#*=}
    elif [[ ${kind[$name]} == switch && ! ${2:-} =~ ^(true|false)$ ]]; then
      value=true
    elif (($# > 1)) && [[ $2 != --* ]]; then
      value=$2 && shift
    else
      wrong_flag "$name" "needs a value; ${meaning[$name]}"
      value=${default[$name]}
    fi
    shift
    [[ -n ${bad[$name]:-} ]] || set_flag "$name" "$value"
  done
  for name in "${names[@]}"; do
    [[ ${flag[$name]} != required ]] || wrong_flag "$name" "is required; ${meaning[$name]}"
  done
}

must_match() { # flag, regular expression, rule
  [[ ${flag[$1]} =~ $2 ]] || wrong_flag "$1" "must be $3, got '${flag[$1]}'"
}

check_name() { must_match name '^[a-z]([a-z0-9-]{0,38}[a-z0-9])?$' "at most 40 lower case letters, digits and -, a letter first"; }

check_run_dir() { # of a run on several hosts; adds it to train's flags
  local word
  must_match run_dir '^/.' "an absolute path on storage that all hosts mount (train does not read gs:// itself)"
  for word in "${train[@]}"; do
    [[ $word != *[[:cntrl:]]* ]] || wrong "${word@Q}: has a control character, which train's flags must not have here"
    [[ $word != --run.dir && $word != --run.dir=* ]] || wrong "--run.dir: is set by --run_dir, got it after -- as well"
  done
  train=(--run.dir "${flag[run_dir]}" "${train[@]}")
}

list() { # flag; prints its values, one a line
  [[ -z ${flag[$1]} ]] || printf '%s\n' "${flag[$1]}"
}

quoted() { # words, as one line that a shell reads back as these words
  local word line=''
  for word; do
    if [[ $word =~ ^[A-Za-z0-9_@%+=:,./-]+$ ]]; then line+=" $word"; else line+=" ${word@Q}"; fi
  done
  printf '%s\n' "${line# }"
}

dry() { [[ ${flag[dry_run]} == true ]]; }

note() { if dry; then printf '# %s\n' "$*"; else say "$*"; fi; } # a remark among the commands

run() { # command; a dry run prints it
  if dry; then quoted "$@"; else "$@"; fi
}
