"""Every tokenizer gives back the text, and knows how many bytes each id stands for."""

import json
import pickle
import random
from pathlib import Path

import numpy as np
import pytest
import tokenizers
from tokenizers import AddedToken, models, normalizers, pre_tokenizers, processors, trainers

from angpt_jax.data.tokenizer import ByteTokenizer, FileTokenizer, Tokenizer, train_bpe
from angpt_jax.data.tokenizer_files import load_tokenizer
from angpt_jax.errors import UserError

TEXTS = ["def f(x):\n    return x + 1\n" * 20, "The quick brown fox; the lazy dog.\n" * 20]
TRICKY = [
    "",
    " ",
    "\n\n\t x\r\n",
    "a<|endoftext|>b </s>",
    "é e\u0301 \u212b ﬁ",
    "漢字🙂\x00\ufeff",
    "    " * 30,
    "\u0120\u010a Ġ",
]


def train_hugging_face(end: str = "<|endoftext|>", alphabet: bool = True) -> tokenizers.Tokenizer:
    """A tokenizer that does to the text what files in the wild do."""
    backend = tokenizers.Tokenizer(models.BPE())
    backend.normalizer = normalizers.NFC()
    backend.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.ByteLevel(add_prefix_space=True)])
    letters = pre_tokenizers.ByteLevel.alphabet() if alphabet else []
    backend.train_from_iterator(
        TEXTS, trainers.BpeTrainer(vocab_size=300, special_tokens=["<pad>", end], initial_alphabet=letters)
    )
    backend.model.dropout = 0.5
    backend.add_tokens([AddedToken("        ", normalized=True), "é§"])
    backend.post_processor = processors.TemplateProcessing(single=f"$A {end}", special_tokens=[(end, 1)])
    backend.enable_truncation(4)
    backend.enable_padding(length=50)
    return backend


def save(backend: tokenizers.Tokenizer, folder: Path) -> str:
    path = folder / "tokenizer.json"
    backend.save(str(path))
    return str(path)


@pytest.fixture(params=["bytes", "bpe", "file"])
def tokenizer(request, tmp_path) -> Tokenizer:
    if request.param == "bytes":
        return ByteTokenizer()
    return train_bpe(TEXTS, 300) if request.param == "bpe" else load_tokenizer(save(train_hugging_face(), tmp_path))


def random_text(seed: int) -> str:
    rng = random.Random(seed)
    pieces = [" ", "  ", "\n", "the", "return", "<|endoftext|>", "<pad>", "        ", "é§"]
    return "".join(rng.choice([*pieces, chr(rng.randrange(0xD800)), chr(rng.randrange(128))]) for _ in range(100))


def test_text_and_its_length_in_bytes_come_back(tokenizer):
    texts = [*TRICKY, *TEXTS, *(random_text(seed) for seed in range(50))]
    for text, ids in zip(texts, tokenizer.encode(texts), strict=True):
        assert tokenizer.decode(ids) == text
        assert tokenizer.byte_lengths[ids].sum() == len(text.encode())


def test_same_text_has_the_same_ids_every_time(tokenizer):
    once, again = (np.concatenate(tokenizer.encode(TEXTS)) for _ in range(2))
    np.testing.assert_array_equal(once, again)


def test_ids_fit_and_none_is_special(tokenizer):
    ids = np.concatenate(tokenizer.encode([*TRICKY, *TEXTS]))
    assert tokenizer.byte_lengths.shape == (tokenizer.size,)
    assert 0 <= ids.min() and ids.max() < tokenizer.size
    assert tokenizer.end_of_document not in ids
    assert tokenizer.byte_lengths[ids].min() > 0 == tokenizer.byte_lengths[tokenizer.end_of_document]


def test_decode_drops_special_ids_and_replaces_what_is_no_text(tokenizer):
    (ids,) = tokenizer.encode(["aé"])
    end = tokenizer.end_of_document
    assert tokenizer.decode([end, *ids, end]) == "aé"
    assert tokenizer.decode(ids[:-1]) == "a\ufffd"
    assert tokenizer.decode([*ids, tokenizer.size]) == "aé\ufffd"


def test_tokenizer_survives_pickling(tokenizer):
    copy = pickle.loads(pickle.dumps(tokenizer))
    assert copy.fingerprint == tokenizer.fingerprint
    for text, mine, its in zip(TRICKY, tokenizer.encode(TRICKY), copy.encode(TRICKY), strict=True):
        np.testing.assert_array_equal(mine, its)
        assert copy.decode(its) == text


def test_byte_ids_are_the_bytes():
    tokenizer = ByteTokenizer()
    assert (tokenizer.size, tokenizer.end_of_document) == (257, 256)
    assert tokenizer.encode(["é\n"])[0].tolist() == [0xC3, 0xA9, 0x0A]


def test_bpe_has_the_size_asked_for_where_the_text_allows_it():
    assert train_bpe(TEXTS, 290).size == 290
    assert train_bpe(["abc"], 5000).size == 257


def test_bpe_is_shorter_than_bytes_and_ends_documents_with_id_0():
    tokenizer = train_bpe(TEXTS, 300)
    assert tokenizer.end_of_document == 0
    assert len(tokenizer.encode(TEXTS)[0]) < len(TEXTS[0]) / 2


def test_bpe_training_is_deterministic_and_the_fingerprint_tells_tokenizers_apart():
    same = {train_bpe(texts, 280).fingerprint for texts in (TEXTS, iter(TEXTS), TEXTS)}
    others = {train_bpe(TEXTS, 279).fingerprint, train_bpe(TEXTS[1:], 280).fingerprint, ByteTokenizer().fingerprint}
    assert len(same) == 1 and len(same | others) == 4


def test_written_tokenizer_is_read_back(tmp_path):
    trained = train_bpe(TEXTS, 300)
    (tmp_path / "t.json").write_text(trained.json, "utf-8")
    loaded = load_tokenizer(str(tmp_path / "t.json"))
    assert loaded.fingerprint == trained.fingerprint and loaded.size == trained.size


def test_long_text_has_the_ids_of_its_pieces_encoded_as_one():
    """Texts above the size that is encoded at once are cut where the tokenizer cuts too."""
    tokenizer = train_bpe(TEXTS, 300)
    long = "".join(TEXTS) * 200
    whole = tokenizers.Tokenizer.from_str(tokenizer.json).encode(long, add_special_tokens=False).ids
    first, second, third = tokenizer.encode(["x", long, "y"])
    assert second.tolist() == whole
    assert tokenizer.decode([*first, *third]) == "xy"
    assert tokenizer.decode(tokenizer.encode(["a" * 100_000])[0]) == "a" * 100_000


def test_end_of_document_may_be_called_as_in_llama(tmp_path):
    tokenizer = load_tokenizer(save(train_hugging_face(end="</s>"), tmp_path))
    assert tokenizer.end_of_document == 1


def test_end_of_document_is_special_even_if_the_file_says_otherwise():
    spec = json.loads(train_bpe(TEXTS, 300).json)
    spec["added_tokens"][0]["special"] = False
    tokenizer = FileTokenizer(json.dumps(spec))
    assert 0 not in tokenizer.encode(["a<|endoftext|>b"])[0]


def test_byte_that_no_text_has_needs_no_id():
    """GPT-NeoX's file lacks the 13 bytes that UTF-8 never uses."""
    spec = json.loads(train_bpe(["abc"], 257).json)
    never = [0xC0, 0xC1, *range(0xF5, 0x100)]
    letters = [letter for letter in spec["model"]["vocab"] if letter not in {chr(byte) for byte in never}]
    spec["model"]["vocab"] = {letter: i for i, letter in enumerate(letters)}
    tokenizer = FileTokenizer(json.dumps(spec))
    assert tokenizer.size == 257 - 13
    assert tokenizer.decode(tokenizer.encode(["\U0010ffff"])[0]) == "\U0010ffff"


def lacks_a_letter() -> str:
    """The letter is common enough for a text to have it, and rare enough for a look at a few texts to miss it."""
    spec = json.loads(train_bpe(["abc"], 257).json)
    letters = [letter for letter in spec["model"]["vocab"] if letter != "Q"]
    spec["model"]["vocab"] = {letter: i for i, letter in enumerate(letters)}
    return json.dumps(spec)


def word_level() -> str:
    backend = tokenizers.Tokenizer(models.WordLevel({"<|endoftext|>": 0, "a": 1}, unk_token="<|endoftext|>"))
    return backend.to_str()


def swallows_spaces() -> str:
    backend = train_hugging_face()
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.WhitespaceSplit(), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    return backend.to_str()


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (lambda: None, "can't be read"),
        (lambda: "{", "not JSON"),
        (lambda: "[1]", "not a tokenizer"),
        (lambda: '{"model": {"type": "BPE"}}', "not a tokenizer"),
        (word_level, "not a byte-level"),
        (swallows_spaces, "not a byte-level"),
        (lacks_a_letter, "not a byte-level"),
        (lambda: train_hugging_face(alphabet=False).to_str(), "not a byte-level"),
        (lambda: train_hugging_face(end="[SEP]").to_str(), "ends a document"),
    ],
    ids=[
        "missing",
        "no JSON",
        "list",
        "no vocabulary",
        "words",
        "no spaces",
        "byte missing",
        "bytes missing",
        "no end",
    ],
)
def test_unusable_file_is_the_users_error(tmp_path, content, said):
    path = tmp_path / "tokenizer.json"
    text = content()
    if text is not None:
        path.write_text(text, "utf-8")
    with pytest.raises(UserError) as caught:
        load_tokenizer(str(path), field="export.tokenizer")
    (problem,) = caught.value.problems
    assert problem.startswith("export.tokenizer: ") and said in problem and f"got {path};" in problem
