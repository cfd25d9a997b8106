"""A run that can't be used says so in one line, whatever is wrong with it."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from commands import tree

from angpt_jax import trained
from angpt_jax.config import MeshConfig
from angpt_jax.errors import UserError

pytestmark = [
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
    pytest.mark.usefixtures("nothing_is_left_to_others"),
]


@pytest.fixture
def copy(source_run: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(source_run, tmp_path / "copy"))


def nothing(run: Path) -> None:
    shutil.rmtree(run)


def a_file(run: Path) -> None:
    nothing(run)
    run.touch()


def no_checkpoints(run: Path) -> None:
    shutil.rmtree(run / "checkpoints")


def half_a_checkpoint(run: Path) -> None:
    shutil.rmtree(run / "checkpoints/3")
    (run / "checkpoints/6").rename(run / "checkpoints/6.orbax-checkpoint-tmp")


def damaged(run: Path) -> None:
    shutil.rmtree(run / "checkpoints/3/state/ocdbt.process_0")
    shutil.rmtree(run / "checkpoints/6")
    (run / "checkpoints/6").mkdir()


def set_aside(run: Path) -> None:
    for step in ("3", "6"):
        (run / "checkpoints" / step).rename(run / "checkpoints" / f"{step}.damaged")


def of_another_model(run: Path) -> None:
    config = run / "config.yaml"
    config.write_text(config.read_text().replace("width: 32", "width: 64"))


def no_tokenizer(run: Path) -> None:
    (run / "tokenizer.json").unlink()


def half_a_tokenizer(run: Path) -> None:
    (run / "tokenizer.json").write_text('{"token')


def another_kind_of_tokenizer(run: Path) -> None:
    (run / "tokenizer.json").write_text(json.dumps({"tokenizer": "words"}))


def a_larger_tokenizer(run: Path) -> None:
    config = run / "config.yaml"
    config.write_text(config.read_text().replace("vocab: 300", "vocab: 200"))


def config(old: str, new: str) -> Callable[[Path], None]:
    def change(run: Path) -> None:
        text = (run / "config.yaml").read_text()
        assert text.count(old) == 1
        (run / "config.yaml").write_text(text.replace(old, new))

    return change


DOES_NOT_HOLD = "run.dir: has a config.yaml that does not hold, got '{run}' "


@pytest.mark.parametrize(
    ("break_it", "said"),
    [
        (nothing, "run.dir: holds no run (no config.yaml), got '{run}'; train one first"),
        (a_file, "run.dir: holds no run (no config.yaml), got '{run}'; train one first"),
        (no_checkpoints, "run.dir: holds no checkpoint, got '{run}'; train it first"),
        (half_a_checkpoint, "run.dir: holds no checkpoint, got '{run}'; train it first"),
        (
            damaged,
            "run.dir: none of its checkpoints is whole, got '{run}/checkpoints' (step 6: it is empty; step 3: ",
        ),
        (set_aside, "run.dir: none of its checkpoints is whole, got '{run}/checkpoints' ("),
        (
            of_another_model,
            "run.dir: the checkpoint of step 6 does not fit the config, got '{run}/checkpoints/6', which differs in "
            "params/embedding (saved: float32[300, 32], wanted: float32[300, 64]); ",
        ),
        (
            no_tokenizer,
            "run.dir: can't be read (No such file or directory), got {run}/tokenizer.json; the file that the run kept; "
            "bring it back",
        ),
        (half_a_tokenizer, "run.dir: not JSON (Unterminated string starting at: "),
        (another_kind_of_tokenizer, "run.dir: not a tokenizer ("),
        (
            a_larger_tokenizer,
            "run.dir: has a tokenizer that is not its own, got '{run}' with 257 entries and model.vocab 200; bring the "
            "right tokenizer.json back",
        ),
        (config("  heads: 2\n", "  heads: 0\n"), DOES_NOT_HOLD + "(model.heads: must be >= 1, got 0)"),
        (
            config("arch: angpt\n", "arch: angptt\n"),
            DOES_NOT_HOLD + "(model.arch: unknown architecture, got 'angptt'; ",
        ),
        (config("  width: 32\n", "  wide: 32\n"), "model.wide: unknown key in '"),
        (config("model:\n", "model: [\n"), "config: is not YAML ("),
    ],
)
def test_what_is_wrong_is_said_in_a_line_and_nothing_is_touched(
    copy: Path, tmp_path: Path, break_it: Callable[[Path], None], said: str
) -> None:
    break_it(copy)
    before = tree(tmp_path)
    with pytest.raises(UserError) as error:
        trained.load(copy, MeshConfig())
    assert error.value.problems[0].startswith(said.replace("{run}", str(copy)))
    assert all("\n" not in line for line in error.value.problems)
    assert error.value.exit_code == 2
    assert tree(tmp_path) == before


def test_a_damaged_checkpoint_is_passed_over(copy: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shutil.rmtree(copy / "checkpoints/6/state/ocdbt.process_0")
    assert trained.load(copy, MeshConfig()).step == 3
    assert capsys.readouterr().err.endswith("; going on with step 3\n")
    assert {path.name for path in (copy / "checkpoints").iterdir()} == {"3", "6"}
