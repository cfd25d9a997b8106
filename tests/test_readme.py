"""What the README shows works: its Python example, its commands' names, and the package's public names."""

import importlib
import re
from pathlib import Path

import pytest

import angpt_jax
from angpt_jax import cli
from angpt_jax.config import Config
from angpt_jax.experiment import architecture

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()


@pytest.mark.parametrize("code", re.findall(r"```python\n(.*?)```", README, re.DOTALL))
def test_python_examples_run(code: str) -> None:
    scope: dict = {}
    exec(compile(code, "README.md", "exec"), scope)
    assert scope["logits_BLV"].shape == (1, 16, 257)


@pytest.mark.parametrize("name", angpt_jax.__all__)
def test_public_names_are_modules_with_a_docstring(name: str) -> None:
    assert importlib.import_module(f"angpt_jax.{name}").__doc__


def test_commands_and_scripts_it_names_exist() -> None:
    for name in set(re.findall(r"python -m angpt_jax\.(\w+)", README)):
        assert (ROOT / "angpt_jax" / f"{name}.py").exists() or (ROOT / "angpt_jax" / name / "__main__.py").exists(), (
            name
        )
    for script in set(re.findall(r"bash (launch/\w+\.sh)", README)):
        assert (ROOT / script).exists(), script


@pytest.mark.parametrize("key, value", re.findall(r"--(model\.[\w.]+) ([\w.]+)", README))
def test_ablations_it_shows_change_the_default_architecture(key: str, value: str) -> None:
    flags = ["--config", "default"]
    plain = cli.parse(Config, flags, command="train")
    ablated = cli.parse(Config, [*flags, f"--{key}", value], command="train")
    assert architecture(ablated.model) != architecture(plain.model)


def test_configs_it_names_exist() -> None:
    """A bare name is looked up for the command on its line, or else for train."""
    for line in README.splitlines():
        command = re.search(r"angpt_jax\.(\w+)", line)
        for name in re.findall(r"--config ([a-z]\w+)(?![\w/])", line):
            assert cli.config_path(name, command[1] if command else "train").is_file(), name
