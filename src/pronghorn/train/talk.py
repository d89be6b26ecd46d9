"""Talking to what a run trained, beside what it began from: each side with its own conversation."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from pronghorn.config import Recipe
from pronghorn.errors import ConfigError, DataError
from pronghorn.models.load import default_device, find_model, resolve_dtype
from pronghorn.train.record import RunRecord

SIDES = ("base", "trained")


@dataclass
class Talk:
    """Models and conversations of both sides. With an adapter one model serves both; after full fine-tuning two do."""

    models: dict[str, Any]
    tokenizer: Any
    system: str | None = None
    max_new_tokens: int = 256
    temperature: float = 0.0
    """0 is greedy."""
    histories: dict[str, list[dict[str, str]]] = field(default_factory=lambda: {side: [] for side in SIDES})

    def reset(self) -> None:
        """Forget what was said."""
        self.histories = {side: [] for side in SIDES}

    def answers(self, text: str) -> Iterator[tuple[str, str]]:
        """(side, answer) of each side to the user's `text`, which both remember."""
        for side in SIDES:
            history = self.histories[side]
            history.append({"role": "user", "content": text})
            answer = self._answer(side, history)
            history.append({"role": "assistant", "content": answer})
            yield side, answer

    @torch.no_grad()
    def _answer(self, side: str, history: list[dict[str, str]]) -> str:
        model = self.models[side]
        if self.tokenizer.chat_template:
            system = [] if self.system is None else [{"role": "system", "content": self.system}]
            prompt = self.tokenizer.apply_chat_template([*system, *history], tokenize=False, add_generation_prompt=True)
        else:  # trained on prompts and completions as they stand: each question is one by itself
            prompt = history[-1]["content"]
        encoded = self.tokenizer(prompt, return_tensors="pt", add_special_tokens=not self.tokenizer.chat_template)
        sampling = {"do_sample": True, "temperature": self.temperature} if self.temperature else {"do_sample": False}
        pad = self.tokenizer.pad_token_id
        with self._side(side, model):
            generated = model.generate(
                **encoded.to(model.device),
                max_new_tokens=self.max_new_tokens,
                pad_token_id=self.tokenizer.eos_token_id if pad is None else pad,
                **sampling,
            )
        return self.tokenizer.decode(generated[0, encoded["input_ids"].shape[1] :], skip_special_tokens=True).strip()

    @contextmanager
    def _side(self, side: str, model: Any) -> Iterator[None]:
        off = side == "base" and hasattr(model, "disable_adapter")
        with model.disable_adapter() if off else nullcontext():
            yield


def load_talk(folder: Path, **options: Any) -> Talk:
    """Load what the run in `folder` trained and what it began from; `options` are Talk's.

    Raises:
        ConfigError, DataError: no run, one that isn't finished, or a base model that is gone.
    """
    if not folder.is_dir():
        raise ConfigError(f"{folder} is no folder", "give the output folder of a finished run")
    if not (folder / "run.json").exists() and (folder / "journal.json").exists():
        raise ConfigError(
            f"the run in {folder} is not finished", "run its `pronghorn train` command again to finish it"
        )
    record = RunRecord.read(folder)
    recipe = Recipe.model_validate(record.recipe)
    device = default_device()
    dtype = resolve_dtype(recipe.precision.dtype, device)
    trained = folder / ("adapter" if recipe.adapter.method == "lora" else "model")
    if not trained.is_dir():
        raise DataError(f"{trained} is not there", "run the recipe again, or restore the folder")

    def load(name: str | Path) -> tuple[Any, Any]:
        found = find_model(
            name,
            max_seq_length=recipe.model.max_seq_length,
            load_in_4bit=recipe.model.load_in_4bit,
            trust_remote_code=recipe.model.trust_remote_code,
        )
        return found.model(dtype, device).eval(), found.tokenizer()

    model, tokenizer = load(trained)
    base = model if recipe.adapter.method == "lora" else load(recipe.model.name)[0]
    options.setdefault("system", recipe.data.system_prompt)
    return Talk({"base": base, "trained": model}, tokenizer, **options)
