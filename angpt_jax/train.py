"""`python -m angpt_jax.train`: pretrain, evaluate, checkpoint, resume."""

import sys

from angpt_jax import cli, host_memory, rules
from angpt_jax.config import Config
from angpt_jax.stopping import EXIT_STOPPED, Stopped, StopRequest


def train(config: Config, name: str) -> int:
    """Trains or continues the run of `config`; returns the exit code. `name` names the default run directory."""
    cli.raise_problems(rules.check(config))
    try:
        with StopRequest(at_once=True) as stop:
            host_memory.keep_freed()
            from angpt_jax.pretrain import pretrain  # not before: JAX takes a second to load, a bad value none

            code = pretrain(config, name, stop)
            if code == EXIT_STOPPED:
                stop.ignore_more()
            return code
    except Stopped as signal:
        print(f"stopped by {signal} before the first step; run the same command again", file=sys.stderr)
        return EXIT_STOPPED


if __name__ == "__main__":
    cli.main(train, Config, command="train", default_config="default")
