"""What a BERT checkpoint's configuration says, and what of it this engine does not do."""

from __future__ import annotations

from dataclasses import dataclass

from ..errors import BundleError
from .checkpoint import Checkpoint
from .geometry import Epilogue
from .jsonfile import JsonFile

MODEL_TYPE = "bert"
MAX_TOKENS = 512  # the largest attention bucket

EPILOGUES = {
    "gelu": Epilogue.GELU_ERF,
    "gelu_new": Epilogue.GELU_TANH,
    "gelu_pytorch_tanh": Epilogue.GELU_TANH,
}


@dataclass(frozen=True, slots=True)
class BertConfig:
    """A checked BERT configuration: HF's config keys, then what the pipeline around it adds."""

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
    config.choice("model_type", (MODEL_TYPE,))
    config.choice("position_embedding_type", ("absolute",), default="absolute")
    for key in ("is_decoder", "add_cross_attention"):
        if config.flag(key, False):
            raise config.error(key, "false", "this engine runs encoders only")
    if config.values.get("pruned_heads"):
        raise config.error("pruned_heads", "none", "this engine runs whole layers only")
    kinds = [module.kind for module in checkpoint.modules]
    if kinds not in ([], ["Normalize"]):
        raise BundleError(
            f"modules.json: {', '.join(kinds)} after Pooling, wanted Normalize or nothing; this "
            "exporter does no other module for a BERT."
        )

    hidden_size = config.integer("hidden_size")
    max_position_embeddings = config.integer("max_position_embeddings")
    _check_heads(config, hidden_size)
    if checkpoint.pooled_width not in (None, hidden_size):
        raise BundleError(
            f"1_Pooling/config.json: word_embedding_dimension {checkpoint.pooled_width}, wanted "
            f"hidden_size {hidden_size} of {config.name}; correct the file."
        )
    max_tokens = checkpoint.max_tokens(max_position_embeddings)
    if max_tokens > MAX_TOKENS:
        raise BundleError(
            f"{config.name}: texts of {max_tokens} tokens, wanted at most {MAX_TOKENS}; set "
            "max_seq_length in sentence_bert_config.json."
        )
    if max_tokens < 3:
        raise BundleError(f"{config.name}: texts of {max_tokens} tokens, wanted 3 or more.")
    return BertConfig(
        hidden_size=hidden_size,
        num_hidden_layers=config.integer("num_hidden_layers"),
        num_attention_heads=config.integer("num_attention_heads"),
        intermediate_size=config.integer("intermediate_size"),
        layer_norm_eps=config.number("layer_norm_eps"),
        vocab_size=config.integer("vocab_size"),
        max_position_embeddings=max_position_embeddings,
        type_vocab_size=config.integer("type_vocab_size"),
        pad_token_id=config.integer("pad_token_id", default=0, minimum=0),
        hidden_act=config.choice("hidden_act", tuple(EPILOGUES)),
        pooling=checkpoint.pooling,
        normalize="Normalize" in kinds,
        max_tokens=max_tokens,
    )


def _check_heads(config: JsonFile, hidden_size: int) -> None:
    heads = config.integer("num_attention_heads")
    if hidden_size % heads or hidden_size // heads % 2:
        raise config.error(
            "num_attention_heads",
            f"heads of an even width that fill hidden_size {hidden_size}",
            "the array moves pairs of elements",
        )
