"""A decoder of angpt_jax in PyTorch. The folder that holds this file is all that transformers needs:

    AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True)

One skeleton for every architecture; `places` of config.json says what fills each of its places, and with which
settings. Products in the dtype of the matrices; norms, joins, scales, rotations and softmax in float32. Attention stays
inside a document, as in training: each end-of-document id begins one (`attend_across_documents` in config.json).

Letters in names: B batch, L length, M keys, D width, H heads, G heads of keys and values, K head width, V vocabulary.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import Cache, DynamicCache, GenerationMixin, PreTrainedModel
from transformers.modeling_outputs import CausalLMOutputWithPast

from .configuration_angpt_jax import AngptJaxConfig
from .norms_angpt_jax import At
from .parts_angpt_jax import PARTS, product

# What the output calls the cache of keys and values; it is `cache` in newer versions of transformers.
CACHE = "cache" if "cache" in CausalLMOutputWithPast.__annotations__ else "past_key_values"


def filled(config: AngptJaxConfig, place: str, at: At, sublayer: str = "") -> Any:
    """The module in a place."""
    settings = config.part(place, sublayer)
    return PARTS[place][settings["part"]](settings, at)


class Attention(nn.Module):
    """ν_p W_p concat(softmax(scale · q kᵀ + mask) v), q, k, v = ν W x."""

    def __init__(self, config: AngptJaxConfig, index: int):
        super().__init__()
        self.index, self.nu = index, config.nu
        self.heads, self.kv_heads = config.num_attention_heads, config.num_key_value_heads
        width, head_width = config.hidden_size, config.hidden_size // self.heads
        self.query = nn.Linear(width, self.heads * head_width, bias=False)
        self.key = nn.Linear(width, self.kv_heads * head_width, bias=False)
        self.value = nn.Linear(width, self.kv_heads * head_width, bias=False)
        self.attention_out = nn.Linear(self.heads * head_width, width, bias=False)
        at = At(head_width, index + 1, self.heads, self.kv_heads)
        self.qk, self.value_norm = filled(config, "qk", at), filled(config, "value", at)
        self.scale: float = config.part("qk")["softmax_scale"]

    def forward(self, x: Tensor, angles_BLR: Tensor, seen: "Seen", cache: Cache | None) -> Tensor:
        batch, length, _ = x.shape
        dtype = self.query.weight.dtype

        def project(linear: nn.Linear, count: int, nu: float) -> Tensor:
            return product(linear, x, nu).to(dtype).view(batch, length, count, -1)

        q = project(self.query, self.heads, self.nu["query"])
        k = project(self.key, self.kv_heads, self.nu["key"])
        v = self.value_norm(project(self.value, self.kv_heads, self.nu["value"]))
        q, k = self.qk(q, k, angles_BLR)
        q, k, v = (t.to(dtype).transpose(1, 2) for t in (q, k, v))
        if cache is not None:
            k, v = self.cached(k, v, seen, cache)
        k, v = (t.repeat_interleave(self.heads // self.kv_heads, dim=1) for t in (k, v))
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=seen.mask_B1LM, scale=self.scale)
        return product(self.attention_out, y.transpose(1, 2).reshape(batch, length, -1), self.nu["attention_out"])

    def cached(self, k: Tensor, v: Tensor, seen: "Seen", cache: Cache) -> tuple[Tensor, Tensor]:
        """All keys and values so far. Those of the first layer tell in one more channel where documents begin."""
        if self.index == 0:
            k = torch.cat([k, seen.begins_BL[:, None, :, None].expand(*k.shape[:3], 1).to(k.dtype)], dim=-1)
        k, v = cache.update(k, v, self.index)
        keys = seen.mask_B1LM.shape[-1]  # a static cache has room for more
        return k[:, :, :keys, : v.shape[-1]], v[:, :, :keys]


class MLP(nn.Module):
    """ν_d W_d (ν_acf · gate(u, z)), u, z = ν W x."""

    def __init__(self, config: AngptJaxConfig, layer: int):
        super().__init__()
        self.nu, at = config.nu, At(config.intermediate_size, layer)
        self.gating, self.hidden_norm = filled(config, "gate", at), filled(config, "hidden_norm", at)
        for role in self.gating.inputs:
            self.add_module(role, nn.Linear(config.hidden_size, config.intermediate_size, bias=False))
        self.down = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        linears: list[Any] = [self.get_submodule(role) for role in self.gating.inputs]
        nus = (self.nu[role] for role in self.gating.inputs)
        maps = [product(linear, x, nu).to(linear.weight.dtype) for linear, nu in zip(linears, nus, strict=True)]
        return product(self.down, self.hidden_norm(self.nu["activation"] * self.gating(*maps)), self.nu["down"])


class Block(nn.Module):
    """Two sublayers, each: stream → input_norm → sublayer → branch_norm → join."""

    def __init__(self, config: AngptJaxConfig, index: int):
        super().__init__()
        self.attention, self.mlp = Attention(config, index), MLP(config, index + 1)
        at = At(config.hidden_size, index + 1)
        for sublayer in ("attention", "mlp"):
            self.add_module(f"{sublayer}_norm", filled(config, "input_norm", at, sublayer))
            self.add_module(f"{sublayer}_branch_norm", filled(config, "branch_norm", at, sublayer))
            self.add_module(f"{sublayer}_residual", filled(config, "residual", at, sublayer))

    def forward(self, h: Tensor, angles_BLR: Tensor, seen: "Seen", cache: Cache | None) -> Tensor:
        x = self.attention(self.get_submodule("attention_norm")(h), angles_BLR, seen, cache)
        h = self.get_submodule("attention_residual")(h, self.get_submodule("attention_branch_norm")(x))
        x = self.mlp(self.get_submodule("mlp_norm")(h))
        return self.get_submodule("mlp_residual")(h, self.get_submodule("mlp_branch_norm")(x))


class Seen(NamedTuple):
    """Which keys each query sees, and which of the tokens begin a document."""

    mask_B1LM: Tensor
    begins_BL: Tensor


class AngptJaxForCausalLM(PreTrainedModel, GenerationMixin):
    """ids → logits; see the top of this file."""

    config_class = AngptJaxConfig
    config: AngptJaxConfig
    base_model_prefix = "model"
    _no_split_modules = ["Block"]
    _supports_sdpa = True
    _tied_weights_keys = {"head.weight": "embedding.weight"}
    _keep_in_fp32_modules_strict = [  # scales and gains, which bfloat16 would round
        *("embedding_norm", "attention_norm", "mlp_norm", "attention_branch_norm", "mlp_branch_norm"),
        *("attention_residual", "mlp_residual", "qk", "value_norm", "gating", "hidden_norm", "final_norm", "logits"),
    ]

    def __init__(self, config: AngptJaxConfig):
        super().__init__(config)
        at = At(config.hidden_size, vocab=config.vocab_size)
        self.embedding = nn.Embedding(config.vocab_size, config.hidden_size)
        self.embedding_norm = filled(config, "embedding_norm", at)
        self.layers = nn.ModuleList(Block(config, index) for index in range(config.num_hidden_layers))
        self.final_norm = filled(config, "final_norm", at)
        self.head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.logits = filled(config, "head", at)
        self.post_init()

    def get_input_embeddings(self) -> nn.Module:
        return self.embedding

    def set_input_embeddings(self, value: Any) -> None:
        self.embedding = value

    def get_output_embeddings(self) -> nn.Module:
        return self.head

    def set_output_embeddings(self, new_embeddings: Any) -> None:
        self.head = new_embeddings

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        cache: Cache | None = None,
        past_key_values: Cache | None = None,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int = 0,
        **others: Any,
    ) -> CausalLMOutputWithPast:
        """`attention_mask` (batch, past and present length) is 0 where there is padding. `labels` are the ids
        themselves, −100 where they do not count. `past_key_values` is the older name of `cache`."""
        cache = cache if cache is not None else past_key_values
        wanted = self.config.use_cache and not self.training if use_cache is None else use_cache
        if wanted and cache is None:
            cache = DynamicCache()
        seen = self.seen(input_ids, attention_mask, cache)
        if position_ids is None:
            mask_BM = torch.ones_like(seen.mask_B1LM[:, 0, 0]) if attention_mask is None else attention_mask
            position_ids = (mask_BM.cumsum(-1) - 1).clamp(min=0)[:, -input_ids.shape[1] :]
        h = self.embedding_norm(self.embedding(input_ids).float())
        angles_BLR = self.angles(position_ids)
        for block in self.layers:
            h = block(h, angles_BLR, seen, cache)
        h = self.final_norm(h[:, -logits_to_keep:])  # all of them if it is 0
        logits = self.logits(h, self.head)
        loss = None
        if labels is not None:
            loss = F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
        return CausalLMOutputWithPast(loss=loss, logits=logits, **{CACHE: cache})  # pyright: ignore[reportArgumentType]

    def seen(self, input_ids: Tensor, attention_mask: Tensor | None, cache: Cache | None) -> Seen:
        """Causal, inside of a document, without padding; everyone sees itself, padding too: no softmax is empty."""
        past = 0 if cache is None else int(cache.get_seq_length())
        begins_BL = input_ids == self.config.bos_token_id
        if self.config.attend_across_documents:
            begins_BL = torch.zeros_like(begins_BL)
        begins_BM = begins_BL
        if past:
            first: Any = cache.layers[0]  # pyright: ignore[reportOptionalMemberAccess]
            begins_BM = torch.cat([first.keys[:, 0, :past, -1] > 0.5, begins_BL], dim=1)
        documents_BM = begins_BM.cumsum(dim=1)
        at_M = torch.arange(begins_BM.shape[1], device=input_ids.device)
        mask_BLM = documents_BM[:, past:, None] == documents_BM[:, None, :]
        mask_BLM = mask_BLM & (at_M[past:, None] >= at_M)
        if attention_mask is not None:
            mask_BLM = mask_BLM & attention_mask[:, None, :].bool()
        return Seen((mask_BLM | (at_M[past:, None] == at_M))[:, None], begins_BL)

    def angles(self, position_ids: Tensor) -> Tensor:
        """p · θ^(−2i/K) of position p and pair i."""
        head_width = self.config.hidden_size // self.config.num_attention_heads
        pairs = torch.arange(0, head_width, 2, dtype=torch.float32, device=position_ids.device)
        return position_ids[..., None].float() * self.config.rope_theta ** (-pairs / head_width)

    @staticmethod
    def create_masks_for_generate(attention_mask: Tensor | None = None, **others: Any) -> Tensor | None:
        """`seen` makes the mask, also for a static cache."""
        return attention_mask
