"""What the tests of exports share: tiny decoders of every recipe with random parameters, as exports."""

from pathlib import Path
from typing import Any

import jax
import numpy as np
from conftest import tiny

from angpt_jax import experiment, fold
from angpt_jax.config import ModelConfig
from angpt_jax.data.tokenizer import ByteTokenizer, Tokenizer
from angpt_jax.exports import writing
from angpt_jax.exports.exported import Exported

WIDTH, LAYERS, HEADS, FEED_FORWARD, CONTEXT = 24, 2, 4, 40, 64
VOCAB, END = 257, 256
BYTES = ByteTokenizer()


def made(recipe: str = "angpt", *, folded: bool = False, across: bool = False, **fields: Any) -> Exported:
    """The export of a tiny decoder; `fields` are those of the section `model`."""
    given: dict[str, Any] = {"feed_forward": FEED_FORWARD, "kv_heads": HEADS, **fields}
    model = ModelConfig(recipe, WIDTH, LAYERS, HEADS, VOCAB, CONTEXT, **given)
    arch, sizes = experiment.architecture(model)
    decoder = tiny(recipe, sizes, arch=arch, tied_embeddings=model.tied_embeddings)
    params = jax.jit(lambda params: fold.folded(arch, sizes, params))(decoder.random) if folded else decoder.random
    return Exported(
        model=model,
        params=jax.tree.map(np.asarray, params),
        step=7,
        folded=folded,
        attend_across_documents=across,
        trained_vocab=VOCAB,
        end_of_document=END,
        tokenizer=BYTES.fingerprint,
    )


def write(
    folder: Path, exported: Exported, dtype: Any = "float32", shard_bytes: int = 10**9, tokenizer: Tokenizer = BYTES
) -> Path:
    writing.write(exported, tokenizer, folder, dtype, shard_bytes)
    return folder


def logits(exported: Exported, tokens_BL: np.ndarray) -> np.ndarray:
    """Of our own decoder, whose documents begin at each END."""
    segments_BL = np.cumsum(tokens_BL == END, axis=1)
    return np.asarray(jax.jit(exported.decoder.apply)({"params": exported.params}, tokens_BL, segments_BL))


def batch(rows: int = 3, length: int = 12) -> np.ndarray:
    """Rows of bytes that begin with END; the first has a second document, two rows are one."""
    tokens_BL = np.random.default_rng(0).integers(0, END, (rows, length), dtype=np.int32)
    tokens_BL[:, 0] = END
    tokens_BL[0, length // 2] = END
    return tokens_BL
