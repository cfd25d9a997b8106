"""A job script for SLURM whose task i runs command i."""

import shlex
from collections.abc import Sequence

REQUEUES = 100

_SCRIPT = """\
#!/usr/bin/env bash
#SBATCH --job-name=angpt_sweep
#SBATCH --array=0-{last}
#SBATCH --ntasks=1
#SBATCH --signal=TERM@120
#SBATCH --requeue
#SBATCH --open-mode=append
# sbatch [flags such as --partition P --gpus-per-node 1 --time 4:00:00 --array 0-{last}%4] THIS FILE
# Before the time limit a run gets SIGTERM, saves and exits with 75; it then goes back into the queue.
set -euo pipefail
cd {folder}
case ${{SLURM_ARRAY_TASK_ID:?is set by sbatch}} in
{tasks}
*) echo "SLURM_ARRAY_TASK_ID: must be 0 … {last}, got $SLURM_ARRAY_TASK_ID" >&2 && exit 2 ;;
esac
status=0
srun --ntasks=1 --kill-on-bad-exit=0 "${{run[@]}}" || status=$?
if [[ $status == 75 && ${{SLURM_RESTART_COUNT:-0}} -lt {requeues} ]]; then
  scontrol requeue "$SLURM_JOB_ID"
fi
exit "$status"
"""


def script(commands: Sequence[str], folder: str) -> str:
    """For commands of a shell, which are run in `folder`."""
    tasks = "\n".join(f"{number}) run=({command}) ;;" for number, command in enumerate(commands))
    return _SCRIPT.format(last=len(commands) - 1, folder=shlex.quote(folder), tasks=tasks, requeues=REQUEUES)
