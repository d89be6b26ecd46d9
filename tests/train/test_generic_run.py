"""`pronghorn train` on families that no file of the package knows: packed where documents stay apart, else unpacked."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer

from pronghorn.errors import UnsupportedError
from pronghorn.train.run import run
from support.generic import generic_model
from support.runs import QUIET, Make, make  # noqa: F401  (the fixture)


def saved(model_type: str, stories: Path, folder: Path) -> Path:
    tokenizer = AutoTokenizer.from_pretrained(stories)
    generic_model(model_type, vocab_size=len(tokenizer)).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def changes(folder: Path, method: str, **more: dict[str, Any]) -> dict[str, Any]:
    return {
        "model": {"name": str(folder), "max_seq_length": 512},
        "adapter": {"method": method, "lora_dropout": 0.0} if method == "lora" else {"method": method, "r": 8},
        "train": {"max_steps": 3, "eval_steps": 2, "save_steps": 2},
        **more,
    }


@pytest.mark.matrix(2)
@pytest.mark.parametrize(
    ("model_type", "method", "recompute"),
    [("gpt_neox", "lora", True), ("gpt_neox", "full", False), ("gpt2", "lora", "auto"), ("starcoder2", "full", True)],
)
def test_a_recipe_trains_an_unknown_family_packed(
    make: Make,  # noqa: F811
    stories: Path,
    tmp_path: Path,
    model_type: str,
    method: str,
    recompute: Any,
) -> None:
    folder = saved(model_type, stories, tmp_path / "model")
    more = {"memory": {"gradient_checkpointing": recompute}}
    record = run(make("run", **changes(folder, method, **more)), QUIET)
    assert math.isfinite(record.heldout["after"])
    assert record.heldout["after"] < record.heldout["before"]
    told = {path["part"]: path for path in json.loads((tmp_path / "run" / "run.json").read_text())["paths"]}
    assert "no mixing found at these lengths: 1, 65, 2" in told["packed documents"]["why"]
    if method == "full":
        assert AutoModelForCausalLM.from_pretrained(tmp_path / "run" / "model").config.model_type == model_type


@pytest.mark.matrix(1)
@pytest.mark.parametrize("method", ["lora", "full"])
def test_a_family_that_mixes_is_refused_packed_and_trains_unpacked(
    make: Make,  # noqa: F811
    stories: Path,
    tmp_path: Path,
    method: str,
) -> None:
    folder = saved("mamba2", stories, tmp_path / "model")
    with pytest.raises(UnsupportedError, match=r"documents mix in layer 0 \(Mamba2Mixer\)") as refused:
        run(make("packed", **changes(folder, method)), QUIET)
    assert "packing.enabled: false" in refused.value.remedy
    more = {"packing": {"enabled": False}}
    record = run(make("unpacked", **changes(folder, method, **more)), QUIET)
    assert record.heldout["after"] < record.heldout["before"]
    assert record.paths[0]["path"].startswith("padded") and "Mamba2Mixer" in record.paths[0]["why"]
