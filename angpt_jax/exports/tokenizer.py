"""The tokenizer as transformers loads it: the ids of ours, with the id in front that begins a document in training."""

import base64
import json
from typing import Any

import tokenizers

from angpt_jax.data.sentencepieces import KEY, SentencePieceTokenizer
from angpt_jax.data.tokenizer import BYTE_ALPHABET, END_OF_TEXT, ByteTokenizer, Tokenizer

BYTE_LEVEL = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}


def files(tokenizer: Tokenizer, context: int) -> dict[str, bytes]:
    """Content by name. A SentencePiece model is kept as it is; transformers has a class that gives its ids, but for a
    text that spells out the character that stands for a space there."""
    if isinstance(tokenizer, SentencePieceTokenizer):
        end, unknown = tokenizer.end_piece, tokenizer.unknown_piece
        kind = {"tokenizer_class": "LlamaTokenizer", "legacy": False, "add_prefix_space": False, "add_bos_token": True}
        model = {"tokenizer.model": base64.b64decode(json.loads(tokenizer.json)[KEY])}
        return {**model, **_config(kind | {"unk_token": unknown}, end, context)}
    spec = _of_bytes(tokenizer) if isinstance(tokenizer, ByteTokenizer) else json.loads(tokenizer.json)
    end = str(tokenizers.Tokenizer.from_str(json.dumps(spec)).id_to_token(tokenizer.end_of_document))
    spec["post_processor"] = _in_front(end, tokenizer.end_of_document)
    spec["decoder"] = spec.get("decoder") or BYTE_LEVEL
    content = json.dumps(spec, ensure_ascii=False, indent=2).encode()
    return {"tokenizer.json": content, **_config({"tokenizer_class": "PreTrainedTokenizerFast"}, end, context)}


def _config(kind: dict[str, Any], end: str, context: int) -> dict[str, bytes]:
    facts = {
        **kind,
        **dict.fromkeys(("bos_token", "eos_token", "pad_token"), end),
        "model_max_length": context,
        "padding_side": "left",
        "clean_up_tokenization_spaces": False,
        "split_special_tokens": True,  # one that is spelt out is text, as it is for us
    }
    return {"tokenizer_config.json": json.dumps(facts, indent=2).encode()}


def _of_bytes(tokenizer: Tokenizer) -> dict[str, Any]:
    """A byte-level BPE without merges, whose ids are the bytes."""
    added = {"id": tokenizer.end_of_document, "content": END_OF_TEXT, "special": True, "normalized": False}
    return {
        "version": "1.0",
        "added_tokens": [added | dict.fromkeys(("single_word", "lstrip", "rstrip"), False)],
        "normalizer": None,
        "pre_tokenizer": BYTE_LEVEL | {"use_regex": False},
        "model": {"type": "BPE", "vocab": BYTE_ALPHABET, "merges": []},
    }


def _in_front(token: str, i: int) -> dict[str, Any]:
    """The id that begins a document in front of a text, and once more between two."""
    special = {"SpecialToken": {"id": token, "type_id": 0}}
    first, second = {"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 0}}
    return {
        "type": "TemplateProcessing",
        "single": [special, first],
        "pair": [special, first, special, second],
        "special_tokens": {token: {"id": token, "ids": [i], "tokens": [token]}},
    }
