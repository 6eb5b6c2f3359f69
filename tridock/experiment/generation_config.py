"""``generation_config.json`` of transformers' models: which tokens end a text, and how they are drawn. No I/O.

Each key is honoured, without effect, or has one value, as in ``config.json``. Checked against transformers 5:
``generation/configuration_utils.py``.
"""

from collections.abc import Mapping
from typing import Annotated, Any, Final

from pydantic import BeforeValidator, Field

from tridock.strict_yaml import Count, Section, validated

GENERATION_CONFIG: Final = "generation_config.json"

_WITHOUT_EFFECT: Final = frozenset(
    (
        # where the file comes from
        *("transformers_version", "_from_model_config", "trust_remote_code"),
        # how many tokens: the command says it
        *("max_new_tokens", "max_length"),
        # another way to compute the same
        *("use_cache", "cache_implementation", "cache_config", "max_cache_len", "compile_config", "disable_compile"),
        *("low_memory", "prefill_chunk_size", "pad_token_id", "remove_invalid_values"),
        # of beams, and of models with an encoder
        *("early_stopping", "length_penalty", "diversity_penalty", "encoder_repetition_penalty"),
        *("encoder_no_repeat_ngram_size", "decoder_start_token_id"),
        # what transformers returns beside the text
        *("output_attentions", "output_hidden_states", "output_scores", "output_logits", "return_dict_in_generate"),
    )
)
_ONLY: Final[Mapping[str, Any]] = {
    **dict.fromkeys(("num_beams", "num_beam_groups", "num_return_sequences", "typical_p", "guidance_scale"), 1),
    **dict.fromkeys(("min_length", "min_new_tokens", "no_repeat_ngram_size", "min_p", "top_h"), 0),
    **dict.fromkeys(("epsilon_cutoff", "eta_cutoff", "penalty_alpha", "renormalize_logits", "token_healing"), 0),
}
"""Keys that are not honoured, with the value, beside null, that changes no text."""


class GenerationConfig(Section):
    """The keys that are honoured. ``top_k`` 0 means all tokens."""

    eos_token_id: Annotated[
        tuple[Count, ...], BeforeValidator(lambda it: tuple(it) if isinstance(it, list) else (it,))
    ] = ()
    bos_token_id: Count | None = None
    do_sample: bool = True
    temperature: Annotated[float, Field(ge=0)] = 1.0
    top_k: Count = 0
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    repetition_penalty: Annotated[float, Field(gt=0)] = 1.0

    @property
    def begin(self) -> int:
        """The token that begins a text without a prompt."""
        return self.eos_token_id[0] if self.bos_token_id is None else self.bos_token_id


_KNOWN: Final = frozenset((*GenerationConfig.model_fields, *_ONLY, *_WITHOUT_EFFECT))


def of_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """Returns what a ``config.json`` says of generating, for a folder without ``generation_config.json``."""
    return {name: value for name, value in config.items() if name in _KNOWN and value is not None}


def read_generation_config(content: Mapping[str, Any], where: str) -> GenerationConfig:
    """Checks the file ``where``. Raises :class:`RequestError` with every key that is not honoured."""
    odd = {name: it for name, it in content.items() if it is not None and name not in _WITHOUT_EFFECT}
    return validated(GenerationConfig, {name: it for name, it in odd.items() if _ONLY.get(name, odd) != it}, where)
