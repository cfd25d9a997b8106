"""Task files of users are plain data: what would run code, or download, is refused by name."""

from pathlib import Path

import pytest
import yaml

from angpt_jax import task_files
from angpt_jax.errors import UserError

PLAIN = {"task": "mine", "dataset_path": "json", "dataset_kwargs": {"data_files": {"test": "x.jsonl"}}}


def write(path: Path, **keys: object) -> str:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(yaml.safe_dump(keys))
    return str(path)


def problems(path: object) -> list[str]:
    with pytest.raises(UserError) as caught:
        task_files.read(str(path))
    return list(caught.value.problems)


def test_a_file_is_read_over_what_it_includes(tmp_path: Path) -> None:
    write(tmp_path / "base/all.yaml", **PLAIN | {"repeats": 2, "description": "base"})
    write(tmp_path / "base/middle.yaml", include="all.yaml", description="middle")
    mine = write(tmp_path / "mine.yaml", include=["base/middle.yaml"], task="other")
    assert task_files.read(mine) == [PLAIN | {"repeats": 2, "description": "middle", "task": "other"}]


def test_a_folder_stands_for_the_files_that_name_a_task(tmp_path: Path) -> None:
    for name in ("b", "a"):
        write(tmp_path / f"x/{name}.yaml", include="../part.yaml", task=name)
    write(tmp_path / "x/part.yaml", repeats=2)
    write(tmp_path / "part.yaml", **{key: value for key, value in PLAIN.items() if key != "task"})
    assert [task["task"] for task in task_files.read(str(tmp_path / "x"))] == ["a", "b"]
    (tmp_path / "none").mkdir()
    assert problems(tmp_path / "none")[0].startswith("harness: no task in the folder, got ")


@pytest.mark.parametrize("word, is_file", [("arc_easy", False), ("./tasks", True), ("a/b", True), ("x.yaml", True)])
def test_a_path_is_told_from_a_name(word: str, is_file: bool) -> None:
    assert task_files.is_file(word) == is_file


@pytest.mark.parametrize("text", ["doc_to_text: !function evil.f", "class: !!python/name:os.system", "a: &x 1"])
def test_tags_and_anchors_are_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "x.yaml").write_text(f"task: x\n{text}\n")
    (line,) = problems(tmp_path / "x.yaml")
    assert line.startswith("harness: is not YAML (") and "not allowed" in line and str(tmp_path) in line


@pytest.mark.parametrize("part", ["!function evil.f", "[x, !function evil.f]"])
def test_also_in_what_a_file_includes(tmp_path: Path, part: str) -> None:
    (tmp_path / "part.yaml").write_text(f"process_docs: {part}\n")
    (line,) = problems(write(tmp_path / "x.yaml", **PLAIN | {"include": "part.yaml"}))
    assert "tags are not allowed" in line and "without !function" in line


@pytest.mark.parametrize(
    "keys, start",
    [
        ({"process_docs": "utils.f"}, "harness: 'process_docs' is not taken from a task file of yours, got "),
        ({"class": "utils.C"}, "harness: 'class' is not taken from "),
        ({"use_prompt": "x.yaml:*"}, "harness: 'use_prompt' is not taken from "),
        ({"custom_dataset": "x"}, "harness: 'custom_dataset' is not taken from "),
        ({"unsafe_code": True}, "harness: 'unsafe_code' is not taken from "),
        ({"group": "x"}, "harness: 'group' is not taken from "),
        ({"task": ["a", "b"]}, "harness: task must be the name of the task, got ['a', 'b'] in "),
        ({"dataset_path": "owner/name"}, "harness: dataset_path must read files of this machine, got 'owner/name' in "),
        ({"dataset_path": "x.py"}, "harness: dataset_path must read files of this machine, got 'x.py' in "),
        (
            {"dataset_kwargs": {"data_files": {"test": ["a.jsonl", "https://host/b.jsonl"]}}},
            "harness: dataset_kwargs must name files of this machine, got 'https://host/b.jsonl' in ",
        ),
        (
            {"metric_list": [{"metric": "acc"}, {"metric": "evil", "hf_evaluate": True}]},
            "harness: metric_list takes no hf_evaluate from a task file of yours, got ",
        ),
        ({"include": "x.yaml"}, "harness: include must be a path, at most 8 files deep, got 'x.yaml' in "),
        ({"include": "none.yaml"}, "harness: can't be read (No such file or directory), got "),
    ],
    ids=str,
)
def test_what_may_run_code_or_download_is_refused(tmp_path: Path, keys: dict, start: str) -> None:
    (line,) = problems(write(tmp_path / "x.yaml", **PLAIN | keys))
    assert line.startswith(start) and line.isprintable()
