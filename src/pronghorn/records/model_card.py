"""The model card of a run: a README.md as the hub reads it, beside what was trained.

It names base, data, recipe, held-out loss, versions and licence, all from the run's record. A base that is a folder on
this machine is named in words but not in the card's metadata: the hub refuses a base that is none of its own. Of paths
the last component alone is shown: cards are published, and where somebody keeps files is nobody else's business.
"""

from __future__ import annotations

import copy
import math
from pathlib import Path
from typing import Any

import yaml

from pronghorn.config.sections import DATA_FILES
from pronghorn.data.downloads import only_cached
from pronghorn.records.page import write_text
from pronghorn.records.record import RunRecord
from pronghorn.text import counted
from pronghorn.version import VERSION

FILE_NAME = "README.md"
_LONGEST = 2**18
"""Characters of a base's card that are looked at."""
_SECONDS = 10.0
"""How long the hub may take to answer what the base's licence is."""
_USE = {
    "peft": """```python
from pronghorn import FastLanguageModel

model, tokenizer = FastLanguageModel.from_pretrained("FOLDER_OR_HUB_NAME", max_seq_length={length})
```

It is an adapter as PEFT saves it: `peft.AutoPeftModelForCausalLM` and vLLM's `--lora-modules` take it, too.""",
    "transformers": """```python
from transformers import AutoModelForCausalLM, AutoTokenizer

model = AutoModelForCausalLM.from_pretrained("FOLDER_OR_HUB_NAME")
tokenizer = AutoTokenizer.from_pretrained("FOLDER_OR_HUB_NAME")
```""",
}


def write_cards(record: RunRecord, output: Path) -> None:
    """Write the card of a finished run into its folder and into that of its adapter or model.

    Raises:
        ConfigError: it can't be written.
    """
    adapter = record.recipe["adapter"]["method"] == "lora"
    text = card(record, "peft" if adapter else "transformers")
    for folder in (output, output / ("adapter" if adapter else "model")):
        write_text(folder / FILE_NAME, text)


def card(record: RunRecord, library: str | None) -> str:
    """Return the card's text.

    Args:
        library: `peft` for an adapter, `transformers` for a whole model, None for a file of neither.
    """
    recipe = record.recipe
    name = Path(str(recipe["train"]["output"])).name
    adapter = recipe["adapter"]["method"] == "lora"
    licence = licence_of(record.model)
    metadata: dict[str, Any] = {
        "base_model": None if _is_local(record.model) else record.model,
        "library_name": library,
        "license": licence,
        "pipeline_tag": "text-generation",
        "tags": [*(["lora"] if adapter else []), "sft", "pronghorn"],
    }
    front = yaml.safe_dump({key: value for key, value in metadata.items() if value}, sort_keys=False)
    table = "\n".join(f"| {label} | {_cell(value)} |" for label, value in _facts(record, licence))
    use = _USE[library].format(length=recipe["model"]["max_seq_length"]) if library else ""
    shown = _without_folders(recipe)
    written = yaml.safe_dump(shown, sort_keys=False, allow_unicode=True)
    told = "" if shown == recipe else "Of the machine's folders and files the names alone are shown.\n\n"
    versions = ", ".join(f"{package} {version}" for package, version in record.versions.items())
    sections = [
        f"---\n{front}---",
        f"# {name}",
        f"| | |\n|---|---|\n{table}",
        *([f"## Use\n\n{use}"] if use else []),
        f"## Recipe\n\n{told}````yaml\n{written}````",
        f"Trained by Pronghorn {VERSION} with {versions}.",
    ]
    return "\n\n".join(sections) + "\n"


def licence_of(name: str) -> str | None:
    """Return the licence that a base's own card names, None where it names none or can't be read."""
    text = _card_of(name)
    if text is None or not text.startswith("---\n"):
        return None
    try:
        metadata = yaml.safe_load(text[4:].partition("\n---")[0])
    except (yaml.YAMLError, ValueError, RecursionError):
        return None
    found = metadata.get("license") if isinstance(metadata, dict) else None
    return found if isinstance(found, str) else None


def _card_of(name: str) -> str | None:
    """Return the card of a local folder, or of a model on the hub: from the cache, or else fetched."""
    path = Path(name).expanduser()
    if not _is_local(name):
        from huggingface_hub import hf_hub_download

        try:
            path = Path(hf_hub_download(name, FILE_NAME, etag_timeout=_SECONDS, **only_cached(name))).parent
        except Exception:  # no card, no hub, no right to read it: of httpx, of the hub, of the disk
            return None
    try:
        with (path / FILE_NAME).open(encoding="utf-8") as file:
            return file.read(_LONGEST)
    except (OSError, UnicodeDecodeError):
        return None


def _is_local(name: str) -> bool:
    """Tell whether a model is a folder or file here rather than a repository of the hub."""
    return name.startswith(("/", ".", "~")) or Path(name).exists() or name.count("/") != 1


def _last(path: str) -> str:
    """Return the last component of a path."""
    return Path(path).name or Path(path).resolve().name


def _name(path: str) -> str:
    """Return the last component of a path of this machine, or the whole name of what is on the hub."""
    return _last(path) if _is_local(path) or Path(path).suffix.lower() in (*DATA_FILES, ".gguf") else path


def _without_folders(recipe: dict[str, Any]) -> dict[str, Any]:
    """Return the recipe with names in the place of paths of this machine."""
    shown = copy.deepcopy(recipe)
    data = shown["data"]
    sources = [each for split in ("train", "eval") if isinstance(data[split], list) for each in data[split]]
    # a held-out share has no folder, and data that are a list are in `sources`
    named = [(shown["model"], "name"), (data, "train"), (data, "eval"), *((each, "path") for each in sources)]
    paths = [(data, "chat_template"), (data, "cache"), (shown["train"], "output")]
    for shorten, places in ((_name, named), (_last, paths)):
        for table, key in places:
            if isinstance(table[key], str):
                table[key] = shorten(table[key])
    return shown


def _facts(record: RunRecord, licence: str | None) -> list[tuple[str, str]]:
    """Return what the card says in its table."""
    recipe, packing = record.recipe, record.packing
    adapter, train, before = recipe["adapter"], recipe["train"], record.heldout["before"]
    base = f"[{record.model}](https://huggingface.co/{record.model})"
    if _is_local(record.model):
        base = f"`{_name(record.model)}`"
        if "/" in record.model or Path(record.model).exists():  # otherwise perhaps an old name of the hub, as gpt2
            base += f", a local {'file' if record.model.endswith('.gguf') else 'folder'}"
    method = f"LoRA of rank {adapter['r']}" if adapter["method"] == "lora" else "every weight"
    method += " over 4-bit weights" if recipe["model"]["load_in_4bit"] else ""
    parameters, share = record.trainable["parameters"], record.trainable["share"]
    sources = ", ".join(f"`{_name(source['path'])}`" for source in packing.get("sources", ()))
    supervised = f", {packing['labelled_tokens']:,} of them trained" if "labelled_tokens" in packing else ""
    loss = "no held-out data in this run"
    after = record.heldout["after"]
    if before is not None and after is not None and math.isfinite(before + after):
        rows = counted(int(record.heldout["rows"] or 0), "row")
        loss = f"{before:.4f} → {after:.4f}, over {rows}, nats per supervised token"
    steps = record.steps[-1]["step"] if record.steps else 0
    kept = "" if record.kept_step is None else f" (the weights are those of step {record.kept_step:,})"
    schedule = f"learning rate {train['learning_rate']:g}, {train['lr_scheduler']}"
    documents = counted(packing["documents"], "document")
    of_data = "the data may have another of their own"
    return [
        ("Base", base),
        ("Trained", f"{method}, {parameters:,.0f} parameters ({share:.2%} of the model)"),
        ("Data", f"{sources or '–'}: {documents}, {packing['tokens']:,} tokens{supervised}"),
        ("Held-out loss", loss),
        ("Steps", f"{steps:,.0f}{kept}, {schedule}, {train['optimizer']}, on {record.device}"),
        ("Licence", f"{licence}, the base's; {of_data}" if licence else f"the base's, which its card tells; {of_data}"),
    ]


def _cell(text: str) -> str:
    """Return a text for a cell of a table."""
    return " ".join(text.split()).replace("|", "\\|")
