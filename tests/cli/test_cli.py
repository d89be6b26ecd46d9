"""The command line: quick to start, plain in its errors, right in its exit codes."""

from __future__ import annotations

import errno
import json
import os
import re
import shlex
import subprocess
import sys
from itertools import pairwise
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from typer.testing import CliRunner

from pronghorn import __version__
from pronghorn.cli.main import app, inspect_data, train
from pronghorn.cli.plan import plan
from pronghorn.cli.profile import profile
from pronghorn.cli.verify import verify
from pronghorn.diagnose import doctor
from pronghorn.diagnose.doctor import Finding
from pronghorn.environment import grow_segments
from pronghorn.errors import DataError, TrainingError
from support.run_records import record

HEAVY = ("torch", "transformers", "trl", "datasets", "matplotlib", "numpy")


def invoke(*arguments: str) -> Any:
    return CliRunner().invoke(app, list(arguments), env={"COLUMNS": "200", "NO_COLOR": "1"})


def test_memory_that_runs_out_is_no_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a GPU, or what the processor's allocator says; another error stays one."""

    def run_out(*_: Any) -> Any:
        raise RuntimeError(words)

    monkeypatch.setattr("pronghorn.diagnose.verify_checks.verify", run_out)
    for words in ("CUDA out of memory. Tried to allocate 2.00 GiB.", "[enforce] not enough: you can't allocate memory"):
        result = invoke("verify", "--model", "tiny", "--tokens", "32")
        assert result.exit_code == 1 and f"memory ran out: {words}" in result.stderr and "remedy: " in result.stderr
        assert isinstance(invoke("verify", "--model", "tiny", "--tokens", "32", "--debug").exception, RuntimeError)
    words = "a defect"
    assert str(invoke("verify", "--model", "tiny", "--tokens", "32").exception) == words


def test_the_allocator_grows_its_segments_unless_told_otherwise(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PYTORCH_CUDA_ALLOC_CONF", raising=False)
    for given, wanted in ((None, "expandable_segments:True"), ("max_split_size_mb:64", "max_split_size_mb:64")):
        monkeypatch.delenv("PYTORCH_ALLOC_CONF", raising=False)
        if given is not None:
            monkeypatch.setenv("PYTORCH_ALLOC_CONF", given)
        grow_segments()
        assert os.environ["PYTORCH_ALLOC_CONF"] == wanted
    monkeypatch.delenv("PYTORCH_ALLOC_CONF")
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "backend:native")
    grow_segments()
    assert "PYTORCH_ALLOC_CONF" not in os.environ


def test_a_notebook_s_backend_does_not_keep_a_report_from_being_drawn(tmp_path: Path) -> None:
    """A kernel gives it to what a cell starts; where it isn't installed, matplotlib's import fails."""
    record().write(tmp_path)
    command = [sys.executable, "-m", "pronghorn", "report", str(tmp_path)]
    backend = {"MPLBACKEND": "module://matplotlib_of_a_notebook"}
    done = subprocess.run(command, env={**os.environ, **backend}, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "<svg" in (tmp_path / "report.html").read_text()


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    """A recipe that is right, though its model doesn't exist."""
    (tmp_path / "rows.jsonl").write_text('{"text": "a"}\n')
    path = tmp_path / "recipe.yaml"
    path.write_text(
        f"model: {{name: none/such, max_seq_length: 64}}\ndata: {{train: {tmp_path / 'rows.jsonl'}}}\n"
        f"train: {{output: {tmp_path / 'out'}}}\n"
    )
    return path


@pytest.fixture
def fake_run(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Puts a function in the place of `pronghorn.train.run.run`."""

    def place(function: Any) -> None:
        module = ModuleType("pronghorn.train.run")
        module.run = function  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, "pronghorn.train.run", module)

    return place


def test_help_is_quick_and_loads_nothing_heavy() -> None:
    code = (
        "import sys\nfrom pronghorn.cli.main import app\n"
        "try: app(['train', '--help'])\n"
        f"except SystemExit: print([name for name in {HEAVY} if name in sys.modules], file=sys.stderr)"
    )
    before = os.times()
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    after = os.times()  # of the processor: what the command takes, not what else the machine does
    assert after.children_user + after.children_system - before.children_user - before.children_system < 1.0
    assert done.stderr.strip() == "[]"
    assert "Examples" in done.stdout and "train.max_steps=20" in done.stdout


@pytest.mark.parametrize(
    ("command", "said"),
    [(name, "known here: model, adapter") for name in ("train", "plan", "verify", "profile", "bench")]
    + [(name, "give the output folder of a finished run") for name in ("chat", "export")],
)
def test_a_wrong_recipe_or_run_is_refused_before_anything_heavy_is_loaded(
    command: str, said: str, tmp_path: Path
) -> None:
    (tmp_path / "bad.yaml").write_text("model: {name: none/such}\nbogus: 1\n")
    given = tmp_path / ("bad.yaml" if said.startswith("known") else "nothing")
    code = (
        "import sys\nfrom pronghorn.cli.main import app\n"
        f"try: app([{command!r}, {str(given)!r}])\n"
        f"except SystemExit: print([name for name in {HEAVY} if name in sys.modules], file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert said in " ".join(done.stderr.split()) and done.stderr.splitlines()[-1] == "[]"


def test_help_is_broken_by_the_terminal_alone() -> None:
    """Not at the source's lines, too, which left words by themselves."""
    lines = CliRunner().invoke(app, ["train", "--help"], env={"COLUMNS": "80"}).stdout.splitlines()
    said = [line.strip() for line in lines[: lines.index(" Examples" + 71 * " ")]]
    assert all(len(line) > 60 for line, after in pairwise(said) if line and after)


def test_overrides_in_the_help_are_right(recipe: Path) -> None:
    from pronghorn.config.recipe import Recipe

    examples = [
        shlex.split(line)
        for function in (train, inspect_data, plan, profile, verify)
        for line in (function.__doc__ or "").splitlines()
        if line.strip().startswith("pronghorn ")
    ]
    overrides = [word for words in examples for word in words if re.match(r"\w+\.\w+=", word)]
    assert len(overrides) > 5
    for override in overrides:
        Recipe.load(recipe, [override])


def test_module_is_the_command() -> None:
    done = subprocess.run([sys.executable, "-m", "pronghorn", "--version"], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == f"pronghorn {__version__}"


@pytest.mark.parametrize(("arguments", "code"), [((), 0), (("train",), 2)])
def test_no_arguments_show_the_help(arguments: tuple[str, ...], code: int) -> None:
    """Alone the command is a question; without its recipe, `train` is a mistake."""
    result = invoke(*arguments)
    assert result.exit_code == code and "Usage" in result.output


def test_commands_are_listed_as_people_need_them() -> None:
    lines = [line.strip("│ ").split(" ")[0] for line in invoke("--help").stdout.splitlines()]
    places = [lines.index(name) for name in ("train", "data", "chat", "plan", "verify", "profile", "doctor")]
    assert places == sorted(places)


@pytest.mark.parametrize("name", ["WORLD_SIZE", "RANK", "LOCAL_RANK"])
@pytest.mark.parametrize("value", ["abc", "", "-1", "²"])
def test_a_launcher_variable_that_is_no_number(
    recipe: Path, name: str, value: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(name, value)
    result = invoke("train", str(recipe))
    assert result.exit_code == 1 and isinstance(result.exception, SystemExit)
    assert result.stderr.startswith(f"error: the environment's {name}={value!r} is not a number\nremedy: unset {name}")


@pytest.mark.parametrize(
    ("cause", "what"),
    [
        (RuntimeError("can't start new thread"), "threads"),
        (MemoryError(), "memory"),
        (OSError(errno.ENOMEM, "Cannot allocate memory"), "memory"),
        (ImportError("libtorch.so: failed to map segment from shared object"), "memory"),
        (SystemError("<function _find_and_load> returned NULL without setting an exception"), "memory"),
    ],
)
def test_what_the_system_refuses_is_no_traceback(recipe: Path, fake_run: Any, cause: Exception, what: str) -> None:
    def refuse(*_: Any) -> None:
        try:
            raise cause
        except type(cause) as error:
            raise RuntimeError("Failed to import something") from error

    fake_run(refuse)
    result = invoke("train", str(recipe))
    assert result.exit_code == 1 and f"error: {what} ran out: Failed to import" in result.stderr
    assert ("ulimit -u" in result.stderr) == (what == "threads")
    assert isinstance(invoke("train", str(recipe), "--debug").exception, RuntimeError)


TOO_MANY = OSError(errno.EMFILE, "Too many open files")


@pytest.mark.parametrize("error", [TOO_MANY, RuntimeError("x.safetensors: Too many open files (os error 24)"), None])
def test_too_many_open_files_are_no_traceback(recipe: Path, fake_run: Any, error: Exception | None) -> None:
    """Also where an error of ours tells of them, and advises to look at the file."""

    def refuse(*_: Any) -> None:
        if error is not None:
            raise error
        raise DataError("a.jsonl can't be read", "fix the path") from TOO_MANY

    fake_run(refuse)
    result = invoke("train", str(recipe))
    assert result.exit_code == 1 and "error: files that may be open ran out: " in result.stderr
    assert "remedy: raise the shell's limit (ulimit -n 1024)" in result.stderr and "fix the path" not in result.stderr


@pytest.mark.parametrize("error", [OSError(errno.EINVAL, "a defect"), ImportError("a defect")])
def test_other_errors_of_the_system_keep_their_traceback(recipe: Path, fake_run: Any, error: Exception) -> None:
    def fail(*_: Any) -> None:
        raise error

    fake_run(fail)
    assert invoke("train", str(recipe)).exception is error


def test_too_many_tokens_are_refused_by_the_option_that_says_them() -> None:
    result = invoke("verify", "--model", "tiny", "--tokens", "9999999")
    assert result.exit_code == 1 and "max_seq_length" not in result.stderr
    said = "error: --tokens 9999999 > 8192, the positions of tiny\nremedy: use --tokens 8192 or fewer\n"
    assert result.stderr.endswith(said)


@pytest.mark.parametrize("seed", ["-1", str(2**32)])
def test_seeds_that_numpy_refuses(seed: str) -> None:
    result = invoke("verify", "--model", "tiny", "--tokens", "32", "--seed", seed)
    assert result.exit_code == 2 and "Invalid value for '--seed'" in result.stderr


def test_missing_recipe() -> None:
    result = invoke("train", "nowhere.yaml")
    assert result.exit_code == 1
    assert result.stderr.startswith("error: recipe nowhere.yaml does not exist\nremedy: ")
    assert "Traceback" not in result.output


@pytest.mark.parametrize(
    ("override", "error", "remedy"),
    [
        ("train.max_step=3", "unknown key train.max_step", "did you mean train.max_steps?"),
        ("train.learning_rate=-1", "train.learning_rate = -1", "set train.learning_rate (the highest learning rate,"),
        ("max_steps", "not section.key=value", "train.max_steps=3"),
        ("data.train=no[where].jsonl", "no[where].jsonl does not exist", ".jsonl"),  # brackets are no markup
    ],
)
def test_recipe_errors(recipe: Path, override: str, error: str, remedy: str) -> None:
    result = invoke("train", str(recipe), override)
    assert result.exit_code == 1 and isinstance(result.exception, SystemExit)
    first, second = result.stderr.splitlines()
    assert first.startswith("error: ") and error in first
    assert second.startswith("remedy: ") and remedy in second


def test_errors_of_a_run(recipe: Path, fake_run: Any) -> None:
    def fail(*_: Any) -> None:
        raise TrainingError("the loss is nan", "lower train.learning_rate")

    fake_run(fail)
    result = invoke("train", str(recipe))
    assert result.exit_code == 1
    assert result.stderr == "error: the loss is nan\nremedy: lower train.learning_rate\n"
    result = invoke("train", str(recipe), "--debug")
    assert isinstance(result.exception, TrainingError)


def test_other_errors_keep_their_traceback(recipe: Path, fake_run: Any) -> None:
    fake_run(lambda *_: [][0])
    assert isinstance(invoke("train", str(recipe)).exception, IndexError)


def test_interrupt(recipe: Path, fake_run: Any) -> None:
    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    fake_run(interrupt)
    result = invoke("train", str(recipe))
    assert result.exit_code == 130
    assert "What is in the output folder is whole" in result.stderr
    assert result.stderr.endswith("The same command goes on, or begins again.\n")


def test_train_ends_with_the_summary(recipe: Path, fake_run: Any) -> None:
    seen = []

    def run(settings: Any, console: Any, allow: bool, allow_older: bool, overwrite: bool) -> Any:
        seen.append(settings)
        assert allow and not allow_older and not overwrite
        return record()

    fake_run(run)
    result = invoke("train", str(recipe), "train.max_steps=3", "packing.enabled=false", "--allow")
    assert result.exit_code == 0, result.output
    assert seen[0].train.max_steps == 3 and seen[0].packing.enabled is False
    for part in ("3.4567 → 2.3456", "4,000 tokens/s", "packed attention: flash", str(seen[0].train.output)):
        assert part in result.stdout
    [chat, export, load] = [line for line in result.stdout.splitlines() if line.startswith("Next")]
    output = seen[0].train.output
    assert f"pronghorn chat {output}" in chat and f"pronghorn export {output}" in export
    assert "FastLanguageModel.from_pretrained(" in load


def test_doctor_of_this_machine() -> None:
    result = invoke("doctor")
    assert result.exit_code == 0, result.output
    assert "torch build" in result.stdout and "transformers" in result.stdout


def test_doctor_fails_if_something_needed_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    findings = [Finding("torch", "2.9.1", "missing", "outside the window", "pip install 'torch>=2.11,<2.15'")]
    monkeypatch.setattr(doctor, "diagnose", lambda: findings)
    result = invoke("doctor")
    assert result.exit_code == 1 and "pip install 'torch>=2.11,<2.15'" in result.stdout
    result = invoke("doctor", "--json")
    assert result.exit_code == 1
    assert json.loads(result.stdout) == [vars(findings[0])]
