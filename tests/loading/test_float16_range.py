"""float16 is refused for families whose hidden states are beyond its range."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from pronghorn.cli.main import app
from pronghorn.diagnose.shapes import byte_tokenizer
from pronghorn.errors import ConfigError
from pronghorn.families.registry import family_of
from pronghorn.loading.load import load_model
from support.composites import write_composite
from support.tiny import tiny_model


@pytest.fixture
def gemma(tmp_path: Path) -> Path:
    model = tiny_model("gemma3_text", eos_token_id=2)
    model.save_pretrained(tmp_path)
    byte_tokenizer(512).save_pretrained(tmp_path)
    return tmp_path


def test_gemma_3_is_refused(gemma: Path) -> None:
    for dtype in ("float32", "bfloat16"):
        model, _ = load_model(gemma, dtype=dtype, max_seq_length=16)
        assert str(model.dtype) == f"torch.{dtype}"
    for four_bits in (False, True):
        with pytest.raises(ConfigError, match="Gemma 3 text are beyond its largest number, 65,504") as refused:
            load_model(gemma, dtype="fp16", max_seq_length=16, load_in_4bit=four_bits)
        assert "float32" in refused.value.remedy


def test_gemma_3_among_towers_is_refused(tmp_path: Path) -> None:
    write_composite(tmp_path, "gemma3", torch.bfloat16)
    with pytest.raises(ConfigError, match="65,504"):
        load_model(tmp_path, dtype="float16", max_seq_length=16)


def test_others_load(tmp_path: Path) -> None:
    model = tiny_model("llama", eos_token_id=2)
    assert family_of(model.config).float16
    model.save_pretrained(tmp_path)
    byte_tokenizer(512).save_pretrained(tmp_path)
    assert load_model(tmp_path, dtype="float16", max_seq_length=16)[0].dtype is torch.float16


@pytest.mark.parametrize(
    ("change", "device", "refused"),
    [
        ("", "t4", True),
        ("precision.dtype=float16", "h100", True),
        ("precision.dtype=float32", "t4", False),
        ("", "h100", False),
    ],
)
def test_a_plan_is_refused_as_the_training_is(
    gemma: Path, tmp_path: Path, change: str, device: str, refused: bool
) -> None:
    rows, recipe = tmp_path / "rows.jsonl", tmp_path / "recipe.yaml"
    rows.write_text('{"prompt": "a b", "completion": "c d e"}\n' * 4)
    sections = {"model": {"name": str(gemma), "max_seq_length": 64}, "data": {"train": str(rows)}}
    recipe.write_text(json.dumps(sections | {"train": {"output": str(tmp_path / "run")}}))
    done = CliRunner().invoke(app, ["plan", str(recipe), "--device", device, *change.split()])
    assert done.exit_code == refused and ("65,504" in " ".join(done.stderr.split())) == refused, done.output
