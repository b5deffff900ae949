"""GEM: tables' outputs, histories and dense features -> interaction -> experts -> one logit a task (docs/model.md).

The embedding tables are not part of this module: they are sharded by themselves (`runtime.embedding`) and hand their outputs in.

Shape legend: B samples, T events of a sequence, C tables of a group.
"""
from __future__ import annotations

import torch
from torch import Tensor, nn

from costmodel.model import Model
from costmodel.regions import num_reading, repeated
from costmodel.regions import regions as known_regions
from runtime.batch import Batch
from runtime.model.llama import NextEvent
from runtime.model.mlp import MLP, Heads
from runtime.model.registry import EXPERT_BLOCKS, INTERACTION_BLOCKS, build_block
from runtime.model.sequence import History, SequenceEncoder

__all__ = ["GEM", "build_block"]


class GEM(nn.Module):
    """The dense part of `model`. `forward(embeddings, batch)` -> logits `(B, num_heads)`; where a sequence predicts its next events, (logits, their
    summed loss).

    embeddings: table group name -> `(C, B, dim)` for pooled groups, `(C, T, dim)` for those of a sequence. Features enter the interaction in the
    order of the model file: pooled tables, summaries, bottom.
    """

    def __init__(self, model: Model) -> None:
        super().__init__()
        known_regions(model)  # refuses unknown kinds and fields by name
        self.model = model
        self.sequences = nn.ModuleList(
            SequenceEncoder(model.sequence_width(s.name), model.dim, s.layers, s.summary, s.time_buckets) for s in model.sequences)
        self.next = nn.ModuleDict({s.name: NextEvent(model.dim, model.table(s.next_event).rows) for s in model.sequences if s.next_event})
        self.bottom = MLP(model.num_dense_features, model.bottom_hidden) if model.num_dense_features else None
        self.interaction_layers, width = nn.ModuleList(), model.interaction_width
        for layer in repeated(model.interaction_layers):
            block = INTERACTION_BLOCKS[layer.kind](width // model.feature_dim, model.feature_dim, model.dim, layer)
            self.interaction_layers.append(block)
            width = block.num_outputs * model.feature_dim
        self.interaction = MLP(width, model.interaction_hidden)
        width = model.interaction_hidden[-1]
        self.experts = nn.ModuleList(EXPERT_BLOCKS[layer.kind](width, layer) for layer in repeated(model.expert_layers))
        self.heads = Heads(width, [head.hidden for head in model.heads])

    def forward(self, embeddings: dict[str, Tensor], batch: Batch) -> Tensor | tuple[Tensor, Tensor]:
        pooled = [embeddings[table.name] for table in self.model.tables if table.pooling != "sequence"]
        histories: dict[str, History] = {}
        summaries: list[Tensor] = []
        losses: list[Tensor] = []
        for spec, encoder in zip(self.model.sequences, self.sequences):
            groups = [embeddings[table.name] for table in self.model.tables if table.sequence == spec.name]
            events = groups[0].transpose(0, 1).flatten(1) if len(groups) == 1 else torch.cat([t for g in groups for t in g.unbind(0)], dim=1)
            histories[spec.name], summary = encoder(events, batch.sequence_offsets[spec.name], batch.max_lengths[spec.name],
                                                    batch.lengths[spec.name], batch.times.get(spec.name))
            summaries.append(summary)
            if spec.next_event:
                losses.append(self.next[spec.name](histories[spec.name].events, batch.ids[spec.next_event], batch.sequence_offsets[spec.name]))
        inputs = [*pooled, *summaries, *([] if self.bottom is None else [batch.dense])]
        if self.num_reading:
            x_BW = self._features(*inputs)
            inputs = [self._interact(x_BW.unflatten(1, (-1, self.model.feature_dim)), histories)]
        logits = self.over_samples(*inputs)
        return (logits, torch.stack(losses).sum()) if losses else logits

    @property
    def num_reading(self) -> int:
        """Interaction layers up to the last one that reads a history."""
        return num_reading(self.model)

    def over_samples(self, *inputs: Tensor) -> Tensor:
        """What has no more to do with events, `(B, num_heads)`. Inputs: pooled tables `(C, B, dim)`, summaries `(B, D)` and dense features; where
        interaction layers read histories, the feature tokens `(B, n, d)` behind the last of those."""
        if self.num_reading:
            x_Bnd, = inputs
        else:
            x_BW = self._features(*inputs)
            x_Bnd = x_BW.unflatten(1, (-1, self.model.feature_dim)) if self.interaction_layers else x_BW
        for block in self.interaction_layers[self.num_reading:]:
            x_Bnd = block(x_Bnd)
        x_BW = self.interaction(x_Bnd.flatten(1))
        for experts in self.experts:
            x_BW = experts(x_BW)
        return self.heads(x_BW)

    def _features(self, *inputs: Tensor) -> Tensor:
        """Pooled tables, summaries and dense features side by side, `(B, W)`."""
        # a group's C tables side by side, in one op: (C, B, dim) -> (B, C dim)
        features = [x.transpose(0, 1) if x.dim() == 3 else x for x in inputs]
        if self.bottom is not None:
            features[-1] = self.bottom(features[-1])
        return torch.cat([f.to(features[-1].dtype).flatten(1) for f in features], dim=1)

    def _interact(self, x_Bnd: Tensor, histories: dict[str, History]) -> Tensor:
        """The interaction layers over the features as tokens, up to the last one that reads a history."""
        for layer, block in zip(repeated(self.model.interaction_layers)[:self.num_reading], self.interaction_layers):
            if layer.sequence is None:
                x_Bnd = block(x_Bnd)
            else:
                history = histories[layer.sequence]
                x_Bnd, events = block(x_Bnd, *history)
                histories[layer.sequence] = history._replace(events=events)
        return x_Bnd

    def regions(self) -> dict[str, list[tuple[nn.Module, str]]]:
        """Region name (docs/model.md) -> its blocks in order, as (parent module, attribute or index) so that a block can be wrapped in place."""
        regions: dict[str, list[tuple[nn.Module, str]]] = {}
        for spec, encoder in zip(self.model.sequences, self.sequences):
            regions[f"{spec.name}.input"] = [(encoder, "input")]
            for i, group in enumerate(encoder.groups):
                regions[f"{spec.name}.{i}"] = [(group, str(j)) for j in range(len(group))]
            regions[f"{spec.name}.summary"] = [(encoder, "summary")]
            if spec.next_event:
                regions[f"{spec.name}.next"] = [(self.next, spec.name)]
        if self.bottom is not None:
            regions["bottom"] = [(self, "bottom")]
        regions |= {f"interaction.{i}": [(self.interaction_layers, str(i))] for i in range(len(self.interaction_layers))}
        regions["interaction"] = [(self, "interaction")]
        regions |= {f"experts.{i}": [(self.experts, str(i))] for i in range(len(self.experts))}
        regions["heads"] = [(self, "heads")]
        return regions
