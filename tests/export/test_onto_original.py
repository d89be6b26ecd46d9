"""An adapter that was trained over 4 bits, merged onto the checkpoint in 16 bits."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from peft import LoraConfig, PeftModel, get_peft_model
from rich.console import Console
from transformers import AutoModelForCausalLM
from typer.testing import CliRunner

from pronghorn.cli.main import app
from pronghorn.config.recipe import Recipe
from pronghorn.diagnose import export_run as export_run_module
from pronghorn.diagnose.export_run import export_run
from pronghorn.diagnose.shapes import byte_tokenizer
from pronghorn.errors import ConfigError
from pronghorn.export.onto_original import ONTO, Apart, adapter_on_original, distances, merged_in_place
from pronghorn.train.chat import load_chat
from pronghorn.train.run import run as train_run
from support.tiny import tiny_model

pytest.importorskip("bitsandbytes")


def trained(folder: Path, in_4_bits: bool, stored: torch.dtype = torch.float32) -> Path:
    base = tiny_model("llama", vocab_size=512, eos_token_id=2, intermediate_size=128)
    base.to(stored).save_pretrained(folder / "base")
    byte_tokenizer(512).save_pretrained(folder / "base")
    (folder / "rows.jsonl").write_text('{"prompt": "one and one", "completion": "two"}\n' * 8)
    table = {
        "model": {"name": str(folder / "base"), "max_seq_length": 64, "load_in_4bit": in_4_bits},
        "data": {"train": str(folder / "rows.jsonl")},
        "train": {"output": str(folder / "run"), "max_steps": 2, "learning_rate": 1e-2},
        "precision": {"dtype": "float32"},
    }
    (folder / "recipe.yaml").write_text(yaml.safe_dump(table))
    train_run(Recipe.load(folder / "recipe.yaml"), Console(quiet=True))
    return folder / "run"


def log_probabilities(model: Any, rows: list[list[int]]) -> torch.Tensor:
    with torch.no_grad():
        each = [model(torch.tensor([ids])).logits[0, :-1].log_softmax(-1) for ids in rows]
    return torch.cat([row[range(len(row)), ids[1:]] for row, ids in zip(each, rows, strict=True)])


@pytest.mark.matrix(1)
@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16], ids=str)
def test_both_bases_are_measured_and_the_nearer_is_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stored: torch.dtype
) -> None:
    """As they are written: a base in bfloat16 is rounded by chance (`export.rounding`)."""
    run = trained(tmp_path, in_4_bits=True, stored=stored)
    rows = [list(range(3, 40)), list(range(90, 50, -1))]
    model = load_chat(run).models["trained"]
    found = distances(model, adapter_on_original(run / "adapter", model), byte_tokenizer(512), rows)
    loads: list[Path] = []
    monkeypatch.setattr(
        export_run_module, "adapter_on_original", lambda *given: loads.append(given[0]) or adapter_on_original(*given)
    )
    right, merged = log_probabilities(model, rows), {}
    for onto in ("seen", "original"):
        exported = export_run(run, "merged", tmp_path / onto, "q8_0", onto=onto)
        assert len(loads) == 1, "16 bits are read once"
        loads.clear()
        assert exported.notes[0].endswith("(asked for).") and ONTO[onto] in exported.notes[0].partition("Taken:")[2]
        merged[onto] = AutoModelForCausalLM.from_pretrained(tmp_path / onto, dtype=torch.float32)
        off = (log_probabilities(merged[onto], rows) - right).abs()
        assert found[onto].mean == pytest.approx(off.mean().item(), rel=0.01)
        assert found[onto].largest == pytest.approx(off.max().item(), rel=0.01)
    assert found["seen"].mean < 0.5 * found["original"].mean, "4 bits are another base"
    expected = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(tmp_path / "base"), run / "adapter")
    plain, onto_original = log_probabilities(expected, rows), log_probabilities(merged["original"], rows)
    assert (onto_original - plain).abs().mean() < 0.5 * found["original"].mean, "the original has the adapter"

    exported = export_run(run, "merged", tmp_path / "nearer", "q8_0")
    [note] = exported.notes
    assert note.count("nats a token") == 2 and "the nearer" in note and ONTO["seen"] in note.partition("Taken:")[2]
    assert note in (tmp_path / "nearer" / "README.md").read_text()
    weights = "model.safetensors"
    assert (tmp_path / "nearer" / weights).read_bytes() == (tmp_path / "seen" / weights).read_bytes()
    near = {"seen": Apart(0.2, 1.0), "original": Apart(0.1, 2.0)}
    monkeypatch.setattr(export_run_module, "distances", lambda *arguments: near)
    assert ONTO["original"] in export_run(run, "merged", None, "q8_0").notes[0].partition("Taken:")[2]
    assert (run / "merged" / weights).read_bytes() == (tmp_path / "original" / weights).read_bytes()


@pytest.mark.parametrize("targets", [["lm_head"], ["embed_tokens"], ["q_proj"]])
def test_a_tied_head_and_its_embedding_are_merged_apart(targets: list[str]) -> None:
    """What is measured: of two names of one weight, only one had its adapter."""
    torch.manual_seed(0)
    model = get_peft_model(tiny_model("gemma3_text"), LoraConfig(r=4, target_modules=targets)).eval()
    assert model.config.tie_word_embeddings
    ids = torch.arange(3, 40)[None]
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_" in name:
                parameter.normal_(std=0.1)
        right, merged = model(ids).logits, merged_in_place(model, torch.float32)
        torch.testing.assert_close(merged(ids).logits, right, rtol=1e-4, atol=1e-4)
    assert (merged.lm_head.weight is merged.model.embed_tokens.weight) == (targets == ["q_proj"])


def test_an_adapter_alone_is_merged_onto_nothing(tmp_path: Path) -> None:
    exported = export_run(trained(tmp_path, in_4_bits=True), "adapter", None, "q8_0")
    assert not exported.notes


def test_what_has_no_other_base_is_refused(tmp_path: Path) -> None:
    run = trained(tmp_path, in_4_bits=False)
    assert not export_run(run, "merged", tmp_path / "merged", "q8_0").notes, "there is one base"
    with pytest.raises(ConfigError, match="--onto original of a run whose base was not quantised"):
        export_run(run, "merged", None, "q8_0", onto="original")
    done = CliRunner().invoke(app, ["export", str(run), "--onto", "base"])
    assert done.exit_code == 1 and "--onto 'base' is not a base" in done.stderr and "seen, original" in done.stderr
