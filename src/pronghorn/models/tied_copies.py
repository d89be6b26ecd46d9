"""Embeddings and head that are one tensor, in the copies that PEFT makes of both to train them."""

from __future__ import annotations

from typing import Any


def tie_copies(adapted: Any, config: Any) -> None:
    """Tie the trained copies of embeddings and head where a PEFT configuration asks for it: PEFT makes two of weights
    that have no memory."""
    base = adapted.get_base_model()
    embeddings, head = base.get_input_embeddings(), base.get_output_embeddings()
    if config.ensure_weight_tying and embeddings.weight.is_meta:
        for name, copy in getattr(embeddings, "modules_to_save", {}).items():
            head.modules_to_save[name].weight = copy.weight
