"""What an architecture is: the sizes of the decoder, and what fills each of its places."""

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from difflib import get_close_matches
from typing import Any, Literal

from angpt_jax.axes import Side
from angpt_jax.errors import UserError
from angpt_jax.nu import ACTIVATIONS, Nu
from angpt_jax.part import Part, part, setting_types
from angpt_jax.parts import PARTS


@dataclass(frozen=True)
class Sizes:
    """D, N, H, F, V of the decoder, and the base of its rotary angles."""

    width: int
    layers: int
    heads: int
    feed_forward: int
    vocab: int
    rope_theta: float = 10_000.0

    @property
    def head_width(self) -> int:
        return self.width // self.heads


@dataclass(frozen=True)
class Constraint:
    """The set that every vector of a matrix is brought back to after each optimizer step.

    Args:
        norm: none, at_most_one (the unit ball) or one (the unit sphere)
        along: which vectors: the input side (rows of W) or the embedding dimension
    """

    norm: Literal["none", "at_most_one", "one"] = "none"
    along: Side = "inputs"


@dataclass(frozen=True)
class Recommended:
    """What a recipe recommends where the config leaves a field of `optim` null."""

    warmup_fraction: float = 0.0
    weight_decay: float = 0.0
    clip_norm: float | Literal["none"] = "none"


@dataclass(frozen=True)
class Arch:
    """A filled skeleton: hashable, printable, equal by value."""

    name: str
    input_norm: Part
    qk: Part
    gate: Part
    residual: Part
    final_norm: Part
    head: Part
    init: Part
    nu: Nu = Nu()
    constraint: Constraint = Constraint()
    optimizer: Recommended = Recommended()

    def __str__(self) -> str:
        return "\n".join(f"{f.name:>12}  {getattr(self, f.name)}" for f in fields(self))


def override(arch: Arch, places: Mapping[str, Any]) -> Arch:
    """The recipe with places replaced: `{qk: {part: qk_norm, softmax_scale: 1.0}, nu: {down: 1.0}}`.

    A mapping without `part` changes single settings of what the recipe has there. All problems are raised at once.
    """
    problems: list[str] = []
    changed: dict[str, Any] = {}
    for place, settings in places.items():
        key = f"model.places.{place}"
        if place not in OVERRIDABLE:
            problems.append(f"{key}: unknown place, got {place!r}; {_nearest(place, OVERRIDABLE)}")
        elif not isinstance(settings, Mapping):
            problems.append(f"{key}: expected a mapping of settings, got {settings!r}; e.g. {{part: NAME}}")
        else:
            changed[place] = _filled(key, place, getattr(arch, place), dict(settings), problems)
    if problems:
        raise UserError(*problems)
    return replace(arch, **changed)


# Not the optimizer: what it recommends is overridden by the fields of `optim`.
OVERRIDABLE = [f.name for f in fields(Arch) if f.name not in ("name", "optimizer")]


def _filled(key: str, place: str, old: Any, settings: dict[str, Any], problems: list[str]) -> Any:
    """What fills `place` after `settings`; problems are appended and `old` is returned then."""
    is_part = isinstance(old, Part)
    new = old
    if is_part and "part" in settings:
        name = settings.pop("part")
        if name not in list(PARTS[place]):
            problems.append(f"{key}.part: unknown part, got {name!r}; {_nearest(name, PARTS[place])}")
            return old
        kind = PARTS[place][name]  # settings of the same name keep the recipe's value, as the softmax scale does
        new = part(kind, **{setting: value for setting, value in old.settings if setting in setting_types(kind)})
    types = setting_types(new.kind if is_part else type(new))
    wrong = [_setting_problem(f"{key}.{name}", name, value, types) for name, value in settings.items()]
    if found := [problem for problem in wrong if problem]:
        problems.extend(found)
        return old
    settings = {name: float(value) if types[name] is float else value for name, value in settings.items()}
    new = new.replace(**settings) if is_part else replace(new, **settings)
    if is_part and (missing := _missing(new)):
        problems.extend(f"{key}.{name}: is required by the part {new.kind.__name__}; give a value" for name in missing)
        return old
    return new


def _missing(filled: Part) -> list[str]:
    """Settings without a default that have no value."""
    given = dict(filled.settings)
    return [name for name in setting_types(filled.kind) if name not in given and not hasattr(filled.kind, name)]


def _setting_problem(key: str, name: str, value: Any, types: dict[str, Any]) -> str | None:
    if name not in types:
        return f"{key}: unknown setting, got {name!r}; {_nearest(name, types)}"
    expected = types[name]
    if expected is float:
        fits = isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < float("inf")
        return None if fits else f"{key}: expected a finite number, got {value!r}"
    allowed = getattr(expected, "__args__", None)
    if allowed and value not in allowed:
        return f"{key}: unknown choice, got {value!r}; one of {', '.join(map(str, allowed))}"
    if name == "activation" and value not in list(ACTIVATIONS):
        return f"{key}: unknown activation, got {value!r}; {_nearest(value, ACTIVATIONS)}"
    return None


def _nearest(name: Any, known: Any) -> str:
    close = get_close_matches(str(name), list(known), n=1)
    if close:
        return f"did you mean {close[0]}?"
    return f"one of {', '.join(known)}" if known else "this part has none"
