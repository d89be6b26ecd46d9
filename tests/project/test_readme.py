"""Every command of the README runs, and every recipe trains (in three steps, where they would take long)."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from pronghorn.cli.main import app

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()
BLOCKS = [block.splitlines() for block in re.findall(r"```bash\n(.*?)```", README, re.DOTALL)]
BEGIN, BASH = BLOCKS[0], [line for block in BLOCKS[1:] for line in block if line]
PYTHON = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
YAML = re.findall(r"```yaml\n(.*?)```", README, re.DOTALL)
THREE_STEPS = ["train.max_steps=3", "train.warmup_steps=0", "data.eval_rows=2", "report.sample_tokens=8"]
SMALL = {  # what each command is given beside what the README says, to be quick on two cores
    "doctor": "",
    "docs": "",
    "data inspect": "--rows 1",
    "plan": "",
    "train": "train.max_steps=2 train.warmup_steps=0 report.sample_tokens=4",
    "chat": "--max-new-tokens 8",
    "verify": "--tokens 128",
    "profile": "--steps 1 --warmup 1",
    "bench": "--steps 2 --warmup 1",
    "report": "",
}


def shell(command: list[str], folder: Path = ROOT) -> subprocess.CompletedProcess[str]:
    path = os.pathsep.join([str(ROOT / "src"), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}  # other tests run beside this one
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=600)


def short_rows(shared: Path, count: int = 40) -> list[dict[str, str]]:
    """GSM8K's shortest questions and answers: stories260k knows 512 positions."""
    lines = (shared / "data" / "gsm8k" / "test.jsonl").read_text(encoding="utf-8").splitlines()
    return [json.loads(line) for line in sorted(lines, key=len)[:count]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, shared: Path, stories: Path) -> Path:
    """A folder as the README's reader has it: `my.yaml` as printed, but with stories260k, and `my-data.jsonl`."""
    folder = tmp_path_factory.mktemp("readme")
    recipe = YAML[0].replace("Qwen/Qwen3-0.6B", str(stories)).replace("4096", "512")
    (folder / "my.yaml").write_text(recipe)
    rows = [{"prompt": row["question"], "completion": row["answer"]} for row in short_rows(shared)]
    (folder / "my-data.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def command(name: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """Run the README's line of a command in that folder."""
    [line] = [line for line in BASH if f"pronghorn {name}" in line]
    line = line.replace("pronghorn ", f"{shlex.quote(sys.executable)} -m pronghorn ", 1)
    done = shell(["bash", "-c", f"{line} {SMALL[name]}"], folder)
    assert done.returncode == 0, done.stdout + done.stderr
    return done


@pytest.fixture(scope="module")
def trained(folder: Path) -> subprocess.CompletedProcess[str]:
    """What `pronghorn train` printed."""
    return command("train", folder)


@pytest.fixture
def tiny(stories: Path, shared: Path, tmp_path: Path) -> list[str]:
    """Changes to a recipe: two steps of a small model."""
    return [
        f"model.name={stories}",
        "model.max_seq_length=512",
        f"data.train={shared / 'data/gsm8k/test.jsonl'}",
        f"data.eval={shared / 'data/gsm8k/test.jsonl'}",
        "data.columns={prompt: question, completion: answer}",
        "data.overflow=drop",
        "data.eval_rows=2",
        "train.max_steps=2",
        "train.warmup_steps=0",
        f"train.output={tmp_path / 'run'}",
        "report.sample_tokens=4",
    ]


def test_the_readme_names_these_commands() -> None:
    """A new command in the README needs a test below."""
    assert [line for line in BASH if "pronghorn " not in line] == ["make demo", "make test"]
    assert [line.split(" -")[0] for line in BEGIN] == [
        "pip install .",
        "pronghorn init first.yaml",
        "pronghorn train first.yaml",
    ]
    commands = [re.split(r"pronghorn ", line)[1] for line in BASH if "pronghorn " in line]
    assert all(any(line.startswith(name) for name in SMALL) for line in commands) and len(commands) == len(SMALL)
    assert len(PYTHON) == len(YAML) == 1
    assert 6_000 <= len(README.encode()) <= 8_192


@pytest.mark.parametrize("page", [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))])
def test_links_of_a_page_lead_somewhere(page: Path) -> None:
    targets = re.findall(r"\]\(([^)#]+)[^)]*\)|src=\"([^\"]+)\"", page.read_text())
    for target in (one or other for one, other in targets):
        assert "://" in target or (page.parent / target).exists(), target


SPEEDS = re.findall(r"^\| ([\w.-]+), (LoRA|full) \| (.*) \|$", README, re.MULTILINE)


@pytest.mark.parametrize(
    ("model", "method", "figures"), SPEEDS, ids=[f"{model} {method}" for model, method, _ in SPEEDS]
)
def test_figures_of_steps_are_those_of_the_results(model: str, method: str, figures: str) -> None:
    """docs/benchmarks.md is made of the results, which another test compares."""
    page = (ROOT / "docs" / "benchmarks.md").read_text().splitlines()
    [row, *_] = [line for line in page if line.startswith(f"| {model} | {method.lower()}") and "| off | 100% |" in line]
    told = re.findall(r"[\d.]+ (?:×|GiB|ms)", figures)
    assert len(SPEEDS) == 6 and len(told) >= 4
    assert all((one.removesuffix(" ms") if one.endswith("ms") else one) in row for one in told), row


def test_make_test_is_what_ci_runs() -> None:
    assert "exec make test" in (ROOT / ".ci" / "run").read_text()
    plan = shell(["make", "-n", "test"]).stdout
    for tool in ("ruff format --check", "ruff check", "mypy", "importlinter", "pytest"):
        assert tool in plan, tool


@pytest.mark.slow
def test_make_demo_in_three_steps(tmp_path: Path) -> None:
    settings = " ".join([*THREE_STEPS, "train.min_improvement=0.005", f"train.output={tmp_path / 'run'}"])
    done = shell(["make", "demo", "VENV=", f"PYTHON={sys.executable}", f"SET={settings}"])
    assert done.returncode == 0, done.stdout + done.stderr
    for file in ("adapter/adapter_model.safetensors", "run.json", "report.html"):
        assert (tmp_path / "run" / file).is_file(), file
    assert "Held-out loss" in done.stdout and "tokens/s" in done.stdout


@pytest.mark.slow
def test_the_demo_fails_loudly_and_keeps_what_it_trained(tmp_path: Path, tiny: list[str]) -> None:
    """The demo's recipe, with an improvement that two steps can't bring."""
    program = [sys.executable, "-m", "pronghorn", "train", "demo/demo-cpu.yaml"]
    done = shell([*program, *tiny, "train.min_improvement=5"])
    assert done.returncode == 1
    assert "which is not a fall of 5.0 or more" in done.stderr and "Traceback" not in done.stderr
    assert (tmp_path / "run" / "adapter" / "adapter_model.safetensors").is_file()
    assert (tmp_path / "run" / "report.html").is_file()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("doctor", ["torch", "transformers"]),
        ("docs", ["# Fine-tune on your own data"]),
        ("data inspect", ["⟦", "Packed rows"]),
        ("plan", ["layers 0–4 keep", "datasheet"]),
        ("verify", ["The numbers are right."]),
        ("profile", ["dense products"]),
        ("bench", ["plain transformers", "times as long"]),
    ],
)
def test_commands_that_need_no_run(name: str, says: list[str], folder: Path) -> None:
    said = command(name, folder).stdout
    assert all(each in said for each in says), said


def test_the_recipe_that_init_writes_trains(folder: Path, stories: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)
    words = shlex.split(BEGIN[1].replace("Qwen/Qwen3-0.6B", str(stories)))
    done = CliRunner().invoke(app, words[1:])
    assert done.exit_code == 0, done.output
    small = ["train.max_steps=1", "train.output=runs/first", "report.html=false"]
    done = CliRunner().invoke(app, ["train", words[2], *small])
    assert done.exit_code == 0, done.output
    assert (folder / "runs/first/adapter/adapter_model.safetensors").is_file()


@pytest.mark.slow
def test_train_chat_and_report(folder: Path, trained: subprocess.CompletedProcess[str]) -> None:
    run = folder / "runs" / "mine"
    assert (run / "adapter" / "adapter_model.safetensors").is_file() and (run / "run.json").is_file()
    said = command("chat", folder).stdout
    assert re.fullmatch(r"base: .*trained: .*", said, re.DOTALL), said
    (run / "report.html").unlink()
    command("report", folder)
    assert (run / "report.html").is_file()


def run_small(script: str, changes: dict[str, str], folder: Path, shared: Path, stories: Path) -> None:
    """Run a script on stories260k, GSM8K from a file and rows of 512 tokens; nothing else is changed than asked for."""
    (folder / "gsm8k.jsonl").write_text("".join(json.dumps(row) + "\n" for row in short_rows(shared)))
    changes = changes | {
        '"Qwen/Qwen3-0.6B"': repr(str(stories)),
        '"openai/gsm8k", "main"': '"json", data_files="gsm8k.jsonl"',
        "4096": "512",
    }
    for printed, here in changes.items():
        assert printed in script, printed
        script = script.replace(printed, here)
    (folder / "script.py").write_text(script)
    done = shell([sys.executable, "script.py"], folder)
    assert done.returncode == 0, done.stderr[-3000:]


@pytest.mark.slow
def test_the_script_runs_as_printed(tmp_path: Path, shared: Path, stories: Path) -> None:
    run_small(PYTHON[0], {"num_train_epochs=1": "max_steps=2"}, tmp_path, shared, stories)
    assert (tmp_path / "runs/gsm8k/adapter/adapter_model.safetensors").is_file()
    assert (tmp_path / "runs/gsm8k/merged/model.safetensors").is_file()


@pytest.mark.slow
def test_the_notebook_runs_cell_by_cell(tmp_path: Path, shared: Path, stories: Path) -> None:
    notebook = json.loads((ROOT / "examples" / "quickstart.ipynb").read_text())
    assert notebook["nbformat"] == 4 and not any(cell.get("outputs") for cell in notebook["cells"])
    assert len({cell["id"] for cell in notebook["cells"]}) == len(notebook["cells"])
    script = "\n\n".join("".join(cell["source"]) for cell in notebook["cells"] if cell["cell_type"] == "code")
    run_small(script, {"max_steps=60": "max_steps=2"}, tmp_path, shared, stories)
    assert (tmp_path / "runs/quickstart/merged/model.safetensors").is_file()


@pytest.mark.slow
def test_the_scripts_after_training_run_as_printed(folder: Path, trained: subprocess.CompletedProcess[str]) -> None:
    page = (ROOT / "docs" / "after-training.md").read_text()
    for number, script in enumerate(re.findall(r"```python\n(.*?)```", page, re.DOTALL)):
        (folder / f"after{number}.py").write_text(script.replace("4096", "512"))
        done = shell([sys.executable, f"after{number}.py"], folder)
        assert done.returncode == 0, done.stderr[-3000:]
    assert (folder / "runs" / "mine" / "merged" / "model.safetensors").is_file()


@pytest.mark.matrix(1)
@pytest.mark.parametrize("recipe", sorted(file.name for file in (ROOT / "recipes").glob("*.yaml")))
def test_shipped_recipes_train_on_a_small_model(recipe: str, tmp_path: Path, tiny: list[str]) -> None:
    done = CliRunner().invoke(app, ["train", str(ROOT / "recipes" / recipe), *tiny])
    assert done.exit_code == 0, done.output
    folder = tmp_path / "run" / ("model" if recipe == "gpu-full.yaml" else "adapter")
    assert list(folder.glob("*.safetensors")) and (tmp_path / "run" / "report.html").is_file()
