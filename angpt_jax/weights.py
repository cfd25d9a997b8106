"""Weights alone, in a folder that is read like a run directory: a third of a checkpoint of the run.

    save_weights(trained.load(run, mesh), out)       # config.yaml, tokenizer.json, weights.json, checkpoints/STEP

`sample`, `evaluate`, `export` and `trained.load` read it, and a new run starts from it (`run.init_from`); it can't be
resumed.
"""

import shutil
import uuid
from pathlib import Path

from angpt_jax import cli, run_dir, weights_folder
from angpt_jax.checkpoint import Checkpoints
from angpt_jax.errors import StorageError, UserError
from angpt_jax.files import write_whole
from angpt_jax.restore import PARAMS, reason_of
from angpt_jax.trained import Trained


def save_weights(trained: Trained, out: Path) -> None:
    """Writes the folder `out`, whole or not at all: the weights as they are, folded or not, with their checksums.

    A UserError if there is an `out` already (an empty folder may be), a StorageError if it can't be written.
    """
    check_new(out)
    draft = out.with_name(f".{out.name[:100]}.{uuid.uuid4().hex}")
    try:
        draft.mkdir(parents=True)
        with Checkpoints(run_dir.checkpoints_of(draft), keep_latest=2) as checkpoints:
            checkpoints.save(trained.step, {PARAMS: trained.params}, {weights_folder.FOLDED: trained.is_folded})
        write_whole(draft / run_dir.TOKENIZER, trained.tokenizer.json)
        write_whole(draft / "config.yaml", cli.to_yaml(trained.run_config))
        weights_folder.mark(draft, trained.is_folded)
        draft.rename(out)
    except (OSError, StorageError) as error:
        raise StorageError(
            f"out: can't be written, got {str(out)!r} ({reason_of(error)}); a folder on a disk with room"
        ) from error
    finally:
        shutil.rmtree(draft, ignore_errors=True)


def check_new(out: Path) -> None:
    """Refuses an `out` that holds something."""
    try:
        is_free = not out.exists() or (out.is_dir() and not any(out.iterdir()))
    except OSError as error:
        raise UserError(f"out: can't be read, got {str(out)!r} ({error.strerror}); another folder") from error
    if not is_free:
        raise UserError(f"out: is there already, got {str(out)!r}; a folder that is new or empty")
