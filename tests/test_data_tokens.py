"""The tokens are exactly the text, and the cache never gives anything else."""

import dataclasses
import json
import multiprocessing
import pickle
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from token_streams import flip, texts_of, truncate

from angpt_jax.config import DataConfig
from angpt_jax.data.corpus import read_documents, split_documents
from angpt_jax.data.tokenizer import train_bpe
from angpt_jax.data.tokens import TokenData, load_tokens
from angpt_jax.errors import StorageError, UserError

VOCAB = 300


@pytest.fixture
def config(tmp_path) -> DataConfig:
    """Eight small documents and an empty cache."""
    (tmp_path / "texts").mkdir()
    for i in range(8):
        (tmp_path / "texts" / f"{i}.txt").write_text(f"document {i} says é<|endoftext|>\n" * (i + 1), "utf-8")
    return DataConfig(
        batch_size=1, source=str(tmp_path / "texts"), validation_fraction=0.4, cache_dir=str(tmp_path / "cache")
    )


def with_tokenizer(config: DataConfig, name: str) -> DataConfig:
    return dataclasses.replace(config, tokenizer=name)


def folder_of(tokens: TokenData) -> Path:
    """Where the training tokens lie."""
    return Path(tokens.train[0].stream.folder)


def contents(tokens: TokenData) -> list[list[str]]:
    return [texts_of(tokens.tokenizer, stream) for stream in (tokens.train[0].stream, tokens.validation["validation"])]


def built(capsys) -> bool:
    """Whether something was tokenized since the last call."""
    return "tokenizing" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["bytes", "bpe"])
def test_streams_are_the_documents_of_the_splits_in_their_order(config, name):
    tokens = load_tokens(with_tokenizer(config, name), VOCAB)
    splits = split_documents(read_documents(config.source), config.validation_fraction)
    assert contents(tokens) == [[document.text for document in split] for split in splits]


def test_tokenizer_is_trained_on_the_training_split_only(config):
    tokens = load_tokens(with_tokenizer(config, "bpe"), VOCAB)
    train, _ = split_documents(read_documents(config.source), config.validation_fraction)
    assert tokens.tokenizer.fingerprint == train_bpe((document.text for document in train), VOCAB).fingerprint


def test_file_tokenizer_is_used(config, tmp_path):
    path = tmp_path / "mine.json"
    path.write_text(train_bpe(["other text " * 50], 270).json, "utf-8")
    tokens = load_tokens(with_tokenizer(config, str(path)), VOCAB)
    assert tokens.tokenizer.size <= 270
    assert sorted(sum(contents(tokens), [])) == sorted(document.text for document in read_documents(config.source))


@pytest.mark.parametrize(("ids", "dtype"), [(2**16, "uint16"), (2**16 + 1, "uint32")])
def test_ids_are_as_narrow_as_the_tokenizer_allows(config, tmp_path, ids, dtype):
    spec = json.loads(train_bpe(["abc"], 257).json)
    spec["model"]["vocab"] |= {f"\u4e00{i}": i for i in range(257, ids)}
    path = tmp_path / "large.json"
    path.write_text(json.dumps(spec), "utf-8")
    tokens = load_tokens(with_tokenizer(config, str(path)), ids)
    (part,) = tokens.train
    assert part.stream.dtype == dtype
    assert part.stream.shards[0].bytes == np.dtype(dtype).itemsize * (part.stream.count - 1)
    assert sum(len(texts) for texts in contents(tokens)) == 8


@pytest.mark.parametrize("name", ["bytes", "bpe"])
def test_second_load_reads_the_cache(config, capsys, name):
    first = load_tokens(with_tokenizer(config, name), VOCAB)
    message = capsys.readouterr().err
    assert "tokenizing 8 documents" in message and message.count("\n") == 1
    second = load_tokens(with_tokenizer(config, name), VOCAB)
    assert not built(capsys)
    assert (second.train, second.validation, second.fingerprint) == (first.train, first.validation, first.fingerprint)
    assert second.tokenizer.fingerprint == first.tokenizer.fingerprint


def test_anything_that_changes_the_tokens_makes_another_cache_and_fingerprint(config, capsys):
    def load(vocab: int = VOCAB, **changes) -> TokenData:
        tokens = load_tokens(dataclasses.replace(config, **changes), vocab)
        assert built(capsys)
        return tokens

    variants = [load(), load(validation_fraction=0.7), load(tokenizer="bpe"), load(260, tokenizer="bpe")]
    Path(config.source, "0.txt").write_text("changed", "utf-8")
    variants.append(load())
    Path(config.source, "1.txt").rename(Path(config.source, "renamed.txt"))
    variants.append(load())
    assert len({folder_of(variant) for variant in variants}) == len(variants)
    assert len({json.dumps(variant.fingerprint) for variant in variants}) == len(variants)


def test_what_does_not_change_the_tokens_keeps_the_cache(config, capsys):
    load_tokens(config, VOCAB)
    assert built(capsys)
    load_tokens(dataclasses.replace(config, batch_size=7, shuffle_seed=3, source=config.source + "/"), VOCAB + 1)
    assert not built(capsys)


def garble(path: Path) -> None:
    path.write_text("{", "utf-8")


@pytest.mark.parametrize("damage", [truncate, flip, garble, Path.unlink])
@pytest.mark.parametrize("file", ["train.bin", "validation.bin", "manifest.json", "tokenizer.json"])
def test_damaged_cache_is_made_again(config, capsys, file, damage):
    bpe = with_tokenizer(config, "bpe")
    good = load_tokens(bpe, VOCAB)
    expected = contents(good)
    assert built(capsys)
    damage(folder_of(good) / file)
    again = load_tokens(bpe, VOCAB)
    assert built(capsys)
    assert (contents(again), again.train, again.fingerprint) == (expected, good.train, good.fingerprint)
    load_tokens(bpe, VOCAB)
    assert not built(capsys)


def test_processes_that_build_the_same_cache_all_end_with_it(config):
    bpe = with_tokenizer(config, "bpe")
    with ProcessPoolExecutor(3, multiprocessing.get_context("spawn")) as pool:
        loaded = list(pool.map(load_tokens, [bpe] * 6, [VOCAB] * 6))
    expected = contents(load_tokens(bpe, VOCAB))
    assert all(contents(tokens) == expected for tokens in loaded)


def test_nothing_but_finished_caches_is_left(config):
    tokens = load_tokens(config, VOCAB)
    folder = folder_of(tokens)
    assert list(folder.parent.iterdir()) == [folder]


@pytest.mark.parametrize(("name", "needed"), [("bytes", 257), ("bpe", 257), ("file", 270)])
def test_vocabulary_smaller_than_the_tokenizer_is_the_users_error(config, tmp_path, name, needed):
    if name == "file":
        name = str(tmp_path / "t.json")
        Path(name).write_text(train_bpe(["some text to learn from " * 50], needed).json, "utf-8")
    with pytest.raises(UserError) as caught:
        load_tokens(with_tokenizer(config, name), needed - 1)
    (problem,) = caught.value.problems
    assert problem.startswith("model.vocab: ") and f"got {needed - 1};" in problem
    assert "data.tokenizer" in problem and name in problem and str(needed) in problem
    assert not Path(config.cache_dir or "").exists()
    assert load_tokens(with_tokenizer(config, name), needed).tokenizer.size == needed


def test_tokenizer_that_loses_text_is_the_users_error(config, tmp_path):
    """An added token that swallows the spaces in front of it is seen only in a text that has it."""
    spec = json.loads(train_bpe(["abc"], 257).json)
    spec["added_tokens"].append(
        {"id": 257, "content": "says", "single_word": False, "lstrip": True, "rstrip": False, "normalized": False}
        | {"special": False}
    )
    path = tmp_path / "t.json"
    path.write_text(json.dumps(spec), "utf-8")
    with pytest.raises(UserError, match=r"^data\.tokenizer: .*\.txt, got .*t\.json"):
        load_tokens(with_tokenizer(config, str(path)), VOCAB)


def test_cache_that_cannot_be_written_is_a_storage_error(config, tmp_path):
    (tmp_path / "file").write_text("in the way", "utf-8")
    with pytest.raises(StorageError, match=r"^data\.cache_dir: can't be written .*got .*file"):
        load_tokens(dataclasses.replace(config, cache_dir=str(tmp_path / "file")), VOCAB)


@pytest.mark.parametrize("xdg", ["xdg", ""])
def test_default_cache_is_in_the_users_cache_folder(config, tmp_path, monkeypatch, xdg):
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / xdg) if xdg else "")
    tokens = load_tokens(dataclasses.replace(config, cache_dir=None), VOCAB)
    expected = tmp_path / xdg if xdg else tmp_path / "home" / ".cache"
    assert folder_of(tokens).is_relative_to(expected / "angpt_jax" / "tokens")


def test_token_data_pickles_without_the_tokens(config):
    tokens = load_tokens(config, VOCAB)
    assert len(pickle.dumps(tokens.train)) < 800
    assert pickle.loads(pickle.dumps(tokens)).train == tokens.train


def test_fingerprint_of_other_tokens_of_the_same_text_names_the_tokenizer(config):
    bytes_, bpe = (load_tokens(with_tokenizer(config, name), VOCAB).fingerprint for name in ("bytes", "bpe"))
    assert {name for name in bytes_ if bytes_[name] != bpe[name]} == {"tokens", "tokenizer"}
