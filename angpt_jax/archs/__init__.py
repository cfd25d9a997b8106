"""The recipes, by the names that `model.arch` takes."""

from collections.abc import Callable

from angpt_jax.arch import Arch, Sizes
from angpt_jax.archs.angpt import angpt, simple_norm
from angpt_jax.archs.gpt_plus import gpt_plus, gpt_plus_bound, gpt_plus_no_qk_norm
from angpt_jax.archs.layer_norm import deep_norm, normformer, post_ln, pre_ln
from angpt_jax.archs.ngpt import ngpt, ngpt_bound
from angpt_jax.archs.norm_variants import derf, dyt, geo_norm, hybrid_norm, ln_scaling, scale_norm, see_dnorm

Recipe = Callable[[Sizes], Arch]

RECIPES: dict[str, Recipe] = {
    recipe.__name__: recipe
    for recipe in (
        angpt,
        gpt_plus,
        gpt_plus_no_qk_norm,
        gpt_plus_bound,
        ngpt,
        ngpt_bound,
        pre_ln,
        post_ln,
        deep_norm,
        normformer,
        ln_scaling,
        dyt,
        derf,
        hybrid_norm,
        scale_norm,
        see_dnorm,
        geo_norm,
        simple_norm,
    )
}
