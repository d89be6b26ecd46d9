"""`pronghorn bench`: one table of both steps, after the losses agree; times of unequal work are refused."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from rich.console import Console
from typer.testing import CliRunner

from pronghorn.cli.main import app
from pronghorn.config.recipe import Recipe
from pronghorn.data.batch import PackedBatch
from pronghorn.diagnose import speed
from pronghorn.errors import TrainingError
from support.tiny import tiny_model


@pytest.fixture
def recipe(stories: Path, tmp_path: Path) -> Path:
    """Short documents, so that every row holds several."""
    rows = [{"prompt": f"What is {n} times {n}?", "completion": f"{n} times {n} is {n * n}."} for n in range(40)]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    path = tmp_path / "recipe.yaml"
    sections = {
        "model": {"name": str(stories), "max_seq_length": 256},
        "data": {"train": str(tmp_path / "rows.jsonl")},
        "train": {"output": str(tmp_path / "run")},
    }
    path.write_text(yaml.safe_dump(sections))
    return path


def invoke(*arguments: object) -> Any:
    return CliRunner().invoke(app, ["bench", *map(str, arguments)], env={"NO_COLOR": "1", "COLUMNS": "160"})


def test_one_table_of_both_steps(recipe: Path, tmp_path: Path) -> None:
    done = invoke(recipe, "--steps", 2, "--warmup", 1, "memory.gradient_checkpointing=false")
    assert done.exit_code == 0, done.output
    rows = {
        line.split("│")[1].strip(): line.split("│")[2:4] for line in done.output.splitlines() if line.count("│") > 3
    }
    ours, plain = rows["loss of the first rows"]
    assert float(ours) == pytest.approx(float(plain), rel=1e-4)
    assert "tokens/s" in rows and "step, ms: median (min to max)" in rows and "256 tokens a step" in done.output
    assert "times as long" in done.output and "recomputes" not in done.output
    assert not (tmp_path / "run").exists()


def test_plain_recomputes_where_the_recipe_lets_pronghorn_plan_for_it(recipe: Path) -> None:
    found = speed.compare(Recipe.load(recipe, []), Console(quiet=True), 2, 1)
    assert found.recomputes and found.tokens == 256
    assert len(found.pronghorn.step_ms) == len(found.plain.step_ms) == 2 and found.plain.peak_bytes is None


@pytest.mark.matrix(1)
@pytest.mark.parametrize("compute", ["fp8_both", "int8", "fp8", "dtype"])
def test_products_in_8_bits_may_be_further_from_plain_s_in_16(
    recipe: Path, stories: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, compute: str
) -> None:
    """Of a model whose logits are large enough for 8 bits to show, with 16 bits close by."""
    from pronghorn.train.build import attach_options

    shutil.copytree(stories, tmp_path / "model")
    model = tiny_model("llama", intermediate_size=128, vocab_size=512)
    with torch.no_grad():
        model.lm_head.weight.mul_(20.0)
    model.bfloat16().save_pretrained(tmp_path / "model")
    for module in ("train.build", "diagnose.speed"):
        monkeypatch.setattr(f"pronghorn.{module}.attach_options", lambda r: {**attach_options(r), "layers": "fused"})
    changes = [f"model.name={tmp_path / 'model'}", "precision.dtype=bfloat16", f"precision.compute={compute}"]
    found = speed.compare(Recipe.load(recipe, changes), Console(quiet=True), 2, 1)
    apart = abs(found.pronghorn.loss / found.plain.loss - 1)
    limits = (
        (speed.LOSS_LIMIT_16_BITS, speed.LOSS_LIMIT_IN_8_BITS)
        if compute == "fp8_both"
        else (0, speed.LOSS_LIMIT_16_BITS)
    )
    assert limits[0] < apart < limits[1]


@pytest.mark.parametrize("command", ["bench", "verify", "profile"])
@pytest.mark.parametrize("token", ["eos_token", "pad_token"])
def test_tokens_without_an_embedding_are_answered_as_by_train(
    recipe: Path, stories: Path, tmp_path: Path, command: str, token: str
) -> None:
    """One that is trained is refused by every command that makes a step, and one that only pads does no harm."""
    model = shutil.copytree(stories, tmp_path / "model", copy_function=shutil.copyfile)
    file = model / "tokenizer_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {token: "<end>"}))
    few = {"bench": ["--steps", "2", "--warmup", "1"], "profile": ["--steps", "1"]}.get(command, ["--tokens", "64"])
    done = CliRunner().invoke(app, [command, str(recipe), f"model.name={model}", *few], env={"COLUMNS": "160"})
    if token == "pad_token":
        assert done.exit_code == 0, done.output
        return
    assert (
        done.exit_code == 1 and "holds the token '<end>' of id 512, and the model has embeddings of 512" in done.output
    )
    assert "remedy: take the model's own tokenizer" in done.output


def test_documents_that_see_each_other_are_refused(recipe: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A row whose documents are one to Pronghorn has another loss: its time would be of other work."""
    collator = speed.Collator.__call__

    def leaking(self: Any, rows: Any) -> Any:
        batch = collator(self, rows)
        tokens = batch["input_ids"].shape[1]
        return batch | {"packed": PackedBatch.build([tokens], tokens=tokens, labels=batch["labels"][0])}

    monkeypatch.setattr(speed.Collator, "__call__", leaking)
    with pytest.raises(TrainingError, match="the losses differ") as refused:
        speed.compare(Recipe.load(recipe, []), Console(quiet=True), 2, 1)
    assert "pronghorn verify" in refused.value.remedy


def test_steps_leave_the_weights(recipe: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second loss is compared after timed steps, and nobody's weights are worth keeping."""
    seen: list[list[torch.Tensor]] = []
    timed = speed._time

    def spy(model: Any, *arguments: Any) -> Any:
        seen.append([p.detach().clone() for p in model.parameters() if p.requires_grad])
        return timed(model, *arguments)

    monkeypatch.setattr(speed, "_time", spy)
    speed.compare(Recipe.load(recipe, []), Console(quiet=True), 2, 1)
    assert len(seen) == 3 and all(map(torch.equal, seen[0], seen[2]))


def test_bad_input(recipe: Path) -> None:
    done = invoke(recipe, "packing.enabled=false")
    assert done.exit_code == 1 and "packing.enabled is false" in done.output
    assert invoke(recipe, "--steps", 1).exit_code == 2
