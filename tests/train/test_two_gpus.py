"""`pronghorn train` itself on two GPUs, from a checkpoint's files to the saved result, against the same recipe on one.

pytest -m gpu -n 4 tests/train/test_two_gpus.py
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from support.packed_checkpoints import mxfp4_checkpoint
from support.several import Make, recipes, steps, stopped_at, weights_of

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs"),
]

SHARDED = {"strategy": "sharded"}
CHANGES: dict[str, dict[str, Any]] = {
    "lora": {},
    "fp8": {"precision": {"compute": "fp8"}},
    "fp8_both": {"precision": {"compute": "fp8_both"}},
    "nf4": {"model": {"load_in_4bit": True}},
    "nf4 fp8": {"model": {"load_in_4bit": True}, "precision": {"compute": "fp8"}},
    "mxfp4": {},
    "full": {"adapter": {"method": "full"}, "train": {"learning_rate": 1e-3}},
}


@pytest.fixture(scope="module")
def base(stories: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Llama whose sizes every product takes: random weights in bfloat16, and the tokenizer of stories260k."""
    from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

    folder, tokenizer = tmp_path_factory.mktemp("base"), AutoTokenizer.from_pretrained(stories)
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
    )
    LlamaForCausalLM(config).bfloat16().save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def experts(stories: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A gpt-oss whose experts are in MXFP4, with the same tokenizer."""
    from transformers import AutoTokenizer

    folder = tmp_path_factory.mktemp("experts")
    mxfp4_checkpoint(folder, vocab_size=512, hidden_size=256, intermediate_size=256, head_dim=64)
    AutoTokenizer.from_pretrained(stories).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def recipe(base: Path, experts: Path, shared: Path, tmp_path_factory: pytest.TempPathFactory) -> Make:
    of_linears = recipes(base, shared, tmp_path_factory.mktemp("gpus"))
    of_experts = recipes(experts, shared, tmp_path_factory.mktemp("gpus"))

    def make(name: str, launch: dict[str, Any] | None = None, **train: Any) -> tuple[str, Path]:
        return (of_experts if name.startswith("mxfp4") else of_linears)(name, launch, **train)

    return make


def written(make: Make, name: str, kind: str, launch: dict[str, Any]) -> tuple[str, Path]:
    """Write a recipe of a kind of `CHANGES`; as `Make` does it, in bfloat16."""
    file, run = make(name, launch, save_steps=5)
    table = yaml.safe_load(Path(file).read_text())
    table["precision"] = {"dtype": "bfloat16"}
    for section, values in CHANGES[kind].items():
        table[section] |= values
    Path(file).write_text(yaml.safe_dump(table))
    return file, run


def train(file: str, gpus: int) -> str:
    """Run the command; return what it shows."""
    line = [sys.executable, "-m", "pronghorn", "train", file, "--gpus", str(gpus)]
    done = subprocess.run(line, capture_output=True, text=True, timeout=300, env={**os.environ, "OMP_NUM_THREADS": "2"})
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    return done.stdout


def agree(run: Path, alone: Path) -> None:
    """The same tokens in every step; the first loss to 1e-3, later ones as 16 bits let them drift."""
    found, expected = steps(run), steps(alone)
    assert [counts for _, *counts in found] == [counts for _, *counts in expected]
    assert found[0][0] == pytest.approx(expected[0][0], rel=1e-3)
    assert [loss for loss, *_ in found] == pytest.approx([loss for loss, *_ in expected], rel=2e-2)
    assert expected[-1][0] < 0.9 * expected[0][0], "it learns"
    weights, others = weights_of(run), weights_of(alone)
    assert weights.keys() == others.keys() and all(bool(each.isfinite().all()) for each in weights.values())


@pytest.mark.parametrize("kind", CHANGES)
def test_shared_layers_load_and_train_as_one_gpu_does(recipe: Make, kind: str) -> None:
    file, alone = written(recipe, f"{kind} alone", kind, {})
    train(file, 1)
    file, run = written(recipe, f"{kind} shared", kind, SHARDED)
    assert "Each of 2 processes holds a part of every layer's weights" in train(file, 2)
    paths = {path["part"]: path["path"] for path in json.loads((run / "run.json").read_text())["paths"]}
    assert paths["layers' weights"] == "a part in each of 2 processes"
    assert ("products of frozen weights" in paths) is ("fp8" in kind)
    agree(run, alone)


@pytest.mark.parametrize("kind", ["lora", "full"])
def test_copies_train_as_one_gpu_does_and_one_gpu_goes_on(recipe: Make, kind: str, tmp_path: Path) -> None:
    file, run = written(recipe, f"{kind} copies", kind, {"strategy": "copies"})
    train(file, 2)
    on, gone_on = written(recipe, f"{kind} goes on", kind, {})
    stopped_at(5, run, gone_on)
    train(on, 1)
    agree(gone_on, run)
