"""What a decoder of angpt_jax is, as config.json says it."""

from typing import Any

from transformers import PretrainedConfig


class AngptJaxConfig(PretrainedConfig):
    """Sizes, the constants ν, and what fills each place. Everything comes from config.json."""

    model_type = "angpt_jax"

    def __init__(
        self,
        vocab_size: int = 257,
        hidden_size: int = 64,
        intermediate_size: int = 256,
        num_hidden_layers: int = 2,
        num_attention_heads: int = 4,
        num_key_value_heads: int = 4,
        max_position_embeddings: int = 256,
        rope_theta: float = 10_000.0,
        attend_across_documents: bool = False,
        use_cache: bool = True,
        places: dict[str, Any] | None = None,
        nu: dict[str, float] | None = None,
        **others: Any,
    ):
        self.vocab_size, self.hidden_size, self.intermediate_size = vocab_size, hidden_size, intermediate_size
        self.num_hidden_layers, self.max_position_embeddings = num_hidden_layers, max_position_embeddings
        self.num_attention_heads, self.num_key_value_heads = num_attention_heads, num_key_value_heads
        self.rope_theta, self.attend_across_documents, self.use_cache = rope_theta, attend_across_documents, use_cache
        self.places, self.nu = places or {}, nu or {}
        super().__init__(**others)

    def part(self, place: str, sublayer: str = "") -> dict[str, Any]:
        """Name and settings of what fills a place; some are filled otherwise in attention than in the MLP."""
        filled = self.places[place]
        return filled.get(sublayer, filled)
