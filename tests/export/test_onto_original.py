"""An adapter that was trained over 4 bits, merged onto the checkpoint in 16 bits."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import yaml
from peft import PeftModel
from rich.console import Console
from transformers import AutoModelForCausalLM
from typer.testing import CliRunner

from pronghorn.cli.main import app
from pronghorn.config import Recipe
from pronghorn.diagnose.export_run import export_run
from pronghorn.diagnose.shapes import byte_tokenizer
from pronghorn.errors import ConfigError
from pronghorn.train.run import run as train_run
from support.tiny import tiny_model

pytest.importorskip("bitsandbytes")


def trained(folder: Path, in_4_bits: bool) -> Path:
    tiny_model("llama", vocab_size=512, eos_token_id=2, intermediate_size=128).save_pretrained(folder / "base")
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


def test_the_original_base_has_the_adapter(tmp_path: Path) -> None:
    run = trained(tmp_path, in_4_bits=True)
    exported = export_run(run, "merged", tmp_path / "original", "q8_0", onto="original")
    expected = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(tmp_path / "base"), run / "adapter")
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "original", dtype=torch.float32)
    ids = torch.arange(3, 40)[None]
    with torch.no_grad():
        right, found = expected(ids).logits, merged(ids).logits
        assert (found - right).norm() < 0.02 * right.norm()  # rounded to bfloat16
    [note] = exported.notes
    assert "nats from what was trained" in note and note in (tmp_path / "original" / "README.md").read_text()
    seen = export_run(run, "merged", tmp_path / "seen", "q8_0")
    assert not seen.notes
    other = AutoModelForCausalLM.from_pretrained(tmp_path / "seen", dtype=torch.float32)
    with torch.no_grad():
        assert (other(ids).logits - right).norm() > 0.02 * right.norm(), "4 bits are another base"


def test_what_has_no_other_base_is_refused(tmp_path: Path) -> None:
    run = trained(tmp_path, in_4_bits=False)
    with pytest.raises(ConfigError, match="--onto original of a run whose base was not quantised"):
        export_run(run, "merged", None, "q8_0", onto="original")
    done = CliRunner().invoke(app, ["export", str(run), "--onto", "base"])
    assert done.exit_code == 1 and "--onto 'base' is no base" in done.stderr and "seen, original" in done.stderr
