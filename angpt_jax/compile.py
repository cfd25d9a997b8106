"""`python -m angpt_jax.compile`: the train step ahead of time, for a TPU pod that is not there or the devices here.

Exit codes: 0 it fits, or that can't be known; 1 it does not; 2 bad input.
"""

import os
from dataclasses import dataclass, replace
from typing import Any

from angpt_jax import cli, json_output, path_rules, rules
from angpt_jax.ahead import topologies
from angpt_jax.config import Config

TOO_LARGE = 1  # exit code
# For the TPU compiler where there is no TPU: don't ask the cloud what this machine is, leave any TPU here alone, let
# several of us run at a time, say errors only. The two names of a machine are read and not used.
TPU_COMPILER = {
    "JAX_PLATFORMS": "cpu",
    "TPU_SKIP_MDS_QUERY": "1",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
    "TPU_ACCELERATOR_TYPE": "v5litepod-4",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "TPU_MIN_LOG_LEVEL": "3",
    "TPU_STDERR_LOG_LEVEL": "3",
    "TF_CPP_MIN_LOG_LEVEL": "3",
}


@dataclass(frozen=True)
class CompileConfig(Config):
    """The train step of a config, compiled ahead of time: memory, collectives, an estimate of the step time.

    Args:
        topology: TPU slice to compile for, e.g. v5e:16x16 or v5p:8x8x16 (v4, v5e, v5p, v6e); null is the devices here
        slices: how many such slices, joined by the data-centre network
        json: file for all that is found out
        largest_batch: also look for the largest data.batch_size that fits, which compiles a few more times
    """

    topology: str | None = None
    slices: int = 1
    json: str | None = None
    largest_batch: bool = False


def compile_step(config: CompileConfig, name: str) -> int:
    """Compiles, prints the table, writes the JSON; returns the exit code."""
    config = replace(config, dry_run=True)  # nothing is allocated here
    own = [*topologies.check(config.topology, config.slices), *path_rules.of_output("json", config.json)]
    cli.raise_problems([*own, *rules.check(config)])
    if config.topology:
        os.environ.update(TPU_COMPILER)
    # Not before: JAX reads the environment, and takes a second to load.
    from angpt_jax.ahead.report import report
    from angpt_jax.ahead.step import prepare
    from angpt_jax.ahead.table import table

    prepared = prepare(config, config.topology, config.slices)
    found: dict[str, Any] = {"config": name} | report(prepared, config.topology, config.largest_batch)
    print(table(found))
    json_output.write(config.json, found)
    return TOO_LARGE if found["memory"]["fits"] is False else 0


if __name__ == "__main__":
    cli.main(compile_step, CompileConfig, command="compile", default_config="default")
