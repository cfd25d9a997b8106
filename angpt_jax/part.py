"""How a recipe names what fills a place: a class and its settings, hashable and equal by value."""

from dataclasses import dataclass, fields
from typing import Any, Literal

NOT_SETTINGS = {"parent", "name", "axis"}  # what every linen module has, and what the skeleton says of a norm's place
Sublayer = Literal["attention", "mlp"]
# What becomes of a factor c in front of a part: f(c·x) is c·f(x), or f(x) but for ε, or neither.
Factor = Literal["kept", "removed", "seen"]


@dataclass(frozen=True)
class Part:
    """A class and its settings; made into an object only where it gets its name.

    A linen module stored in another module's field would be adopted under that field's name, and
    `functools.partial` compares by identity: equal recipes would trace twice.
    """

    kind: type
    settings: tuple[tuple[str, Any], ...] = ()

    def make(self, **extra: Any) -> Any:
        """The object itself; `name=` is passed for linen modules."""
        return self.kind(**dict(self.settings), **extra)

    def at(self, sublayer: Sublayer) -> "Part":
        """What fills the place in this sublayer: the same in both."""
        return self

    def __getitem__(self, setting: str) -> Any:
        """The value of a setting, given or default."""
        return dict(self.settings).get(setting, getattr(self.kind, setting, None))

    def replace(self, **changes: Any) -> "Part":
        return part(self.kind, **{**dict(self.settings), **changes})

    def __str__(self) -> str:
        settings = ", ".join(f"{name}={value}" for name, value in self.settings)
        return f"{self.kind.__name__}({settings})"


@dataclass(frozen=True)
class Split:
    """A place that attention and MLP fill with different parts."""

    attention: Part
    mlp: Part

    def at(self, sublayer: Sublayer) -> Part:
        return self.attention if sublayer == "attention" else self.mlp

    def __str__(self) -> str:
        return f"attention: {self.attention}, mlp: {self.mlp}"


def part(kind: type, **settings: Any) -> Part:
    """`part(RMSNorm, epsilon=1e-6)`."""
    return Part(kind, tuple(sorted(settings.items())))


def setting_types(kind: type) -> dict[str, Any]:
    """Names and types of the settings that a part takes."""
    return {f.name: f.type for f in fields(kind) if f.init and f.name not in NOT_SETTINGS}
