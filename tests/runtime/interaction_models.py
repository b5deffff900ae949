"""Interaction and expert layers of every kind, small, and a model that has them all."""
from __future__ import annotations

import runtime_models as models

from costmodel import blocks as costs
from costmodel.blocks import InteractionBlock
from costmodel.model import LayerGroup, Model, Sequence
from runtime.model.registry import EXPERT_BLOCKS, INTERACTION_BLOCKS

TOKENS, FEATURE_DIM, DIM = 6, 16, 32
WUKONG = LayerGroup(kind="wukong", mlp_dim=24, options={"num_fm": 3, "num_linear": 2, "rank": 4, "mlp_layers": 2, "compressed": 2})
INTERFORMER = LayerGroup(kind="interformer", heads=2, head_dim=16, sequence="history", activation="gelu", divisor=2.0, num_queries=2,
                         options={"summary_tokens": 2, "recent": 2})
MOE = LayerGroup(kind="moe", num_experts=3, mlp_dim=24)
LAYERS: dict[str, tuple[LayerGroup, ...]] = {
    "wukong": (WUKONG, LayerGroup(kind="wukong", mlp_dim=24, options={"num_fm": 4, "num_linear": 2, "rank": 4, "mlp_layers": 3, "compressed": 1})),
    "interformer": (INTERFORMER, LayerGroup(kind="interformer", heads=1, head_dim=16, sequence="history", activation="silu", divisor=2.0, window=4,
                                            num_queries=1, causal=False, options={"summary_tokens": 3, "recent": 1})),
    "dcn_cross": (LayerGroup(kind="dcn_cross", options={"layers": 3, "rank": 5}), LayerGroup(kind="dcn_cross", options={"layers": 1, "rank": 8})),
    "moe": (MOE,),
}


def build(kind: str, layer: LayerGroup):
    """(module, cost class's block) of one layer."""
    if kind in EXPERT_BLOCKS:
        return EXPERT_BLOCKS[kind](DIM, layer), costs.EXPERT_BLOCKS[kind](layer, DIM)
    module = INTERACTION_BLOCKS[kind](TOKENS, FEATURE_DIM, DIM, layer)
    cost: InteractionBlock = costs.INTERACTION_BLOCKS[kind](layer, num_tokens=TOKENS, feature_dim=FEATURE_DIM, dim=DIM, first=False)
    assert cost.num_outputs == module.num_outputs
    return module, cost


def full_model(**changes) -> Model:
    """Every kind of layer in one small model, HSTU's with its bias: 88 concatenated features as 11 tokens of 8."""
    sequence_layers = (models.LAYERS["self_attention"][0], models.LAYERS["gdpa"][0], models.TIMED[0], models.LAYERS["block_attention"][0],
                       models.PYRAMID[1])
    values = {"sequences": (Sequence(name="history", layers=sequence_layers, summary=models.PMA, time_buckets=8),),
              "interaction_layers": (INTERFORMER, WUKONG, INTERFORMER, WUKONG), "feature_dim": 8, "expert_layers": (MOE,)}
    return models.model(**{**values, **changes})
