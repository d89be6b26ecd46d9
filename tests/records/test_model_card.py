"""The model card of a run: what it names, and that the hub takes its metadata."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import yaml
from huggingface_hub import ModelCard

from pronghorn.config.recipe import Recipe
from pronghorn.diagnose.export_run import export_run
from pronghorn.records.model_card import card, licence_of
from pronghorn.records.record import RunRecord
from pronghorn.train.run import run
from pronghorn.train.trainer import SFTTrainer
from support.run_records import record
from support.runs import QUIET

RECIPE = {
    "model": {"name": "a/b", "max_seq_length": 128},
    "data": {"train": "x.jsonl"},
    "train": {"output": "runs/mine"},
}
SOURCES = [{"path": "/home/me/x.jsonl", "format": "text", "rows": 9, "dropped": 0, "used": 9}]


def of_run(base: str = "a/b", **changes: Any) -> RunRecord:
    recipe = Recipe.model_validate(RECIPE).to_dict()
    packing = {**record().packing, "sources": SOURCES, "labelled_tokens": 5_000}
    recipe["model"]["name"] = base
    return record(model=base, recipe=recipe, packing=packing, **changes)


@pytest.fixture(autouse=True)
def offline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)


@pytest.mark.parametrize(("library", "use"), [("peft", "FastLanguageModel"), ("transformers", "AutoModelForCausalLM")])
def test_a_card_names_what_a_reader_asks(library: str, use: str) -> None:
    written = ModelCard(card(of_run(), library))
    assert written.data.base_model == "a/b" and written.data.library_name == library
    assert written.data.pipeline_tag == "text-generation" and written.data.license is None
    for text in (
        "# mine",
        "[a/b](https://huggingface.co/a/b)",
        "LoRA of rank 16, 1,250,000 parameters (1.25% of the model)",
        "`x.jsonl`: 1,234 documents, 99,000 tokens, 5,000 of them trained",
        "3.4567 → 2.3456, over 16 rows",
        "80, learning rate 0.0002, linear, adamw_torch_fused, on Some GPU",
        "the base's, which its card tells",
        "torch 2.13.0",
        use,
    ):
        assert text in written.text, text
    assert "/home/me" not in written.text
    assert "| 80 (the weights are those of step 30), learning rate" in card(of_run(kept_step=30), library)
    shown = written.text.partition("````yaml\n")[2].partition("````")[0]
    assert Recipe.model_validate(yaml.safe_load(shown), strict=False).model.name == "a/b"


def test_a_folder_of_this_machine_is_no_base_of_the_hub(tmp_path: Path) -> None:
    """Its licence is what its own card says."""
    (tmp_path / "README.md").write_text("---\nlicense: apache-2.0\ntags: [x]\n---\n# Base\n")
    written = ModelCard(card(of_run(str(tmp_path)), "peft"))
    assert written.data.base_model is None and written.data.license == "apache-2.0"
    assert f"`{tmp_path.name}`, a local folder" in written.text and "apache-2.0, the base's" in written.text


def test_of_paths_a_card_shows_the_names_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "sets/own").mkdir(parents=True)  # which looks like a name of the hub
    table = {
        "model": {"name": "/home/me/secret/base", "max_seq_length": 128},
        "data": {
            "train": ["/home/me/secret/x.jsonl", "../secret/y.jsonl", "secret/z.csv", "sets/own", "owner/set"],
            "eval": "~/secret/held.jsonl",
            "chat_template": "secret/chat.jinja",
            "cache": "/scratch/secret/cache",
        },
        "train": {"output": "/home/me/secret/mine"},
    }
    sources = [{**SOURCES[0], "path": path} for path in table["data"]["train"]]
    given = record(
        model="/home/me/secret/base",
        recipe=Recipe.model_validate(table).to_dict(),
        packing={**record().packing, "sources": sources},
    )
    text = card(given, "peft")
    assert not any(folder in text for folder in ("secret", "/home", "/scratch", "sets/", str(Path.home())))
    assert "`x.jsonl`, `y.jsonl`, `z.csv`, `own`, `owner/set`: " in text and "`base`, a local folder" in text
    assert "the names alone are shown.\n\n````yaml" in text
    shown = yaml.safe_load(text.partition("````yaml\n")[2].partition("````")[0])
    names = ["x.jsonl", "y.jsonl", "z.csv", "own", "owner/set"]
    assert [source["path"] for source in shown["data"]["train"]] == names
    assert (shown["data"]["eval"], shown["data"]["chat_template"], shown["data"]["cache"]) == (
        "held.jsonl",
        "chat.jinja",
        "cache",
    )
    assert (shown["model"]["name"], shown["train"]["output"]) == ("base", "mine")
    assert Recipe.model_validate(shown, strict=False)
    assert given.recipe["model"]["name"] == "/home/me/secret/base", "the record keeps them"


@pytest.mark.parametrize(
    ("base", "said"),
    [("gpt2", "| Base | `gpt2` |"), ("models/a.b/x.gguf", "| Base | `x.gguf`, a local file |")],
)
def test_a_base_is_not_called_what_it_is_not(base: str, said: str) -> None:
    assert said in card(of_run(base), "peft")


@pytest.mark.parametrize("text", ["", "# Base\n", "---\n: [\n---\n", "---\n- a\n---\n", "---\nlicense: [a]\n---\n"])
def test_a_licence_that_is_not_told_is_not_made_up(text: str, tmp_path: Path) -> None:
    (tmp_path / "README.md").write_text(text)
    assert licence_of(str(tmp_path)) is None and licence_of("nobody/here") is None


@pytest.mark.parametrize("heldout", [(None, None), (2.0, math.nan)])
def test_a_run_without_a_held_out_loss_says_so(heldout: tuple[float | None, float | None]) -> None:
    before, after = heldout
    text = card(of_run(steps=0, heldout={"before": before, "after": after, "rows": 0}), None)
    assert "no held-out data" in text and "## Use" not in text


def test_a_run_and_its_export_have_cards(tmp_path: Path, stories: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save = SFTTrainer._save_checkpoint
    (tmp_path / "x.jsonl").write_text('{"prompt": "One day", "completion": " a cat sat."}\n' * 4)
    table = {
        "model": {"name": str(stories), "max_seq_length": 64},
        "data": {"train": str(tmp_path / "x.jsonl")},
        "train": {"output": str(tmp_path / "mine"), "max_steps": 1, "save_steps": 1},
        "report": {"html": False},
    }
    cards: list[bool] = []  # whether there is one when a checkpoint is sealed

    def save_and_look(trainer: SFTTrainer, *args: Any) -> None:
        save(trainer, *args)
        cards.append((tmp_path / "mine/README.md").exists())

    monkeypatch.setattr(SFTTrainer, "_save_checkpoint", save_and_look)
    run(Recipe.model_validate(table), QUIET)
    assert cards and not any(cards)
    own, adapter = ((tmp_path / name / "README.md").read_text() for name in ("mine", "mine/adapter"))
    assert own == adapter and ModelCard(own).data.library_name == "peft"
    exported = export_run(tmp_path / "mine", "merged", None, "q8_0").folder
    merged = ModelCard((exported / "README.md").read_text())
    assert merged.data.library_name == "transformers" and "Exported by Pronghorn as merged" in merged.text
    for text in (own, merged.text):
        assert "[None]" not in text and "More Information Needed" not in text and "`x.jsonl`: 4 documents" in text
