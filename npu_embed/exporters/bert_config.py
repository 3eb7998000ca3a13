"""What the configuration of a BERT or a relative says, and what this engine does not do."""

from __future__ import annotations

from dataclasses import dataclass

from ..errors import BundleError
from .bert_families import FAMILIES, BertFamily
from .checkpoint import Checkpoint
from .geometry import Epilogue
from .jsonfile import MAX_INTEGER, JsonFile
from .limits import MAX_HEADS, MAX_LAYERS, MAX_WIDTH, check_hidden, check_width

MAX_TOKENS = 512  # attention has buckets up to here

EPILOGUES = {
    "gelu": Epilogue.GELU_ERF,
    "gelu_new": Epilogue.GELU_TANH,
    "gelu_pytorch_tanh": Epilogue.GELU_TANH,
}


@dataclass(frozen=True, slots=True)
class BertConfig:
    """A checked BERT configuration: HF's config keys, then what the pipeline around it adds.

    The keys are BERT's; model_type says which family's checkpoint they were read from.
    """

    model_type: str
    hidden_size: int
    num_hidden_layers: int
    num_attention_heads: int
    intermediate_size: int
    layer_norm_eps: float
    vocab_size: int
    max_position_embeddings: int
    type_vocab_size: int
    pad_token_id: int
    hidden_act: str
    pooling: str
    normalize: bool
    max_tokens: int

    @property
    def family(self) -> BertFamily:
        """What the checkpoint calls BERT's parts."""
        return FAMILIES[self.model_type]

    @property
    def padding_idx(self) -> int | None:
        """The token that is not counted as a position; None where all are, from 0."""
        return self.pad_token_id if self.family.counts_from_pad else None

    @property
    def head_dim(self) -> int:
        """Columns of one attention head."""
        return self.hidden_size // self.num_attention_heads

    @property
    def epilogue(self) -> Epilogue:
        """The array's form of hidden_act."""
        return EPILOGUES[self.hidden_act]

    @property
    def stages(self) -> tuple[str, ...]:
        """What happens to a text, in order."""
        stages = ("embeddings", "layers", "pooling")
        return (*stages, "normalize") if self.normalize else stages


def bert_config(checkpoint: Checkpoint) -> BertConfig:
    """The configuration of a checkpoint that this engine computes as Hugging Face would.

    Raises:
        BundleError: naming the key and value that it would compute differently.
    """
    config = checkpoint.config
    model_type = config.choice("model_type", list(FAMILIES))
    family = FAMILIES[model_type]
    config.choice("position_embedding_type", ("absolute",), default="absolute")
    for key, reason in family.refused.items():
        if config.flag(key, False):
            raise config.error(key, "false", reason)
    if config.values.get("pruned_heads"):
        raise config.error("pruned_heads", "none", "this engine runs whole layers only")
    kinds = [module.kind for module in checkpoint.modules]
    if kinds not in ([], ["Normalize"]):
        raise BundleError(
            f"modules.json: {', '.join(kinds)} after Pooling, wanted Normalize or nothing; this "
            "exporter does no other module for a BERT."
        )

    def integer(key: str, maximum: int = MAX_INTEGER) -> int:
        return config.integer(family.key(key), maximum=maximum)

    hidden_size = integer("hidden_size", MAX_WIDTH)
    layers = integer("num_hidden_layers", MAX_LAYERS)
    max_position_embeddings = integer("max_position_embeddings")
    pad_token_id = config.integer("pad_token_id", default=family.pad_token_id, minimum=0)
    _check_heads(config, family)
    if checkpoint.pooled_width not in (None, hidden_size):
        raise BundleError(
            f"1_Pooling/config.json: word_embedding_dimension {checkpoint.pooled_width}, wanted "
            f"{family.key('hidden_size')} {hidden_size} of {config.name}; correct the file."
        )
    # RoBERTa's table begins with rows that no text's tokens use: 512 tokens of 514 positions.
    unused = pad_token_id + 1 if family.counts_from_pad else 0
    max_tokens = checkpoint.max_tokens(max_position_embeddings, unused)
    if max_tokens > MAX_TOKENS:
        raise BundleError(
            f"{config.name}: texts of {max_tokens} tokens, wanted at most {MAX_TOKENS}; set "
            f"max_seq_length in {checkpoint.settings}."
        )
    if max_tokens < 3:
        raise BundleError(f"{config.name}: texts of {max_tokens} tokens, wanted 3 or more.")
    check_width(config, "q, k and v", 3 * hidden_size)
    check_hidden(config, max_tokens, layers, hidden_size)
    eps = family.fixed.get("layer_norm_eps")
    return BertConfig(
        model_type=model_type,
        hidden_size=hidden_size,
        num_hidden_layers=layers,
        num_attention_heads=integer("num_attention_heads"),
        intermediate_size=integer("intermediate_size", MAX_WIDTH),
        layer_norm_eps=config.number("layer_norm_eps", below=1) if eps is None else eps,
        vocab_size=integer("vocab_size"),
        max_position_embeddings=max_position_embeddings,
        type_vocab_size=integer("type_vocab_size") if family.token_types else 1,
        pad_token_id=pad_token_id,
        hidden_act=config.choice(family.key("hidden_act"), tuple(EPILOGUES)),
        pooling=checkpoint.pooling,
        normalize="Normalize" in kinds,
        max_tokens=max_tokens,
    )


def _check_heads(config: JsonFile, family: BertFamily) -> None:
    key, width_key = family.key("num_attention_heads"), family.key("hidden_size")
    heads, width = config.integer(key, maximum=MAX_HEADS), config.integer(width_key)
    if width % heads or width // heads % 2:
        raise config.error(
            key,
            f"heads of an even width that fill {width_key} {width}",
            "the array moves pairs of elements",
        )
