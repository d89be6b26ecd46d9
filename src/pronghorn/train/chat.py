"""A chat with what a run trained, beside what it began from: each side has its own conversation."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from pronghorn.config import Recipe
from pronghorn.errors import ConfigError, DataError
from pronghorn.families.registry import import_plugins
from pronghorn.models.load import FoundModel, default_device, find_model, resolve_dtype
from pronghorn.models.new_tokens import grow_embeddings
from pronghorn.recipe_errors import without_removed
from pronghorn.train.evaluate import answer
from pronghorn.train.record import RunRecord

SIDES = ("base", "trained")


@dataclass
class ChatSession:
    """Models and conversations of both sides. With an adapter one model serves both; where weights of the base itself
    were trained, two do."""

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

    def replies(self, text: str) -> Iterator[tuple[str, str]]:
        """Yield (side, reply) of each side to the user's `text`. Once both have replied both remember it; a turn that
        fails or is interrupted neither does.

        Raises:
            DataError: the conversation leaves no position of the model for an answer.
        """
        turns = {}
        for side in SIDES:
            turns[side] = [{"role": "user", "content": text}]
            reply = self._reply(side, [*self.histories[side], *turns[side]])
            turns[side].append({"role": "assistant", "content": reply})
            yield side, reply
        for side, turn in turns.items():
            self.histories[side] += turn

    def _reply(self, side: str, history: list[dict[str, str]]) -> str:
        """Return one side's reply to a conversation."""
        model = self.models[side]
        with self._side(side, model):
            return answer(model, self.tokenizer, history, self.max_new_tokens, self.system, self.temperature)

    @contextmanager
    def _side(self, side: str, model: Any) -> Iterator[None]:
        """Switch the adapter off for the base's side where both share a model."""
        off = side == "base" and model is self.models["trained"]
        with model.disable_adapter() if off else nullcontext():
            yield


def load_chat(folder: Path, *, trust_remote_code: bool = False, **options: Any) -> ChatSession:
    """Load what the run in `folder` trained and what it began from.

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
    recipe = _recipe(folder)
    if recipe.model.trust_remote_code and not trust_remote_code:
        raise ConfigError(
            f"the run in {folder} ran Python code that came with {recipe.model.name}", "allow it: --trust-remote-code"
        )
    if recipe.model.plugins and not trust_remote_code:
        raise ConfigError(
            f"the run in {folder} imported {', '.join(recipe.model.plugins)}", "allow it: --trust-remote-code"
        )
    import_plugins(recipe.model.plugins)
    lora = recipe.adapter.method == "lora"
    path = folder / ("adapter" if lora else "model")
    if not path.is_dir():
        raise DataError(f"{path} is not there", "run the recipe again, or restore the folder")

    def find(name: str | Path) -> FoundModel:
        try:
            return find_model(
                name,
                max_seq_length=recipe.model.max_seq_length,
                load_in_4bit=recipe.model.load_in_4bit,
                experts_in_16bit=recipe.model.experts_in_16bit,
                trust_remote_code=trust_remote_code,
            )
        except DataError as error:
            raise DataError(
                f"the run in {folder}, which began from {recipe.model.name}, can't be loaded: {error.problem}",
                f"{error.remedy}; relative paths count from the current folder",
            ) from error

    found = find(path)
    began = found.base or find(recipe.model.name)
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
    return ChatSession({"base": base, "trained": trained}, tokenizer, system, **options)


def _recipe(folder: Path) -> Recipe:
    """Return the recipe of the finished run in `folder`."""
    if not folder.is_dir():
        raise ConfigError(f"{folder} is no folder", "give the output folder of a finished run")
    if not (folder / "run.json").exists() and (folder / "journal.json").exists():
        raise ConfigError(
            f"the run in {folder} is not finished", "run its `pronghorn train` command again to finish it"
        )
    try:
        return Recipe.model_validate(without_removed(RunRecord.read(folder).recipe))
    except ValidationError as error:
        key = ".".join(map(str, error.errors()[0]["loc"]))
        raise DataError(
            f"{folder / 'run.json'}: {key} of its recipe is not of this version ({error.errors()[0]['msg']})",
            "use the version that trained it",
        ) from error
