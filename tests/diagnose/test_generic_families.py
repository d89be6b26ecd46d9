"""verify, profile and plan for families that no file of the package knows: they work, or say what to do instead."""

from __future__ import annotations

import json
import types
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from transformers import AutoTokenizer
from typer.testing import CliRunner

from pronghorn.cli.main import app
from pronghorn.config.recipe import Recipe
from pronghorn.diagnose.profile import profile
from pronghorn.diagnose.verify_checks import verify
from pronghorn.diagnose.verify_report import Name
from pronghorn.diagnose.verify_subject import Subject, subject_of
from pronghorn.models.families import decoder_layers
from support.generic import generic_model


def recipe_of(model_type: str, stories: Path, tmp_path: Path) -> Path:
    tokenizer = AutoTokenizer.from_pretrained(stories)
    generic_model(model_type, vocab_size=len(tokenizer)).save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    return written(tmp_path)


def written(tmp_path: Path) -> Path:
    rows = [{"prompt": "Once upon", "completion": f" a time there were {n} dogs who ran all day."} for n in range(6)]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    sections = {
        "model": {"name": str(tmp_path / "model"), "max_seq_length": 128},
        "adapter": {"lora_dropout": 0.0},
        "data": {"train": str(tmp_path / "rows.jsonl")},
        "train": {"output": str(tmp_path / "run")},
        "memory": {"gradient_checkpointing": False},
    }
    (tmp_path / "recipe.yaml").write_text(json.dumps(sections))
    return tmp_path / "recipe.yaml"


@pytest.mark.matrix(1)
@pytest.mark.parametrize("model_type", ["gpt2", "opt", "falcon"])
def test_verify_judges_an_unknown_family_with_a_longer_probe(model_type: str, stories: Path, tmp_path: Path) -> None:
    report = verify(subject_of(Recipe.load(recipe_of(model_type, stories, tmp_path)), 128))
    assert report.ok, report.causes
    [twice] = [check for check in report.checks if check.name is Name.TWICE]
    assert twice.detail == "loss and every gradient bit-equal"  # dropout, of whatever kind, is off
    [sight] = [check for check in report.checks if check.name is Name.VISIBILITY]
    assert "no mixing found at these lengths: 1, 65, 2, 3, 4, 17, 63, 1, 64, 129, 256, 257" in sight.detail


def test_verify_finds_a_leak_that_the_first_probe_is_too_short_for(stories: Path, tmp_path: Path) -> None:
    subject = subject_of(Recipe.load(recipe_of("gpt_neox", stories, tmp_path)), 128)

    def attach(model: Any) -> object:
        handle = subject.attach(model)
        mlp = decoder_layers(model)[1].mlp
        own = mlp.forward

        def leaks_in_long_rows(self: Any, x: torch.Tensor) -> torch.Tensor:
            out: torch.Tensor = own(x)
            return out if x.shape[1] < 300 else out + 0.01 * x.cumsum(1)

        mlp.forward = types.MethodType(leaks_in_long_rows, mlp)
        return handle

    changed: Subject = replace(subject, attach=attach)
    report = verify(changed)
    [sight] = [check for check in report.checks if check.name is Name.VISIBILITY]
    assert not sight.ok
    assert "in layer 1 (GPTNeoXMLP)" in sight.detail
    assert not report.ok
    assert any("leaking mask" in cause for cause in report.causes)


def test_a_step_of_an_unknown_family_is_profiled(stories: Path, tmp_path: Path) -> None:
    recipe = Recipe.load(recipe_of("gpt2", stories, tmp_path))
    report = profile(recipe, Console(quiet=True), steps=1, warmup=1)
    assert any(path["part"] == "packed documents" and "no mixing found" in path["why"] for path in report.paths)


@pytest.mark.parametrize("model_type", ["gpt2", "mamba"])
def test_plan_refuses_an_unknown_family_and_says_what_to_do(model_type: str, stories: Path, tmp_path: Path) -> None:
    done = CliRunner().invoke(app, ["plan", str(recipe_of(model_type, stories, tmp_path)), "--device", "h100"])
    output = " ".join(done.output.split())
    assert done.exit_code == 1, output
    assert f"no plan is made of {model_type}: no family file knows {model_type}" in output
    assert "train.max_steps=3" in output


@pytest.mark.parametrize("verb", ["verify", "profile"])
def test_a_family_that_mixes_documents_is_refused_by_name(verb: str, stories: Path, tmp_path: Path) -> None:
    done = CliRunner().invoke(app, [verb, str(recipe_of("mamba2", stories, tmp_path))])
    output = " ".join(done.output.split())
    assert done.exit_code == 1, output
    assert "documents mix in layer 0 (Mamba2Mixer)" in output
    assert "packing.enabled: false" in output


@pytest.mark.parametrize("verb", ["verify", "profile", "plan"])
def test_code_that_comes_with_a_model_stays_off(verb: str, stories: Path, tmp_path: Path) -> None:
    folder, ran = tmp_path / "model", tmp_path / "ran"
    generic_model("gpt_neox", vocab_size=64).save_pretrained(folder)
    AutoTokenizer.from_pretrained(stories).save_pretrained(folder)
    code = {"AutoConfig": "configuration_own.OwnConfig", "AutoModelForCausalLM": "modeling_own.Own"}
    (folder / "config.json").write_text(json.dumps({"model_type": "own", "auto_map": code, "architectures": ["Own"]}))
    for name in ("configuration_own.py", "modeling_own.py"):
        (folder / name).write_text(f"open({str(ran)!r}, 'w').close()\n")
    options = ["--device", "h100"] if verb == "plan" else []
    done = CliRunner().invoke(app, [verb, str(written(tmp_path)), *options])
    assert done.exit_code == 1, done.output
    assert "trust_remote_code runs code that comes with a model" in " ".join(done.output.split())
    assert not ran.exists()
