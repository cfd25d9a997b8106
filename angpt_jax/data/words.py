"""Words that were tokenized before: several times faster than the library, with the same ids.

GPT-2's tokenizer, and all that are made like it, first cut the text into words and then encode each word for itself. So
the ids of a word can be looked up. Only the cutting is done here, by the same expression as far as it is ASCII; what
stands between white space and holds anything else goes to the library in one piece.
"""

import re
from collections.abc import Callable, Sequence
from itertools import islice
from typing import Any

import numpy as np

_SPACE = r" \t\n\x0b\x0c\r\x85\xa0\u1680\u2000-\u200a\u2028\u2029\u202f\u205f\u3000"  # Unicode's White_Space
_ASCII = rf"'(?:[sdmt]|ll|ve|re)| ?[A-Za-z]+| ?[0-9]+| ?[^{_SPACE}A-Za-z0-9]+|[{_SPACE}]+(?![^{_SPACE}])|[{_SPACE}]+"
_NOT_ASCII = rf"[{_SPACE}]*+(?:(?![{_SPACE}])[\x00-\x7f])*+[^\x00-\x7f{_SPACE}][^{_SPACE}]*"
_GAP = rf"[{_SPACE}]{{2,}}+[^{_SPACE}]*"  # white space that may hold a token of several spaces, and what follows
_WORDS_AT_ONCE = 4096
_MOST = 8_000_000  # characters that are kept, and _OVERHEAD for each word
_OVERHEAD = 32


class WordCache:
    """The ids of texts, by way of those of their words.

    Args:
        encode: ids of words that are new
        has_gaps: whether some tokens are runs of spaces
    """

    def __init__(self, encode: Callable[[list[str]], list[list[int]]], has_gaps: bool):
        ascii = f"{_GAP}|{_ASCII}" if has_gaps else _ASCII
        self._ascii, self._any = re.compile(ascii), re.compile(f"{_NOT_ASCII}|{ascii}")
        self._encode = encode
        self._ids: dict[str, bytes] = {}
        self._kept = 0

    def encode(self, texts: Sequence[str]) -> list[np.ndarray]:
        words = [(self._ascii if text.isascii() else self._any).findall(text) for text in texts]
        if self._kept > _MOST:
            self._ids, self._kept = {}, 0
        known = self._ids  # stays the same dict in this call, whatever another thread does
        new = iter(set().union(*words).difference(known))
        while group := list(islice(new, _WORDS_AT_ONCE)):
            known.update(
                (word, np.array(ids, np.int32).tobytes()) for word, ids in zip(group, self._encode(group), strict=True)
            )
            self._kept += sum(map(len, group)) + _OVERHEAD * len(group)
        return [np.frombuffer(b"".join(map(known.__getitem__, of_text)), np.int32) for of_text in words]


def word_cache(spec: dict[str, Any], encode: Callable[[list[str]], list[list[int]]]) -> WordCache | None:
    """For a tokenizer.json without normalizer and prefix; None if it does not cut its text as GPT-2 does."""
    step = spec["pre_tokenizer"]
    if step and step["type"] == "Sequence" and len(step["pretokenizers"]) == 1:
        (step,) = step["pretokenizers"]
    tokens = [token for token in spec["added_tokens"] if not token["special"]]  # special ones are not looked for
    reach_out = any(token["lstrip"] or token["rstrip"] or token["single_word"] for token in tokens)
    is_like_gpt2 = (
        spec["model"]["type"] == "BPE"
        and step is not None
        and step["type"] == "ByteLevel"
        and step.get("use_regex", True)
        and not step["add_prefix_space"]
        and all(re.fullmatch("  +", token["content"]) for token in tokens)
        and not reach_out
    )
    return WordCache(encode, bool(tokens)) if is_like_gpt2 else None
