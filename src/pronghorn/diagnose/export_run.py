"""Export what a run trained, load what was written, compare it with the run, and only then put it in its place."""

from __future__ import annotations

import copy
import json
import os
import shlex
import tempfile
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pronghorn.device import versions
from pronghorn.diagnose.served import heldout_rows
from pronghorn.errors import ConfigError, TrainingError, UnsupportedError
from pronghorn.export.adapter_layouts import write_served_adapter
from pronghorn.export.compare import ROW_TOKENS, compare, rendered_conversations
from pronghorn.export.comparison import Comparison
from pronghorn.export.engine import Engine
from pronghorn.export.engines.llama_cpp import has_llama_cpp, serve_gguf
from pronghorn.export.engines.transformers import TransformersEngine
from pronghorn.export.engines.vllm import check_interpreter, serve_vllm
from pronghorn.export.folder import whole_folder
from pronghorn.export.fp8_checkpoint import check_parts, write_fp8_checkpoint
from pronghorn.export.gguf import (
    check_quantisations,
    left_out,
    read_tokenizer,
    stop_tokens,
    write_gguf,
    written_family,
)
from pronghorn.export.gguf_lora import write_gguf_lora
from pronghorn.export.gguf_rope import rope_note
from pronghorn.export.licences import copy_licences
from pronghorn.export.merge import dtype_before_gguf, save_merged
from pronghorn.export.onto_original import ONTO, adapter_on_original, distances, has_quantised_base, knows_original
from pronghorn.export.original import composite_of
from pronghorn.families.gguf_spec import as_named
from pronghorn.loading.gguf import load_gguf, reads
from pronghorn.loading.load import load_model
from pronghorn.loading.packed_checkpoint import fetched
from pronghorn.models.families import base_causal_lm, has_experts
from pronghorn.records.finished import is_export, recipe_of
from pronghorn.records.model_card import FILE_NAME as CARD
from pronghorn.records.model_card import card
from pronghorn.records.record import FILE_NAME as RECORD
from pronghorn.records.record import RunRecord
from pronghorn.train.chat import load_chat

Say = Callable[[str], None]
TEXT = "The quick brown fox jumps over the lazy dog, and nobody is surprised."
"""What is scored where a run has no held-out rows."""


@dataclass(frozen=True)
class Format:
    """What an export is, and how one goes on with it."""

    about: str
    next: str
    """The command that uses it; {folder} and {file} are filled in."""
    folder: str = ""
    """What its folder is called in the run's; the format's own name if empty."""
    merges: bool = False
    """Whether base and adapter become one."""
    library: str | None = None
    """Which library loads it, as the hub calls that."""


FORMATS = {
    "merged": Format("the whole model in 16 bits", "vllm serve {folder}", merges=True, library="transformers"),
    "adapter": Format("LoRA alone, as PEFT saves it", "pronghorn chat {folder}", "exported-adapter", library="peft"),
    "served-adapter": Format(
        "LoRA alone, experts by their own names", "vllm serve BASE --enable-lora --lora-modules mine={folder}"
    ),
    "fp8": Format("the whole model, linears in 8 bits", "vllm serve {folder}", merges=True),
    "gguf": Format("one file for llama.cpp", "llama-server -m {file}", merges=True),
    "gguf-lora": Format("LoRA alone, one file for llama.cpp", "llama-server -m BASE.gguf --lora {file}"),
    "ollama": Format("a GGUF file and its Modelfile", "ollama create mine -f {folder}/Modelfile", merges=True),
}

BY_VLLM = ("merged", "adapter", "served-adapter")
"""What `--vllm` compares in vLLM."""


@dataclass(frozen=True)
class Exported:
    """What was written, and what came of comparing it."""

    folder: Path
    comparisons: tuple[Comparison, ...]
    """By each engine that is here and reads what was written."""
    next: str
    notes: tuple[str, ...] = ()


def export_run(
    run: Path,
    to: str,
    output: Path | None,
    quantisation: str,
    say: Say = lambda text: None,
    onto: str | None = None,
    vllm: Path | None = None,
) -> Exported:
    """Export a finished run.

    Args:
        to: one of FORMATS.
        output: the folder to write; None: one in the run's folder, called as the format (the adapter of training
            is there already, so its export is `exported-adapter`).
        quantisation: of a GGUF file, one of `export.gguf.QUANTISATIONS`.
        onto: the base that the adapter is put on, one of `ONTO`: what is written is then compared with that. None
            takes the nearer to what was trained, where something is merged and both are at hand.
        vllm: the interpreter of an environment with vLLM, in which one of `BY_VLLM` is compared, too.
    Raises:
        ConfigError, DataError: no finished run, an unknown format, something is in the output folder, or a checkpoint
            without `output`.
        UnsupportedError: a model that the format doesn't hold; says what to do instead.
        TrainingError: what was written is not what was trained; names the causes, and nothing is left in its place.
    """
    if to not in FORMATS:
        remedy = f"use one of {', '.join(FORMATS)}"
        if to in ("vllm", "sglang"):
            remedy = "use merged, or served-adapter for LoRA alone: it reads both"
        raise ConfigError(f"--to {to!r} is not a format", remedy)
    if onto is not None and onto not in ONTO:
        raise ConfigError(f"--onto {onto!r} is not a base", f"use one of {', '.join(ONTO)}")
    if vllm is not None and to not in BY_VLLM:
        raise ConfigError(f"--vllm with --to {to}", f"use --to {', '.join(BY_VLLM)}, or leave it out")
    if vllm is not None:
        check_interpreter(vllm)
    if to in ("gguf", "ollama"):
        check_quantisations([quantisation])
    recipe = None if is_export(run) else recipe_of(run)
    if output is None and (run / "trainer_state.json").is_file():
        raise ConfigError(f"{run} is a checkpoint, which training deletes in time", "name a folder by --output")
    target = (run if run.is_dir() else run.parent) / (FORMATS[to].folder or to) if output is None else output
    if os.path.exists(target) and any(target.iterdir() if target.is_dir() else [target]):
        raise ConfigError(f"{target} already exists", "name another folder by --output, or delete it")
    say(f"loading {run}")
    session = load_chat(run)
    trained, tokenizer = session.models.get("trained") or session.models["model"], session.tokenizer
    if to == "fp8":  # refused before the whole model is merged for it
        check_parts(run, base_causal_lm(trained).config, composite_of(trained), "use --to merged")
    rows = [] if recipe is None else heldout_rows(recipe, tokenizer, say)
    exported, base, notes, unlike = trained, session.models.get("base"), list[str](), None
    adapter = run if is_export(run) else run / "adapter"
    if onto == "original":
        say("loading the original base")
        exported, base = adapter_on_original(adapter, trained), None
    elif (onto or FORMATS[to].merges) and has_quantised_base(trained) and knows_original(adapter):
        taken, note = _measured(trained, adapter_on_original(adapter, trained), tokenizer, rows, onto, say)
        notes.append(note)
        if taken == "original":
            say("loading the original base again: measuring has overwritten it")
            exported, base = adapter_on_original(adapter, trained), None
    on_cpu = exported.device.type == "cpu"
    if to in ("gguf", "gguf-lora", "ollama"):
        written_family(base_causal_lm(exported).config)
        if to != "gguf-lora":
            read_tokenizer(tokenizer)
        unlike = rope_note(base_causal_lm(exported).config)
        notes += [note for note in (left_out(exported) if to != "gguf-lora" else None, unlike) if note]
    if vllm is not None and to != "merged" and not _base_is_a_checkpoint(exported):
        problem = "vLLM would serve the adapter over another base: this one was quantised as it loaded, or has towers"
        raise UnsupportedError(problem, "leave --vllm out, or use --to merged")
    with whole_folder(target) as folder:
        say(f"writing {target}")
        limits = _write(to, exported, tokenizer, folder, quantisation, vllm is not None)
        comparisons: list[Comparison] = []
        if limits is not None:
            say("loading what was written")
            with ExitStack() as served:
                engines = _engines(to, folder, exported, tokenizer, served, vllm)
                reference = TransformersEngine(exported, tokenizer, str(run), base)
                comparisons = _compared(to, reference, engines, limits, rows, unlike, say)
                del reference  # which holds a copy of the model in other numbers
        if onto == "original":  # last, since it is overwritten
            notes.insert(0, _measured(trained, exported, tokenizer, rows, onto, say)[1])
        _describe(folder, to, run, comparisons, notes)
    file = next(iter(sorted(target.glob("*.gguf"))), target)
    line = FORMATS[to].next.format(folder=shlex.quote(str(target)), file=shlex.quote(str(file)))
    if to in BY_VLLM and line.startswith("vllm") and on_cpu:
        line += " --dtype float32"  # the checkpoint's own 16 bits are slower there, and less exact
    return Exported(target, tuple(comparisons), line, tuple(notes))


def _compared(
    to: str,
    reference: TransformersEngine,
    engines: Iterable[Engine],
    limits: str,
    rows: Sequence[Sequence[int]],
    unlike: str | None,
    say: Say,
) -> list[Comparison]:
    """Compare what was written in each engine with what was trained.

    Args:
        limits: of which format.
        unlike: in what the format is always a little other than the model.
    Raises:
        TrainingError: one differs; names the causes.
    """
    comparisons = []
    for engine in engines:
        comparison = compare(reference, engine, format=limits, rows=rows, say=say)
        if any(check.ok is False for check in comparison.checks):
            causes = "; ".join((*comparison.causes, *filter(None, [unlike]))) or "its answers differ"
            instead = "use what training left in the run's folder" if to == "merged" else "try --to merged"
            remedy = f"nothing was written; {instead}, and report it"
            if limits in ("fp8", "4bit"):
                remedy = (
                    "nothing was written; a very small model bears few bits badly: try --to gguf --quantization q8_0, "
                    "or --to merged, and report it if these differ, too"
                )
            raise TrainingError(f"the export is not what was trained ({engine.name}): {causes}", remedy)
        comparisons.append(comparison)
    return comparisons


def _measured(
    trained: Any, original: Any, tokenizer: Any, rows: Sequence[Sequence[int]], onto: str | None, say: Say
) -> tuple[str, str]:
    """Measure merges onto both bases. Return which is taken, `onto` or else the nearer, and a note that says so.

    Args:
        original: the adapter on its original; its weights are overwritten.
        rows: held-out ones; without any, conversations are scored.
    """
    say("measuring merges onto both bases")
    texts, what = rows, f"{len(rows)} held-out rows"
    if not rows:
        texts = [ids for _, ids in rendered_conversations(TransformersEngine(trained, tokenizer))[0]]
        texts, what = (texts, "built-in conversations") if texts else ([tokenizer(TEXT)["input_ids"]], "a sentence")
    apart = distances(trained, original, tokenizer, [ids[:ROW_TOKENS] for ids in texts])
    taken, why = (onto, "asked for") if onto else (min(apart, key=lambda each: apart[each].mean), "the nearer")
    both = "; ".join(f"onto {ONTO[each]}, it is {apart[each]}" for each in ONTO)
    return taken, f"Merged {both} from what was trained, on {what}. Taken: {ONTO[taken]} ({why})."


def _write(to: str, model: Any, tokenizer: Any, folder: Path, quantisation: str, in_vllm: bool) -> str | None:
    """Write a format, and return which limits it is compared by; None where nothing here reads it."""
    adapted = hasattr(model, "peft_config")
    if to in ("adapter", "served-adapter", "gguf-lora") and not adapted:
        raise ConfigError("the run has no adapter: it trained whole weights", "use --to merged")
    if to == "adapter":
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
        return "adapter"
    if to == "served-adapter":
        write_served_adapter(model, tokenizer, folder)
        return "adapter" if in_vllm and _base_is_a_checkpoint(model) else None
    if to == "gguf-lora":
        write_gguf_lora(model, folder / "adapter.gguf")
        return "f16" if has_llama_cpp() and _base_is_a_checkpoint(model) else None
    if to == "merged":
        save_merged(model, tokenizer, folder)
        return "merged"
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=".merged-") as scratch:
        exact = None if to == "fp8" else dtype_before_gguf(model)
        merged = save_merged(model, tokenizer, Path(scratch) / "merged", dtype=exact)
        if to == "fp8":
            write_fp8_checkpoint(merged, folder)
            return "fp8"
        file = write_gguf(merged, folder / f"model-{quantisation}.gguf", quantisation)
        copy_licences(merged, folder)
        stops = tokenizer.convert_ids_to_tokens(stop_tokens(merged, tokenizer))
    if to == "ollama":
        (folder / "Modelfile").write_text(modelfile(file.name, stops), encoding="utf-8")
    if not _reads_back(model) and not has_llama_cpp():
        return None  # only llama.cpp reads the file
    return quantisation if quantisation in ("f32", "f16", "bf16", "q8_0") else "4bit"


def _base_is_a_checkpoint(model: Any) -> bool:
    """Tell whether an adapter's base is what its checkpoint holds: not one that was quantised as it loaded, nor one out
    of a model with towers."""
    return not getattr(base_causal_lm(model), "is_quantized", False) and composite_of(model) is None


def _checkpoint_of(adapted: Any) -> Path:
    """Return the folder of an adapter's base."""
    return fetched(base_causal_lm(adapted).name_or_path, {"revision": adapted.active_peft_config.revision})


def _engines(
    to: str, folder: Path, trained: Any, tokenizer: Any, served: ExitStack, vllm: Path | None
) -> Iterator[Engine]:
    """Yield what was written in each engine that is here and reads it."""
    if to not in ("gguf-lora", "served-adapter") and (to not in ("gguf", "ollama") or _reads_back(trained)):
        model, own_tokenizer, read = _load(folder, trained, tokenizer)
        yield TransformersEngine(model, own_tokenizer, f"{to}{read} in transformers")
    if vllm is not None:
        config = base_causal_lm(trained).config
        how: dict[str, Any] = {"dtype": "float32" if trained.device.type == "cpu" else "auto"}
        how["context"] = min(2048, config.max_position_embeddings)
        if to != "merged":
            lora = trained.active_peft_config
            how |= {"adapter": folder, "rank": max(lora.r, *(lora.rank_pattern or {}).values(), 1)}
        yield served.enter_context(serve_vllm(vllm, folder if to == "merged" else _checkpoint_of(trained), **how))
    if to not in ("gguf", "gguf-lora", "ollama") or not has_llama_cpp():
        return
    [file] = folder.glob("*.gguf")
    if to != "gguf-lora":
        yield served.enter_context(serve_gguf(file))
        return
    scratch = Path(served.enter_context(tempfile.TemporaryDirectory(dir=folder.parent, prefix=".base-")))
    checkpoint = _checkpoint_of(trained)
    if "quantization_config" in json.loads((checkpoint / "config.json").read_text(encoding="utf-8")):
        with trained.disable_adapter():  # what MXFP4 stands for
            checkpoint = save_merged(trained, tokenizer, scratch / "merged")
    base = write_gguf(checkpoint, scratch / "base.gguf", "f16")
    yield served.enter_context(serve_gguf(base, lora=file))


def _reads_back(model: Any) -> bool:
    """Tell whether transformers can be given the weights of a model's GGUF file: not experts, and not tensors that
    llama.cpp has in other forms."""
    config = base_causal_lm(model).config
    return not has_experts(config) and written_family(config)[1].parts is as_named


def _load(folder: Path, trained: Any, tokenizer: Any) -> tuple[Any, Any, str]:
    """Load what was written, in the numbers and on the device of the trained model, and say what was read of it.

    Where transformers reads no configuration or tokenizer from a GGUF file, the trained model's is taken: what the file
    says of them llama.cpp compares, which reads all.
    """
    file = next(iter(sorted(folder.glob("*.gguf"))), folder)
    if file.suffix == ".gguf" and not reads(file):
        config = copy.deepcopy(base_causal_lm(trained).config)
        return *load_gguf(file, trained.dtype, trained.device, config, tokenizer), "'s weights"
    return *load_model(file, dtype=trained.dtype, device=trained.device, max_seq_length=1), ""


def modelfile(name: str, stops: Iterable[str]) -> str:
    """Return an Ollama Modelfile for a GGUF file beside it. The template is the file's own, which Ollama reads."""
    return "\n".join(
        [f"FROM ./{name}", *(f'PARAMETER stop "{stop}"' for stop in stops), "PARAMETER temperature 0.7", ""]
    )


def _describe(folder: Path, to: str, run: Path, comparisons: Collection[Comparison], notes: Iterable[str]) -> None:
    """Say in the folder's README.md what was checked, against what."""
    lines = [f"# Exported by Pronghorn as {to}", "", f"From the run `{run.name}`: {FORMATS[to].about}.", ""]
    lines += [line for note in notes for line in (note, "")]
    if not comparisons:
        lines.append("Not compared with the trained model: nothing on the machine that wrote it reads this format.")
    for comparison in comparisons:
        lines += ["", f"Compared with the trained model by {comparison.engine}, on {comparison.scored_on}:", ""]
        lines += ["| compared | result | limit |", "|---|---|---|"]
        verdicts = {True: "same", False: "differs", None: "not compared"}
        for check in comparison.checks:
            told = check.detail if check.ok is None else check.value
            lines.append(f"| {check.name.value} | {verdicts[check.ok]}: {told} | {check.limit} |")
        if comparison.loss is not None:
            lines += ["", f"{comparison.loss}."]
    packages = ", ".join(f"{name} {version}" for name, version in versions("gguf").items())
    lines += ["", f"Versions: {packages}.", ""]
    path = folder / CARD
    before = path.read_text(encoding="utf-8") + "\n" if path.is_file() else ""
    if (run / RECORD).is_file():  # instead of the empty form that PEFT leaves
        before = card(RunRecord.read(run), FORMATS[to].library) + "\n"
    path.write_text(before + "\n".join(lines), encoding="utf-8")
