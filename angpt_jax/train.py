"""`python -m angpt_jax.train`: pretrain, evaluate, checkpoint, resume."""

from angpt_jax import cli, rules
from angpt_jax.config import Config


def train(config: Config, name: str) -> int:
    """Trains or continues the run of `config`; returns the exit code. `name` names the default run directory."""
    cli.raise_problems(rules.check(config))
    from angpt_jax.pretrain import pretrain  # not before: JAX takes a second to load, and a bad value none to refuse

    return pretrain(config, name)


if __name__ == "__main__":
    cli.main(train, Config, command="train", default_config="default")
