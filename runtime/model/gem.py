"""GEM: tables' outputs, histories and dense features -> interaction -> one logit a task (docs/model.md).

The embedding tables are not part of this module: they are sharded by themselves (`runtime.embedding`) and hand their outputs in.

Shape legend: B samples, T events of a sequence, C tables of a group.
"""
from __future__ import annotations

import torch
from torch import Tensor, nn

from costmodel.model import Model
from runtime.batch import Batch
from runtime.model.mlp import MLP, Heads
from runtime.model.registry import build_block
from runtime.model.sequence import SequenceEncoder

__all__ = ["GEM", "build_block"]


class GEM(nn.Module):
    """The dense part of `model`. `forward(embeddings, batch)` -> logits `(B, num_heads)`.

    embeddings: table group name -> `(C, B, dim)` for pooled groups, `(C, T, dim)` for those of a sequence. Features enter the interaction in the
    order of the model file: pooled tables, summaries, bottom.
    """

    def __init__(self, model: Model) -> None:
        super().__init__()
        self.model = model
        self.sequences = nn.ModuleList(
            SequenceEncoder(model.sequence_width(s.name), model.dim, s.layers) for s in model.sequences)
        self.bottom = MLP(model.num_dense_features, model.bottom_hidden) if model.num_dense_features else None
        if model.interaction_layers:
            kinds = ", ".join(layer.kind for layer in model.interaction_layers)
            raise ValueError(f"interaction_layers: {kinds} not executable; the runtime has interaction_hidden (kind mlp) only")
        self.interaction = MLP(model.interaction_width, model.interaction_hidden)
        width = model.interaction_hidden[-1] if model.interaction_hidden else model.interaction_width
        self.heads = Heads(width, [head.hidden for head in model.heads])

    def forward(self, embeddings: dict[str, Tensor], batch: Batch) -> Tensor:
        features = [t for table in self.model.tables if table.pooling != "sequence" for t in embeddings[table.name].unbind(0)]
        for spec, encoder in zip(self.model.sequences, self.sequences):
            parts = [t for table in self.model.tables if table.sequence == spec.name for t in embeddings[table.name].unbind(0)]
            events = parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)
            features.append(encoder(events, batch.sequence_offsets[spec.name], batch.max_lengths[spec.name]))
        if self.bottom is not None:
            features.append(self.bottom(batch.dense))
        features = [f.to(features[-1].dtype) for f in features]
        return self.heads(self.interaction(torch.cat(features, dim=1)))

    def regions(self) -> dict[str, list[tuple[nn.Module, str]]]:
        """Region name (docs/model.md) -> its blocks in order, as (parent module, attribute or index) so that a block can be wrapped in place."""
        regions: dict[str, list[tuple[nn.Module, str]]] = {}
        for spec, encoder in zip(self.model.sequences, self.sequences):
            regions[f"{spec.name}.input"] = [(encoder, "input")]
            for i, group in enumerate(encoder.groups):
                regions[f"{spec.name}.{i}"] = [(group, str(j)) for j in range(len(group))]
            regions[f"{spec.name}.summary"] = [(encoder, "summary")]
        if self.bottom is not None:
            regions["bottom"] = [(self, "bottom")]
        regions["interaction"] = [(self, "interaction")]
        regions["heads"] = [(self, "heads")]
        return regions
