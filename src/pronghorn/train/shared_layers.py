"""TRL's trainer where processes share trained layers (`parallel.training`): what the optimiser steps on, and what
is saved and read. A checkpoint may be read by another number of processes, and by one that has all weights."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
import trl
from safetensors import safe_open
from torch import Tensor

from pronghorn.device import processes
from pronghorn.errors import DataError, UnsupportedError
from pronghorn.export.merge import write_model
from pronghorn.loading.load import find_model
from pronghorn.models.families import base_causal_lm
from pronghorn.optimizers import ON_PARTS
from pronghorn.parallel.sharded import ShardedLayers, sharded, whole_trained
from pronghorn.parallel.state import gathering, load_state
from pronghorn.parallel.training import Piece
from pronghorn.train.saved_adapters import load_adapters

_FILE = "shared_optimizer-{}-of-{}.pt"

ReadState = Callable[[str], dict[str, Any]]
"""Returns the optimiser's state of a parameter by its name, tensors of its size flat."""


class SharedLayersTrainer(trl.SFTTrainer):
    """TRL's trainer, which also trains layers that processes share."""

    _pieces: list[Piece]

    @property
    def _shared(self) -> ShardedLayers | None:
        """Return the layers if processes share them and they are trained."""
        found = sharded(base_causal_lm(self.model))
        return found if found is not None and found.trained is not None else None

    def create_optimizer(self, model: Any = None) -> Any:
        """Make the optimiser as stock does, of this process's parts of layers and of all that lies outside."""
        shared, ours = self._shared, base_causal_lm(self.model)
        if shared is None or self.optimizer is not None:
            return super().create_optimizer(model)
        assert shared.trained is not None
        name = str(getattr(self.args.optim, "value", self.args.optim))
        if name not in ON_PARTS or self.optimizer_cls_and_kwargs is not None or self.args.fp16:
            raise UnsupportedError(
                f"train.optimizer: {name}{' in float16' if self.args.fp16 else ''} with layers that processes share",
                f"use {', '.join(ON_PARTS)} and bfloat16 or float32; or launch.strategy: copies",
            )
        # stock's two groups, with pieces of parts in the place of the layers' parameters
        names = set(self.get_decay_parameter_names(ours))
        decayed = {id(p) for name, p in ours.named_parameters() if name in names}
        cut = shared.trained.pieces(decayed)
        groups = [
            {
                "params": [
                    *(p for p in whole_trained(ours) if (id(p) in decayed) is decays),
                    *(piece.parameter for decaying, piece in cut if decaying is decays),
                ],
                "weight_decay": self.args.weight_decay if decays else 0.0,
            }
            for decays in (True, False)
        ]
        self._pieces = [piece for _, piece in cut]
        kind, options = self.get_optimizer_cls_and_kwargs(self.args, ours)
        self.optimizer = made = kind(groups, **options)
        trained = shared.trained
        made.register_step_post_hook(lambda *_: trained.clear())
        return made

    @contextmanager
    def gathering_weights(self) -> Iterator[None]:
        """Let the main process save the model in this block, which all enter: of shared layers it writes what all
        gather, one shard in its memory at a time."""
        if self._shared is None:
            yield
            return
        base: Any = base_causal_lm(self.model)
        with gathering(base) as values:
            refused = base.save_pretrained
            if values is not None:
                base.save_pretrained = partial(_write, base, values)
            try:
                yield
            finally:
                base.save_pretrained = refused

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Save as stock does; of shared layers the main process writes what all gather."""
        if self._shared is None:
            return super().save_model(output_dir, _internal_call)
        with self.gathering_weights():
            if self.args.should_save:
                self._save(output_dir or str(self.args.output_dir))

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        if self._shared is None:
            return super()._save_optimizer_and_scheduler(output_dir)
        states, names = _bare(self.optimizer).state, {id(p): name for name, p in _named(self.model)}
        told = {
            "groups": [_options(group) for group in _bare(self.optimizer).param_groups],
            "outside": {names[id(p)]: states[p] for p in whole_trained(base_causal_lm(self.model)) if p in states}
            if self.args.should_save
            else {},
            "pieces": [(each.unit, each.begin, states[each.parameter]) for each in self._pieces],
            "spans": _spans(self._shared, names),
        }
        Path(output_dir).mkdir(parents=True, exist_ok=True)
        torch.save(told, Path(output_dir) / _FILE.format(self.args.process_index, processes()))
        if self.args.should_save:
            assert self.lr_scheduler is not None
            torch.save(self.lr_scheduler.state_dict(), Path(output_dir) / "scheduler.pt")

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if checkpoint is None:
            return None
        files = sorted(Path(checkpoint).glob(_FILE.format("*", "*")))
        shared = self._shared
        if shared is None and not files:
            return super()._load_optimizer_and_scheduler(checkpoint)
        read, groups = _of_parts(files) if files else _of_copies(Path(checkpoint), self)
        optimizer, names = _bare(self.optimizer), {id(p): name for name, p in _named(self.model)}
        cut = {id(piece.parameter): piece for piece in (self._pieces if shared is not None else ())}
        spans = [] if shared is None else _spans(shared, names)
        state: dict[int, Any] = {}
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        for index, parameter in enumerate(parameters):
            if (piece := cut.get(id(parameter))) is not None:
                state[index] = _of_piece(piece, spans[piece.unit], read)
            else:
                found = read(names[id(parameter)])
                state[index] = {
                    key: value.view_as(parameter) if _is_whole(value) else value for key, value in found.items()
                }
        told = optimizer.state_dict()["param_groups"]
        for group, before in zip(told, groups, strict=True):
            group.update(before)
        optimizer.load_state_dict({"state": state, "param_groups": told})
        assert self.lr_scheduler is not None
        self.lr_scheduler.load_state_dict(torch.load(Path(checkpoint) / "scheduler.pt", weights_only=True))

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        """Load as stock does; adapters, and what it can't put into place, as experts that are saved apart, go by our
        own readers. So does all where stock doesn't say."""
        base = base_causal_lm(self.model)
        if self._shared is None:
            if hasattr(self.model, "peft_config"):
                return load_adapters(self.model, Path(resume_from_checkpoint))
            self._lacking: set[str] | None = None
            super()._load_from_checkpoint(resume_from_checkpoint, model)
            if self._lacking is not None and not self._lacking & {name for name, _ in base.named_parameters()}:
                return
        load_whole(base, Path(resume_from_checkpoint))

    def _issue_warnings_after_load(self, load_result: Any) -> None:
        """Note which weights found no tensor of their name; stock warns of them, and trains on with the base's."""
        self._lacking = set(load_result.missing_keys)

    def _load_best_model(self) -> None:
        self._load_from_checkpoint(str(self.state.best_model_checkpoint))


def _write(
    base: Any, values: Callable[[Tensor], Tensor], folder: str | Path, max_shard_size: str = "50GB", **_: Any
) -> None:
    """Do what `save_pretrained` does, with weights that are gathered."""
    Path(folder).mkdir(parents=True, exist_ok=True)
    write_model(base, base.dtype, Path(folder), max_shard_size, values)


def load_whole(model: Any, folder: Path) -> None:
    """Put a whole model's files into a causal LM; of layers that are trained and shared each process takes its parts.

    Files whose names aren't the model's own, as of experts that transformers saves apart, are read by loading the model
    once more, into host memory.
    """
    with ExitStack() as opened:
        files = [opened.enter_context(safe_open(file, framework="pt")) for file in sorted(folder.glob("*.safetensors"))]
        of = {name: each for each in files for name in each.keys()}  # noqa: SIM118
        if of.keys() >= {name for name, _ in model.named_parameters()}:
            return load_state(model, lambda name: of[name].get_tensor(name), of)
    state = find_model(folder, max_seq_length=1).model(torch.float32, torch.device("cpu")).state_dict()
    load_state(model, state.__getitem__, state)


def _bare(optimizer: Any) -> Any:
    return getattr(optimizer, "optimizer", optimizer)


def _named(model: Any) -> Iterator[tuple[str, Tensor]]:
    named: Iterator[tuple[str, Tensor]] = base_causal_lm(model).named_parameters()
    return named


def _spans(shared: ShardedLayers, names: dict[int, str]) -> list[list[tuple[str, int, int]]]:
    """Return for each unit the names of its parameters, the number each begins at, and how many it has."""
    assert shared.trained is not None
    units = range(len(shared.trained.parts))
    return [[(names[id(p)], begin, p.numel()) for p, begin in shared.trained.spans(unit)] for unit in units]


def _options(group: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in group.items() if key != "params"}


def _is_whole(value: Any) -> bool:
    return isinstance(value, Tensor) and value.dim() > 0


def _window(begin: int, size: int, kept: Iterable[tuple[int, dict[str, Any]]]) -> dict[str, Any]:
    """Return the state of `size` numbers from `begin` on, cut out of states that begin at other numbers; zero between
    these. What isn't a tensor of all numbers is taken as it is, each time its own: each parameter counts steps."""
    state: dict[str, Any] = {}
    for first, each in kept:
        length = max((value.numel() for value in each.values() if _is_whole(value)), default=0)
        low, high = max(first, begin), min(first + length, begin + size)
        for key, value in each.items() if low < high else ():
            if _is_whole(value):
                flat = state.setdefault(key, torch.zeros(size, dtype=value.dtype))
                flat[low - begin : high - begin] = value[low - first : high - first]
            else:
                state[key] = value.clone() if isinstance(value, Tensor) else value
    return state


def _of_piece(piece: Piece, spans: list[tuple[str, int, int]], read: ReadState) -> dict[str, Any]:
    """Return the state of a piece, cut out of the states of its parameters."""
    count = piece.parameter.numel()
    inside = ((name, at) for name, at, size in spans if at < piece.begin + count and piece.begin < at + size)
    return _window(piece.begin, count, ((at, read(name)) for name, at in inside))


def _of_parts(files: list[Path]) -> tuple[ReadState, list[dict[str, Any]]]:
    """Read what several processes saved, each its parts; the files stay on the disk until a state is asked for."""
    told = [torch.load(file, mmap=True, map_location="cpu", weights_only=True) for file in files]
    if not files[0].name.endswith(f"-of-{len(files)}.pt"):
        raise DataError(f"{files[0].parent} lacks a process's part of the optimiser's states", "take another one")
    outside = {name: state for each in told for name, state in each["outside"].items()}
    spans = {name: (layer, begin, size) for layer, of in enumerate(told[0]["spans"]) for name, begin, size in of}

    def read(name: str) -> dict[str, Any]:
        if name in outside:
            return {key: value.view(-1) if _is_whole(value) else value for key, value in outside[name].items()}
        layer, begin, size = spans[name]
        pieces = (piece for each in told for piece in each["pieces"])
        return _window(begin, size, ((first, kept) for at, first, kept in pieces if at == layer))

    return read, told[0]["groups"]


def _of_copies(checkpoint: Path, trainer: Any) -> tuple[ReadState, list[dict[str, Any]]]:
    """Read what one process saved that had all weights, in the order of the parameters that decay, then the others."""
    saved = torch.load(checkpoint / "optimizer.pt", mmap=True, map_location="cpu", weights_only=True)
    decayed = set(trainer.get_decay_parameter_names(trainer.model))
    names = [name for name, _ in trainer.model.named_parameters()]
    ordered = [name for decays in (True, False) for name in names if (name in decayed) is decays]

    def read(name: str) -> dict[str, Any]:
        state = saved["state"][ordered.index(name)]
        return {key: value.view(-1) if _is_whole(value) else value for key, value in state.items()}

    return read, [_options(group) for group in saved["param_groups"]]
