"""Tokens a model didn't have: put into its tokenizer and embeddings, and trained there (PEFT's trainable tokens)."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import torch

from pronghorn.errors import ConfigError
from pronghorn.models.families import base_causal_lm
from pronghorn.models.lora import whole_modules
from pronghorn.models.reach import end_names


def add_tokens(tokenizer: Any, tokens: Sequence[str], special: Collection[str] = ()) -> None:
    """Make each of `tokens` one token of the tokenizer, an ordinary one: it may stand in what the model learns to say.
    Those in `special` become special tokens: a chat template needs them as such.

    Raises ConfigError for one that is empty, named twice, or known already.
    """
    from tokenizers import AddedToken

    known = tokenizer.get_vocab()
    for index, token in enumerate(tokens):
        if not token.strip() or token in known or token in tokens[:index]:
            what = "is empty" if not token.strip() else "is a token already" if token in known else "is named twice"
            raise ConfigError(
                f"adapter.new_tokens: {token!r} {what}",
                "name tokens that the tokenizer doesn't have, each once",
            )
    tokenizer.add_tokens([AddedToken(token, normalized=False, special=token in special) for token in tokens])


@torch.no_grad()
def grow_embeddings(
    model: Any, tokenizer: Any, tokens: Sequence[str] = (), random_state: int = 3407, exactly: int | None = None
) -> None:
    """Give embeddings and head a row for every token. New rows are drawn around the mean of the old ones, the same each
    time. Models often have rows to spare, of zeros or noise: those that `tokens` take become the mean.
    `exactly` is how many rows there shall be instead, more or fewer: as many as saved weights have.

    The global generators are left as they were.
    """
    base = base_causal_lm(model)
    rows = base.get_input_embeddings().weight.shape[0]
    wanted = max(len(tokenizer), rows) if exactly is None else exactly
    if wanted != rows:
        with torch.random.fork_rng(devices=[base.device] if base.device.type == "cuda" else []):
            torch.manual_seed(random_state)
            base.resize_token_embeddings(wanted)
    ids = [int(i) for i in tokenizer.convert_tokens_to_ids(list(tokens))]
    spare = [i for i in ids if i < rows]
    for layer in (base.get_input_embeddings(), base.get_output_embeddings()) if spare else ():
        layer.weight[spare] = layer.weight[: min(ids)].float().mean(0).to(layer.weight.dtype)


def trainable_tokens(
    model: Any, tokenizer: Any, tokens: Sequence[str], trained_whole: Sequence[str]
) -> dict[str, list[int]] | None:
    """Return PEFT's `trainable_token_indices` for `tokens`: their rows of the embeddings and of a head of its own.

    What is `trained_whole` (modules_to_save) is left out.
    """
    if not tokens:
        return None
    whole = {name.rsplit(".", 1)[-1] for name in whole_modules(model, trained_whole)}
    ids = [int(i) for i in tokenizer.convert_tokens_to_ids(list(tokens))]
    base = base_causal_lm(model)
    embeddings, head = end_names(base)
    ends = [embeddings]
    if not getattr(base.config, "tie_word_embeddings", False):
        ends.append(head)
    elif head in whole:
        ends = []
    found = {end: ids for end in ends if end not in whole}
    return found or None
