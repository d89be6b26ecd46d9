"""Prove on a loaded model of a generic family, before it trains unpacked, that padded batches mean what they say.

    causal   no logits change when the tokens that come later do: else a model would be trained to predict what it sees
    alone    a document's logits in a padded batch equal those of the document by itself
    trains   these logits have a gradient with respect to what is trained

A model that reads both ways fails the first, one that counts padding, or chooses tokens among it, the second.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from pronghorn.errors import UnsupportedError
from pronghorn.families.generic import routes
from pronghorn.layers.linears import products_dtype
from pronghorn.models.families import base_causal_lm, decoder_layers
from pronghorn.models.generic import PACKING
from pronghorn.models.passes import differs, in_evaluation, relative_error, short, undisturbed
from pronghorn.models.probe import TOLERANCE

LENGTHS = (9, 40)
"""Tokens of the two documents of the batch; the first is padded."""


def require_padded(model: Any) -> None:
    """Refuse to train an attached generic model on padded batches where these change what it computes.

    Takes five forward passes of at most 80 tokens; changes nothing.

    Raises:
        UnsupportedError: says what is wrong.
    """
    base = base_causal_lm(model)
    base.__dict__[PACKING].take(None)
    try:
        with undisturbed(base), in_evaluation(base), torch.no_grad():
            problem = _problem(base)
    except Exception as error:  # whatever a stranger's forward raises is why it can't be used
        problem = f"its forward fails on a padded batch ({type(error).__name__}: {short(error)})"
    if problem is not None:
        raise UnsupportedError(
            f"{base.config.model_type} can't be trained here: {problem}",
            "train a causal language model; of an encoder set is_decoder in its config.json if it was made to decode",
        )


def _problem(base: Any) -> str | None:
    """Say what is wrong with padded batches of this model, or None."""
    short, long = LENGTHS
    vocabulary = base.get_input_embeddings().weight.shape[0]
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(min(3, vocabulary - 1), vocabulary, (2, long), generator=generator, device="cpu").to(
        base.device
    )
    mask = torch.ones_like(ids)
    mask[0, short:] = 0
    exact = not routes(decoder_layers(base))
    tolerance = TOLERANCE[products_dtype(base.get_input_embeddings().weight)]

    def logits(tokens: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        out: Tensor = base(input_ids=tokens, attention_mask=attention_mask, use_cache=False).logits
        return out

    # causal
    changed = ids.clone()
    changed[:, -1] = torch.where(ids[:, -1] == vocabulary - 1, vocabulary - 2, vocabulary - 1)
    padded = logits(ids, mask)
    if differs(padded[1, :-1], logits(changed, mask)[1, :-1], tolerance, exact):
        return "a token sees one that comes after it, so that the model would be trained to predict what it reads"
    # trains
    with torch.enable_grad():
        if not logits(ids).requires_grad and any(parameter.requires_grad for parameter in base.parameters()):
            return "its forward passes no gradient on to what is trained"
    # alone
    for row, length in enumerate(LENGTHS):
        error = relative_error(padded[row, :length], logits(ids[row : row + 1, :length])[0])
        if error > tolerance:
            return (
                f"a document of {length} tokens has other logits in a padded batch than alone (relative error "
                f"{error:.1e}, tolerance {tolerance:.0e})"
            )
    return None
