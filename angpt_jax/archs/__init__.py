"""The recipes, by the names that `model.arch` takes."""

from collections.abc import Callable

from angpt_jax.arch import Arch, Sizes
from angpt_jax.archs.angpt import angpt
from angpt_jax.archs.gpt_plus import gpt_plus, gpt_plus_no_qk_norm
from angpt_jax.archs.ngpt import ngpt

RECIPES: dict[str, Callable[[Sizes], Arch]] = {
    recipe.__name__: recipe for recipe in (angpt, gpt_plus, gpt_plus_no_qk_norm, ngpt)
}
