"""Held-out loss over packed rows, and an answer to a prompt: what a run shows before and after."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.distributed as dist

from pronghorn.data.batch import Collator
from pronghorn.data.control_tokens import ControlTokens, Rule
from pronghorn.data.packed_rows import PackedRows
from pronghorn.data.reasoning import Reasoning, said
from pronghorn.data.rows import Conversation, Message
from pronghorn.data.template import render, without_reasoning
from pronghorn.device import processes
from pronghorn.errors import DataError
from pronghorn.export.engines.transformers import continued
from pronghorn.families.generic import text_config
from pronghorn.models.families import base_causal_lm, has_experts
from pronghorn.models.passes import in_evaluation
from pronghorn.parallel.sharded import sharded


@torch.no_grad()
def heldout_loss(model: Any, rows: PackedRows, collator: Collator, track: Any = None) -> float:
    """Return the mean cross-entropy in nats over every supervised token of the rows.

    Ranks share the rows and all get the same mean. `track` wraps this rank's iterable, to show progress.
    """
    # TRL switches experts' auxiliary loss on in the config: it is not part of this.
    alone = {"output_router_logits": False} if has_experts(base_causal_lm(model).config) else {}
    total = torch.zeros(2, dtype=torch.float64, device=model.device)  # nats, labels
    own_rows = _share(len(rows))
    with in_evaluation(model):
        for index, counts in own_rows if track is None else track(own_rows):
            batch = {name: value.to(model.device) for name, value in collator([rows[index]]).items()}
            n = batch["packed"].n_labels
            loss = model(**batch, **alone).loss.double() * n
            if counts:
                total += torch.stack([loss, torch.full_like(loss, n)])
    if processes() > 1:
        dist.all_reduce(total)
    return (total[0] / total[1].clamp(min=1)).item()


UNTRAINED = 3.0
"""Nats by which a sound model may be worse than guessing: one with random weights, whose width spreads its logits, or a
tiny one on text of another kind."""


def worse_than_guessing(loss: float | None, model: Any) -> str | None:
    """Say that a loss before training is far above that of giving every token the same probability, if it is: text of
    any kind is likelier than that to a model that is loaded as it was trained."""
    guessing = math.log(text_config(base_causal_lm(model).config).vocab_size)
    if loss is None or not loss > guessing + UNTRAINED:
        return None
    return (
        f"The held-out loss {loss:.2f} is far above that of guessing, {guessing:.2f}: tokenizer, chat template, "
        "config.json and weights may not be of one model, or this text is of a kind that it never saw"
    )


def _share(count: int) -> list[tuple[int, bool]]:
    """Return this rank's rows and whether each counts. All ranks get equally many: sharded
    models communicate in a forward."""
    ranks = processes()
    rank = dist.get_rank() if ranks > 1 else 0
    own = range(rank, count, ranks)
    return [(index, True) for index in own] + [(0, False)] * (-(-count // ranks) - len(own))


def answer(
    model: Any,
    tokenizer: Any,
    turns: list[dict[str, str]],
    max_new_tokens: int,
    system: str | None = None,
    temperature: float = 0.0,
    control_tokens: Rule = "escape",
    reasons: bool = True,
) -> str:
    """Generate the answer to the last of a conversation's turns, through the chat template if there is one, as in
    training; at temperature 0 the greedy one.

    Args:
        control_tokens: as `data.control_tokens`. Where the data were refused for them, they are escaped: the training
            saw none of either kind, and ordinary text ends no turn.
        reasons: whether reasoning that the template opens is left to the model; else it is left empty, as turns
            without any are trained.
    Raises:
        DataError: the template can't render the conversation, or it leaves no position of the model for an answer, or
            the prompt has no token.
    """
    if tokenizer.chat_template:
        text, ids = _prompt(tokenizer, turns, system, control_tokens, reasons)
    else:  # trained on prompts and completions as they stand: each question is one by itself
        text = turns[-1]["content"]
        ids = list(tokenizer(text, verbose=False)["input_ids"])
        if len(ids) > 1 and ids[-1] == tokenizer.eos_token_id:  # one alone may be BOS, too
            del ids[-1]  # training had none there
    if not ids:
        raise DataError("an empty prompt, and a tokenizer that writes no BOS before it", "write something")
    used, positions = len(ids), getattr(model.config, "max_position_embeddings", None)
    room = max_new_tokens if positions is None else positions - used
    if room < 1:
        raise DataError(
            f"the conversation has {used} tokens, and the model {positions} positions",
            "ask something shorter, or begin again (in a chat with /reset)",
        )
    shared = sharded(base_causal_lm(model)) is not None  # then a process whose answer ends goes on for the others
    drawn = {"do_sample": True, "temperature": temperature} if temperature else {"do_sample": False}
    with in_evaluation(model):
        ids = continued(model, tokenizer, ids, min(max_new_tokens, room), use_cache=True, synced_gpus=shared, **drawn)
    return said(tokenizer, ids, text)


def _prompt(
    tokenizer: Any, turns: list[dict[str, str]], system: str | None, rule: Rule, reasons: bool
) -> tuple[str, list[int]]:
    """Render a conversation up to its answer and tokenise it, as training did."""
    first = [] if system is None else [Message("system", system)]
    messages = (*first, *(Message(turn["role"], turn["content"]) for turn in turns))
    row = Conversation(messages, path="the prompt", line=1)
    control = ControlTokens(tokenizer) if rule != "allow" and tokenizer.is_fast else None
    if control is not None and control.held(row) is None:
        control = None
    row = Reasoning(tokenizer).remembered(row if control is None else control.escape(row))
    if reasons:
        text = render(row.messages, [], tokenizer, "the prompt", answer=True)
    else:
        text = without_reasoning(row.messages, tokenizer, "the prompt")
    if control is not None:
        return text, control.encode(text, "the prompt").ids
    return text, list(tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])
