"""A whole run from a recipe, and folders that appear whole or not at all."""

from __future__ import annotations

import errno
import io
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml
from rich.console import Console

from pronghorn.config.recipe import Recipe
from pronghorn.errors import ConfigError, DataError, TrainingError
from pronghorn.export.folder import disk_is_full, whole_folder
from pronghorn.loading.load import load_model
from pronghorn.models.lora import add_lora
from pronghorn.records.record import RunRecord
from pronghorn.train.build import build
from pronghorn.train.run import run
from pronghorn.train.run_folder import must_have_improved


@pytest.fixture
def recipe(stories: Path, shared: Path, tmp_path: Path) -> Any:
    def make(**changes: dict[str, Any]) -> Recipe:
        rows = (shared / "data/gsm8k/test.jsonl").read_text().splitlines()
        (tmp_path / "train.jsonl").write_text("\n".join(rows[:60]))
        (tmp_path / "eval.jsonl").write_text("\n".join(rows[60:90]))
        table: dict[str, dict[str, Any]] = {
            "model": {"name": str(stories), "max_seq_length": 512},
            "adapter": {"r": 4},
            "data": {
                "train": tmp_path / "train.jsonl",
                "eval": tmp_path / "eval.jsonl",
                "columns": {"prompt": "question", "completion": "answer"},
                "overflow": "drop",
                "eval_rows": 3,
            },
            "train": {"output": tmp_path / "run", "max_steps": 6, "learning_rate": 1e-2, "warmup_steps": 1},
            "memory": {"gradient_checkpointing": False},
            "report": {"sample_prompts": ["Once upon a time"], "sample_tokens": 4, "html": False},
        }
        return Recipe.model_validate(
            {key: {**table.get(key, {}), **changes.get(key, {})} for key in {*table, *changes}}
        )

    return make


QUIET = Console(quiet=True)


def test_a_run_leaves_adapter_and_record(recipe: Any, tmp_path: Path) -> None:
    settings = recipe(train={"min_improvement": 0.05})
    record = run(settings, QUIET)
    assert record.heldout["before"] - record.heldout["after"] > 0.05 and record.heldout["rows"] == 3
    assert [step["step"] for step in record.steps] == [1, 2, 3, 4, 5, 6]
    assert all(0 < step["labelled"] < step["tokens"] <= 512 and step["seconds"] > 0 for step in record.steps)
    assert record.packing["efficiency"] <= record.packing["ceiling"] <= 1
    assert {path["part"]: path["path"] for path in record.paths}["activations"] == "keep"
    assert record.stopped == "max_steps" and record.samples[0]["prompt"] == "Once upon a time"
    assert RunRecord.read(tmp_path / "run") == record
    model, _ = load_model(tmp_path / "run" / "adapter", max_seq_length=512)
    assert any(parameter.abs().max() > 0 for name, parameter in model.named_parameters() if "lora_B" in name)
    with pytest.raises(ConfigError, match="already holds a finished run: choose another"):
        run(settings, QUIET)


@pytest.mark.matrix(1)
@pytest.mark.parametrize("packed", [True, False])
def test_documents_are_written_once(recipe: Any, tmp_path: Path, packed: bool) -> None:
    """The token cache's files are what is trained on: nothing writes them once more beside them."""
    changes = {"data": {"cache": tmp_path / "cache"}, "train": {"max_steps": 1, "eval_steps": 1}}
    changes |= {"packing": {"enabled": packed}, "report": {"sample_prompts": [], "html": False}}
    record = run(recipe(**changes), QUIET)
    assert record.steps[0]["tokens"] > 100 and len(record.evaluations) == 1
    assert {path.suffix for path in (tmp_path / "cache").rglob("*.*")} >= {".arrow"}
    assert not list((tmp_path / "cache").rglob("cache-*"))


@pytest.mark.matrix(1)
@pytest.mark.parametrize("accumulated", [2, 500])
def test_accumulation_beyond_the_data_is_told(recipe: Any, accumulated: int) -> None:
    console = Console(file=io.StringIO(), width=300)
    changes = {"gradient_accumulation_steps": accumulated, "max_steps": 1}
    run(recipe(train=changes, report={"sample_prompts": [], "html": False}), console)
    told = console.file.getvalue()  # type: ignore[attr-defined]
    assert ("train.gradient_accumulation_steps 500 is more than " in told) == (accumulated == 500)


@pytest.mark.slow
def test_the_same_recipe_gives_the_same_run(recipe: Any, tmp_path: Path) -> None:
    first, second = (run(recipe(train={"output": tmp_path / name}), QUIET) for name in "ab")
    assert [step["loss"] for step in first.steps] == [step["loss"] for step in second.steps]
    assert first.heldout == second.heldout


@pytest.mark.matrix(2)
@pytest.mark.parametrize(
    "changes",
    [
        {"packing": {"enabled": False, "rows_per_step": 3}},
        {"packing": {"rows_per_step": 2}, "memory": {"gradient_checkpointing": True}},
        {"adapter": {"method": "full"}},
        {"train": {"gradient_accumulation_steps": 2, "deterministic": False, "max_steps": 3}},
    ],
    ids=["unpacked", "recompute", "full", "accumulation"],
)
def test_other_recipes(recipe: Any, tmp_path: Path, changes: dict[str, Any]) -> None:
    record = run(recipe(**changes), QUIET)
    assert record.heldout["after"] < record.heldout["before"]
    recompute = changes.get("memory", {}).get("gradient_checkpointing", False)
    paths = {path["part"]: path["path"] for path in record.paths}
    assert paths["activations"] == ("recompute the layer" if recompute else "keep")
    unpacked = "end to end in one row, without padding" if "enabled" in changes.get("packing", {}) else None
    assert paths.get("documents") == unpacked
    assert (tmp_path / "run" / ("model" if changes.get("adapter") else "adapter")).is_dir()


def test_settings_of_a_recipe_arrive(recipe: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    given: dict[str, Any] = {}
    monkeypatch.setattr(
        "pronghorn.train.build.add_lora", lambda model, **options: given.update(options) or add_lora(model, **options)
    )
    adapter = {"r": 3, "lora_alpha": 5, "lora_dropout": 0.05, "use_rslora": True, "bias": "lora_only",
               "target_modules": ["q_proj"], "modules_to_save": ["norm"], "random_state": 8}  # fmt: skip
    train = {"max_steps": 7, "learning_rate": 3e-4, "warmup_steps": 2, "lr_scheduler": "cosine", "weight_decay": 0.02,
             "max_grad_norm": 0.3, "gradient_accumulation_steps": 3, "logging_steps": 5, "seed": 9}  # fmt: skip
    names = {"lr_scheduler": "lr_scheduler_type"}
    trainer, _ = build(recipe(adapter=adapter, train={**train, "save_steps": None}), QUIET, [])
    lora = {name: getattr(trainer.model.peft_config["default"], name) for name in adapter if name != "random_state"}
    assert {**lora, "target_modules": [*lora["target_modules"]], "random_state": given["random_state"]} == adapter
    assert {name: getattr(trainer.args, names.get(name, name)) for name in train} == train
    assert trainer.args.save_steps > 10**6 and not trainer.args.greater_is_better and not trainer.args.bf16
    assert not trainer.args.logging_nan_inf_filter


def test_a_loss_that_does_not_fall_fails_after_saving(recipe: Any, tmp_path: Path) -> None:
    with pytest.raises(TrainingError, match=r"is not a fall of 9\.0 or more"):
        run(recipe(train={"min_improvement": 9.0, "max_steps": 1}), QUIET)
    with pytest.raises(TrainingError, match="to nan, which"):
        must_have_improved(recipe(train={"min_improvement": 0.0}), {"before": 1.0, "after": float("nan")})
    assert (tmp_path / "run" / "adapter" / "adapter_model.safetensors").is_file()
    assert (tmp_path / "run" / "run.json").is_file()


def test_max_minutes_stops_a_run(recipe: Any) -> None:
    record = run(recipe(train={"max_minutes": 1e-5, "max_steps": 500}), QUIET)
    assert record.stopped == "max_minutes" and len(record.steps) == 1


def test_rows_longer_than_the_positions_of_the_model(recipe: Any) -> None:
    with pytest.raises(ConfigError, match="max_seq_length 513 > 512"):
        run(recipe(model={"max_seq_length": 513}), QUIET)


@pytest.mark.parametrize(
    "error", [OSError(errno.ENOSPC, "full"), OSError("No space left on device"), KeyboardInterrupt(), ValueError("x")]
)
def test_a_folder_that_could_not_be_finished(
    tmp_path: Path, error: BaseException, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = tmp_path / "adapter"
    with whole_folder(target) as folder:
        (folder / "weights").write_text("first")
    expected = TrainingError if isinstance(error, OSError) else type(error)
    with pytest.raises(expected), whole_folder(target) as folder:
        (folder / "weights").write_text("half")
        raise error
    assert (target / "weights").read_text() == "first"
    assert [path.name for path in tmp_path.iterdir()] == ["adapter"]
    with monkeypatch.context() as patch, pytest.raises(expected), whole_folder(target) as folder:
        (folder / "weights").write_text("never there")

        def fails(self: Path, to: Path) -> Path:
            if self == folder:
                raise error
            return rename(self, to)

        rename = Path.rename
        patch.setattr(Path, "rename", fails)
    assert (target / "weights").read_text() == "first"
    assert [path.name for path in tmp_path.iterdir()] == ["adapter"]
    with whole_folder(target) as folder:
        (folder / "weights").write_text("second")
    assert (target / "weights").read_text() == "second" and len(list(tmp_path.iterdir())) == 1


def test_a_full_disk_is_told_before_its_folder_is_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    used = SimpleNamespace(free=0)
    monkeypatch.setattr("shutil.disk_usage", lambda folder: used if folder == tmp_path else 1 / 0)
    assert disk_is_full(RuntimeError("unexpected pos 64 vs 0"), tmp_path / "run" / "checkpoint-1")
    assert disk_is_full(OSError("1024 requested and 568 written"), tmp_path / "run" / "export")  # numpy's tofile
    used.free = 2**30
    assert disk_is_full(Exception("I/O error: Disk quota exceeded (os error 122)"), tmp_path)  # safetensors'
    assert not disk_is_full(OSError("1024 requested and 568 written"), tmp_path)
    assert not disk_is_full(RuntimeError("unexpected pos 64 vs 0"), tmp_path / "run" / "checkpoint-1")


def test_what_fails_in_a_scratch_folder_names_the_folder_that_was_asked_for(tmp_path: Path) -> None:
    """numpy's tofile says no more than this where a quota or a limit of a file's size cuts a file off."""
    target = tmp_path / "export"
    for error, told in (
        (OSError("1024 requested and 568 written"), f"a file of {target} can't be written whole"),
        (OSError(errno.EDQUOT, "Disk quota exceeded"), f"the disk of {target} is full"),
    ):
        with (
            pytest.raises(TrainingError, match=re.escape(told)),
            whole_folder(target) as folder,
            whole_folder(folder.parent / "scratch" / "merged"),
        ):
            raise error
    elsewhere = tmp_path / "elsewhere"
    told = re.escape(f"the disk of {elsewhere} is full")
    with pytest.raises(TrainingError, match=told), whole_folder(target), whole_folder(elsewhere):
        raise OSError(errno.ENOSPC, "No space left on device")


def test_a_folder_that_can_not_be_made_is_told(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    for target in (tmp_path / "file/folder", tmp_path / ("x" * 300)):
        with (
            pytest.raises(
                TrainingError, match=r"can't be written \((File exists|Not a directory|File name too long)\)"
            ),
            whole_folder(target),
        ):
            pass
    with pytest.raises(FileNotFoundError), whole_folder(tmp_path / "folder"):
        (tmp_path / "another").read_text()  # what is written from is another matter


def test_a_disk_that_fails_while_a_folder_is_written_is_told(tmp_path: Path) -> None:
    """Such as one of the network, or one that the system made read-only after an error."""
    target, other = tmp_path / "checkpoint-2", tmp_path / "base"
    for number in (errno.EIO, errno.EROFS, errno.EACCES, errno.ESTALE):
        told = re.escape(f"{target} can't be written ({os.strerror(number)})")
        with pytest.raises(TrainingError, match=told), whole_folder(target) as folder:
            raise OSError(number, os.strerror(number), str(folder / "trainer_state.json"))
        with pytest.raises(OSError, match="base"), whole_folder(target):
            raise OSError(number, os.strerror(number), str(other))
    with pytest.raises(FileNotFoundError), whole_folder(target) as folder:
        (folder / "never written").read_text()


@pytest.mark.parametrize("shuffled", [False, True])
def test_a_tokenizer_that_is_another_model_s_is_told(
    recipe: Any, stories: Path, tmp_path: Path, shuffled: bool
) -> None:
    """Its ids are all there, and mean other tokens: nothing fails, and the model knows no word."""
    shutil.copytree(stories, tmp_path / "model")
    if shuffled:
        table = json.loads((tmp_path / "model/tokenizer.json").read_text())
        vocabulary = table["model"]["vocab"]
        words = [word for word, number in vocabulary.items() if number > 258]
        vocabulary.update(dict(zip(words, sorted(map(vocabulary.__getitem__, words), reverse=True), strict=True)))
        (tmp_path / "model/tokenizer.json").write_text(json.dumps(table))
    out = io.StringIO()
    run(recipe(model={"name": str(tmp_path / "model")}, train={"max_steps": 1}), Console(file=out, width=300))
    assert ("is far above that of guessing, 6.24: tokenizer, chat template" in out.getvalue()) is shuffled


def test_a_saved_adapter_is_trained_on(recipe: Any, tmp_path: Path) -> None:
    first = run(recipe(), QUIET)
    saved = {"name": str(tmp_path / "run" / "adapter")}
    again = run(recipe(model=saved, train={"output": tmp_path / "again"}), QUIET)
    assert again.heldout["before"] == pytest.approx(first.heldout["after"], rel=1e-4)
    with pytest.raises(ConfigError, match="is a saved adapter"):
        run(recipe(model=saved, adapter={"method": "full"}, train={"output": tmp_path / "full"}), QUIET)


@pytest.mark.parametrize(
    ("special", "changes", "holds"),
    [
        ({"eos_token": "<end>"}, {}, "train_dataset holds the token '<end>' of id 512, .* embeddings of 512"),
        ({"eos_token": "<end>"}, {"packing": {"enabled": False}}, "train_dataset holds the token"),
        ({"extra_special_tokens": ["<end>"]}, {}, "data.eval holds the token '<end>'"),
        ({"extra_special_tokens": ["<end>"]}, {"train": {"eval_steps": 2}}, "eval_dataset holds the token '<end>'"),
        ({"pad_token": "<end>"}, {}, None),
        ({"pad_token": "<end>"}, {"packing": {"enabled": False, "rows_per_step": 3}}, None),
    ],
)
def test_tokens_that_the_model_has_no_embedding_of(
    recipe: Any, stories: Path, tmp_path: Path, special: dict[str, Any], changes: dict[str, Any], holds: str | None
) -> None:
    """Trained ones are refused, and one that only pads does no harm."""
    model = shutil.copytree(stories, tmp_path / "model", copy_function=shutil.copyfile)
    file = model / "tokenizer_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | special))
    settings = recipe(model={"name": str(model)}, **changes)
    with (tmp_path / "eval.jsonl").open("a") as rows:
        rows.write('\n{"question": "Why <end>?", "answer": "The."}')
    if holds is None:
        reference = recipe(train={"output": tmp_path / "plain"}, **changes)
        assert run(settings, QUIET).heldout == run(reference, QUIET).heldout
        return
    with pytest.raises(DataError, match=holds):
        run(settings, QUIET)


def test_a_model_that_is_nowhere(recipe: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(DataError, match="neither a folder here nor to be had from the hub"):
        run(recipe(model={"name": "nobody/nothing"}), QUIET)


@pytest.mark.slow
def test_two_processes_make_one_run(recipe: Any, tmp_path: Path) -> None:
    """Under torchrun the ranks share the work; one of them talks and writes."""
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(recipe(train={"gradient_accumulation_steps": 2}).to_dict()))
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2", "-m"]
    done = subprocess.run(
        [*launcher, "pronghorn", "train", str(tmp_path / "recipe.yaml")],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.count("Held-out loss before training") == 1
    record = RunRecord.read(tmp_path / "run")
    assert record.heldout["after"] < record.heldout["before"] and len(record.steps) == 6
    assert all(512 < step["tokens"] <= 1024 for step in record.steps)  # of both
    assert (tmp_path / "run" / "adapter" / "adapter_model.safetensors").is_file()
