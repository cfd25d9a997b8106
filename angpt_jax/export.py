"""`python -m angpt_jax.export`: a run as a folder that transformers loads, with safetensors, tokenizer, model files."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from angpt_jax import cli, path_rules
from angpt_jax.config import FromRun, MeshConfig
from angpt_jax.schema import show

MEGABYTE = 1_000_000
LONGEST_NAME = 200  # bytes of one part of out; file systems take 255, and the unfinished folder has a longer name


@dataclass(frozen=True)
class ExportConfig:
    """The newest checkpoint of a run as a folder of safetensors, config.json, tokenizer and PyTorch model files.

    Args:
        out: folder to make; it must not be there, or be empty
        run: where the model comes from
        format: safetensors, which transformers loads (AutoModelForCausalLM with trust_remote_code=True, AutoTokenizer),
            or orbax, a checkpoint of the weights alone, which our own commands read as a run directory
        fold: multiply ν, α and scales into the matrices, so that a plain decoder is left (anGPT)
        dtype: of the matrices; scales and gains stay float32
        shard_mb: megabytes of one file of tensors, at most; a larger tensor has a file of its own
    """

    out: str
    run: FromRun = field(default_factory=FromRun)
    format: Literal["safetensors", "orbax"] = "safetensors"
    fold: bool = False
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    shard_mb: int = 5000


def export(config: ExportConfig, name: str) -> int:
    """Writes the folder and prints what is in it; returns the exit code."""
    cli.raise_problems(check(config))
    return {"safetensors": as_safetensors, "orbax": as_orbax}[config.format](config)


def as_safetensors(config: ExportConfig) -> int:
    from angpt_jax import trained  # not before: JAX takes a second to load, a bad value none
    from angpt_jax.exports import exported, writing

    model = trained.load(Path(config.run.dir).absolute(), MeshConfig(), folded=config.fold)
    out = Path(config.out).expanduser().absolute()
    files = writing.write(exported.of_run(model), model.tokenizer, out, config.dtype, config.shard_mb * MEGABYTE)
    print(f"exported step {model.step} to {out}: {', '.join(files)}")
    return 0


def as_orbax(config: ExportConfig) -> int:
    from angpt_jax import trained, weights

    model = trained.load(Path(config.run.dir).absolute(), MeshConfig(), folded=config.fold)
    out = Path(config.out).expanduser().absolute()
    weights.save_weights(model, out)
    print(f"exported the weights of step {model.step} to {out}; a new run starts from them by --run.init_from {out}")
    return 0


def check(config: ExportConfig) -> list[str]:
    """Problems of the values themselves, and of the place that is to be written to."""
    problems = [] if config.shard_mb >= 1 else [f"shard_mb: must be at least 1, got {config.shard_mb}"]
    if config.format == "orbax":
        without = ExportConfig(config.out)
        problems += [
            f"{name}: has no effect on format orbax, got {value}; leave it out"
            for name, value, default in (
                ("dtype", config.dtype, without.dtype),
                ("shard_mb", config.shard_mb, without.shard_mb),
            )
            if value != default
        ]
    for key, path in (("run.dir", config.run.dir), ("out", config.out)):
        found = list(path_rules.of_path(key, path, LONGEST_NAME))
        problems += found or ([f"{key}: must be a path, got ''"] if path == "" else [])
    return problems or _place(config.out)


def _place(text: str) -> list[str]:
    rule = "a folder that is not there, or an empty one"
    try:
        out = Path(text).expanduser()
        if not out.absolute().name or ".." in out.parts:
            return [f"out: must end in the name of a folder, without '..', got {show(text)}; {rule}"]
        if out.is_symlink() or (out.exists() and not out.is_dir()):
            return [f"out: is not a folder, got {show(text)}; {rule}"]
        above = next(path for path in (out.absolute(), *out.absolute().parents) if path.exists())
        if not above.is_dir():
            return [f"out: can't be written there, got {show(text)} ({show(above.name)} is a file); {rule}"]
        if out.is_dir() and any(out.iterdir()):
            return [f"out: is not empty, got {show(text)}; {rule}"]
    except (OSError, RuntimeError) as error:
        return [f"out: can't be read ({error}), got {show(text)}; {rule}"]
    return []


if __name__ == "__main__":
    cli.main(export, ExportConfig, command="export", default_config=None)
