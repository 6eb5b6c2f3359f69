"""The model of an experiment: its shape, with Megatron's names, and the sizes that it implies. No I/O."""

import math
from collections.abc import Mapping
from typing import Annotated, Any, Final, Literal, Self

from pydantic import Field, model_validator

from tridock.experiment.presets import Preset, preset_fields
from tridock.strict_yaml import Section

Layers = Annotated[int, Field(gt=0, le=2**14)]
Width = Annotated[int, Field(gt=0, le=2**20)]
Many = Annotated[int, Field(gt=0, le=2**28)]
Fraction = Annotated[float, Field(ge=0.0, lt=1.0)]

LOW_FREQUENCY: Final = 1.0
HIGH_FREQUENCY: Final = 4.0
"""Llama 3.1's values: periods above original_max_position_embeddings / LOW_FREQUENCY tokens are scaled by the whole
factor, those below original_max_position_embeddings / HIGH_FREQUENCY tokens are not."""
_RESNET: Final[Mapping[str, int | float]] = {
    "num_layers": 16,  # blocks
    "num_attention_heads": 1,
    "hidden_size": 2048,
    "seq_length": 1,  # a sample is one image, and one prediction
    "make_vocab_size_divisible_by": 1,
    "hidden_dropout": 0.0,
    "attention_dropout": 0.0,
}
_IMAGES: Final[Mapping[str, int]] = {"img_h": 224, "img_w": 224, "num_classes": 1000}
"""Fields that only preset resnet50 has, with ImageNet's sizes as defaults."""
_SIZES: Final = {
    "kv_channels": "head_size",
    "num_query_groups": "query_groups",
    "ffn_hidden_size": "ffn_size",
    "moe_ffn_hidden_size": "expert_size",
    "max_position_embeddings": "positions",
    "activation_func": "gelu",
}
"""Properties with the values of fields, or their defaults."""


class Model(Section):
    """The shape of the GPT (with Megatron's names) or of the image model; ``from: hf:DIR`` takes it from a folder."""

    preset: Preset | None = Field(
        default=None,
        description="A known model, whose fields are the defaults; with another hidden_size or"
        " num_attention_heads, all but kv_channels, num_query_groups and ffn_hidden_size. With --set it replaces the"
        " file's model, of which seq_length and the fields of recomputation, transformer_impl and fp8 stay."
        " resnet50 classifies images, with engine torch; its only fields are img_h, img_w and num_classes.",
    )
    num_layers: Layers = Field(description="Transformer layers.")
    hidden_size: Width = Field(description="Width of the residual stream.")
    num_attention_heads: Width = Field(
        description="Attention heads; must divide hidden_size, unless kv_channels is given."
    )
    kv_channels: Width | None = Field(
        default=None, description="Size of one attention head. Default: hidden_size / num_attention_heads."
    )
    num_query_groups: Width | None = Field(
        default=None,
        description="Grouped query attention: number of key and value heads, each shared by a group of query heads."
        " Default: num_attention_heads.",
    )
    ffn_hidden_size: Many | None = Field(
        default=None,
        description="Width of the MLP. Default: 4 x hidden_size; with swiglu, 8/3 x hidden_size rounded down to a"
        " multiple of 64.",
    )
    num_moe_experts: Annotated[int, Field(gt=1, le=2**14)] | None = Field(
        default=None, description="Engine megatron-core: mixture of experts; number of experts (MLPs) in each layer."
    )
    moe_router_topk: Layers = Field(default=2, description="num_moe_experts: experts per token.")
    moe_router_pre_softmax: bool = Field(
        default=False,
        description="num_moe_experts: weights of a token's experts are the softmax over all experts (Qwen 2's MoE), not"
        " over the selected ones.",
    )
    moe_ffn_hidden_size: Many | None = Field(
        default=None, description="num_moe_experts: width of each expert. Default: ffn_hidden_size."
    )
    moe_shared_expert_intermediate_size: Many | None = Field(
        default=None,
        description="num_moe_experts: width of an MLP that processes every token beside its experts (all shared experts"
        " together). Default: none.",
    )
    moe_shared_expert_gate: bool = Field(
        default=False,
        description="moe_shared_expert_intermediate_size: multiplies that MLP's output by the sigmoid of a score of the"
        " token (Qwen 2's MoE).",
    )
    moe_router_load_balancing_type: Literal["aux_loss", "seq_aux_loss", "none"] = Field(
        default="aux_loss",
        description="num_moe_experts: load balancing: an auxiliary loss per micro batch, per sample, or none.",
    )
    moe_aux_loss_coeff: float = Field(
        default=0.0, ge=0.0, description="num_moe_experts: weight of that loss; the reported loss does not include it."
    )
    seq_length: Many = Field(description="Tokens per training sample.")
    max_position_embeddings: Many | None = Field(
        default=None,
        description="Maximum context length, and the number of learned position embeddings, if any."
        " Default: seq_length.",
    )
    position_embedding_type: Literal["learned_absolute", "rope"] = Field(
        default="learned_absolute", description="Learned position embeddings, or rotary ones."
    )
    rotary_base: float = Field(default=10000.0, gt=1.0, description="rope: base of the rotation periods (theta).")
    rotary_percent: float = Field(
        default=1.0, gt=0.0, le=1.0, description="rope: fraction of each head that is rotated."
    )
    use_rope_scaling: bool = Field(
        default=False, description="rope: scale periods, for contexts longer than original_max_position_embeddings."
    )
    rope_scaling_type: Literal["llama3", "linear", "yarn"] = Field(
        default="llama3",
        description="use_rope_scaling: which periods are scaled: llama3 (long ones, as Llama 3.1 does), linear (all),"
        " or yarn (long ones, and attention's scores grow).",
    )
    rope_scaling_factor: float = Field(
        default=8.0, ge=1.0, description="use_rope_scaling: factor of the longest periods."
    )
    original_max_position_embeddings: Many = Field(
        default=8192, description="rope_scaling_type llama3 and yarn: context length without scaling."
    )
    no_rope_freq: Layers | None = Field(
        default=None, description="rope: of each so many layers the last one does not rotate, as in SmolLM3 (4)."
    )
    normalization: Literal["LayerNorm", "RMSNorm"] = Field(default="LayerNorm", description="Type of normalization.")
    norm_epsilon: float = Field(default=1e-5, gt=0.0, description="Added to the variance in normalization.")
    qk_layernorm: bool = Field(
        default=False, description="Normalize the queries and keys of each head, as Qwen 3 does."
    )
    qk_layernorm_all_heads: bool = Field(
        default=False, description="qk_layernorm: normalize those of all heads together, as OLMo 2 does."
    )
    use_post_norm: bool = Field(
        default=False, description="Normalize the outputs of attention and MLP, not their inputs, as OLMo 2 does."
    )
    swiglu: bool = Field(default=False, description="SwiGLU in the MLP instead of GELU.")
    activation_func: Literal["gelu", "gelu_tanh"] | None = Field(
        default=None,
        description="Without swiglu, the GELU of the MLP: gelu (exact, with erf) or gelu_tanh (GPT-2's approximation)."
        " Default: gelu_tanh. Engine megatron-deepspeed has gelu, or gelu_tanh with --bias-gelu-fusion or --openai-gelu"
        " in megatron_args.",
    )
    add_bias_linear: bool = Field(default=True, description="Linear layers have biases.")
    add_qkv_bias: bool = Field(
        default=False, description="Queries, keys and values have biases, even if add_bias_linear is false."
    )
    add_attention_bias: bool = Field(
        default=False,
        description="Queries, keys, values and the output of attention have biases, even if add_bias_linear is false.",
    )
    embedding_multiplier: float = Field(
        default=1.0, gt=0.0, description="Factor of the token embedding's output, as Granite has it."
    )
    residual_multiplier: float = Field(
        default=1.0,
        gt=0.0,
        description="Factor of what attention and MLP add to the residual stream, as Granite has it.",
    )
    attention_multiplier: float | None = Field(
        default=None, gt=0.0, description="Factor of attention's scores. Default: 1 / sqrt(size of a head)."
    )
    logits_scaling: float = Field(default=1.0, gt=0.0, description="Divides the logits, as Granite has it.")
    untie_embeddings_and_output_weights: bool = Field(
        default=False, description="Use a separate output layer instead of the token embedding."
    )
    vocab_size: Many | None = Field(
        default=None,
        description="Tokens of the tokenizer. Default: read from the data. Engine megatron-deepspeed always trains with"
        " those of data.vocab_file; there, this field is only used by the plan.",
    )
    make_vocab_size_divisible_by: Width = Field(
        default=128,
        description="The embedding is padded to a multiple of this times the tensor parallel size; with engine torch,"
        " to a multiple of this.",
    )
    hidden_dropout: Fraction = Field(default=0.1, description="Dropout on the residual branches and the embedding.")
    attention_dropout: Fraction = Field(default=0.1, description="Dropout on the attention weights.")
    init_method_std: float = Field(default=0.02, gt=0.0, description="Standard deviation of the initial weights.")
    checkpoint_activations: bool = Field(
        default=False, description="Recompute each layer's activations in the backward pass."
    )
    checkpoint_num_layers: Layers = Field(
        default=1, description="Engine megatron-deepspeed: layers between two stored activations."
    )
    partition_activations: bool = Field(
        default=False,
        description="Engine megatron-deepspeed: partition the stored activations over the tensor parallel ranks.",
    )
    checkpoint_in_cpu: bool = Field(
        default=False, description="Engine megatron-deepspeed: keep stored activations in host memory."
    )
    contiguous_checkpointing: bool = Field(
        default=False, description="Engine megatron-deepspeed: keep stored activations in one contiguous buffer."
    )
    synchronize_each_layer: bool = Field(
        default=False, description="Engine megatron-deepspeed: synchronize with the device around each stored layer."
    )
    recompute_granularity: Literal["full", "selective"] | None = Field(
        default=None,
        description="Engine megatron-core: what the backward pass recomputes: full (whole layers) or selective"
        " (core attention).",
    )
    recompute_method: Literal["uniform", "block"] | None = Field(
        default=None,
        description="Granularity full: uniform (every layer, in groups of recompute_num_layers) or block (the first"
        " recompute_num_layers of a stage).",
    )
    recompute_num_layers: Layers | None = Field(default=None, description="Granularity full: layers per group.")
    transformer_impl: Literal["local", "transformer_engine"] | None = Field(
        default=None,
        description="Engine megatron-core: layers of megatron-core itself (local) or of TransformerEngine"
        " (transformer_engine: bf16 or fp16, GPUs of compute capability 8.0 and newer). Default: transformer_engine"
        " where it is installed and supported, otherwise local.",
    )
    fp8: Literal["e4m3", "hybrid"] | None = Field(
        default=None,
        description="Engine megatron-core: matrix products of the layers in fp8, by TransformerEngine (GPUs of compute"
        " capability 8.9 and newer): e4m3, or hybrid (gradients in e5m2). Each tensor has its own scale (Megatron's"
        " fp8_recipe tensorwise). Weights, optimizer states and checkpoints keep the format of precision.",
    )
    img_h: Width | None = Field(default=None, description="Preset resnet50: image height (default: 224).")
    img_w: Width | None = Field(default=None, description="Preset resnet50: image width (default: 224).")
    num_classes: Many | None = Field(default=None, description="Preset resnet50: number of classes (default: 1000).")

    def value_of(self, name: str) -> Any:
        """Returns the value of a field; of a size that is omitted its default."""
        return getattr(self, _SIZES.get(name, name))

    @property
    def is_vision(self) -> bool:
        return self.preset == "resnet50"

    @property
    def head_size(self) -> int:
        return self.kv_channels or self.hidden_size // self.num_attention_heads

    @property
    def attention_size(self) -> int:
        """Width of all heads' queries together, which is also the width of attention's output."""
        return self.num_attention_heads * self.head_size

    @property
    def query_groups(self) -> int:
        return self.num_query_groups or self.num_attention_heads

    @property
    def key_size(self) -> int:
        """Width of all groups' keys together; the values have the same."""
        return self.query_groups * self.head_size

    @property
    def usual_ffn_size(self) -> int:
        """Megatron's default for ``ffn_hidden_size``."""
        return max(64, 8 * self.hidden_size // 3 // 64 * 64) if self.swiglu else 4 * self.hidden_size

    @property
    def ffn_size(self) -> int:
        """Width of the MLP."""
        return self.ffn_hidden_size or self.usual_ffn_size

    @property
    def experts(self) -> int:
        """MLPs in a layer: 1 without a mixture of experts."""
        return self.num_moe_experts or 1

    @property
    def active_experts(self) -> int:
        """MLPs in a layer that process each token."""
        return self.moe_router_topk if self.num_moe_experts else 1

    @property
    def expert_size(self) -> int:
        """Width of an expert, or of the layer's only MLP."""
        return (self.moe_ffn_hidden_size if self.num_moe_experts else None) or self.ffn_size

    @property
    def rotary_size(self) -> int:
        """Elements of a head that rotary embeddings rotate; 0 without them."""
        return int(self.head_size * self.rotary_percent) if self.position_embedding_type == "rope" else 0

    @property
    def unrotated_layers(self) -> list[bool]:
        """Of each layer, whether it lacks the rotation that the others have."""
        freq = self.no_rope_freq or self.num_layers + 1
        return [number % freq == 0 for number in range(1, self.num_layers + 1)]

    @property
    def rotary_factor(self) -> float:
        """What the lengths of rotated queries and keys are multiplied by."""
        is_yarn = self.use_rope_scaling and self.rope_scaling_type == "yarn"
        return 0.1 * math.log(self.rope_scaling_factor) + 1.0 if is_yarn else 1.0

    @property
    def query_and_key_norms(self) -> tuple[int, ...]:
        """Sizes of the norms of queries and of keys; empty without them."""
        sizes = (self.attention_size, self.key_size) if self.qk_layernorm_all_heads else (self.head_size,) * 2
        return sizes if self.qk_layernorm else ()

    @property
    def positions(self) -> int:
        """Maximum number of tokens in a sample."""
        return self.max_position_embeddings or self.seq_length

    @property
    def gelu(self) -> str:
        """``activation_func``, or its default."""
        return self.activation_func or "gelu_tanh"

    @property
    def has_qkv_bias(self) -> bool:
        return self.has_attention_bias or self.add_qkv_bias

    @property
    def has_attention_bias(self) -> bool:
        """Whether the output of attention has a bias."""
        return self.add_bias_linear or self.add_attention_bias

    @property
    def unit(self) -> str:
        """Unit of throughput: ``tokens`` or ``images``."""
        return "images" if self.is_vision else "tokens"

    @model_validator(mode="before")
    @classmethod
    def _from_preset(cls, fields: Any) -> Any:
        if isinstance(fields, dict) and fields.get("preset") == "resnet50":
            given = {name: value for name, value in fields.items() if name not in _IMAGES or value is not None}
            images = {**_IMAGES, **given}
            return {"vocab_size": images["num_classes"], **_RESNET, **images}
        return preset_fields(fields) if isinstance(fields, dict) else fields

    @model_validator(mode="after")
    def _check_preset_fields(self) -> Self:
        if not self.is_vision:
            given = [name for name in _IMAGES if getattr(self, name) is not None]
            what = "only preset resnet50 has"
        else:
            expected = {
                **{name: field.default for name, field in type(self).model_fields.items()},
                **_RESNET,
                **{name: getattr(self, name) for name in ("preset", *_IMAGES)},
                "vocab_size": self.num_classes,
            }
            given = [name for name, value in expected.items() if getattr(self, name) != value]
            what = "preset resnet50 has no"
        if given:
            raise ValueError(f"{what} {', '.join(given)}")
        return self
