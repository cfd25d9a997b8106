"""What an export holds, whoever made it: a run, or the folder of another export."""

from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from angpt_jax import experiment, fold
from angpt_jax.arch import Arch, Sizes
from angpt_jax.axes import Annotated
from angpt_jax.config import ModelConfig
from angpt_jax.model import Decoder
from angpt_jax.trained import Trained

# The fields of `model` that say what is computed; the others say how.
OF_THE_MODEL = (
    *("arch", "width", "layers", "heads", "vocab", "context", "feed_forward", "kv_heads", "tied_embeddings"),
    *("rope_theta", "compute_dtype", "places"),
)


@dataclass(frozen=True)
class Exported:
    """A decoder with its parameters, and where they come from.

    Args:
        model: the section `model` of the run, as far as it says what is computed; its vocab has no padded entries
        params: float32 arrays of the tree that `decoder` takes, on the host
        step: of the checkpoint
        folded: whether ν, α and scales are multiplied into the matrices (`angpt_jax.fold`)
        attend_across_documents: whether attention crosses the boundary between two documents
        trained_vocab: rows of the embedding in training, padded ones too
        end_of_document: id that begins each document
        tokenizer: fingerprint of the tokenizer
    """

    model: ModelConfig
    params: Any
    step: int
    folded: bool
    attend_across_documents: bool
    trained_vocab: int
    end_of_document: int
    tokenizer: str

    @property
    def arch(self) -> Arch:
        """What fills the places; of a folded model, those of the plain decoder."""
        arch = experiment.architecture(self.model)[0]
        return fold.plain(arch) if self.folded else arch

    @property
    def sizes(self) -> Sizes:
        return experiment.architecture(self.model)[1]

    @property
    def decoder(self) -> Decoder:
        """The model in float32 that has these parameters."""
        return Decoder(
            self.arch,
            self.sizes,
            tied_embeddings=self.model.tied_embeddings,
            attend_across_documents=self.attend_across_documents,
        )


def of_run(trained: Trained) -> Exported:
    """The model of a run, folded or as it is. Vocabulary entries that no id of its tokenizer has are cut off."""
    config, tokenizer = trained.config, trained.tokenizer
    model = ModelConfig(**{name: getattr(config.model, name) for name in OF_THE_MODEL})
    exported = Exported(
        model=replace(model, vocab=tokenizer.size),
        params=None,
        step=trained.step,
        folded=trained.is_folded,
        attend_across_documents=config.data.attend_across_documents,
        trained_vocab=config.model.vocab,
        end_of_document=tokenizer.end_of_document,
        tokenizer=tokenizer.fingerprint,
    )
    boxes = annotated(exported.decoder)
    return replace(exported, params=jax.tree.map(_cut, boxes, trained.params, is_leaf=is_box))


def with_vocab(exported: Exported, vocab: int) -> Exported:
    """The same with as many vocabulary entries as a new run has, at least its own. Those that are added stand for
    nothing: rows of zeros, and the scale that the others have in the mean."""
    padded = replace(exported, model=replace(exported.model, vocab=vocab))
    boxes = annotated(padded.decoder)
    return replace(padded, params=jax.tree.map(_filled_up, boxes, exported.params, is_leaf=is_box))


def annotated(decoder: Decoder) -> Any:
    """The tree of parameters in their boxes, as shapes."""
    tokens_BL = jnp.zeros((1, 2), jnp.int32)
    return jax.eval_shape(lambda: decoder.init(jax.random.key(0), tokens_BL, tokens_BL)["params"])


def is_box(node: Any) -> bool:
    return isinstance(node, Annotated)


def _cut(box: Annotated, leaf: Any) -> np.ndarray:
    """The entries of `leaf` that the shape in the box has."""
    return np.asarray(leaf)[tuple(slice(size) for size in box.value.shape)]


def _filled_up(box: Annotated, leaf: np.ndarray) -> np.ndarray:
    more = [(0, wanted - size) for wanted, size in zip(box.value.shape, leaf.shape, strict=True)]
    return np.pad(leaf, more, constant_values=0.0 if box.axes.is_matrix else float(leaf.mean()))
