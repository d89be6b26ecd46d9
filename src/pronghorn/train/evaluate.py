"""Held-out loss over packed rows, and an answer to a prompt: what a run shows before and after."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from pronghorn.data.batch import Collator
from pronghorn.data.packed_rows import PackedRows


@torch.no_grad()
def heldout_loss(model: Any, rows: PackedRows, indices: Iterable[int], collator: Collator) -> float:
    """Mean cross-entropy in nats over every labelled token of the rows named by `indices`."""
    was_training = model.training
    model.eval()
    total, labels = torch.zeros((), dtype=torch.float64), 0
    try:
        for index in indices:
            batch = {name: value.to(model.device) for name, value in collator([rows[index]]).items()}
            n = batch["packed"].n_labels
            total += model(**batch).loss.double().cpu() * n
            labels += n
    finally:
        model.train(was_training)
    return (total / max(labels, 1)).item()


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
