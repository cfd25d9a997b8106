"""Command line of every `python -m angpt_jax.NAME`: YAML files and dotted flags become a dataclass, or errors.

    parse(Config, ["--config", "tiny", "--optim.peak_lr", "2e-3"], command="train")  ->  Config(...)

Files come in the order of `--config`, flags after them; what is later wins, key by key. Knows no command and imports
no JAX. What a schema allows is in `angpt_jax.schema`, what a file may hold in `angpt_jax.yaml_files`, how values are
checked and merged in `angpt_jax.form`.
"""

import argparse
import dataclasses
import inspect
import os
import signal
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import MISSING, dataclass, field
from difflib import get_close_matches
from pathlib import Path
from typing import Any, NoReturn, TypeVar

from jsonargparse import ArgumentParser

from angpt_jax.errors import UserError, print_problems
from angpt_jax.form import Form, flatten
from angpt_jax.schema import allowed, build, leaves, sections, show
from angpt_jax.yaml_files import dump, read_mapping

T = TypeVar("T")

_PACKAGED = Path(__file__).parent.parent / "configs"

_RULES = """\
--config and flags can be mixed; a later file overrides an earlier one and flags override files, key by key
(mappings are merged). --KEY VALUE and --KEY=VALUE are the same; a key below a mapping is reached with a further
dot; lists and mappings are written as YAML: '[1, 2]', '{a: 1}'. Whole numbers are digits (1000 or 1_000; 1e3 is
refused), other numbers may be 0.001 or 1e-3; booleans are true or false, a flag without a value is true; null is
"no value" where it is allowed."""


@dataclass
class _Words:
    """A command line, taken apart.

    Args:
        configs: values of --config
        flags: dotted key and text of the other flags, None where no value follows
        plain: words that are no flags
        wants_help: whether --help was among them
        problems: what can be none of these
    """

    configs: list[str] = field(default_factory=list)
    flags: list[tuple[str, str | None]] = field(default_factory=list)
    plain: list[str] = field(default_factory=list)
    wants_help: bool = False
    problems: list[str] = field(default_factory=list)


def _split(argv: list[str], takes_words: bool = False) -> _Words:
    words, rest = _Words(), list(argv)
    while rest:
        word = rest.pop(0)
        key, equals, text = word.removeprefix("--").partition("=")
        value = text if equals else None
        if word in ("-h", "--help"):
            words.wants_help = True
        elif takes_words and word and not word.startswith("-"):
            words.plain.append(word)
        elif not word.startswith("--") or not key:
            words.problems.append(f"{show(word)}: is not a flag; write --KEY VALUE, --help lists the keys")
        else:
            if value is None and rest and not rest[0].startswith("--"):
                value = rest.pop(0)
            if key != "config":
                words.flags.append((key, value))
            elif value:
                words.configs.append(value)
            else:
                words.problems.append("config: needs a value; expected a YAML file or a name in configs/")
    return words


def config_path(name: str, command: str = "train") -> Path:
    """The file that `--config name` means: a bare name is looked up in ./configs, then beside the package; in both,
    what lies in the folder of the command (configs/evaluate) comes first."""
    if "/" in name or name.endswith((".yaml", ".yml", ".json")):
        return Path(name)
    folders = [folder / part for folder in (Path("configs"), _PACKAGED) for part in (command, "")]
    there = {path.stem: path for folder in reversed(folders) for path in sorted(folder.glob("*.yaml"))}
    if name in there:
        return there[name]
    near = get_close_matches(name, there, 1)
    hint = f"did you mean {near[0]}?" if near else f"there are {', '.join(sorted(there)) or 'none'} in configs/"
    raise UserError(f"config: no config of that name, got {show(name)}; {hint}")


def config_name(argv: list[str], default: str, command: str = "train") -> str:
    """Name of the last --config, without folder and suffix; `default` if there is none."""
    configs = _split(argv).configs
    return config_path(configs[-1], command).stem if configs else default


def parse(
    schema: type[T], argv: list[str], *, command: str, default_config: str | None = None, words: str | None = None
) -> T:
    """The `schema` that a command line describes; `default_config` is read if it names no --config and has no words.

    Words that are no flags fill the field `words`, a list of str; without one they are refused. A UserError lists
    everything that is wrong with keys and types (their meaning is checked elsewhere, for training in
    `angpt_jax.rules`). `--help` prints the help and exits with 0.
    """
    given = _split(argv, words is not None)
    if given.wants_help:
        print(help_text(schema, command, default_config, words))
        raise SystemExit(0)
    form, all_read = Form(schema), True
    form.note(*given.problems)
    for name in given.configs or filter(None, [None if words and given.plain else default_config]):
        try:
            path = config_path(name, command)
            values = read_mapping(path)
        except UserError as error:
            form.note(*error.problems)
            all_read = False
        else:
            form.add(flatten(values), f" in {show(str(path))}")
    if words and given.plain:
        form.note(*_problems_of_words(words, given))
        form.add([((words,), given.plain)])
    form.add_flags(given.flags)
    return build(schema, form.finish(all_read=all_read))


def _problems_of_words(key: str, given: _Words) -> Iterator[str]:
    if key in dict(given.flags):
        yield f"{key}: given twice, as {show(given.plain[0])} and as --{key}; keep one"
    for word in given.plain:
        if any("\ud800" <= character <= "\udfff" for character in word):
            yield f"{key}: is not UTF-8 text, got {show(word)}"


def help_text(schema: type, command: str, default_config: str | None = None, words: str | None = None) -> str:
    """What `--help` prints: each leaf of `schema` under its section, with type, meaning and default."""
    plain = f"{words.removesuffix('s').upper()}... " if words else ""
    parser = ArgumentParser(
        prog=f"python -m angpt_jax.{command}",
        usage=f"%(prog)s {plain}[--config FILE]... [--KEY VALUE]...",
        description=inspect.cleandoc(schema.__doc__ or "").partition("\n\n")[0],
        epilog=_RULES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    default = f" (default: {default_config})" if default_config else ""
    which = f"YAML file, or NAME for configs/NAME.yaml; repeatable, later ones win{default}"
    parser.add_argument("--config", metavar="FILE", help=which)
    groups = {key: parser.add_argument_group(key, meaning) for key, meaning in sections(schema)}
    for leaf in leaves(schema):
        group = groups.get(leaf.key.rpartition(".")[0], parser)
        state = "required" if leaf.default is MISSING else f"default: {show(leaf.default)}"
        text = f"{leaf.meaning} ({state})".replace("%", "%%")
        if leaf.key == "config":  # --config names files; what stands under that key in one of them is another thing
            parser.add_argument_group("config, in a file", text)
            continue
        group.add_argument(f"--{leaf.key}", metavar=allowed(leaf.hint), help=text)
    return parser.format_help().rstrip()


def main(
    run: Callable[[T, str], int | None],
    schema: type[T],
    command: str,
    default_config: str | None,
    words: str | None = None,
) -> NoReturn:
    """Runs a command: `run(config, name of the config)` decides the exit code, None is 0. `words`: see `parse`.

    A UserError becomes one line on stderr for each problem and its own exit code; all other errors are bugs and keep
    their traceback.
    """
    argv = sys.argv[1:]
    try:
        config = parse(schema, argv, command=command, default_config=default_config, words=words)
        code = run(config, config_name(argv, default_config or command, command))
        sys.stdout.flush()
    except UserError as error:
        print_problems(*error.problems)
        code = error.exit_code
    except BrokenPipeError:  # `… | head` has read enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # for what Python flushes at its exit
        code = 128 + signal.SIGPIPE
    raise SystemExit(code or 0)


def raise_problems(problems: Iterable[str]) -> None:
    """Raises a UserError if there are problems, such as those of `angpt_jax.rules.check`."""
    lines = list(problems)
    if lines:
        raise UserError(*lines)


def to_yaml(config: Any) -> str:
    """The dataclass as a YAML file with all its fields in declared order; parsing it gives an equal object."""
    return dump(dataclasses.asdict(config))


def changed(old: Any, new: Any) -> list[tuple[str, Any, Any]]:
    """(dotted key, old value, new value) wherever two configs (dataclasses or nested dicts) differ.

    A key that one of them lacks counts as null there.
    """
    before, after = (
        {
            ".".join(path): value
            for path, value in flatten(config if isinstance(config, dict) else dataclasses.asdict(config))
            if value != {}
        }
        for config in (old, new)
    )
    keys = dict.fromkeys([*before, *after])
    return [(key, before.get(key), after.get(key)) for key in keys if before.get(key) != after.get(key)]
