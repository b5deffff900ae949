"""DCNv2 cross layers over the concatenated features (docs/model.md, section 1)."""
from __future__ import annotations

from costmodel.blocks.base import CHEAP, INPUT, MATRIX, BatchShape, Saved, activation_dtype, linear_parameters, parameter
from costmodel.blocks.interaction import InteractionBlock
from costmodel.ops import Op, elementwise, linear


class DcnCross(InteractionBlock):
    """`layers` low-rank cross layers of DCN v2 (arXiv 2008.13535, equation 2 of section 4.1.1) as one block, for each of them reads the first input:

        x_(l+1) = x_0 * (U_l (V_l x_l) + b_l) + x_l        x: (B, n d) the flattened tokens, V: n d -> `rank` without bias, U: `rank` -> n d
    """

    kind = "dcn_cross"
    uses = ("options",)
    options = ("layers", "rank")

    @property
    def num_outputs(self) -> int:
        return self.num_tokens

    @property
    def flat(self) -> int:
        """n d, the width of all tokens."""
        return self.num_tokens * self.feature_dim

    @property
    def parameters(self) -> tuple[tuple[str, tuple[int, ...]], ...]:
        rank = self.option("rank")
        return tuple(p for i in range(self.option("layers"))
                     for p in (*parameter(f"down.{i}.weight", rank, self.flat), *linear_parameters(f"up.{i}", rank, self.flat)))

    def forward(self, batch: BatchShape, precision: str = "fp32") -> tuple[Op, ...]:
        rows, low, flat, rank = batch.samples, activation_dtype(precision), self.flat, self.option("rank")
        layer = (linear(rows, flat, rank, precision), linear(rows, rank, flat, precision), elementwise("mul", rows, flat, low),
                 elementwise("add", rows, flat, low))
        return (*self.concat(rows), *layer * self.option("layers"))

    def saved_tensors(self, batch: BatchShape) -> tuple[Saved, ...]:
        rows, flat, rank, count = batch.samples, self.flat, self.option("rank"), self.option("layers")
        return (Saved("input", rows * flat, INPUT, rows=rows),
                *(Saved(f"down.{i}", rows * rank, MATRIX, rows=rows) for i in range(count)),
                *(Saved(f"up.{i}", rows * flat, MATRIX, rows=rows) for i in range(count)),
                *(Saved(f"x.{i}", rows * flat, CHEAP, rows=rows) for i in range(1, count)))
