"""Configurations of Axolotl and LLaMA-Factory become recipes that validate and, on a small model, train."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from transformers import AutoModelForCausalLM, AutoTokenizer
from typer.testing import CliRunner

from pronghorn.cli.main import app
from pronghorn.config.recipe import Recipe
from pronghorn.data.template import BUILT_IN
from support.foreign_recipes import AXOLOTL, DATASET_INFO, LLAMA_FACTORY

REFUSED = {"chatml-dpo", "lora_dpo"}
TURNS = [{"role": "user", "content": "Who?"}, {"role": "assistant", "content": "A cat sat."}]
SHAREGPT = [{"from": "human", "value": "Who?"}, {"from": "gpt", "value": "A cat sat."}]
ROWS = {
    "alpaca": {"instruction": "Who?", "input": "", "output": "A cat sat."},
    "messages": {"messages": TURNS},
    "sharegpt": {"conversations": SHAREGPT},
    "text": {"text": "One day a cat sat."},
}


def convert(text: str, folder: Path) -> tuple[Any, dict[str, Any] | None, str]:
    """Run the command in the folder; return its result, the recipe and its text."""
    (folder / "theirs.yaml").write_text(text)
    result = CliRunner().invoke(app, ["convert", "theirs.yaml"], env={"COLUMNS": "300"})
    written = (folder / "recipe.yaml").read_text() if (folder / "recipe.yaml").is_file() else ""
    return result, yaml.safe_load(written), written


@pytest.fixture(scope="module")
def chat_model(tmp_path_factory: pytest.TempPathFactory, stories: Path) -> Path:
    """Return stories260k with the special tokens of every built-in template, and ChatML as its own."""
    folder = tmp_path_factory.mktemp("chat-model")
    tokenizer, model = AutoTokenizer.from_pretrained(stories), AutoModelForCausalLM.from_pretrained(stories)
    tokens = {token for template in BUILT_IN.values() for token in template.needs} - {"</s>"}
    tokenizer.add_special_tokens({"additional_special_tokens": sorted(tokens)})
    tokenizer.chat_template = BUILT_IN["chatml"].text
    model.resize_token_embeddings(len(tokenizer))
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a current folder with LLaMA-Factory's data folder."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "data").mkdir()
    (tmp_path / "data/dataset_info.json").write_text(json.dumps(DATASET_INFO))
    alpaca = {"question": "Who?", "answer": "A cat sat."}
    for name, row in (("identity", ROWS["alpaca"]), ("alpaca", alpaca), ("chats", {"turns": TURNS})):
        (tmp_path / f"data/{name}.json").write_text(f"[{','.join(lines(row))}]")
    (tmp_path / "data/c4.jsonl").write_text("\n".join(lines(ROWS["text"])))
    return tmp_path


def lines(row: dict[str, Any]) -> list[str]:
    """Return forty rows that differ, as JSON."""
    return [json.dumps(row).replace("cat sat", f"cat sat by {number} trees") for number in range(40)]


def put_files(recipe: dict[str, Any], folder: Path) -> None:
    """Put a local file in the place of each data set of the hub, of the same format."""
    for number, source in enumerate(recipe["data"]["train"]):
        if not Path(source["path"]).exists():
            row = dict(ROWS[source["format"]])
            for ours, theirs in source.get("columns", {}).items():
                row[theirs] = row.pop(ours)
            source["path"] = f"{number}.jsonl"
            (folder / source["path"]).write_text("\n".join(lines(row)))
            for key in ("split", "config", "revision"):
                source.pop(key, None)


@pytest.mark.matrix(2)
@pytest.mark.parametrize(
    "text", [*AXOLOTL.values(), *LLAMA_FACTORY.values()], ids=[f"{n}" for n in [*AXOLOTL, *LLAMA_FACTORY]]
)
def test_an_example_becomes_a_recipe_that_trains(
    text: str, place: Path, chat_model: Path, request: pytest.FixtureRequest
) -> None:
    name = request.node.callspec.id
    result, recipe, written = convert(text, place)
    if name in REFUSED:
        assert result.exit_code == 1 and "pronghorn docs preference-training" in result.output
        return
    assert result.exit_code == 0, result.output
    Recipe.model_validate(recipe)
    for line in filter(None, result.output.splitlines()):  # what is told stands in the recipe, too
        if line.startswith("no equivalent"):
            assert line.removeprefix("no equivalent  ") in written
    put_files(recipe, place)
    recipe["model"] |= {"name": str(chat_model), "max_seq_length": 128}
    recipe["train"] |= {"max_steps": 1, "output": "out"}
    recipe["report"] = {"html": False}
    if recipe["train"].get("optimizer", "").startswith(("paged", "adamw_torch_4bit")):
        del recipe["train"]["optimizer"]  # they need a GPU, or a package that may be missing
    (place / "small.yaml").write_text(yaml.safe_dump(recipe))
    trained = CliRunner().invoke(app, ["train", "small.yaml"], env={"COLUMNS": "300"})
    assert trained.exit_code == 0, trained.output
    assert list((place / "out").glob("*/*.safetensors"))


def test_each_key_of_a_file_is_taken_over_or_told(place: Path) -> None:
    """Nothing is left out silently."""
    for name, text in {**AXOLOTL, **LLAMA_FACTORY}.items():
        if name in REFUSED:
            continue
        (place / "recipe.yaml").unlink(missing_ok=True)
        _, _, written = convert(text, place)
        keys = [key for key, value in yaml.safe_load(text).items() if value is not None]
        aside = {"bf16", "stage", "dataset_dir", "lora_r", "quantization_method"}
        assert not [key for key in keys if key not in written and key not in aside], name


def test_values_are_those_of_the_file(place: Path) -> None:
    _, recipe, written = convert(AXOLOTL["llama-3.2-1b-lora"], place)
    assert recipe is not None
    assert recipe["model"] == {"name": "NousResearch/Llama-3.2-1B", "max_seq_length": 2048}
    assert recipe["adapter"]["r"] == 16 and recipe["adapter"]["lora_alpha"] == 32
    assert recipe["adapter"]["target_modules"][0] == "gate_proj"
    assert recipe["data"]["train"] == [{"path": "teknium/GPT4-LLM-Cleaned", "format": "alpaca"}]
    assert recipe["data"]["eval"] == "10%" and recipe["data"]["overflow"] == "drop"
    assert recipe["packing"] == {"rows_per_step": 2}
    assert recipe["train"]["lr_scheduler"] == "cosine" and recipe["train"]["optimizer"] == "adamw_8bit"
    assert "# sequence_len" in written and "#   loss_watchdog_threshold: " in written


def test_defaults_there_that_differ_are_written(place: Path) -> None:
    _, recipe, _ = convert(LLAMA_FACTORY["dora"], place)
    assert recipe is not None
    assert recipe["adapter"] == {"use_rslora": True, "method": "lora", "r": 8, "lora_alpha": 16}
    assert recipe["model"]["max_seq_length"] == 2048 and recipe["data"]["loss_on"] == "last"


ONCE = {"warmup_steps": 0, "warmup_ratio": None, "load_best": None}


@pytest.mark.parametrize(
    ("tool", "more", "values"),
    [
        ("axolotl", "", {"warmup_steps": None, "warmup_ratio": 0.03, "load_best": None}),
        ("axolotl", "max_steps: 1000", {"warmup_steps": 30, "warmup_ratio": None}),
        ("axolotl", "max_steps: 90000", {"warmup_steps": 100}),
        ("axolotl", "warmup_ratio: 0.2", {"warmup_steps": None, "warmup_ratio": 0.2}),
        ("axolotl", "eval_steps: 10", {"load_best": False}),
        ("axolotl", "eval_steps: 10\nsave_steps: 20", {"load_best": None}),
        ("axolotl", "eval_steps: 10\nsave_steps: 20\nload_best_model_at_end: false", {"load_best": False}),
        ("factory", "", ONCE),
        ("factory", "max_steps: 1000\neval_steps: 10", {**ONCE, "load_best": False}),
        ("factory", "eval_steps: 10\nload_best_model_at_end: true", {"load_best": True}),
        ("factory", "warmup_steps: 7", {"warmup_steps": 7}),
        ("factory", "warmup_steps: 0\nwarmup_ratio: 0.1", {"warmup_ratio": 0.1}),
        ("axolotl", "warmup_steps: 0\nwarmup_ratio: 0.1", {"warmup_steps": 0, "warmup_ratio": None}),
    ],
)
def test_the_warm_up_and_the_result_are_as_by_default_there(
    tool: str, more: str, values: dict[str, Any], place: Path
) -> None:
    theirs = {"axolotl": f"{HEAD}{ALPACA}val_set_size: 0.1", "factory": f"{FACTORY}dataset: identity\nval_size: 0.1"}
    result, recipe, _ = convert(f"{theirs[tool]}\n{more}\n", place)
    assert recipe is not None and "0 keys have no equivalent" in result.output
    assert {key: recipe["train"].get(key) for key in values} == values


def test_the_wording_of_a_format_of_one_s_own_is_told_as_lost(place: Path) -> None:
    own = """{field_instruction: question, field_output: answer, system_prompt: Be brief, system_format: "",
        format: "Q: {instruction} A:", no_input_format: "Q: {instruction} A:"}"""
    best = "load_best_model_at_end: false\n"
    _, recipe, written = convert(f"{HEAD}{best}datasets: [{{path: a/c, type: {own}}}]\n", place)
    assert recipe is not None and recipe["train"]["load_best"] is False
    columns = {"instruction": "question", "output": "answer"}
    assert recipe["data"]["train"] == [{"path": "a/c", "format": "alpaca", "columns": columns}]
    for key in ("system_prompt", "format", "no_input_format"):
        assert f"#   datasets.type.{key}: '" in written
    assert "type.system_format" not in written and "type.field_" not in written  # empty, or taken over


def test_dataset_info_is_read(place: Path) -> None:
    _, recipe, _ = convert(LLAMA_FACTORY["lora_sft"], place)
    assert recipe is not None
    assert recipe["data"]["train"] == [
        {"path": "data/identity.json", "format": "alpaca"},
        {"path": "data/alpaca.json", "format": "alpaca", "columns": {"instruction": "question", "output": "answer"}},
    ]


HEAD = "base_model: a/b\nadapter: lora\noutput_dir: out\n"
FACTORY = "model_name_or_path: a/b\nstage: sft\noutput_dir: out\nper_device_train_batch_size: 1\n"
ALPACA = "datasets: [{path: a/c}]\n"


@pytest.mark.parametrize(
    ("text", "section", "values"),
    [
        (f"{HEAD}{ALPACA}val_set_size: 200\n", "data", {"eval": "200"}),
        (f"{HEAD}{ALPACA}val_set_size: 0.025\n", "data", {"eval": "2.5%"}),
        (f"{HEAD}{ALPACA}val_set_size: 0.1\ntest_datasets: [{{path: a/d}}]\n", "data", {"eval": [{"path": "a/d"}]}),
        (
            f"{HEAD}datasets: [{{path: a/c, name: main, split: 'train[:5%]', revision: v1, type: alpaca}}]\n",
            "data",
            {"train": [{"path": "a/c", "format": "alpaca", "split": "train[:5%]", "config": "main", "revision": "v1"}]},
        ),
        (
            f"{HEAD}datasets: [{{path: json, data_files: [a.json, b.json], type: alpaca}}]\n",
            "data",
            {"train": [{"path": "a.json", "format": "alpaca"}, {"path": "b.json", "format": "alpaca"}]},
        ),
        (
            f"{HEAD}pretraining_dataset: [{{path: a/c, type: pretrain, text_column: content}}]\nmax_steps: 9\n",
            "data",
            {"train": [{"path": "a/c", "format": "text", "columns": {"text": "content"}}], "overflow": "split"},
        ),
        (f"{HEAD}{ALPACA}bf16: false\n", "precision", {"dtype": "float32"}),
        (f"{HEAD}{ALPACA}bf16: false\nfp16: true\n", "precision", {"dtype": "float16"}),
        (f"{FACTORY}dataset: identity\nneat_packing: true\n", "packing", {"enabled": None}),
        (
            f"{FACTORY.replace('sft', 'pt')}dataset: identity\npacking: false\n",
            "packing",
            {"rows_per_step": 1, "enabled": False},
        ),
        (f"{FACTORY.replace('sft', 'pt')}dataset: identity\npacking: false\n", "data", {"overflow": "truncate"}),
        (f"{HEAD}{ALPACA}excess_length_strategy: truncate\n", "data", {"overflow": "truncate"}),
        (
            f"{HEAD}datasets: [{{path: a/c, type: completion}}]\nexcess_length_strategy: drop\n",
            "data",
            {"overflow": "split"},
        ),
        (f"{HEAD}{ALPACA}val_set_size: 0.0\nmax_steps: -1\n", "data", {"eval": None}),
        (
            f"{FACTORY}dataset: talks\n",
            "data",
            {"train": [{"path": "data/talks.jsonl", "format": "messages", "columns": {"messages": "talk"}}]},
        ),
        (f"{FACTORY}dataset: identity\nval_size: 0\nmax_steps: -1\n", "train", {"max_steps": None}),
        (f"{HEAD}{ALPACA}train_on_inputs: true\n", "data", {"loss_on": "all"}),
        (f"{HEAD}{ALPACA}peft_init_lora_weights: olora\n", "adapter", {"init_lora_weights": "olora"}),
        (
            f"{HEAD}{ALPACA}lr_scheduler: cosine\ncosine_min_lr_ratio: 0.1\n",
            "train",
            {"lr_scheduler": "cosine_with_min_lr", "lr_scheduler_kwargs": {"min_lr_rate": 0.1}},
        ),
        (
            f"{FACTORY}dataset: identity\nval_size: 50\n",
            "data",
            {"eval": "50"},
        ),
        (
            f"{FACTORY}dataset: part\n",
            "data",
            {
                "train": [{"path": "a/c", "format": "alpaca", "split": "test", "config": "main", "max_samples": 100}],
                "overflow": "truncate",
            },
        ),
        (
            f"{FACTORY}dataset: identity\npissa_init: true\npissa_iter: 4\n",
            "adapter",
            {"init_lora_weights": "pissa_niter_4"},
        ),
        (
            f"{FACTORY}dataset: identity\nuse_unsloth_gc: true\n",
            "memory",
            {"gradient_checkpointing": "offload"},
        ),
        (f"{HEAD}{ALPACA}bf16: true\nfp16: true\ntf32: true\n", "precision", {"tf32": True, "dtype": None}),
        (f"{HEAD}{ALPACA}bf16: auto\nfp16: true\n", "precision", {"dtype": "float16"}),
        (f"{HEAD}{ALPACA}bf16: false\nfloat16: true\n", "precision", {"dtype": "float16"}),
        (f"{HEAD}{ALPACA}bf16: false\nbfloat16: true\ntf32: true\n", "precision", {"dtype": None}),
        (
            f"{HEAD}datasets: [{{path: a/c, type: chat_template, chat_template: chatml}}]\n",
            "data",
            {"chat_template": "chatml", "train": [{"path": "a/c", "format": "messages"}]},
        ),
        (
            f"{HEAD}datasets: [{{path: a/c, type: chat_template, roles: {{user: [user], assistant: assistant}}}}]\n",
            "data",
            {"train": [{"path": "a/c", "format": "messages"}]},
        ),
        (f"{HEAD}{ALPACA}chat_template: qwen3\n", "data", {"chat_template": "qwen-3"}),
        (f"{HEAD}{ALPACA}lora_rank_pattern: {{down_proj: 4}}\n", "adapter", {"rank_pattern": {"down_proj": 4}}),
        (
            f"{HEAD}{ALPACA}noisy_embedding_alpha: 5\nevaluation_strategy: steps\nplugins: [axolotl.liger.Plugin]\n",
            "train",
            {"neftune_noise_alpha": 5},
        ),
        (
            f"{FACTORY}dataset: identity\nval_size: 0.1\neval_steps: 5\nearly_stopping_steps: 3\n"
            "gradient_checkpointing: true\n",
            "train",
            {"patience": 3},
        ),
        (
            f"{FACTORY}dataset: a/c\ndataset_dir: ONLINE\n",
            "data",
            {"train": [{"path": "a/c", "format": "alpaca"}]},
        ),
    ],
)
def test_a_key_is_taken_over(text: str, section: str, values: dict[str, Any], place: Path) -> None:
    result, recipe, _ = convert(text, place)
    assert recipe is not None, result.output
    assert {key: recipe[section].get(key) for key in values} == values
    told = any(said in result.output for said in ("datasets.type: alpaca", "part.num_samples: rows are drawn"))
    assert told is ("type: alpaca" in text or "dataset: part" in text)
    assert ("1 key has" if told else "0 keys have") + " no equivalent" in result.output, result.output


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("{path: a/c, data_files: x.json}", "datasets.data_files: download them from a/c, and name each file"),
        ("{path: a/c, type: chat_template, train_on_eos: last}", "datasets.train_on_eos: 'last'"),
        ("{path: a/c, type: chat_template, message_field_training: learn}", "call the turns' key `train` in the data"),
        (
            "{path: a/c, type: chat_template, message_property_mappings: {content: text}}",
            "None and text: call the turns'",
        ),
    ],
)
def test_what_a_data_set_asks_for_in_vain_is_told(line: str, says: str, place: Path) -> None:
    result, _, _ = convert(f"{HEAD}datasets: [{line}]\n", place)
    assert says in result.output and "1 key has no" in result.output


TALKS = "datasets: [{path: a/c, type: chat_template, roles: {assistant: [doctor]}}]\n"


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (f"{HEAD}{ALPACA}lora_target_modules: 'layers.[0-9]+.(q|k)_proj'\n", "q|k)_proj': a regular expression;"),
        (f"{HEAD}{TALKS}", "datasets.roles: doctor: turns of these roles are refused; call them system, user,"),
        (f"{HEAD}{ALPACA}chat_template: mistral_v1\n", "chat_template: mistral_v1: the tokenizer's own is used"),
        (f"{HEAD}{ALPACA}shuffle_merged_datasets: false\n", "shuffle_merged_datasets: false: documents are always"),
        (f"{HEAD}{ALPACA}plugins: [axolotl.integrations.grokfast.GrokfastPlugin]\n", "GrokfastPlugin: no equivalent"),
        (f"{HEAD}{ALPACA}lr_scheduler: linear\ncosine_min_lr_ratio: 0.1\n", "cosine_min_lr_ratio: train.lr_sched"),
        (f"{HEAD}{ALPACA}adam_beta2: 0.95\n", "adam_beta2: 0.9, 0.999, 1e-8 here; SFTConfig"),
        (f"{HEAD}{ALPACA}rope_scaling: {{type: yarn}}\n", "rope_scaling: set it in the model's config.json"),
        (f"{HEAD}{ALPACA}lora_r: 64.0\n", "valid integer; the default (16) stays"),
        (f"base_model: a/b\nsample_packing: true\n{ALPACA}tokens: [<x>]\n", "tokens: for full fine-tuning add them"),
        (f"{FACTORY}dataset: roles\n", "dataset roles.tags.roles: Human: turns of these roles are refused"),
        (f"{FACTORY}dataset: identity\nexport_dir: merged\n", "export_dir: no equivalent"),
        (f"{FACTORY}dataset: lines\n", "lines.txt: each line is a text there; here the file is one"),
        (f"{HEAD}datasets: [{{path: a.txt, type: completion}}]\n", "datasets.path: a.txt: each line is a text there"),
        (f"{FACTORY}dataset: system\n", "dataset system.system: 'system': put it first among the messages"),
        (
            f"{FACTORY}dataset: identity\nresume_from_checkpoint: out/checkpoint-5\n",
            "out/checkpoint-5 is another tool's",
        ),
        (f"{FACTORY}dataset: identity\nenable_thinking: false\n", "enable_thinking: false: the chat template"),
        (f"{FACTORY}dataset: identity\ndouble_quantization: false\n", "double_quantization: false: NF4's scales"),
        (f"{FACTORY}dataset: identity\ntemplate: default\n", "template: default: the tokenizer's own is used, or"),
    ],
)
def test_what_would_mean_something_else_is_told(text: str, says: str, place: Path) -> None:
    tags = {"role_tag": "role", "content_tag": "content", "user_tag": "Human", "assistant_tag": "assistant"}
    talks = {"roles": {"file_name": "talks.json", "formatting": "sharegpt", "tags": tags}}
    usual = {"role_tag": "role", "content_tag": "content"}
    columns = {"messages": "messages", "system": "system"}
    talks["lines"] = {"file_name": "lines.txt", "columns": {"prompt": "text"}}
    talks["system"] = {"file_name": "talks.json", "formatting": "sharegpt", "columns": columns, "tags": usual}
    (place / "data/dataset_info.json").write_text(json.dumps(DATASET_INFO | talks))
    result, recipe, _ = convert(text, place)
    assert recipe is not None and "target_modules" not in recipe["adapter"]
    assert recipe["train"].get("lr_scheduler_kwargs") is None
    assert says in result.output and "1 key has no equivalent" in result.output, result.output


def test_what_is_counted_or_trained_otherwise_stands_beside_it(place: Path) -> None:
    _, _, written = convert(f"{HEAD}{ALPACA}gradient_accumulation_steps: 4\ntrain_on_inputs: true\n", place)
    assert "# train_on_inputs; headers of turns are trained, too" in written
    assert "# gradient_accumulation_steps; if it ran on N GPUs, write N times this" in written


def test_what_is_cut_off_is_told(place: Path) -> None:
    _, _, written = convert(f"{FACTORY}dataset: identity\nmask_history: true\n", place)
    assert "overflow: truncate" in written and "# the end is cut; there each turn in proportion" in written


def test_a_script_is_no_file_of_keys(place: Path) -> None:
    (place / "train.sh").write_text("llamafactory-cli train --stage sft\n")
    result = CliRunner().invoke(app, ["convert", "train.sh"])
    assert result.exit_code == 1 and "train.sh is a script" in result.output


def test_each_of_several_data_sets_tells_what_it_loses(place: Path) -> None:
    sets = [
        {"path": "a/c", "type": "chat_template", "shards": 2},
        {"path": "a/d", "type": "chat_template", "shards": 3},
    ]
    sets.append({"path": "a/e", "type": "chat_template", "chat_template": "gemma"})
    result, _, _ = convert(f"{HEAD}datasets: {json.dumps(sets)}\n", place)
    assert "datasets.0.shards: 2" in result.output and "datasets.1.shards: 3" in result.output
    assert "datasets.2.chat_template: gemma: data.chat_template holds for all sources" in result.output
    assert "3 keys have no equivalent" in result.output


def test_texts_beside_conversations_are_told(place: Path) -> None:
    """Axolotl cuts these alone into pieces."""
    sets = "datasets: [{path: a/c, type: completion}, {path: a/d, type: alpaca}]\n"
    result, recipe, _ = convert(f"{HEAD}{sets}", place)
    assert recipe is not None and recipe["data"]["overflow"] == "drop"
    assert "datasets.type: completion: texts over sequence_len are split there" in result.output


def test_targets_outside_of_all_linears_are_told(place: Path) -> None:
    targets = "lora_target_linear: true\nlora_target_modules: [q_proj, lm_head]\nbatch_size: 16\n"
    result, _, _ = convert(f"{HEAD}{ALPACA}{targets}", place)
    assert "lora_target_modules: lm_head: adapter.modules_to_save" in result.output
    assert "batch_size: train.gradient_accumulation_steps" in result.output


def test_what_an_entry_of_dataset_info_asks_for_in_vain_is_told(place: Path) -> None:
    result, _, _ = convert(f"{FACTORY}dataset: seen\n", place)
    for said in ("seen.tags: speaker and text: call the", "seen.images: 'pictures': no", "seen.folder: 'b': no"):
        assert f"no equivalent  dataset {said}" in result.output


def test_full_fine_tuning_has_no_left_over_keys_of_adapters(place: Path) -> None:
    """They would be refused, or passed over."""
    lora = "lora_dropout: 0.1\nuse_dora: true\nuse_rslora: true\nlora_rank: 8\nadditional_target: lm_head\n"
    result, recipe, written = convert(f"{FACTORY}dataset: identity\nfinetuning_type: full\n{lora}", place)
    assert recipe is not None and recipe["adapter"] == {"method": "full"}
    assert "0 keys have no equivalent" in result.output and "use_dora: full fine-tuning has no adapter" in written


def test_turns_that_are_not_trained_need_no_key(place: Path) -> None:
    table = "{path: a/c, type: chat_template, message_field_training: train, roles_to_train: [assistant]}"
    result, _, written = convert(f"{HEAD}datasets: [{table}]\n", place)
    assert "0 keys have no equivalent" in result.output
    assert "message_field_training: turns whose train is false or 0 are not supervised" in written


def test_a_ratio_of_warm_up_is_counted_where_steps_are_known(place: Path) -> None:
    _, recipe, _ = convert(AXOLOTL["tiny-llama-pretrain"], place)
    assert recipe is not None and recipe["train"]["warmup_steps"] == 20
    assert recipe["data"]["train"][0]["format"] == "text"


def test_documents_that_are_not_packed_there_stay_so(place: Path) -> None:
    _, recipe, written = convert(AXOLOTL["instruct-lora-8b"], place)
    assert recipe is not None and recipe["packing"] == {"rows_per_step": 2, "enabled": False}
    assert "documents aren't packed there" in written


@pytest.mark.parametrize(("own", "read"), [(5, 5), (500, None)])
def test_of_two_limits_of_rows_the_smaller_holds(own: int, read: int | None, place: Path) -> None:
    info = {"alpaca": {"file_name": "identity.json", "num_samples": own}}
    (place / "data/dataset_info.json").write_text(json.dumps(info))
    _, recipe, _ = convert(f"{FACTORY}dataset: alpaca\nmax_samples: 10\n", place)
    assert recipe is not None and recipe["data"]["max_samples"] == 10
    assert recipe["data"]["train"][0].get("max_samples") == read


@pytest.mark.parametrize(("way", "told"), [("bnb", False), ("hqq", True), ("eetq", True)])
def test_another_quantiser_of_4_bits_is_told(way: str, told: bool, place: Path) -> None:
    result, recipe, _ = convert(f"{FACTORY}dataset: identity\nquantization_bit: 4\nquantization_method: {way}\n", place)
    assert recipe is not None and recipe["model"]["load_in_4bit"] is True
    assert (f"quantization_method: {way} is not here; bitsandbytes' NF4 is written instead" in result.output) is told


def test_a_dataset_info_that_is_no_json_is_told(place: Path) -> None:
    (place / "data/dataset_info.json").write_text("{")
    result, _, _ = convert(LLAMA_FACTORY["lora_sft"], place)
    assert result.exit_code == 1 and "dataset_info.json can't be used" in result.output


def test_what_is_there_is_not_written_over(place: Path) -> None:
    (place / "recipe.yaml").write_text("mine")
    result, _, written = convert(AXOLOTL["qlora"], place)
    assert result.exit_code == 1 and "recipe.yaml already exists" in result.output and written == "mine"


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("model: {name: a}\ntrain: {}\n", "is a recipe already"),
        ("name: a\n", "no known configuration"),
        ("base_model: a\nadapter: lora\ndatasets: [{type: alpaca}]\n", "KeyError: 'path'"),
        ("base_model: a\nadapter: lora\ndatasets: [3]\n", "not of the kind that Axolotl documents"),
        ("base_model: a\nmax_steps: 5\nwarmup_ratio: some\n", "not of the kind that Axolotl documents"),
        ("model_name_or_path: a\nstage: sft\nlora_rank: x\ndataset: 3\n", "not of the kind that LLaMA-Factory"),
        ("model_name_or_path: a\ndataset_name: b\n", "a configuration of TRL"),
        ("base_model: a\nadapter: lora\ndatasets: []\n", "add datasets to the file"),
        ("model_name_or_path: a\nstage: sft\ndataset: identity\n", "add output_dir to the file"),
        (
            f"{HEAD}datasets: [{{path: 'https://a.b/c.jsonl'}}]\n",
            "'https://a.b/c.jsonl' can't be data.train: an address",
        ),
        (
            f"{HEAD}{ALPACA}".replace("a/b", "${MODEL}"),
            "base_model: '${MODEL}' can't be model.name: recipes don't fill",
        ),
        ("model: a/b\ntrain_dataset: a.yaml\nmicro_batch_size: 1\n", "the keys of LLaMA-Factory's v1 (train_dataset)"),
        (f"{FACTORY}dataset: identity\nadapter_name_or_path: a,b\n", "'a,b' is merged there before training"),
        (f"{FACTORY}dataset: identity\nadapter_name_or_path: a\ncreate_new_adapter: true\n", "--to merged"),
    ],
)
def test_other_files_are_refused_by_name(text: str, says: str, place: Path) -> None:
    result, _, _ = convert(text, place)
    assert result.exit_code == 1 and says in result.output
