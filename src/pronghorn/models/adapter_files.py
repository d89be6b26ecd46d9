"""A saved adapter's files, checked before PEFT reads them: a stranger's adapter must not change the base or hang."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable
from itertools import pairwise
from pathlib import Path
from typing import Any

from pronghorn.config.sections import CHANGES_BASE
from pronghorn.errors import ConfigError, DataError, UnsupportedError
from pronghorn.families.registry import FAMILIES
from pronghorn.precision.loader import PLAIN, checkpoint
from pronghorn.text import counted, short

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
_OUT_OF_BASE = (*CHANGES_BASE, "corda", "loftq", "lora_ga")
_BY_CHANCE = ("pissa_niter_", "corda", "lora_ga")
"""Ways to begin that take something random, or of some data, out of the base's weights."""
CLASSIFIES = "train it by transformers or TRL (RewardTrainer) alone, of AutoModelForSequenceClassification"
CONVERTED = (
    "save_pretrained(FOLDER, path_initial_model_for_weight_conversion=INITIAL) of the trained model, INITIAL being the "
    "adapter as it was saved before training, leaves plain LoRA"
)
_INNER = r"(\.(token_adapter|modules_to_save|original_module|base_layer))*"
_INTEGERS = re.compile(r"_(indices|size)(\.|$)")
"""In the names of integers that PEFT saves with some kinds: which of a weight's or bank's numbers these are (SHiRA)."""
_CLASSIFYING = ("SEQ_CLS", "TOKEN_CLS", "QUESTION_ANS")
_LONGEST, _MOST = 1_000, 1_000
"""Characters of a pattern; patterns of a field, and copies of layers."""
_LARGEST = 100_000
"""A rank beyond any weight's smaller size."""
_MOST_PATHS = 10**8
"""How many ways a pattern may match a module's name: about `.*` four times, with alternatives."""
_LONG_NAME = 64
"""Characters of a module's name, about."""


def check_adapter_config(path: Path) -> dict[str, Any]:
    """Read an adapter_config.json. Refuse one whose patterns or sizes would hang PEFT, or that names code to import.

    Raises:
        DataError: values of wrong types, patterns that are no regular expressions or match too slowly, absurd sizes.
        UnsupportedError: virtual tokens, a kind of adapter that PEFT doesn't know, a classifier's, Megatron's layers,
            or a beginning that can't be made again.
    """
    from peft import PromptLearningConfig
    from peft.mapping import PEFT_TYPE_TO_CONFIG_MAPPING

    table: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    kind = table.get("peft_type")
    config = next((config for type_, config in PEFT_TYPE_TO_CONFIG_MAPPING.items() if type_.value == kind), None)
    if config is None or issubclass(config, PromptLearningConfig):
        what = "of an unknown kind" if config is None else "tokens before the prompt"
        raise UnsupportedError(
            f"the adapter in {path.parent} is {str(kind)[:40]}, {what}",
            "train a LoRA adapter; packed rows have no place for others",
        )
    if table.get("task_type") in _CLASSIFYING:
        raise UnsupportedError(f"the adapter in {path.parent} is a classifier's ({table['task_type']})", CLASSIFIES)
    if (init := begins_by_chance(table.get("init_lora_weights"))) is not None:
        raise UnsupportedError(
            f"{path}: init_lora_weights is {init}, so that the adapter fits the very base it was trained over alone",
            CONVERTED,
        )
    if table.get("megatron_config"):
        raise UnsupportedError(f"{path}: megatron_config is not supported", "train a LoRA adapter without it")
    for field in ("target_modules", "exclude_modules", "modules_to_save", "layers_pattern", "target_parameters"):
        names = table.get(field) or []
        names = [names] if isinstance(names, str) else names
        if not isinstance(names, list) or not all(isinstance(name, str) and name for name in names):
            raise DataError(f"{path}: {field} {str(names)[:80]} is not a list of names", "save the adapter again")
        if field in ("layers_pattern", "modules_to_save") or isinstance(table.get(field), str):
            _check_patterns(path, field, names)
    for field in ("rank_pattern", "alpha_pattern"):
        patterns = table.get(field) or {}
        if not isinstance(patterns, dict):
            raise DataError(f"{path}: {field} is not a table", "save the adapter again")
        _check_patterns(path, field, patterns)
    _check_numbers(path, table)
    try:
        copies = sum(max(end - start, 1) for start, end in table.get("layer_replication") or ())
    except (TypeError, ValueError) as error:
        raise DataError(f"{path}: layer_replication is not a list of [start, end]", "save the adapter again") from error
    if copies > _MOST:
        raise DataError(f"{path}: layer_replication makes {copies:,} layers, more than {_MOST:,}", "use fewer")
    return table


def _check_numbers(path: Path, table: dict[str, Any]) -> None:
    """Refuse ranks and scales with which PEFT fails or the adapter is another one: a text is true, whatever it says."""
    for field in ("use_rslora", "use_dora", "fan_in_fan_out", "lora_bias"):
        if not isinstance(value := table.get(field) or False, bool):
            raise DataError(f"{path}: {field} {short(value)} is neither true nor false", "write it without quotes")
    ranks = {"r": table.get("r", 8)} | (table.get("rank_pattern") or {})
    for name, rank in ranks.items() if table["peft_type"] == "LORA" else ():
        if not isinstance(rank, int) or not 1 <= rank <= _LARGEST:
            raise DataError(f"{path}: rank {short(rank)} of {name} is not from 1 to {_LARGEST:,}", "save it again")
    for name, alpha in ({"lora_alpha": table.get("lora_alpha", 8)} | (table.get("alpha_pattern") or {})).items():
        if not isinstance(alpha, int | float) or not math.isfinite(alpha):
            raise DataError(f"{path}: {short(alpha)} of {name} is not a finite number", "save the adapter again")
    if (bias := table.get("bias", "none")) not in ("none", "all", "lora_only") and table["peft_type"] == "LORA":
        raise DataError(f"{path}: bias {short(bias)} is not one of none, all and lora_only", "save the adapter again")


def changes_base(config: Any) -> bool:
    """Tell whether an adapter's beginning was taken out of the base's weights: it applies to what PEFT left of them
    alone."""
    return str(getattr(config, "init_lora_weights", True)).lower().startswith(_OUT_OF_BASE)


def begins_by_chance(init: Any) -> str | None:
    """Return a way for an adapter to begin that changes the base's weights as no second call does, or None."""
    return init if isinstance(init, str) and init.lower().startswith(_BY_CHANCE) else None


def check_adapter_weights(folder: Path, table: dict[str, Any]) -> None:
    """Refuse tensors of a saved adapter that are neither the adapter's nor declared: PEFT would write them into the
    base. Declared are `modules_to_save`, biases where `bias` says so, embeddings and head (see `check_embeddings`).

    Raises:
        DataError: other tensors, numbers that aren't plain or aren't finite, or several files; names them.
    """
    file = folder / WEIGHTS
    if not file.is_file():
        raise DataError(
            f"{folder} holds an adapter in several files ({WEIGHTS}.index.json), and PEFT reads {WEIGHTS} alone",
            f"join them: safetensors.torch's save_file({{**load_file(PART), **load_file(PART)}}, {WEIGHTS!r})",
        )
    from peft.mapping import PEFT_TYPE_TO_PREFIX_MAPPING

    prefix = next(v for k, v in PEFT_TYPE_TO_PREFIX_MAPPING.items() if k.value == table["peft_type"])
    own = (f"{prefix.split('_')[0]}_", "trainable_tokens_")  # beside its vera_lambda_d VeRA saves vera_A
    saved = tuple(table.get("modules_to_save") or ())
    biases = table.get("bias", "none") != "none"

    embeddings = _embeddings()

    def declared(key: str) -> bool:
        parts = key.removeprefix("base_model.model.").split(".")
        modules = (".".join(parts[:count]) for count in range(1, len(parts)))
        return (
            any(part.startswith(own) for part in parts)
            or (biases and parts[-1] == "bias")
            or embeddings.search(f".{key}") is not None
            or any(module.endswith(saved) for module in modules)
        )

    foreign = []
    for tensor in checkpoint(file):
        if not (tensor.dtype in PLAIN or _INTEGERS.search(tensor.name)):
            raise DataError(
                f"{file}: {tensor.name} is {tensor.dtype}, of which nothing says what its numbers mean",
                "save the adapter in 16 or 32 bits",
            )
        if tensor.dtype in PLAIN and not tensor.read().isfinite().all():
            raise DataError(
                f"{file}: {tensor.name} holds NaN or infinite numbers: the training that saved it went wrong",
                "use the adapter of an earlier checkpoint, or train it again with a lower learning rate",
            )
        if not declared(tensor.name):
            foreign.append(tensor.name)
    if foreign:
        raise DataError(
            f"{file} holds {counted(len(foreign), 'tensor')} that would change the base model "
            f"({', '.join(sorted(foreign)[:3])}{' ...' if len(foreign) > 3 else ''})",
            "remove them, or declare what was trained whole in modules_to_save of adapter_config.json",
        )


def check_embeddings(folder: Path, base_rows: int) -> int | None:
    """Return how many rows the embeddings or head have that were saved whole with the adapter, or None without.

    Raises:
        DataError: embeddings with the base's own number of rows that the configuration doesn't declare as trained.
    """
    shapes = tensor_shapes(folder / WEIGHTS)
    embeddings = _embeddings()
    keys = [key for key in shapes if embeddings.search(f".{key}")]
    if not keys:
        return None
    rows = shapes[keys[0]][0]
    table = json.loads((folder / CONFIG).read_text(encoding="utf-8"))
    targets = table.get("target_modules") or ()
    named = [*([targets] if isinstance(targets, str) else targets), *(table.get("modules_to_save") or ())]
    declared = table.get("trainable_token_indices") or any(end in n for n in named for end in _ends())
    if rows == base_rows and not declared:
        raise DataError(
            f"{folder / WEIGHTS} would replace the base model's embeddings or head, which its configuration doesn't "
            f"say were trained ({keys[0]})",
            "remove them from the file, or name them in modules_to_save of adapter_config.json",
        )
    return rows


def _ends() -> set[str]:
    """Return the names of embeddings and head in all families: an adapter doesn't say which its base is of."""
    return {end for family in FAMILIES.values() for end in (family.embeddings, family.head)}


def _embeddings() -> re.Pattern[str]:
    """Return what finds the weights of embeddings and head among an adapter's tensors."""
    return re.compile(rf"\.({'|'.join(map(re.escape, sorted(_ends())))}){_INNER}\.weight$")


def tensor_shapes(file: Path) -> dict[str, list[int]]:
    """Read the tensors' names and shapes from a safetensors file's header; empty without the file."""
    return {tensor.name: [*tensor.shape] for tensor in checkpoint(file)} if file.is_file() else {}


def _check_patterns(path: Path, field: str, patterns: Iterable[Any]) -> None:
    patterns = list(patterns)
    if len(patterns) > _MOST:
        raise DataError(f"{path}: {field} has {len(patterns):,} patterns, more than {_MOST:,}", "use fewer, wider ones")
    for pattern in patterns:
        try:
            check_pattern(str(pattern))
        except ConfigError as error:
            raise DataError(f"{path}: {field}: {error.problem}", error.remedy) from error


def check_pattern(pattern: str) -> None:
    """Refuse a regular expression for modules' names that may take for ever to match.

    Raises:
        ConfigError: no regular expression, too long, or too many ways to match a name (nested or many repetitions).
    """
    remedy = "use a list of modules' names, or a simpler regular expression"
    if len(pattern) > _LONGEST:
        raise ConfigError(f"a regular expression of {len(pattern):,} characters, more than {_LONGEST:,}", remedy)
    try:
        re.compile(pattern)
        paths = _paths(re._parser.parse(pattern))  # type: ignore[attr-defined]  # the only parser of re's own language
    except (re.error, OverflowError, RecursionError) as error:
        raise ConfigError(f"{pattern[:80]!r} is not a regular expression ({error})", remedy) from error
    if paths > _MOST_PATHS:
        raise ConfigError(f"the regular expression {pattern[:80]!r} may take for ever to match", remedy)


def _paths(parsed: Any) -> float:
    """Bound the ways in which a parsed expression can match a name: what backtracking tries at worst."""
    return math.prod(_paths_of(str(kind), value) for kind, value in parsed)


def _paths_of(kind: str, value: Any) -> float:
    if kind.endswith("_REPEAT"):
        least, most, repeated = value
        most = min(int(most), _LONG_NAME)
        return (most - min(int(least), most) + 1) * min(_paths(repeated), 1e9) ** most
    if kind == "BRANCH":
        words = [
            [item for _, item in branch] if all(str(k) == "LITERAL" for k, _ in branch) else None for branch in value[1]
        ]
        ordered = sorted(word for word in words if word is not None)
        exclusive = len(ordered) == len(words) and all(
            after[: len(word)] != word for word, after in pairwise(ordered)
        )  # none begins another: at most one of them matches
        return 1 if exclusive else sum(_paths(branch) for branch in value[1])
    parts = value if isinstance(value, tuple) else (value,)
    return math.prod(_paths(part) for part in parts if type(part).__name__ == "SubPattern")
