"""Prepared folders as they are, mixtures of them, and data that do not fit to one another or to the model."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from token_streams import texts_of

from angpt_jax.config import DataConfig
from angpt_jax.data.corpus import read_documents, split_documents
from angpt_jax.data.prepared import SPLITS, TOKENIZER, Manifest, write_manifest
from angpt_jax.data.shards import ShardWriter
from angpt_jax.data.tokenizer import ByteTokenizer, FileTokenizer, Tokenizer, train_bpe
from angpt_jax.data.tokens import load_tokens
from angpt_jax.errors import UserError

VOCAB = 300


@pytest.fixture
def config(tmp_path) -> DataConfig:
    """Two small texts and an empty cache."""
    (tmp_path / "texts").mkdir()
    for i in range(2):
        (tmp_path / "texts" / f"{i}.txt").write_text(f"text {i}", "utf-8")
    return DataConfig(batch_size=1, source=str(tmp_path / "texts"), cache_dir=str(tmp_path / "cache"))


def prepared(folder: Path, text: str, tokenizer: Tokenizer | None = None, largest_id: int | None = None) -> str:
    """The path of a folder as prepare makes it, of one document, in which one further id may stand."""
    folder.mkdir()
    tokenizer = tokenizer or ByteTokenizer()
    if isinstance(tokenizer, FileTokenizer):
        (folder / TOKENIZER).write_text(tokenizer.json, "utf-8")
    splits = {}
    for split in SPLITS:
        writer = ShardWriter(folder / f"{split}.bin", "memmap", "uint16", tokenizer.end_of_document)
        (ids,) = tokenizer.encode([f"{text} of {split}"])
        writer.add(np.append(ids, [] if largest_id is None else [largest_id]), len(text))
        splits[split] = (writer.close(),)
    kind = "bpe" if isinstance(tokenizer, FileTokenizer) else "bytes"
    write_manifest(folder, Manifest.of("memmap", tokenizer, kind, {"name": "text"}, splits))
    return str(folder)


def loading(config: DataConfig, vocab: int = VOCAB, **changes: Any) -> str:
    """What is wrong with the config, with these changes."""
    with pytest.raises(UserError) as caught:
        load_tokens(dataclasses.replace(config, **changes), vocab)
    (problem,) = caught.value.problems
    return problem


@pytest.fixture(scope="module")
def bpe() -> FileTokenizer:
    return train_bpe(["other text " * 50], 270)


def test_prepared_folder_is_read_as_it_is(config, tmp_path, capsys, bpe):
    """With the tokenizer that made it, named or not."""
    source = prepared(tmp_path / "web", "text", bpe)
    Path(tmp_path / "same.json").write_text(bpe.json, "utf-8")
    for name in (None, "bpe", str(tmp_path / "same.json")):
        tokens = load_tokens(dataclasses.replace(config, source=source, tokenizer=name), VOCAB)
        assert tokens.tokenizer.fingerprint == bpe.fingerprint
        for split, stream in (("train", tokens.train[0].stream), ("validation", tokens.validation["validation"])):
            assert stream.folder == source and texts_of(bpe, stream) == [f"text of {split}"]
        assert not capsys.readouterr().err


def test_tokenizer_that_did_not_make_the_prepared_tokens_is_refused(config, tmp_path, bpe):
    source = prepared(tmp_path / "web", "text", bpe)
    Path(tmp_path / "other.json").write_text(train_bpe(["else " * 50], 270).json, "utf-8")
    for name in ("bytes", str(tmp_path / "other.json")):
        problem = loading(config, source=source, tokenizer=name)
        assert problem.startswith("data.tokenizer: not the tokenizer that made") and f"got {name};" in problem


def test_damaged_prepared_folder_is_named_and_not_made_again(config, tmp_path):
    source = prepared(tmp_path / "web", "text")
    path = tmp_path / "web" / "train.bin"
    path.write_bytes(path.read_bytes()[:-2])
    assert loading(config, source=source).startswith("data.source: train.bin holds ")
    assert loading(config, mixture={source: 1.0}).startswith("data.mixture: train.bin holds ")
    assert loading(config, validation_sets={"web": source}).startswith("data.validation_sets: train.bin holds ")


def test_a_vocabulary_smaller_than_the_tokenizer_of_the_tokens_is_refused(config, tmp_path):
    source = prepared(tmp_path / "web", "text")
    assert load_tokens(dataclasses.replace(config, source=source), 257)
    problem = loading(config, 256, source=source)
    assert problem.startswith("model.vocab: ") and "got 256; 257 or more" in problem


@pytest.mark.parametrize("largest_id", [257, 300])
def test_ids_that_the_tokenizer_lacks_are_refused_whatever_the_vocabulary(config, tmp_path, largest_id):
    source = prepared(tmp_path / "web", "text", largest_id=largest_id)
    problem = loading(config, 1000, source=source)
    assert problem.startswith("data.source: ") and f"with id {largest_id}, its tokenizer has 257 ids" in problem


def test_mixture_has_the_parts_their_weights_and_their_validation_sets(config, tmp_path):
    web, code = (prepared(tmp_path / name, f"text of {name}") for name in ("web", "code"))
    sets = {"texts": config.source}
    data = dataclasses.replace(config, mixture={web: 0.7, code: 0.3}, validation_sets=sets)
    tokens = load_tokens(data, VOCAB)
    assert [(part.name, part.weight) for part in tokens.train] == [(web, 0.7), (code, 0.3)]
    assert [texts_of(tokens.tokenizer, part.stream) for part in tokens.train] == [
        ["text of web of train"],
        ["text of code of train"],
    ]
    assert list(tokens.validation) == ["validation", "code", "texts"]
    assert texts_of(tokens.tokenizer, tokens.validation["validation"]) == ["text of web of validation"]
    assert texts_of(tokens.tokenizer, tokens.validation["code"]) == ["text of code of validation"]
    _, held_out = split_documents(read_documents(config.source), config.validation_fraction)
    assert texts_of(tokens.tokenizer, tokens.validation["texts"]) == [document.text for document in held_out]


def test_validation_sets_of_one_name_are_refused(config, tmp_path):
    """One of them would be lost."""
    (tmp_path / "more").mkdir()
    web, code, other = (prepared(tmp_path / name, "text") for name in ("web", "code", "more/code"))
    twice = loading(config, mixture={web: 1.0, code: 1.0, other: 1.0})
    assert twice.startswith("data.validation_sets: names must differ, got code twice")
    assert "got validation twice" in loading(config, validation_sets={"validation": web})


def test_data_of_different_tokenizers_do_not_mix(config, tmp_path, bpe):
    web, code = prepared(tmp_path / "web", "text"), prepared(tmp_path / "code", "text", bpe)
    mixed = loading(config, mixture={web: 0.5, code: 0.5})
    judged = loading(config, source=web, validation_sets={"code": code})
    for problem in (mixed, judged):
        assert "all data need one tokenizer" in problem and "code" in problem and bpe.fingerprint[:12] in problem


def test_fingerprint_of_a_mixture_names_the_part_that_changed(config, tmp_path):
    def fingerprint(web: str, code: str, weight: float = 0.3) -> dict[str, Any]:
        mixture = {web: 0.7, code: weight}
        return load_tokens(dataclasses.replace(config, mixture=mixture), VOCAB).fingerprint

    def changed(other: dict[str, Any]) -> set[str]:
        return {name for name in first | other if first.get(name) != other.get(name)}

    web, code, books = (prepared(tmp_path / name, f"text of {name}") for name in ("web", "code", "books"))
    (tmp_path / "new").mkdir()
    first = fingerprint(web, code)
    assert first == json.loads(json.dumps(fingerprint(web, code)))
    assert changed(fingerprint(web, code, 0.4)) == {"1.weight"}
    assert changed(fingerprint(web, prepared(tmp_path / "new" / "code", "new text"))) == {"1.tokens"}
    assert changed(fingerprint(web, books)) == {"1.source", "1.tokens"}
