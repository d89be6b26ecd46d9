"""Recipes: what loads, what is refused, and that docs/recipe.md is the recipe."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from pronghorn.config.checks import unused
from pronghorn.config.recipe import Recipe, fields
from pronghorn.data.template import find_template
from pronghorn.errors import ConfigError

ROOT = Path(__file__).parents[2]
GOOD = """
model: {name: m, max_seq_length: 512}
data: {train: train.jsonl, eval: eval.jsonl}
train: {output: out, learning_rate: 1e-3}
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "train.jsonl").write_text("{}\n")
    (tmp_path / "eval.jsonl").write_text("{}\n")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def load(folder: Path, text: str, *overrides: str) -> Recipe:
    (folder / "recipe.yaml").write_text(text)
    return Recipe.load(folder / "recipe.yaml", overrides)


def test_a_recipe_with_defaults_and_overrides(folder: Path) -> None:
    recipe = load(folder, GOOD, "train.max_steps=3", "adapter.target_modules=[q_proj]", "train.max_minutes=null")
    assert recipe.train.learning_rate == 1e-3 and recipe.train.max_steps == 3
    assert recipe.adapter.target_modules == ["q_proj"] and recipe.adapter.r == 16
    assert recipe.memory.gradient_checkpointing == "auto" and recipe.train.max_minutes is None
    again = Recipe.model_validate(recipe.to_dict())
    assert again == recipe


def test_paths_in_the_home_folder(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No shell expands what stands in a recipe or behind `=`: the run would go to a folder called ~."""
    monkeypatch.setenv("HOME", str(folder))
    (folder / "t.jinja").write_text("{{ messages }}")
    recipe = load(folder, GOOD, "train.output=~/runs", "data.train=[{path: ~/train.jsonl}]", "data.cache=~/cache")
    assert recipe.train.output == folder / "runs" and recipe.data.cache == folder / "cache"
    assert [source.path for source in recipe.data.sources("train")] == [folder / "train.jsonl"]
    template = find_template("~/t.jinja")
    assert template is not None and template.text == "{{ messages }}"
    with pytest.raises(ConfigError, match=r"train\.output = '~nobody-here/runs': .*home"):
        load(folder, GOOD, "train.output=~nobody-here/runs")


@pytest.mark.parametrize("written", ["10%", "10 %", "10.0%", "0.1"])
def test_shares_of_a_run_are_written_as_those_of_the_data(folder: Path, written: str) -> None:
    train = load(folder, GOOD, f"train.warmup_ratio={written}", f"train.logging_steps={written}").train
    assert train.warmup_ratio == train.logging_steps == 0.1


@pytest.mark.parametrize("way", ["on", "off", "auto"])
def test_on_and_off_are_words(folder: Path, way: str) -> None:
    """YAML 1.1 reads the first two as true and false, in a file and behind `=`."""
    assert load(folder, f"{GOOD}packing: {{graph: {way}}}").packing.graph == way
    assert load(folder, GOOD, f"packing.graph={way}").packing.graph == way
    assert load(folder, GOOD, f"packing.graph='{way}'").packing.graph == way


def test_a_recipe_is_frozen(folder: Path) -> None:
    with pytest.raises(ValueError, match="frozen"):
        load(folder, GOOD).train.max_steps = 4


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ([], []),
        (["adapter.r=16"], []),
        (["adapter.method=full"], []),
        (["adapter.method=full", "adapter.r=16"], ["adapter.r is not used"]),  # its default, but somebody wrote it
        (["packing.enabled=false", "packing.graph=on", "memory.feed_forward=tiled"], []),
        (["packing.enabled=false", "packing.look_ahead=4"], ["packing.look_ahead is not used"]),
        (["memory.budget=8GiB"], []),
        (["memory.budget=8GiB", "memory.gradient_checkpointing=true"], ["memory.budget 8GiB is not used"]),
        (["data.eval_rows=3", "data.eval=null"], ["data.eval_rows is not used"]),
        (["train.load_best=false"], []),
        (["train.load_best=true"], ["train.load_best is not used"]),
        (["train.load_best=true", "train.eval_steps=5"], []),
        (["report.sample_tokens=9", "report.sample_prompts=[a]"], []),
        (["report.sample_tokens=9"], ["report.sample_tokens is not used"]),
    ],
)
def test_what_has_no_effect_is_told(folder: Path, changes: list[str], told: list[str]) -> None:
    found = list(unused(load(folder, GOOD, *changes)))
    assert [message.partition(":")[0] for message in found] == told


BAD: list[tuple[str, list[str], str]] = [
    ("", ["train.max_stps=3"], "unknown key train.max_stps: did you mean train.max_steps?"),
    ("", ["train.max-steps=3"], "unknown key train.max-steps: did you mean train.max_steps?"),
    ("trian: {output: x}\n", [], "unknown key trian: did you mean train?"),
    ("train-it: {output: x}\n", [], "unknown key train-it: did you mean train?"),
    ("", ["model.learning_rate=1"], "unknown key model.learning_rate: did you mean train.learning_rate?"),
    ("", ["data.zzz=1"], "unknown key data.zzz: known here: train, eval"),
    ("", ["model.max_seq_length=0"], "model.max_seq_length = 0: input should be greater than 0"),
    ("", ["model.max_seq_length=-5"], "model.max_seq_length = -5"),
    ("", ["model.max_seq_length=many"], "model.max_seq_length = 'many': input should be a valid integer"),
    ("", ["adapter.r=0"], "adapter.r = 0"),
    ("", ["adapter.method=qlora"], "adapter.method = 'qlora': input should be 'lora' or 'full'"),
    ("", ["adapter.target_modules=[]"], "adapter.target_modules"),
    ("", ["adapter.lora_dropout=1.5"], "adapter.lora_dropout = 1.5"),
    ("", ["data.overflow=cut"], "data.overflow = 'cut'"),
    ("", ["data.train=nowhere.jsonl"], "data.train: nowhere.jsonl does not exist"),
    ("", ["data.eval=nowhere.jsonl"], "data.eval: nowhere.jsonl does not exist"),
    ("", ["data.eval=null", "train.min_improvement=0.1"], "train.min_improvement needs held-out data"),
    ("", ["packing.metadata=once"], "packing.metadata is not a key of a recipe any more: leave it out; to measure"),
    ("", ["packing.moe_routing=loop"], "with it: attach(model, experimental={'moe_routing': ...})"),
    ("", ["packing.attention=masked"], "with it: attach(model, experimental={'masked_attention': True})"),
    ("", ["packing.attention=eager"], "packing.attention = 'eager'"),
    ("", ["packing.rows_per_step=0"], "packing.rows_per_step = 0"),
    ("", ["train.max_steps=0"], "train.max_steps = 0"),
    ("", ["train.epochs=0"], "train.epochs = 0"),
    ("", ["train.logging_steps=2.5"], "train.logging_steps = 2.5: input should be a valid integer"),
    ("", ["train.learning_rate=-1"], "train.learning_rate = -1"),
    ("", ["precision.dtype=int8"], "precision.dtype = 'int8'"),
    ("", ["memory.gradient_checkpointing=maybe"], "memory.gradient_checkpointing"),
    ("", ["adapter.method=full", "model.load_in_4bit=true"], "4-bit weights can't be trained"),
    ("", ["adapter.method=full", "precision.compute=fp8"], "8-bit products are for frozen weights"),
    ("", ["precision.dtype=fp32", "precision.compute=fp8"], "with precision.dtype: float32"),
    ("", ["max_steps"], "override 'max_steps' is not section.key=value: write e.g. train.max_steps=3"),
    ("", ["max_steps=3"], "is not section.key=value: did you mean train.max_steps=3?"),
    ("", ["packing=false"], "is not section.key=value: did you mean packing.enabled=false?"),
    ("", ["streaming=true"], "is not section.key=value: leave it out"),
    ("", ["lora=8"], "is not section.key=value: the section is adapter"),
    ("", ["zzz=8"], "is not section.key=value: write e.g. train.max_steps=3"),
    ("", ["train.output"], "is not section.key=value"),
    ("", ["train.output=runs/a #2"], "YAML leaves out '#2': quote the value: 'train.output="),
    ("", ["data.system_prompt=# Be brief"], "YAML leaves out '# Be brief'"),
    ("", ["data.columns.prompt=question"], "write data.columns: {prompt: …}"),
    ("", ["train.output={"], "override 'train.output={' line 1: not YAML"),
    ("", ["train.max_steps=3: 4: 5"], "not YAML"),
    ("", ["train.seed=2026-13-40"], "train.seed = '2026-13-40': input should be a valid integer"),
    ("", ["train.max_steps=true"], "train.max_steps = True: input should be a valid integer"),
    ("", ["train.max_steps='3'"], "train.max_steps = '3': a number in quotes is a text"),
    ("", ["train.learning_rate=.inf"], "train.learning_rate = inf: input should be a finite number"),
    ("", ["model.name=''"], "model.name = ''"),
    ("", ["train.output=''"], "train.output = '': an empty path"),
    ("", ["train.output=."], "train.output is the current folder"),
    ("", ["train.output=null"], "train.output = null: a value is needed"),
    ("", ["memory.offload_buffers=1"], "memory.offload_buffers is not a key of a recipe any more"),
    ("", ["train.max_steps=!!timestamp x"], "override 'train.max_steps=!!timestamp x': not YAML"),
    ("", ["adapter.random_state=-1"], "adapter.random_state = -1"),
    ("", ["train.lr=1e-3"], "unknown key train.lr: did you mean train.learning_rate?"),
    ("", ["train.batch_size=2"], "did you mean packing.rows_per_step?"),
    ("", ["data.train=''"], "data.train = '': an empty path"),
    ("", ["data.chat_template=''"], "data.chat_template = '': an empty path"),
    ("", ["model.name=' '"], "model.name = ' ': an empty path"),
    (
        "",
        ["data.columns={text: 0}"],
        "data.columns.text = 0: a number in YAML, where a text is needed: write it in quotes",
    ),
    ("", ["data.columns={text: yes}"], "data.columns.text = True: a truth value in YAML, where a text is needed"),
    ("", ["data.train=' '"], "data.train = ' ': an empty path"),
    ("", ["data.train=['']"], "data.train.0.path = '': an empty path"),
    ("", ["data.train=[{path: ''}]"], "data.train.0.path = '': an empty path"),
    ("", ["data.train=null"], "data.train = null: a value is needed: set data.train"),
    ("", [f"data.train={'a' * 5000}"], "no path (File name too long)"),
    ("", [f"data.eval={'a' * 300}"], "no path (File name too long)"),
    ("", [f"model.name={'a' * 300}"], "no path (File name too long)"),
    ("", ['data.train="a\\0b"'], "data.train = 'a\\x00b': no path ("),
    ("", ['model.name="a\\0b"'], "no path ("),
    ("", ['data.chat_template="a\\0b"'], "no path ("),
    ("", ['data.cache="a\\0b"'], "no path ("),
    ("", [f"train.seed={2**32}"], "train.seed = 4294967296: input should be less than 4294967296"),
    ("", [f"adapter.random_state={2**32}"], "adapter.random_state = 4294967296"),
    ("", [f"train.max_steps={'9' * 400}"], "has more than 64 bits"),
    ("", [f"train.learning_rate=0x{'f' * 100_000}"], "has more than 64 bits"),
    ("", ["train.max_steps=010"], "'010' is a number of base 8 in YAML: write it in base 10"),
    ("", ["train.max_steps=-0_7"], "base 8"),
    ("", ["train.max_steps=1:00"], "'1:00' is a number of base 60 (hours and minutes) in YAML"),
    ("", ["train.epochs=1:30.5"], "base 60"),
    ("", ["train.max_steps=!!int ''"], "not YAML"),
    ("", ["adapter.method=qlora"], "set adapter.method: lora and model.load_in_4bit: true"),
    ("", ["data.truncation=true"], "did you mean data.overflow?"),
    (
        "",
        ["data.train=[{path: train.jsonl, wieght: 1}]"],
        "unknown key data.train.0.wieght: did you mean data.train.0.w",
    ),
    ("? [a]\n: b\n", [], "as a key: write keys as plain words"),
]


@pytest.mark.parametrize("extra,overrides,says", BAD, ids=[says[:40] for *_, says in BAD])
def test_bad_recipes(folder: Path, extra: str, overrides: list[str], says: str) -> None:
    with pytest.raises(ConfigError) as error:
        load(folder, GOOD + extra, *overrides)
    assert says in str(error.value), str(error.value)
    assert error.value.remedy


@pytest.mark.parametrize(
    "text,says",
    [
        ("model: {name: m, max_seq_length: 512\n", "line 2: not YAML"),
        ("- a\n- b\n", "a recipe is a table of sections"),
        ("", "a recipe is a table of sections"),
        (GOOD + "model: {name: other, max_seq_length: 8}\n", "key 'model' is set twice"),
        (GOOD.replace("output: out,", "output: out, output: out2,"), "line 4: key 'output' is set twice"),
        (GOOD.replace("name: m, ", ""), "model.name is missing"),
        (GOOD.replace("train: {output: out, learning_rate: 1e-3}", ""), "train is missing"),
        (GOOD.replace("train: {", "trian: {"), "unknown key trian: did you mean train?"),
        (
            "model:\n\tname: m\n",
            "line 2: not YAML (found character '\\t' that cannot start any token): indent with spaces",
        ),
        (
            "base_model: m\nsequence_len: 8\n",
            "a configuration of Axolotl, not a recipe: pronghorn convert ",
        ),
        (
            "model_name_or_path: m\nlora_rank: 8\n",
            "a configuration of LLaMA-Factory, not a recipe: pronghorn convert ",
        ),
    ],
)
def test_bad_files(folder: Path, text: str, says: str) -> None:
    with pytest.raises(ConfigError) as error:
        load(folder, text)
    assert says in str(error.value), str(error.value)


def test_files_that_are_not_text(folder: Path) -> None:
    for content, says in ((b"model: \xff", "not UTF-8"), (b"model: \x00", "not YAML")):
        (folder / "recipe.yaml").write_bytes(content)
        with pytest.raises(ConfigError, match=says):
            Recipe.load(folder / "recipe.yaml")


LAUGHS = "a0: &a0 [x,x,x,x,x,x,x,x,x]\n" + "".join(
    f"a{i}: &a{i} [{','.join([f'*a{i - 1}'] * 9)}]\n" for i in range(1, 10)
)
BOMBS = {
    "aliases of aliases": (LAUGHS, "holds 4.4e+09 values, with aliases (*name) written out; at most 20,000"),
    "merges of merges": (
        LAUGHS.replace("[x,x,x,x,x,x,x,x,x]", "{k: 1}").replace("[*", "{<<: [*").replace("]\n", "]}\n"),
        "holds 1.5e+09 values",
    ),
    "a list in itself": ("a: &a [*a]\n", "nested too deeply, or hold themselves"),
    "a key that is its table": ("&a {*a : 1}\n", "nested too deeply, or hold themselves"),
    "lists in lists": ("[" * 100_000, "nested too deeply"),
    "tables in tables": ("{a: " * 30_000, "nested too deeply"),
    "items in items": ("- " * 60_000, "nested too deeply"),
    "many values": ("[" + "a," * 30_000 + "]", "holds 3e+04 values"),
    "a file of data": ("a: " + "x" * 400_000, "has more than 131,072 characters"),
}


@pytest.mark.parametrize("text,says", BOMBS.values(), ids=BOMBS)
@pytest.mark.timeout(60)
def test_a_recipe_that_grows_without_bounds_is_refused(folder: Path, text: str, says: str) -> None:
    with pytest.raises(ConfigError) as error:
        load(folder, text)
    assert says in str(error.value) and len(str(error.value)) < 500
    with pytest.raises(ConfigError) as error:
        load(folder, GOOD, f"model.name={text}")
    assert len(str(error.value)) < 500


def test_a_long_value_is_shown_short(folder: Path) -> None:
    for value in ("x" * 100_000, [["y"] * 100] * 100, {str(i): i for i in range(2_000)}):
        with pytest.raises(ConfigError) as error:
            load(folder, GOOD, f"train.max_steps={json.dumps(value)}")
        assert "train.max_steps = " in str(error.value) and len(str(error.value)) < 500


def test_a_recipe_that_is_a_folder(folder: Path) -> None:
    with pytest.raises(ConfigError, match="is a folder: give the path of a YAML file"):
        Recipe.load(folder)
    with pytest.raises(
        ConfigError, match=r"can't be read \(File name too long\)|does not exist"
    ):  # Python 3.14 says so
        Recipe.load(folder / ("a" * 300))


def test_a_recipe_that_is_a_pipe(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "recipe.yaml")
    with pytest.raises(ConfigError, match="is a pipe or a device, not a file: write it to a file"):
        Recipe.load(tmp_path / "recipe.yaml")


def test_one_text_stands_for_a_list_of_it(folder: Path) -> None:
    recipe = load(folder, GOOD, "adapter.target_modules=q_proj, v_proj", "report.sample_prompts=Who?")
    assert recipe.adapter.target_modules == ["q_proj", "v_proj"] and recipe.report.sample_prompts == ["Who?"]
    assert load(folder, GOOD, "adapter.target_modules=all-linear").adapter == load(folder, GOOD).adapter
    with pytest.raises(ConfigError, match=r"report_to\.0 = 'wandbb': input should be 'tensorboard'"):
        load(folder, GOOD, "train.report_to=wandbb")


def test_dtypes_by_their_short_names(folder: Path) -> None:
    names = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32", "bfloat16": "bfloat16"}
    assert {name: load(folder, GOOD, f"precision.dtype={name}").precision.dtype for name in names} == names


def test_numbers_are_what_they_look_like(folder: Path) -> None:
    recipe = load(
        folder, GOOD, "train.max_steps=1_000", "train.output=2026-11-22", "train.epochs=0.50", "model.name='1:00'"
    )
    assert recipe.train.max_steps == 1000 and recipe.train.output == Path("2026-11-22") and recipe.model.name == "1:00"
    assert load(folder, GOOD, f"train.seed={2**32 - 1}", "packing.enabled=no").train.seed == 2**32 - 1


def test_merge_keys_and_empty_sections(folder: Path) -> None:
    recipe = load(folder, GOOD + "packing:\nreport: {<<: {html: false}, sample_tokens: 3}\n")
    assert recipe.packing.enabled and not recipe.report.html and recipe.report.sample_tokens == 3


def test_missing_recipe(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="does not exist"):
        Recipe.load(tmp_path / "no.yaml")


def recipe_page() -> str:
    lines = [
        "# The recipe",
        "",
        "Every key of a recipe. `pronghorn train recipe.yaml section.key=value` overrides one for a run.",
        "",
    ]
    section = ""
    for key, kind, default, description in fields():
        if key.split(".")[0] != section:
            section = key.split(".")[0]
            about = (Recipe.model_fields[section].annotation.__doc__ or "").strip()
            lines += ["", f"## {section}", "", about, "", "| key | type | default | what |", "|---|---|---|---|"]
        cells = [f"`{key.split('.')[1]}`", kind, f"`{default}`", description]
        lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    return "\n".join(lines).replace("\n\n\n", "\n\n") + "\n"


def test_the_page_is_the_recipe() -> None:
    """To renew it: python tests/config/test_config.py > docs/recipe.md"""
    assert (ROOT / "docs" / "recipe.md").read_text() == recipe_page()


@pytest.mark.parametrize("recipe", sorted(p.name for p in (ROOT / "recipes").glob("*.yaml")))
def test_shipped_recipes_are_valid(recipe: str, monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    Recipe.load(ROOT / "recipes" / recipe, ["data.train=train.jsonl", "data.eval=eval.jsonl"])


if __name__ == "__main__":
    print(recipe_page(), end="")
