"""Ablations as values: `override` replaces places of a recipe, or single settings of them, and refuses what is wrong
or could not have an effect."""

import math
from collections.abc import Callable, Mapping
from dataclasses import fields, replace
from difflib import get_close_matches
from typing import Any

from angpt_jax.arch import Arch, Sizes
from angpt_jax.errors import UserError
from angpt_jax.nu import ACTIVATIONS, Nu, approximate_nu
from angpt_jax.part import Part, Split, Sublayer, part, setting_types
from angpt_jax.parts import PARTS

# Not the optimizer: what it recommends is overridden by the fields of `optim`.
OVERRIDABLE = [f.name for f in fields(Arch) if f.name not in ("name", "optimizer")]
SUBLAYERS: tuple[Sublayer, ...] = ("attention", "mlp")
SPLITTABLE = ("input_norm", "branch_norm", "residual")
NUMBERS: dict[str, Callable[[Sizes], float]] = {  # what can stand for a number: it follows the sizes
    "1/layers": lambda sizes: 1 / sizes.layers,
    "sqrt(width)": lambda sizes: math.sqrt(sizes.width),
    "1/sqrt(width)": lambda sizes: 1 / math.sqrt(sizes.width),
    "sqrt(head_width)": lambda sizes: math.sqrt(sizes.head_width),
    "1/sqrt(head_width)": lambda sizes: 1 / math.sqrt(sizes.head_width),
}
FACTOR = "_factor"  # nu: {down_factor: 0.98} multiplies what the recipe has


def override(arch: Arch, places: Mapping[str, Any], sizes: Sizes) -> Arch:
    """The recipe with places replaced: `{qk: {part: qk_norm, softmax_scale: 1.0}, nu: {down_factor: 0.98}}`.

    A mapping without `part` changes single settings of what the recipe has there; below `attention` or `mlp` it
    changes a place of that sublayer alone. null leaves a place or setting to the recipe, whatever an earlier file says.
    ν of the activation follows another activation. All problems are raised at once, as lines of a UserError.
    """
    return _Override(arch, sizes).apply(_given(places))


def _given(places: Mapping[str, Any]) -> dict[str, Any]:
    """The mapping without its nulls, at any depth."""
    return {
        name: _given(value) if isinstance(value, Mapping) else value
        for name, value in places.items()
        if value is not None
    }


class _Override:
    """One call of `override`: the problems that it found so far."""

    def __init__(self, arch: Arch, sizes: Sizes):
        self._arch, self._sizes = arch, sizes
        self._problems: list[str] = []

    def apply(self, places: Mapping[str, Any]) -> Arch:
        changed: dict[str, Any] = {}
        for place, settings in places.items():
            key = f"model.places.{place}"
            if place not in OVERRIDABLE:
                self._problems.append(f"{key}: unknown place, got {place!r}; {nearest(place, OVERRIDABLE)}")
            elif not isinstance(settings, Mapping):
                self._problems.append(_not_a_mapping(key, settings))
            elif place != "nu":
                changed[place] = self._place(key, place, dict(settings))
        arch = replace(self._arch, **changed)
        nu = places.get("nu", {})
        if isinstance(nu, Mapping):
            arch = replace(arch, nu=self._nu(arch, nu))
        if not self._problems:
            self._problems += _without_effect(arch, places)
        if self._problems:
            raise UserError(*self._problems)
        return arch

    def _place(self, key: str, place: str, settings: dict[str, Any]) -> Any:
        """What fills `place` after `settings`."""
        old = getattr(self._arch, place)
        if not isinstance(old, Part | Split):
            return self._dataclass(key, old, settings)
        if place not in SPLITTABLE:
            return self._part(key, place, old.at("attention"), settings)
        own = {name: settings.pop(name) for name in SUBLAYERS if name in settings}
        filled = {}
        for name in SUBLAYERS:
            mine = own.get(name, {})
            if not isinstance(mine, Mapping):
                self._problems.append(_not_a_mapping(f"{key}.{name}", mine))
                return old
            both = self._part(key, place, old.at(name), dict(settings)) if settings or not mine else old.at(name)
            filled[name] = self._part(f"{key}.{name}", place, both, dict(mine))
        self._problems = list(dict.fromkeys(self._problems))  # one line for what is wrong in both
        return filled["attention"] if filled["attention"] == filled["mlp"] else Split(**filled)

    def _part(self, key: str, place: str, old: Part, settings: dict[str, Any]) -> Part:
        new = old
        if "part" in settings:
            name = settings.pop("part")
            if name not in list(PARTS[place]):
                self._problems.append(f"{key}.part: unknown part, got {name!r}; {nearest(name, PARTS[place])}")
                return old
            kind = PARTS[place][name]  # settings of the same name keep the recipe's value, as the softmax scale does
            new = part(kind, **{setting: value for setting, value in old.settings if setting in setting_types(kind)})
        values = self._values(key, setting_types(new.kind), settings)
        if values is None:
            return old
        new = new.replace(**values)
        missing = [f"{key}.{n}: is required by the part {new.kind.__name__}; give a value" for n in _missing(new)]
        self._problems += missing
        return old if missing else new

    def _dataclass(self, key: str, old: Any, settings: dict[str, Any]) -> Any:
        values = self._values(key, setting_types(type(old)), settings)
        return old if values is None else replace(old, **values)

    def _values(self, key: str, types: dict[str, Any], settings: dict[str, Any]) -> dict[str, Any] | None:
        """The settings as their types want them, or None where one of them is wrong."""
        wrong = [_setting_problem(f"{key}.{name}", name, value, types) for name, value in settings.items()]
        if found := [problem for problem in wrong if problem]:
            self._problems += found
            return None
        return {name: self._number(value) if types[name] is float else value for name, value in settings.items()}

    def _number(self, value: Any) -> float:
        return NUMBERS[value](self._sizes) if isinstance(value, str) else float(value)

    def _nu(self, arch: Arch, settings: Mapping[str, Any]) -> Nu:
        """ν after the gate was replaced and after `settings`, each a value or a factor on the recipe's value."""
        nu = self._arch.nu
        if nu.activation != 1.0 and arch.gate != self._arch.gate:
            sizes, gate = self._sizes, arch.gate
            follows = approximate_nu(sizes.width, sizes.heads, sizes.feed_forward, gate["activation"], gate.kind.inputs)
            nu = replace(nu, activation=follows.activation)
        names = setting_types(Nu)
        values = self._values("model.places.nu", names | {name + FACTOR: float for name in names}, dict(settings)) or {}
        for name, value in values.items():
            field = name.removesuffix(FACTOR)
            recipe = getattr(nu, field)
            if name == field:
                nu = replace(nu, **{field: value})
            elif field in values:
                self._problems.append(f"model.places.nu.{name}: can't stand beside {field}, got {value}; keep one")
            elif recipe == 1.0:
                self._problems.append(
                    f"model.places.nu.{name}: {arch.name} has no ν there to multiply, got {value}; give {field} a value"
                )
            else:
                nu = replace(nu, **{field: recipe * value})
        return nu


def _without_effect(arch: Arch, places: Mapping[str, Any]) -> list[str]:
    """Problems of settings that no result could depend on."""
    problems = []
    hidden = hidden_nu(arch)
    for name, value in places.get("nu", {}).items():
        if reason := hidden.get(name.removesuffix(FACTOR)):
            problems.append(f"model.places.nu.{name}: has no effect in {arch.name}, got {value}; {reason}")
    along = places.get("constraint", {}).get("along")
    if along is not None and arch.constraint.norm == "none":
        problems.append(f"model.places.constraint.along: has no effect, got {along!r}; constraint.norm is none")
    return problems


def hidden_nu(arch: Arch) -> dict[str, str]:
    """Name of each ν that no logit depends on, and why: a norm behind its map takes every factor out again."""
    hidden: dict[str, str] = {}
    value, gate, hidden_norm = arch.value.kind.factor, arch.gate.kind, arch.hidden_norm.kind.factor

    def behind(place: str, filled: Part, *names: str) -> None:
        if filled.kind.factor == "removed":
            hidden.update(dict.fromkeys(names, f"{filled.kind.__name__} of {place} takes every factor out again"))

    linear = ("up",) if gate.factor == "kept" else ()
    through = gate.inputs if ACTIVATIONS[arch.gate["activation"]].homogeneous and gate.factor != "removed" else linear
    activation = ("activation", *through) if hidden_norm == "kept" else ()
    behind("branch_norm", arch.branch_norm.at("attention"), "attention_out", *(("value",) if value == "kept" else ()))
    behind("branch_norm", arch.branch_norm.at("mlp"), "down", *activation)
    behind("hidden_norm", arch.hidden_norm, "activation", *through)
    behind("gate", arch.gate, "up", "gate")
    behind("value", arch.value, "value")
    behind("qk", arch.qk, "query", "key")
    if "gate" not in gate.inputs:
        hidden["gate"] = f"{gate.__name__} has no such map"
    return hidden


def _not_a_mapping(key: str, value: Any) -> str:
    return f"{key}: expected a mapping of settings, got {value!r}; e.g. {{part: NAME}}"


def _missing(filled: Part) -> list[str]:
    """Settings without a default that have no value."""
    given = dict(filled.settings)
    return [name for name in setting_types(filled.kind) if name not in given and not hasattr(filled.kind, name)]


def _setting_problem(key: str, name: str, value: Any, types: dict[str, Any]) -> str | None:
    if name not in types:
        return f"{key}: unknown setting, got {name!r}; {nearest(name, types)}"
    expected = types[name]
    if expected is float:
        fits = isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < float("inf")
        if fits or (isinstance(value, str) and value in NUMBERS):
            return None
        return f"{key}: expected a finite number, got {value!r}; or one of {', '.join(NUMBERS)}"
    allowed = getattr(expected, "__args__", None)
    if allowed and value not in allowed:
        return f"{key}: unknown choice, got {value!r}; one of {', '.join(map(str, allowed))}"
    if name == "activation" and value not in list(ACTIVATIONS):
        return f"{key}: unknown activation, got {value!r}; {nearest(value, ACTIVATIONS)}"
    return None


def nearest(name: Any, known: Any) -> str:
    """The known name that comes nearest, or all of them, in words."""
    close = get_close_matches(str(name), list(known), n=1)
    if close:
        return f"did you mean {close[0]}?"
    return f"one of {', '.join(known)}" if known else "this part has none, null drops it"
