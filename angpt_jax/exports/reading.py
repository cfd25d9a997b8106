"""Reads an export back, bit for bit. Nothing in it is executed: config.json is data, the PyTorch files are not opened.

exported = read_export(Path("my_export"))         # read_description: all but the parameters
exported.params, exported.arch, exported.sizes, exported.model, exported.folded, exported.tokenizer
"""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError, safe_open

from angpt_jax import fold, json_text, rules
from angpt_jax.config import Config, DataConfig, ModelConfig, OptimConfig, RunConfig
from angpt_jax.errors import UserError
from angpt_jax.exports import description, tensors
from angpt_jax.exports.exported import Exported
from angpt_jax.exports.tensors import Entry
from angpt_jax.exports.writing import INDEX, WEIGHTS
from angpt_jax.form import Form, flatten
from angpt_jax.schema import build, show

CONFIG = "config.json"
SHARD = re.compile(r"model-\d{5}-of-\d{5}\.safetensors")
DTYPES = ("F32", "BF16", "F16")
LARGEST_JSON = 50_000_000  # bytes
SHOWN = 3  # names in a message
FACTS = {"format": int, "step": int, "folded": bool, "trained_vocab": int, "tokenizer": str, "model": dict}


def read_export(folder: Path, field: str = "run.init_from") -> Exported:
    """What an export of ours holds, folded or not, in one file or several; parameters become float32 on the host.

    A UserError, which is a ValueError, names the file that is damaged, missing or not one of ours; `field` is what it
    blames.
    """
    with _blaming(folder, field):
        exported = _described(_json(folder / CONFIG))
        return replace(exported, params=_params(folder, tensors.entries(exported.decoder)))


def read_description(folder: Path, field: str = "run.init_from") -> Exported:
    """The same without the parameters, which are None."""
    with _blaming(folder, field):
        return _described(_json(folder / CONFIG))


def is_export(folder: Path) -> bool:
    """Whether a folder is laid out as an export, sound or not."""
    return (folder / CONFIG).is_file()


@contextmanager
def _blaming(folder: Path, field: str) -> Iterator[None]:
    """What is wrong with the export becomes a UserError that says which it is."""
    try:
        yield
    except ValueError as error:
        reason = "; ".join(error.problems) if isinstance(error, UserError) else str(error)
        raise UserError(f"{field}: {reason}, got {str(folder)!r}; a folder that export made") from error


def _json(path: Path) -> dict[str, Any]:
    try:
        if not path.is_file():
            raise ValueError(f"{path.name} is missing")
        if path.stat().st_size > LARGEST_JSON:
            raise ValueError(f"{path.name} is larger than {LARGEST_JSON:,} bytes")
        text = path.read_bytes()
    except OSError as error:
        raise ValueError(f"{path.name} can't be read ({error.strerror})") from error
    try:
        content = json_text.parsed(text.decode("utf-8"))
    except ValueError as error:
        raise ValueError(f"{path.name} is not JSON ({error})") from error
    if not isinstance(content, dict):
        raise ValueError(f"{path.name} holds no mapping")
    return content


def _described(config: dict[str, Any]) -> Exported:
    """All but the parameters; everything that config.json says of what is computed must agree."""
    facts = config.get("angpt_jax")
    if not isinstance(facts, dict):
        raise ValueError("config.json has no section angpt_jax")
    for name, kind in FACTS.items():
        if type(facts.get(name)) is not kind:
            raise ValueError(f"config.json: angpt_jax.{name} must be of type {kind.__name__}")
    if facts["format"] != description.FORMAT:
        raise ValueError(f"config.json: format {facts['format']}, where this version reads {description.FORMAT}")
    exported = Exported(
        model=_model(facts["model"]),
        params=None,
        **{name: facts[name] for name in description.OF_THE_EXPORT},
        attend_across_documents=config.get("attend_across_documents") is True,
        end_of_document=config.get("eos_token_id", -1),
    )
    if exported.folded and list(fold.obstacles(replace(exported, folded=False).arch, exported.model.tied_embeddings)):
        raise ValueError(f"config.json: {exported.model.arch} can't be folded")
    for name, value in description.computed(exported).items():
        if config.get(name) != value:
            raise ValueError(f"config.json: {name} is not what its section angpt_jax says")
    return exported


def _model(values: dict[str, Any]) -> ModelConfig:
    """The section `model`, by the rules of a training config."""
    form = Form(ModelConfig)
    form.add(flatten(values), " in config.json")
    model = build(ModelConfig, form.finish(all_read=True))
    config = Config(model, OptimConfig(peak_lr=1.0), DataConfig(batch_size=1), RunConfig(steps=1))
    if problems := [problem for problem in rules.check(config, devices=1) if problem.startswith("model")]:
        raise UserError(*problems)
    return model


def _params(folder: Path, entries: list[Entry]) -> dict[str, Any]:
    wanted = {entry.name: entry for entry in entries}
    found: dict[str, np.ndarray] = {}
    for name in _files(folder):
        try:
            found |= _arrays(folder / name, wanted)
        except (SafetensorError, OSError) as error:
            raise ValueError(f"{name} is damaged or can't be read ({error})") from error
    if missing := [name for name in wanted if name not in found]:
        raise ValueError(f"the tensors {', '.join(missing[:SHOWN])} are missing ({len(missing)} in all)")
    return tensors.tree([(entry, found[entry.name]) for entry in entries])


def _files(folder: Path) -> list[str]:
    """Names of the files with tensors; only such as export gives them."""
    if not (folder / INDEX).exists():
        names = [WEIGHTS]
    else:
        places = _json(folder / INDEX).get("weight_map")
        names = sorted({str(name) for name in places.values()}) if isinstance(places, dict) else []
        if not names or not all(SHARD.fullmatch(name) for name in names):
            raise ValueError(f"{INDEX} must name files such as model-00001-of-00002.safetensors")
    for name in names:
        if not (folder / name).is_file():
            raise ValueError(f"{name} is missing")
    return names


def _arrays(path: Path, wanted: dict[str, Entry]) -> dict[str, np.ndarray]:
    """The tensors of one file, if the model has them all in these shapes; nothing is read of them before."""
    with safe_open(path, framework="numpy") as file:
        for name in file.keys():
            stored = file.get_slice(name)
            shape, dtype = tuple(stored.get_shape()), stored.get_dtype()
            if name not in wanted:
                raise ValueError(f"{path.name} holds {show(name)}, which the model does not have")
            if shape != wanted[name].shape or dtype not in DTYPES:
                right = f"float32, bfloat16 or float16 of shape {wanted[name].shape}"
                raise ValueError(f"{path.name} holds {name} as {dtype} of shape {shape}, which must be {right}")
        return {name: file.get_tensor(name) for name in file.keys()}
