"""What one model forward tells its layers: the batch, the dtypes, and what is computed once for all of them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from pronghorn.attention import explicit
from pronghorn.data.batch import PackedBatch
from pronghorn.families.spec import FamilySpec
from pronghorn.kernels.cast_copies import CastCopies
from pronghorn.layers.attention import AttentionBlock
from pronghorn.layers.block import Block
from pronghorn.layers.stock import StockBlock


@dataclass(frozen=True)
class LayerRun:
    """The blocks of one layer as the model is now."""

    family: FamilySpec
    blocks: list[Block | StockBlock]
    last: bool
    """Of the last layer only the rows that predict a label may be wanted."""

    def __deepcopy__(self, memo: dict[int, Any]) -> None:
        return None  # a copied layer has modules of its own, and builds anew

    @property
    def fused(self) -> bool:
        """Whether every block is computed here, experts aside."""
        return all(isinstance(block, Block) or block.reason is None for block in self.blocks)


@dataclass(eq=False)
class Step:
    """What one model forward tells all of its layers."""

    packed: PackedBatch
    stream: torch.dtype
    """Of the residual stream."""
    products: torch.dtype
    runs: dict[Any, LayerRun]
    """The blocks of each layer."""
    halved_rotary: bool
    narrow: bool
    """Nothing but the rows that predict a label is read of the last layer's output."""
    autocast: bool
    copies: CastCopies | None
    """The adapters' copies in the products' dtype; None once they are up to date."""
    _tables: dict[int, tuple[Any, Tensor, Tensor]] = field(default_factory=dict)
    _attention: dict[Any, explicit.Options] = field(default_factory=dict)

    def update_copies(self) -> None:
        """Copy all adapters in the products' dtype; by the first layer, and not again."""
        copies, self.copies = self.copies, None
        if copies is not None:
            with torch.inference_mode(False), torch.no_grad():
                copies.run()

    def rotary(self, tables: tuple[Tensor, Tensor], tokens: int) -> tuple[Tensor, Tensor]:
        """Return RoPE's cos and sin as [T, D_r]; computed once a forward for each pair of tables."""
        found = self._tables.get(id(tables[0]))
        if found is None:
            cos, sin = (x.flatten(0, -2).expand(tokens, -1) for x in tables)
            if self.halved_rotary:
                cos, sin = torch.cat([cos, cos], 1), torch.cat([sin, sin], 1)
            found = self._tables[id(tables[0])] = (tables, cos, sin)
        return found[1], found[2]

    def attention(self, block: AttentionBlock, device: torch.device) -> explicit.Options:
        """Choose how packed attention goes for a block; once a forward for each kind of block."""
        key = block.window, block.scale, block.heads.heads.dim, block.backend
        if key not in self._attention:
            query = torch.empty(0, block.heads.heads.dim, dtype=self.products, device=device)
            self._attention[key] = block.options(query, self.packed)
        return self._attention[key]
