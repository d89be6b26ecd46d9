"""Every command of the README runs, and every recipe trains (in three steps, where they would take long)."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from pronghorn.cli.main import app

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()
BASH = [line for block in re.findall(r"```bash\n(.*?)```", README, re.DOTALL) for line in block.splitlines() if line]
PYTHON = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
THREE_STEPS = ["train.max_steps=3", "train.warmup_steps=0", "data.eval_rows=2", "report.sample_tokens=8"]


def shell(command: list[str], folder: Path = ROOT) -> subprocess.CompletedProcess[str]:
    path = os.pathsep.join([str(ROOT / "src"), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}  # other tests run beside this one
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=600)


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
    assert [line.split(" train.")[0] for line in BASH] == [
        "make demo",
        "make test",
        "pronghorn doctor",
        "pronghorn train recipes/demo-cpu.yaml",
        "pronghorn data inspect recipes/demo-cpu.yaml --rows 2 --html runs/data.html",
        'echo "What does len do?" | pronghorn chat runs/three',
        "pronghorn verify recipes/demo-cpu.yaml --tokens 128",
        "pronghorn profile recipes/demo-cpu.yaml --steps 1 --warmup 1 --html runs/profile.html",
        "pronghorn plan recipes/demo-cpu.yaml --device rtx4090",
        "pronghorn bench recipes/demo-cpu.yaml --steps 2 --warmup 1",
    ]
    assert len(PYTHON) == 1


def test_make_test_is_what_ci_runs() -> None:
    assert "exec make test" in (ROOT / ".ci" / "run").read_text()
    plan = shell(["make", "-n", "test"]).stdout
    for tool in ("ruff format --check", "ruff check", "mypy", "importlinter", "pytest"):
        assert tool in plan, tool


def test_doctor() -> None:
    done = shell([sys.executable, "-m", "pronghorn", "doctor"])
    assert done.returncode == 0, done.stdout + done.stderr
    assert "torch" in done.stdout and "transformers" in done.stdout


@pytest.mark.slow
def test_make_demo_in_three_steps(tmp_path: Path) -> None:
    settings = " ".join([*THREE_STEPS, "train.min_improvement=0.005", f"train.output={tmp_path / 'run'}"])
    done = shell(["make", "demo", "VENV=", f"PYTHON={sys.executable}", f"SET={settings}"])
    assert done.returncode == 0, done.stdout + done.stderr
    for file in ("adapter/adapter_model.safetensors", "run.json", "report.html"):
        assert (tmp_path / "run" / file).is_file(), file
    assert "Held-out loss" in done.stdout and "tokens/s" in done.stdout


def test_the_demo_fails_loudly_and_keeps_what_it_trained(tmp_path: Path, tiny: list[str]) -> None:
    """The README's own train command, with an improvement that two steps can't bring."""
    command = BASH[3].replace("pronghorn", f"{sys.executable} -m pronghorn", 1).split()
    command = [part for part in command if not part.startswith(("train.output", "train.min_improvement"))]
    done = shell([*command, *tiny, "train.min_improvement=5"])
    assert done.returncode == 1
    assert "which is not a fall of 5.0 or more" in done.stderr and "Traceback" not in done.stderr
    assert (tmp_path / "run" / "adapter" / "adapter_model.safetensors").is_file()
    assert (tmp_path / "run" / "report.html").is_file()


@pytest.mark.slow
def test_data_inspect(tmp_path: Path) -> None:
    """Of the demo's data; only the page goes elsewhere."""
    assert (ROOT / ".cache" / "docs" / "train.jsonl").is_file(), "test_make_demo_in_three_steps makes this"
    page = tmp_path / "data.html"
    command = BASH[4].replace("pronghorn", f"{sys.executable} -m pronghorn", 1).replace("runs/data.html", str(page))
    done = shell(command.split())
    assert done.returncode == 0, done.stdout + done.stderr
    assert "⟦" in done.stdout and "Packed rows" in done.stdout
    assert "max_seq_length 512" in page.read_text(encoding="utf-8")


@pytest.mark.slow
def test_train_then_chat(tmp_path: Path) -> None:
    """The README's own commands, one after the other; only the folder is another, and the answers are short."""
    assert (ROOT / ".cache" / "docs" / "train.jsonl").is_file(), "test_make_demo_in_three_steps makes this"
    output, python = shlex.quote(str(tmp_path / "run")), shlex.quote(sys.executable)
    for line, more in ((BASH[3], "data.eval_rows=2 report.sample_tokens=8"), (BASH[5], "--max-new-tokens 8")):
        command = line.replace("pronghorn ", f"{python} -m pronghorn ", 1).replace("runs/three", output)
        done = shell(["bash", "-c", f"{command} {more}"])
        assert done.returncode == 0, done.stdout + done.stderr
    assert re.fullmatch(r"base: .+trained: .+", done.stdout, re.DOTALL), done.stdout


@pytest.mark.slow
def test_verify_and_profile(tmp_path: Path) -> None:
    assert (ROOT / ".cache" / "docs" / "train.jsonl").is_file(), "test_make_demo_in_three_steps makes this"
    page = tmp_path / "profile.html"
    for line, said in ((BASH[6], "The numbers are right."), (BASH[7], "dense products")):
        command = line.replace("pronghorn", f"{sys.executable} -m pronghorn", 1).replace("runs/profile.html", str(page))
        done = shell(command.split())
        assert done.returncode == 0, done.stdout + done.stderr
        assert said in done.stdout
    assert 'class="timeline"' in page.read_text(encoding="utf-8")


@pytest.mark.slow
def test_plan() -> None:
    assert (ROOT / ".cache" / "docs" / "train.jsonl").is_file(), "test_make_demo_in_three_steps makes this"
    done = shell(BASH[8].replace("pronghorn", f"{sys.executable} -m pronghorn", 1).split())
    assert done.returncode == 0, done.stdout + done.stderr
    assert "layers 0–29 keep" in done.stdout and "datasheet" in done.stdout and "micro-batches" in done.stdout


@pytest.mark.slow
def test_bench() -> None:
    assert (ROOT / ".cache" / "docs" / "train.jsonl").is_file(), "test_make_demo_in_three_steps makes this"
    done = shell(BASH[9].replace("pronghorn", f"{sys.executable} -m pronghorn", 1).split())
    assert done.returncode == 0, done.stdout + done.stderr
    assert "plain transformers" in done.stdout and "times as long" in done.stdout


@pytest.mark.slow
def test_the_script_runs_as_printed(tmp_path: Path) -> None:
    """Only the hub name becomes the local folder of the same model."""
    script = PYTHON[0].replace("HuggingFaceTB/SmolLM2-135M-Instruct", str(ROOT / ".cache" / "SmolLM2-135M-Instruct"))
    (tmp_path / "script.py").write_text(script)
    done = shell([sys.executable, "script.py"], folder=tmp_path)
    assert done.returncode == 0, done.stderr[-3000:]
    assert (tmp_path / "runs/script/adapter/adapter_model.safetensors").is_file()
    assert (tmp_path / "runs/script/merged/model.safetensors").is_file()


@pytest.mark.parametrize("recipe", ["gpu-lora.yaml", "gpu-full.yaml"])
def test_gpu_recipes_train_on_a_small_model(recipe: str, tmp_path: Path, tiny: list[str]) -> None:
    done = CliRunner().invoke(app, ["train", str(ROOT / "recipes" / recipe), *tiny])
    assert done.exit_code == 0, done.output
    folder = tmp_path / "run" / ("adapter" if recipe == "gpu-lora.yaml" else "model")
    assert list(folder.glob("*.safetensors")) and (tmp_path / "run" / "report.html").is_file()
