"""What BERT's relatives call its parts, and the little that they compute differently.

The bundle, the forward and the float32 reference use BERT's own names; only reading a checkpoint
needs the table below.

Source: the configuration and modelling files of transformers, one pair a model_type.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

_NO_HEADS = ("pooler.", "embeddings.position_ids")  # a table of 0, 1, 2, ... old versions saved
_ENCODERS_ONLY = "this engine runs encoders only"


@dataclass(frozen=True, slots=True)
class BertFamily:
    """A model_type that is BERT by other names.

    prefix: what a checkpoint with a head puts before its tensors' names
    ignored: how the names of tensors begin that no embedding needs
    keys: BERT's config key -> this family's, where they differ
    fixed: BERT's config keys that this family gives no choice in
    names: a part of BERT's tensor names -> this family's, replaced in this order
    refused: flags of config.json that must not be set -> why
    pad_token_id: what config.json means by leaving it out
    counts_from_pad: positions begin at pad_token_id + 1 and leave padding uncounted
    token_types: whether there is an embedding of token types
    """

    prefix: str
    ignored: tuple[str, ...]
    keys: Mapping[str, str] = field(default_factory=dict)
    fixed: Mapping[str, float] = field(default_factory=dict)
    names: Mapping[str, str] = field(default_factory=dict)
    refused: Mapping[str, str] = field(
        default_factory=lambda: dict.fromkeys(("is_decoder", "add_cross_attention"), _ENCODERS_ONLY)
    )
    pad_token_id: int = 0
    counts_from_pad: bool = False
    token_types: bool = True

    def key(self, bert_key: str) -> str:
        """This family's spelling of BERT's config key."""
        return self.keys.get(bert_key, bert_key)

    def name(self, bert_name: str) -> str:
        """This family's name of BERT's tensor."""
        for bert, own in self.names.items():
            bert_name = bert_name.replace(bert, own)
        return bert_name


_ROBERTA = BertFamily(
    prefix="roberta.",
    ignored=(*_NO_HEADS, "lm_head."),
    pad_token_id=1,
    counts_from_pad=True,
)

FAMILIES: dict[str, BertFamily] = {
    "bert": BertFamily(prefix="bert.", ignored=(*_NO_HEADS, "cls.")),
    "roberta": _ROBERTA,
    "xlm-roberta": _ROBERTA,
    "distilbert": BertFamily(
        prefix="distilbert.",
        ignored=(*_NO_HEADS, "vocab_transform.", "vocab_layer_norm.", "vocab_projector."),
        keys={
            "hidden_size": "dim",
            "num_hidden_layers": "n_layers",
            "num_attention_heads": "n_heads",
            "intermediate_size": "hidden_dim",
            "hidden_act": "activation",
        },
        fixed={"layer_norm_eps": 1e-12},
        names={
            "encoder.layer": "transformer.layer",
            "attention.self.query": "attention.q_lin",
            "attention.self.key": "attention.k_lin",
            "attention.self.value": "attention.v_lin",
            "attention.output.dense": "attention.out_lin",
            "attention.output.LayerNorm": "sa_layer_norm",
            "intermediate.dense": "ffn.lin1",
            "output.dense": "ffn.lin2",
            "output.LayerNorm": "output_layer_norm",
        },
        refused={"sinusoidal_pos_embds": "this exporter reads a learned table of positions only"},
        token_types=False,
    ),
}
