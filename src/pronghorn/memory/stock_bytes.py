"""Count what transformers' and PEFT's layers keep between forward and backward, and what DoRA needs for a moment."""

from __future__ import annotations

from pronghorn.families.layer_spec import LayerSpec, Linear
from pronghorn.memory.workload import TrainSetup


def stock_bytes(layer: LayerSpec, setup: TrainSetup, width: int) -> int:
    """Count what transformers and PEFT keep: float32 in norms, and what products are given where that is trained.

    Args:
        width: of a token's activation in the MLP.
    """
    b, attention, full = setup.itemsize, layer.attention, setup.method == "full"
    assert attention is not None
    q, kv, heads = attention.query, attention.key_value, attention.heads + attention.kv_heads
    # with a mask, whose row is kept, keys and values are repeated for all heads; of a single head all see the same
    # memory, but for keys that autocast makes 16 bits of
    copied = 2 if attention.kv_heads > 1 else setup.narrows
    masked = copied * (q - kv) + setup.tokens // setup.padded if setup.padded else 0
    means = {"head": heads, "all heads": 2}  # one for each that a norm of queries or keys is taken over
    # a trained norm's result before its weight, too; it is rounded then, but in Olmo and Gemma later
    rounds = not layer.norms_after
    token = layer.norms * (layer.hidden * (4 + full * (setup.stream_bytes if rounds else 4)) + 4)
    result = b if attention.head_norms == "head" and rounds else 4
    token += (4 + result * full) * (q + kv) + 4 * means[attention.head_norms] if attention.head_norms else 0
    repeats = setup.padded and 1 < attention.kv_heads < attention.heads
    if len(attention.groups[0]) == 1 and not repeats:  # values are columns of one product, which they keep
        token += b * (q + kv)
    token += b * (2 * q + 2 * kv + masked) + 4 * attention.heads + 3 * b * width
    inputs, rest = _inputs(layer, setup), 0
    if full:
        rest = b * layer.linear_weights * setup.narrows
    else:
        adapted = [linear for linear in layer.linears if setup.rank(linear.path)]
        inputs += 4 * sum(setup.rank(linear.path) for linear in adapted)
        if setup.dora:  # what it multiplies by the magnitudes: the base's result, and the adapter's in float32
            inputs += sum((4 + (4 if setup.dropout else b)) * linear.out for linear in adapted)
            rest = sum(12 * linear.out for linear in adapted)
            rest += 4 * sum(linear.weights for linear in adapted) if setup.dropout and b < 4 else 0
    return setup.tokens * (token + inputs) + rest


def _inputs(layer: LayerSpec, setup: TrainSetup) -> int:
    """Count a token's inputs of products that are trained: where autocast rounds them each product has a copy, and so
    has each adapter, in float32, over 16 bits; else all of a group have one, and that of attention's last linear is its
    output. Dropout makes one for each adapter, with a byte an element for what it left."""
    b, attention, full = setup.itemsize, layer.attention, setup.method == "full"
    assert attention is not None
    counted = 0
    for group in layer.groups:
        trained = len(group) if full else sum(setup.rank(linear.path) > 0 for linear in group)
        is_there = group == attention.groups[-1]
        if setup.dropout and not full:
            counted += 5 * group[0].inputs * trained
        elif setup.narrows:
            counted += b * group[0].inputs * trained * (not is_there)
        elif b < 4 and not full:
            counted += 4 * group[0].inputs * trained
        else:
            counted += b * group[0].inputs * (trained > 0 and not is_there)
    return counted


def dora_bytes(layer: LayerSpec, setup: TrainSetup) -> int:
    """Count what comes and goes in one of DoRA's forwards: PEFT multiplies A and B by way of a unit matrix as wide as
    the input, and adds the product to a copy of the weight to take the norm."""
    return max((_dora_bytes(x) for x in layer.linears if setup.rank(x.path)), default=0) if setup.dora else 0


def _dora_bytes(linear: Linear) -> int:
    return 4 * (linear.inputs**2 + 4 * linear.weights)
