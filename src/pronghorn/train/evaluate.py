"""Held-out loss over packed rows, and an answer to a prompt: what a run shows before and after."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from pronghorn.data.batch import Collator
from pronghorn.data.packed_rows import PackedRows
from pronghorn.device import processes
from pronghorn.models.families import base_causal_lm, has_experts


@torch.no_grad()
def heldout_loss(model: Any, rows: PackedRows, indices: Sequence[int], collator: Collator, track: Any = None) -> float:
    """Mean cross-entropy in nats over every labelled token of the rows named by `indices`.

    Ranks share the rows and all get the same mean. `track` wraps this rank's iterable, to show progress.
    """
    # TRL switches experts' auxiliary loss on in the config: it is no part of this.
    alone = {"output_router_logits": False} if has_experts(base_causal_lm(model).config) else {}
    was_training = model.training
    model.eval()
    total = torch.zeros(2, dtype=torch.float64, device=model.device)  # nats, labels
    mine = _share(indices)
    try:
        for index, counts in mine if track is None else track(mine):
            batch = {name: value.to(model.device) for name, value in collator([rows[index]]).items()}
            n = batch["packed"].n_labels
            loss = model(**batch, **alone).loss.double() * n
            if counts:
                total += torch.stack([loss, torch.full_like(loss, n)])
    finally:
        model.train(was_training)
    if processes() > 1:
        dist.all_reduce(total)
    return (total[0] / total[1].clamp(min=1)).item()


def _share(indices: Sequence[int]) -> list[tuple[int, bool]]:
    """This rank's rows and whether each counts. All ranks get equally many: sharded models communicate in a forward."""
    ranks = processes()
    rank = dist.get_rank() if ranks > 1 else 0
    each = -(-len(indices) // ranks)
    mine = list(indices)[rank::ranks]
    return [(index, True) for index in mine] + [(indices[0], False)] * (each - len(mine))


@torch.no_grad()
def answer(model: Any, tokenizer: Any, prompt: str, max_new_tokens: int, system_prompt: str | None = None) -> str:
    """The model's greedy answer to `prompt`, through the chat template if there is one, as in training."""
    if tokenizer.chat_template:
        chat = [] if system_prompt is None else [{"role": "system", "content": system_prompt}]
        chat.append({"role": "user", "content": prompt})
        text = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
    else:
        text = prompt
    encoded = tokenizer(text, return_tensors="pt", add_special_tokens=not tokenizer.chat_template).to(model.device)
    was_training = model.training
    model.eval()
    try:
        generated = model.generate(
            **encoded,
            max_new_tokens=max_new_tokens,
            do_sample=False,
            use_cache=True,
            pad_token_id=tokenizer.pad_token_id if tokenizer.pad_token_id is not None else tokenizer.eos_token_id,
        )
    finally:
        model.train(was_training)
    return tokenizer.decode(generated[0, encoded["input_ids"].shape[1] :], skip_special_tokens=True).strip()
