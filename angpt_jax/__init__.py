"""Approximately normalized transformers in JAX: anGPT, its rivals and the field's designs, as one skeleton with places.

    from angpt_jax import archs, config, model, nu, optim

Shape letters, for the whole package: B batch, L length, D model width, H heads, K head width, F feed-forward
width, V vocabulary, N layers. `h_BLD` is a stream of shape (batch, length, width).
"""

# Submodules, not imported here: a bad flag is answered before JAX is loaded.
__all__ = ["archs", "config", "model", "nu", "optim"]  # pyright: ignore[reportUnsupportedDunderAll]
