"""Writes an export: into a folder beside the one that is wanted, which gets its name when everything is there."""

import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

import jax.numpy as jnp
import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import save_file

from angpt_jax.data.tokenizer import Tokenizer
from angpt_jax.errors import StorageError, UserError
from angpt_jax.exports import description, tensors
from angpt_jax.exports import tokenizer as tokenizer_files
from angpt_jax.exports.exported import Exported
from angpt_jax.exports.tensors import Entry

DType = Literal["float32", "bfloat16", "float16"]
STANDALONE = Path(__file__).parent / "standalone"
WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
UNFINISHED = ".unfinished"


def write(exported: Exported, tokenizer: Tokenizer, folder: Path, dtype: DType, shard_bytes: int) -> list[str]:
    """Makes `folder`, which must not be there or be empty; returns the names of the files with tensors.

    Matrices are stored as `dtype`; scales, gains and biases, which are few, stay float32.
    """
    with _folder(folder) as draft:
        for name, content in _small_files(exported, tokenizer, dtype).items():
            (draft / name).write_bytes(content)
        return _write_tensors(exported, draft, dtype, shard_bytes)


def _small_files(exported: Exported, tokenizer: Tokenizer, dtype: DType) -> dict[str, bytes]:
    texts = {
        "config.json": description.config(exported, dtype),
        "generation_config.json": description.generation(exported),
    }
    return {
        **{name: _json(content) for name, content in texts.items()},
        **{name: (STANDALONE / name).read_bytes() for name in description.MODEL_FILES},
        **tokenizer_files.files(tokenizer, exported.model.context),
    }


def _json(content: Any) -> bytes:
    return (json.dumps(content, indent=2) + "\n").encode()


def _write_tensors(exported: Exported, folder: Path, dtype: DType, shard_bytes: int) -> list[str]:
    """One shard is in memory at a time, beside the parameters themselves."""
    shards = _shards(tensors.entries(exported.decoder), dtype, shard_bytes)
    names = [f"model-{n:05}-of-{len(shards):05}.safetensors" for n in range(1, len(shards) + 1)]
    names = names if len(shards) > 1 else [WEIGHTS]
    for name, shard in zip(names, shards, strict=True):
        arrays = {entry.name: _cast(entry, tensors.tensor(entry, exported.params), dtype) for entry in shard}
        save_file(arrays, folder / name, metadata={"format": "pt"})
    if len(shards) > 1:
        places = {entry.name: name for name, shard in zip(names, shards, strict=True) for entry in shard}
        total = sum(_bytes(entry, dtype) for shard in shards for entry in shard)
        (folder / INDEX).write_bytes(_json({"metadata": {"total_size": total}, "weight_map": places}))
    return names


def _shards(entries: list[Entry], dtype: DType, shard_bytes: int) -> list[list[Entry]]:
    """Cut in front of a tensor that would make its shard too large."""
    shards: list[list[Entry]] = []
    room = 0
    for entry in entries:
        needed = _bytes(entry, dtype)
        if needed > room:
            shards.append([])
            room = shard_bytes
        shards[-1].append(entry)
        room -= needed
    return shards


def _dtype(entry: Entry, dtype: DType) -> np.dtype:
    return jnp.dtype(dtype if entry.is_matrix else "float32")


def _bytes(entry: Entry, dtype: DType) -> int:
    return int(np.prod(entry.shape, dtype=np.int64)) * _dtype(entry, dtype).itemsize


def _cast(entry: Entry, array: np.ndarray, dtype: DType) -> np.ndarray:
    with np.errstate(over="ignore"):
        cast = array.astype(_dtype(entry, dtype))
    if np.isfinite(array).all() and not np.isfinite(cast.astype(np.float32)).all():
        raise UserError(
            f"dtype: can't hold {entry.name}, whose largest entry is {np.abs(array).max():.3g}, got {dtype}; "
            "float32 or bfloat16"
        )
    return cast


@contextmanager
def _folder(folder: Path) -> Iterator[Path]:
    """A folder beside `folder` that gets its name at the end, or is removed; what the disk says is a StorageError."""
    draft = folder.with_name(f".{folder.name}{UNFINISHED}")
    missing = [path for path in folder.parents if not path.exists()]
    try:
        if draft.exists():
            shutil.rmtree(draft)  # of an export that was killed
        draft.mkdir(parents=True)
        try:
            yield draft
            os.replace(draft, folder)
        except BaseException:
            shutil.rmtree(draft, ignore_errors=True)
            for path in missing:
                path.rmdir()
            raise
    except (OSError, SafetensorError) as error:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        raise StorageError(
            f"out: can't be written, got {str(folder)!r} ({reason}); a folder on a disk with room"
        ) from error
