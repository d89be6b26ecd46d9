"""A model in this process, run by transformers: the trained one, and what a merged folder holds."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor

from pronghorn.data.rows import Conversation
from pronghorn.data.template import render
from pronghorn.errors import DataError
from pronghorn.export.engine import Completion, Refused, Scored


class TransformersEngine:
    """A causal LM and its tokenizer, as an engine and as the reference of a comparison."""

    def __init__(self, model: Any, tokenizer: Any, name: str | None = None, base: Any = None) -> None:
        """Take a model; `base` is what its training began from, or the model itself where its adapter can be off."""
        import transformers

        self.model, self.tokenizer, self._base = model.eval(), tokenizer, base
        self.name = name or f"transformers {transformers.__version__}"
        self._rounded: Any = None
        """A copy in other numbers; False where there can't be one."""
        self.stops = frozenset(stop_tokens(model, tokenizer))
        self.positions: int | None = getattr(model.config, "max_position_embeddings", None)
        """The longest text, or None without a limit."""

    def tokenize(self, conversation: Conversation) -> list[int]:
        """Render a conversation as training did.

        Raises:
            Refused: the template refuses it, or leaves a part of it out.
        """
        try:
            text = render(conversation.messages, conversation.tools, self.tokenizer, conversation.source, answer=True)
        except DataError as error:
            raise Refused(error.problem, error.remedy) from error
        return list(self.tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])

    def distribution(self, token_ids: Sequence[int]) -> Tensor:
        """Return the log-probabilities [n - 1, vocabulary] of what follows each token but the last, on the CPU."""
        return _distribution(self.model, token_ids)

    def base_distribution(self, token_ids: Sequence[int]) -> Tensor | None:
        """Return the same of what training began from; None where that isn't at hand."""
        if self._base is None:
            return None
        with self.model.disable_adapter() if self._base is self.model else nullcontext():
            return _distribution(self._base, token_ids)

    def rounded_distribution(self, token_ids: Sequence[int]) -> Tensor | None:
        """Return the same of a copy in bfloat16, or in float32 of a model that has 16 bits: what rounding costs.

        None of a model that can't be cast (packed weights), or where no memory is left for a copy.
        """
        if self._rounded is None:
            other = torch.bfloat16 if self.model.dtype is torch.float32 else torch.float32
            try:
                self._rounded = copy.deepcopy(self.model).to(other)
            except (RuntimeError, ValueError, TypeError, MemoryError):
                self._rounded = False
        return _distribution(self._rounded, token_ids) if self._rounded else None

    def logprobs(self, token_ids: Sequence[int]) -> Mapping[int, Scored]:
        """Return what the model says of each token but the first."""
        firsts = (rows := self.distribution(token_ids)).argmax(-1).tolist()
        pairs = enumerate(zip(token_ids[1:], rows, firsts, strict=True), 1)
        return {index: Scored(token, row[token].item(), first) for index, (token, row, first) in pairs}

    def complete(self, token_ids: Sequence[int], max_tokens: int) -> Completion:
        """Continue a text greedily."""
        generated = continued(self.model, self.tokenizer, token_ids, max_tokens, do_sample=False)
        text = self.tokenizer.decode(generated, skip_special_tokens=True)
        return Completion(text, bool(generated) and generated[-1] in self.stops, tuple(generated), len(token_ids))

    def answer(self, conversation: Conversation, max_tokens: int) -> Completion:
        """Answer a conversation greedily."""
        return self.complete(self.tokenize(conversation), max_tokens)


@torch.no_grad()
def _distribution(model: Any, token_ids: Sequence[int]) -> Tensor:
    ids = torch.tensor([list(token_ids)[:-1]], device=model.device)
    return torch.log_softmax(model(input_ids=ids, use_cache=False).logits[0].float(), dim=-1).cpu()


@torch.no_grad()
def continued(model: Any, tokenizer: Any, ids: Sequence[int], most: int, **how: Any) -> list[int]:
    """Return at most so many tokens that a model writes behind a text's, up to one of `stop_tokens`.

    Args:
        how: further arguments of transformers' `generate`.
    """
    given = torch.tensor([list(ids)], device=model.device)
    ends, pad = stop_tokens(model, tokenizer), tokenizer.pad_token_id
    generated = model.generate(
        input_ids=given,
        attention_mask=torch.ones_like(given),
        max_new_tokens=most,
        eos_token_id=ends or None,
        pad_token_id=next(iter(ends), None) if pad is None else pad,
        **how,
    )
    return generated[0, len(ids) :].tolist()


def stop_tokens(model: Any, tokenizer: Any) -> list[int]:
    """Return the tokens that end an answer: the checkpoint's own and the tokenizer's, which is the chat template's."""
    own = model.generation_config.eos_token_id
    ends = [own] if isinstance(own, int) else list(own or [])
    return [*ends, *({tokenizer.eos_token_id} - {None, *ends})]
