"""Chats with what a run trained beside what it began from, with an export, and with a server."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pronghorn.data.control_tokens import Rule
from pronghorn.errors import ConfigError, DataError
from pronghorn.export.engines.openai import OpenAIServer
from pronghorn.loading.load import FoundModel, default_device, find_model, resolve_dtype
from pronghorn.loading.new_tokens import grow_embeddings
from pronghorn.records.finished import is_export, recipe_of
from pronghorn.records.record import RunRecord
from pronghorn.train.documents import find
from pronghorn.train.evaluate import answer

Turns = list[dict[str, str]]


@dataclass
class ChatSession:
    """Models and conversations of all sides: base and trained, or an export alone. With an adapter one model serves
    both; where weights of the base itself were trained, two do."""

    models: dict[str, Any]
    tokenizer: Any
    system: str | None = None
    max_new_tokens: int = 256
    temperature: float = 0.0
    """0 is greedy."""
    control_tokens: Rule = "escape"
    """What becomes of control tokens that a user types, as in the training."""
    reasons: bool = True
    """Whether models reason where the chat template opens that, as the training's turns did."""
    histories: dict[str, Turns] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """Forget what was said."""
        self.histories = {side: [] for side in self.models}

    def replies(self, text: str) -> Iterator[tuple[str, str]]:
        """Yield (side, reply) of each side to the user's `text`. Once all have replied all remember it; a turn that
        fails or is interrupted none does.

        Raises:
            DataError: the conversation leaves no position of the model for an answer.
        """
        turns = {}
        how = self.max_new_tokens, self.system, self.temperature, self.control_tokens, self.reasons
        for side, model in self.models.items():
            turns[side] = [{"role": "user", "content": text}]
            with self._side(side):
                reply = answer(model, self.tokenizer, [*self.histories[side], *turns[side]], *how)
            turns[side].append({"role": "assistant", "content": reply})
            yield side, reply
        for side, turn in turns.items():
            self.histories[side] += turn

    def _side(self, side: str) -> Any:
        """Return what switches the adapter off for the base's side where both share a model."""
        model = self.models[side]
        off = side == "base" and model is self.models.get("trained")
        return model.disable_adapter() if off else nullcontext()


@dataclass
class ServedChat:
    """A conversation with a server's model, which renders it itself."""

    server: OpenAIServer
    system: str | None = None
    max_new_tokens: int = 256
    temperature: float = 0.0
    history: Turns = field(default_factory=list)

    def reset(self) -> None:
        """Forget what was said."""
        self.history = []

    def pieces(self, text: str) -> Iterator[str]:
        """Yield the pieces of the reply to the user's `text` as they come. A turn that fails is not remembered, nor is
        reasoning, which is not part of an answer's text."""
        turns = [*self.history, {"role": "user", "content": text}]
        system = [{"role": "system", "content": self.system}] if self.system else []
        reply, thinking = "", False
        for thought, piece in self.server.stream([*system, *turns], self.max_new_tokens, self.temperature):
            thinking = thinking or bool(thought)
            yield f"{thought}\n\n{piece}" if thinking and piece else f"{thought}{piece}"
            thinking = thinking and not piece
            reply += piece
        self.history = [*turns, {"role": "assistant", "content": reply}]


def load_chat(folder: Path, *, trust_remote_code: bool = False, **options: Any) -> ChatSession:
    """Load what the run in `folder` trained and what it began from, or what was exported there: a merged folder, an
    adapter's (beside its base), a GGUF file.

    An adapter and its base share one copy of the base's weights. Where a run trained weights of the base itself (full
    fine-tuning, biases), the base is loaded a second time; both in the run's dtype take less than training did.

    Args:
        trust_remote_code: run Python code that comes with the checkpoint, if the run did: a run's folder may be
            anyone's, so it doesn't decide that by itself.
        options: ChatSession's; `system` is the recipe's if it is left out, and "" is none.
    Raises:
        ConfigError: no run, one that isn't finished, one that needs `trust_remote_code`, or a system prompt for a model
            without a chat template.
        DataError: weights or the base model are gone, or the run is of another version.
    """
    if is_export(folder):
        return _load_export(folder, trust_remote_code, **options)
    recipe = recipe_of(folder)
    code = f"imported {', '.join(recipe.model.plugins)}" if recipe.model.plugins else ""
    if recipe.model.trust_remote_code:
        code = f"ran Python code that came with {recipe.model.name}"
    if code and not trust_remote_code:
        raise ConfigError(f"the run in {folder} {code}", "allow it: --trust-remote-code")
    lora = recipe.adapter.method == "lora"
    path = folder / ("adapter" if lora else "model")
    if not path.is_dir():
        raise DataError(f"{path} is not there", "run the recipe again, or restore the folder")

    def found_there(name: str | Path) -> FoundModel:
        try:
            return find(recipe, name)
        except DataError as error:
            raise DataError(
                f"the run in {folder}, which began from {recipe.model.name}, can't be loaded: {error.problem}",
                f"{error.remedy}; relative paths count from the current folder",
            ) from error

    found = found_there(path)
    began = found.base or found_there(recipe.model.name)
    tokenizer = found.tokenizer()
    system = options.pop("system", recipe.data.system_prompt) or None
    if system is not None and not tokenizer.chat_template:
        raise ConfigError(f"a system prompt, but {recipe.model.name} has no chat template", "leave it out")
    device = default_device()
    dtype = resolve_dtype(recipe.precision.dtype, device)
    trained = base = found.model(dtype, device).eval()
    if not lora or trained.active_peft_config.bias != "none":  # the adapter off wouldn't give the base back
        base = began.model(dtype, device).eval()
        grow_embeddings(base, tokenizer)
    options.setdefault("control_tokens", recipe.data.control_tokens)
    options.setdefault("reasons", RunRecord.read(folder).packing.get("reasoning", True))
    return ChatSession({"base": base, "trained": trained}, tokenizer, system, **options)


def _load_export(path: Path, trust_remote_code: bool, **options: Any) -> ChatSession:
    """Load a model's folder or file by itself, an adapter's with its base beside it."""
    found = find_model(path, max_seq_length=1, trust_remote_code=trust_remote_code)
    tokenizer = found.tokenizer()
    if options.get("system") and not tokenizer.chat_template:
        raise ConfigError(f"a system prompt, but {path} has no chat template", "leave it out")
    device = default_device()
    model = found.model(resolve_dtype(None, device), device).eval()
    bare = found.is_adapter and model.active_peft_config.bias == "none"
    models = {"base": model, "trained": model} if bare else {"model": model}
    options["system"] = options.get("system") or None
    return ChatSession(models, tokenizer, **options)
