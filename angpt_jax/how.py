"""How a decoder is computed, whatever it computes."""

from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp

from angpt_jax.attention import Implementation
from angpt_jax.layout import Layout


@dataclass(frozen=True)
class How:
    """Dtype of the products, code for attention, where arrays lie."""

    dtype: Any = jnp.float32
    attention: Implementation = "reference"
    layout: Layout = Layout()
