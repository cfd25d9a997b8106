"""`config.json` and `generation_config.json`: what the model is, for transformers and for reading it back."""

from dataclasses import asdict
from typing import Any

from angpt_jax.arch import Arch
from angpt_jax.exports.exported import OF_THE_MODEL, Exported
from angpt_jax.part import Part, Split, setting_types
from angpt_jax.parts import PARTS

FORMAT = 1  # of the section `angpt_jax` in config.json
MODEL_FILES = ("modeling_angpt_jax.py", "configuration_angpt_jax.py", "parts_angpt_jax.py", "norms_angpt_jax.py")
OF_THE_EXPORT = ("step", "folded", "trained_vocab", "tokenizer")


def config(exported: Exported, dtype: str) -> dict[str, Any]:
    """The content of config.json."""
    of_the_model = asdict(exported.model)
    return {
        "architectures": ["AngptJaxForCausalLM"],
        "auto_map": {
            "AutoConfig": "configuration_angpt_jax.AngptJaxConfig",
            "AutoModelForCausalLM": "modeling_angpt_jax.AngptJaxForCausalLM",
        },
        "model_type": "angpt_jax",
        "dtype": dtype,
        **computed(exported),
        "use_cache": True,
        "bos_token_id": exported.end_of_document,
        "eos_token_id": exported.end_of_document,
        "pad_token_id": exported.end_of_document,
        "angpt_jax": {
            "format": FORMAT,
            **{name: getattr(exported, name) for name in OF_THE_EXPORT},
            "model": {name: of_the_model[name] for name in OF_THE_MODEL},
        },
    }


def computed(exported: Exported) -> dict[str, Any]:
    """The part of config.json that says what is computed."""
    arch, sizes = exported.arch, exported.sizes
    return {
        "vocab_size": sizes.vocab,
        "hidden_size": sizes.width,
        "intermediate_size": sizes.feed_forward,
        "num_hidden_layers": sizes.layers,
        "num_attention_heads": sizes.heads,
        "num_key_value_heads": sizes.key_value_heads,
        "head_dim": sizes.head_width,
        "max_position_embeddings": exported.model.context,
        "rope_theta": sizes.rope_theta,
        "tie_word_embeddings": exported.model.tied_embeddings,
        "attend_across_documents": exported.attend_across_documents,
        "places": places(arch),
        "nu": asdict(arch.nu),
    }


def places(arch: Arch) -> dict[str, Any]:
    """What fills each place that is there after training: its name, and all its settings."""
    return {place: _filled(place, getattr(arch, place)) for place in PARTS if place != "init"}


def _filled(place: str, filled: Part | Split) -> dict[str, Any]:
    if isinstance(filled, Split):
        return {"attention": _filled(place, filled.attention), "mlp": _filled(place, filled.mlp)}
    (name,) = (name for name, kind in PARTS[place].items() if kind is filled.kind)
    return {"part": name, **{setting: filled[setting] for setting in setting_types(filled.kind)}}


def generation(exported: Exported) -> dict[str, Any]:
    """The content of generation_config.json: greedy, from a document's beginning to its end, inside the context."""
    ids = dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"), exported.end_of_document)
    return {**ids, "max_length": exported.model.context}
