"""Count the bytes that a layer's mixer keeps for the backward, and the expert that all tokens go through."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pronghorn.families.layer_spec import AttentionSpec, BlockSpec, ExpertsSpec, GatedDeltaSpec

if TYPE_CHECKING:
    from pronghorn.memory.estimate import TrainSetup


def mixer_bytes(block: BlockSpec, setup: TrainSetup) -> int:
    """Count q·k·v with gates, attention's output and log-sum-exp; or what the products of a gated delta net left, the
    rule's output, and its states."""
    t, b = setup.tokens, setup.itemsize
    if isinstance(block, AttentionSpec):
        return t * (b * (block.query + block.projected) + 4 * block.heads)
    if isinstance(block, GatedDeltaSpec):
        return t * b * (block.convolved + 2 * block.values + 2 * block.value_heads) + rule_bytes(block, setup)
    return 0


def rule_bytes(block: GatedDeltaSpec, setup: TrainSetup) -> int:
    """Count what the gated delta rule's kernels keep: w, N, the inverse and decays' sums of each value head, one over
    the lengths of q and k, and the states at chunks' starts."""
    t, b, chunk = setup.tokens, setup.itemsize, 64
    token = block.value_heads * (b * (block.key_dim + block.value_dim + chunk) + 4) + 8 * block.key_heads
    chunks = t // chunk + 16 * -(-t // (16 * setup.documents))  # with room for documents by buckets of 16
    return t * token + chunks * block.value_heads * block.key_dim * block.value_dim * b


def shared_bytes(experts: ExpertsSpec, hidden: int, setup: TrainSetup) -> int:
    """Count what transformers and PEFT keep of a token in the expert that all go through: gate, its activation, up, the
    result and its gate; and what adapters are given, in 16 bits a float32 copy each."""
    b, (gate_up, (down,)) = setup.itemsize, experts.groups
    ranks = sum(setup.rank(linear.path) for linear in (*gate_up, down))
    token = b * (3 * experts.shared + (hidden + 1) * experts.gated_shared) + (4 - b) * ranks
    if setup.method == "full":
        return token + b * experts.shared
    inputs = sum(linear.inputs for linear in gate_up if setup.rank(linear.path)) if b < 4 else 0
    return token + 4 * (inputs + (down.inputs if setup.rank(down.path) else 0))
