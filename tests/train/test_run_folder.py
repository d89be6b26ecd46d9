"""What a run's folder holds belongs to one run, is checked before it is used, and is made whole by the same command."""

from __future__ import annotations

import errno
import json
import os
import pty
import signal
import sys
import time
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml
from rich.console import Console
from typer.testing import CliRunner

from pronghorn import state
from pronghorn.cli.main import app
from pronghorn.config.recipe import Recipe
from pronghorn.errors import ConfigError, DataError, PronghornError, TrainingError, UnsupportedError
from pronghorn.records.record import RunRecord
from pronghorn.records.report import is_final
from pronghorn.train import run as run_module
from pronghorn.train import run_folder
from pronghorn.train.checkpoint import checkpoints
from pronghorn.train.control import RunControl
from pronghorn.train.run import run
from pronghorn.train.run_folder import lock_folder
from pronghorn.train.run_state import open_run_state
from pronghorn.train.validate import check_no_fsdp, use_one_gpu
from support.runs import QUIET, Make, finish, start

SHORT: dict[str, Any] = {"train": {"max_steps": 2, "save_steps": 1}, "data": {"eval_rows": 1}}


def short(make: Make, name: str = "run", **changes: dict[str, Any]) -> Recipe:
    return make(name, **{key: {**SHORT.get(key, {}), **changes.get(key, {})} for key in {*SHORT, *changes}})


# ---- one run, one folder ----


@pytest.mark.parametrize("rate", [1e-2, 1e-3], ids=["the same command", "another recipe"])
def test_a_run_that_starts_while_another_reads_its_data_is_refused(
    make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rate: float
) -> None:
    """The lock is held before the folder is looked at, so that no run takes another's weights for its own."""
    monkeypatch.setattr("pronghorn.train.run_folder.PATIENCE", 0.1)
    prepare, others = run_module.prepare, []

    def while_reading(*args: Any) -> Any:
        if not others and os.getpid() == here:
            others.append(finish(start(short(make, train={"learning_rate": rate}))))
        return prepare(*args)

    here = os.getpid()
    monkeypatch.setattr(run_module, "prepare", while_reading)
    record = run(short(make), QUIET)
    assert others == [9] and record.recipe["train"]["learning_rate"] == 1e-2 and record.resumed_at == []


def test_a_checkpoint_of_another_recipe_is_refused_until_allowed(make: Make, unfinished: Path) -> None:
    """By the checkpoint itself, whatever the journal says."""
    changed = make("run", train={"learning_rate": 1e-3})
    table = json.loads((unfinished / "journal.json").read_text())
    (unfinished / "journal.json").write_text(json.dumps({**table, "recipe": changed.to_dict()}))
    with pytest.raises(ConfigError, match=r"checkpoint-5 was trained by another recipe: .*--allow"):
        run(changed, QUIET)
    assert run(changed, QUIET, allow=True).resumed_at == [5]


def test_what_is_free_to_change_is_no_other_recipe(make: Make, unfinished: Path) -> None:
    """The report's prompts, too: they are answered by the model as it was before training."""
    record = run(make("run", report={"sample_prompts": ["Once", "Twice"], "sample_tokens": 2}), QUIET)
    assert record.resumed_at == [5] and len(record.samples) == 2


# ---- a finished run ----


def test_overwrite_begins_anew_and_deletes_nothing_but_runs(make: Make, tmp_path: Path) -> None:
    first = run(short(make), QUIET)
    (tmp_path / "run/notes.txt").write_text("x")
    again = run(short(make, train={"learning_rate": 1e-3}), QUIET, overwrite=True)
    assert again.resumed_at == [] and again.recipe["train"]["learning_rate"] == 1e-3 != first.steps[0]["learning_rate"]
    assert not (tmp_path / "run/notes.txt").exists() and RunRecord.read(tmp_path / "run") == again
    (tmp_path / "other").mkdir()
    (tmp_path / "other/thesis.tex").write_text("x")
    with pytest.raises(ConfigError, match="is not empty, and no run was begun there"):
        run(make("other"), QUIET, overwrite=True)
    assert (tmp_path / "other/thesis.tex").exists()


def test_the_report_that_a_finished_run_lacks_is_written_by_the_same_command(
    make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = short(make, report={"html": True})
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(run_module, "write_report", lambda *args: (_ for _ in ()).throw(KeyboardInterrupt))
        run(recipe, QUIET)
    assert (tmp_path / "run/run.json").exists() and not is_final(tmp_path / "run/report.html")
    with pytest.raises(ConfigError, match="already holds a finished run"):
        run(short(make, train={"learning_rate": 1.0}, report={"html": True}), QUIET)
    before = (tmp_path / "run/run.json").read_bytes()
    assert run(recipe, QUIET) == RunRecord.read(tmp_path / "run")
    assert (tmp_path / "run/report.html").read_text().startswith("<!doctype html>")
    assert (tmp_path / "run/run.json").read_bytes() == before
    with pytest.raises(ConfigError, match="already holds a finished run"):
        run(recipe, QUIET)


@pytest.mark.matrix(1)
@pytest.mark.parametrize("after", [3.0, float("nan")])
def test_the_verdict_is_given_again(make: Make, tmp_path: Path, after: float) -> None:
    recipe = short(make, train={"min_improvement": 9.0}, report={"html": True})
    with pytest.raises(TrainingError, match=r"not a fall of 9\.0"):
        run(recipe, QUIET)
    record = RunRecord.read(tmp_path / "run")
    record.heldout["after"] = after
    record.write(tmp_path / "run")
    (tmp_path / "run/report.html").unlink()
    for _ in range(2):
        with pytest.raises(TrainingError, match=r"not a fall of 9\.0"):
            run(recipe, QUIET)
    assert (tmp_path / "run/report.html").exists()


@pytest.mark.slow
def test_the_report_command_writes_it_from_the_record(make: Make, tmp_path: Path) -> None:
    run(short(make), QUIET)
    done = CliRunner().invoke(app, ["report", str(tmp_path / "run")])
    assert done.exit_code == 0 and "run/report.html" in done.output.replace("\n", "")
    assert (tmp_path / "run/report.html").exists()
    record = json.loads((tmp_path / "run/run.json").read_text())
    record["steps"][0]["loss"] = None  # a NaN
    (tmp_path / "run/run.json").write_text(json.dumps(record))
    assert CliRunner().invoke(app, ["report", str(tmp_path / "run/run.json")]).exit_code == 0


@pytest.mark.matrix(7)
@pytest.mark.parametrize("key", [field for field in RunRecord.__dataclass_fields__ if field != "schema"])
def test_a_record_of_other_types_is_no_traceback(make: Make, tmp_path: Path, key: str) -> None:
    if not (tmp_path / "run.json").exists():
        _record().write(tmp_path)
    whole = json.loads((tmp_path / "run.json").read_text())
    for wrong in (True, [3], {"x": [3]}, [{"x": "y"}]):
        (tmp_path / "run.json").write_text(json.dumps({**whole, key: wrong}))
        done = CliRunner().invoke(app, ["report", str(tmp_path)])
        assert done.exit_code == 0 or (isinstance(done.exception, SystemExit) and "run.json" in done.stderr), wrong


def _record() -> RunRecord:
    step = {"step": 1, "loss": 2.0, "learning_rate": 1.0, "grad_norm": 1.0, "tokens": 9, "labelled": 9, "seconds": 1.0}
    packing = {"documents": 1, "tokens": 9, "rows": 1, "row_tokens": 9, "efficiency": 1.0, "ceiling": 1.0}
    return RunRecord(
        recipe={"model": {"name": "a"}},
        model="a",
        device="CPU",
        versions={},
        packing={**packing, "dropped": 0, "truncated": 0},
        paths=[{"part": "a", "path": "b", "why": "c"}],
        steps=[step],
        heldout={"before": 2.0, "after": 1.0, "rows": 1},
        samples=[{"prompt": "a", "before": "b", "after": "c"}],
        trainable={"tensors": 1, "parameters": 1, "share": 1.0},
        seconds=1.0,
        stopped="max_steps",
        peak_memory_bytes=None,
    )


# ---- checked before it is used ----


def _flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def test_one_flipped_bit_is_refused_and_the_older_one_taken_if_allowed(make: Make, unfinished: Path) -> None:
    before = (unfinished / "journal.json").read_bytes()
    for name in ("optimizer.pt", "adapter_model.safetensors", "trainer_state.json", "rng_state.pth", "manifest.json"):
        whole = (unfinished / "checkpoint-5" / name).read_bytes()
        _flip(unfinished / "checkpoint-5" / name)
        with pytest.raises(DataError, match=r"checkpoint-5.*--allow-older to go on from checkpoint-4") as refused:
            run(make("run"), QUIET)
        assert name in refused.value.problem and (unfinished / "journal.json").read_bytes() == before
        (unfinished / "checkpoint-5" / name).write_bytes(whole)
    _flip(unfinished / "checkpoint-5/optimizer.pt")
    assert run(make("run"), QUIET, allow_older=True).resumed_at == [4]


@pytest.mark.slow
def test_a_terminal_is_asked_whether_the_older_one_is_meant(
    make: Make, unfinished: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (unfinished / "checkpoint-5/manifest.json").unlink()
    terminal, asked, answers = Console(force_terminal=True, quiet=True), [], iter([False, True])
    monkeypatch.setattr("sys.stdin", SimpleNamespace(isatty=lambda: True))
    monkeypatch.setattr(run_folder.Confirm, "ask", lambda text, **_: asked.append(text) or next(answers))
    with pytest.raises(DataError, match=r"manifest\.json can't be read"):
        run(make("run"), terminal)
    assert run(make("run"), terminal).resumed_at == [4]
    assert asked == ["Go on from checkpoint-4?"] * 2


def test_the_only_checkpoint_damaged_leaves_a_new_start(make: Make, unfinished: Path) -> None:
    for folder in checkpoints(unfinished):
        (folder / "optimizer.pt").unlink()
    with pytest.raises(DataError, match="delete checkpoint-4 and run again, from the start"):
        run(make("run"), QUIET, allow_older=True)


@pytest.mark.slow
def test_a_damaged_best_checkpoint_names_the_way_out(
    make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    evaluations = iter([1.0, 2.0])
    monkeypatch.setattr("pronghorn.train.evaluating.heldout_loss", lambda *args: next(evaluations))
    train = {"eval_steps": 2, "max_steps": 4}
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(RunRecord, "write", lambda *args: (_ for _ in ()).throw(KeyboardInterrupt))
        run(make("run", train=train), QUIET)
    _flip(tmp_path / "run/checkpoint-2/adapter_model.safetensors")
    with pytest.raises(DataError, match=r"train\.load_best=false"):
        run(make("run", train=train), QUIET)
    assert len(run(make("run", train={**train, "load_best": False}), QUIET).steps) == 4


@pytest.mark.matrix(1)
@pytest.mark.parametrize("trained", [99, 5])
def test_the_journal_can_not_end_a_training_that_the_checkpoint_has_not(
    make: Make, unfinished: Path, trained: int
) -> None:
    path = unfinished / "journal.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"trained": trained}))
    record = run(make("run"), QUIET)
    assert len(record.steps) == 12 and record.resumed_at == [5]


def test_a_journal_or_manifest_of_other_types_is_an_error(
    make: Make, unfinished: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Served(Exception):
        """The folder was taken as it is."""

    def served(*args: Any) -> Any:
        raise Served

    monkeypatch.setattr(run_module, "find", served)
    taken = []
    for path in (unfinished / "journal.json", unfinished / "checkpoint-5" / state.MANIFEST):
        whole = json.loads(path.read_text())
        for key in whole:
            for wrong in ("\0", [["x"]], {"x": 3}, {"x": {"bytes": "1", "xxh3_128": 3}}, -1.5, True):
                path.write_text(json.dumps({**whole, key: wrong}))
                with pytest.raises((PronghornError, Served)) as ended:
                    run(make("run"), QUIET)
                taken += [(key, wrong)] if ended.type is Served and key != "model" else []
        path.write_text(json.dumps(whole))
    # of the right type, and the model's fingerprint is compared when there is a model
    assert taken == [("before", -1.5), ("judged", True), ("stopped", "\0")]


def test_the_journal_of_an_earlier_version_is_read_and_its_keys_are_kept(make: Make, tmp_path: Path) -> None:
    recipe = make("run")
    written = {"before": 2.5, "answers": ["a cat"], "judged": True, "trained": 5, "stopped": "patience", "data": {}}
    written |= {"recipe": recipe.to_dict(), "processes": 1, "resumed_at": [3], "versions": {"torch": "2"}}
    (tmp_path / "journal.json").write_text(json.dumps(written | {"schema": "pronghorn-journal-v1"}))
    state_read = open_run_state(tmp_path, recipe, allow=False)
    assert (state_read.eval_loss_before, state_read.samples_before, state_read.baseline_done) == (2.5, ["a cat"], True)
    state_read.write(tmp_path)
    assert json.loads((tmp_path / "journal.json").read_text()) == {
        "model": None,
        **written,
        "schema": "pronghorn-journal-v1",
    }


@pytest.mark.parametrize("wrong", ["x", [3], {"trainable": 3}, None])
def test_a_manifest_without_the_models_fingerprint_is_refused(make: Make, unfinished: Path, wrong: Any) -> None:
    path = unfinished / "checkpoint-5" / state.MANIFEST
    path.write_text(json.dumps(json.loads(path.read_text()) | {"model": wrong}))
    with pytest.raises(DataError, match="is a checkpoint of another model"):
        run(make("run"), QUIET)


# ---- places and disks ----


@pytest.mark.parametrize("name", ["x" * 300, "loop/run", "/proc/pronghorn", "file/run", "a\0b"])
def test_an_output_that_can_not_be_is_refused_before_anything_is_loaded(
    make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setattr(run_module, "find", lambda *args: pytest.fail("the model is looked at"))
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    (tmp_path / "file").write_text("")
    table = make("run").to_dict()
    table["train"]["output"] = str(tmp_path / name)
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(table))
    with pytest.raises(ConfigError, match=r"train\.output"):
        run(Recipe.load(tmp_path / "recipe.yaml"), QUIET)
    if "\0" not in name and len(name) < 256:  # which no recipe can hold
        with pytest.raises(ConfigError, match=r"train\.output"):
            run(make(name), QUIET)


@pytest.mark.parametrize("name", ["run", "run/mine"])
def test_an_output_on_a_disk_that_is_not_there_is_called_so(make: Make, tmp_path: Path, name: str) -> None:
    (tmp_path / "run").symlink_to(tmp_path / "scratch")
    with pytest.raises(ConfigError, match=r"train\.output.*run links to .*scratch, which is not there"):
        run(make(name), QUIET)
    assert not (tmp_path / "scratch").exists()


def test_a_folder_of_something_else_stays_as_it_is(make: Make, tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run/notes.txt").write_text("mine")
    with pytest.raises(ConfigError, match="no run was begun there"):
        run(make("run"), QUIET)
    assert os.listdir(tmp_path / "run") == ["notes.txt"]
    (tmp_path / "run/checkpoint-7").mkdir()
    with pytest.raises(ConfigError, match=r"has checkpoints, but no journal.json.*train on from .*checkpoint-7"):
        run(make("run"), QUIET)


def test_killed_while_the_first_journal_was_written(
    make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What it left behind is not a foreign file."""
    replace = Path.replace

    def killed(path: Path, to: Path) -> Path:
        if to.name == "journal.json":
            raise KeyboardInterrupt
        return replace(path, to)

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr("pathlib.Path.replace", killed)
        patch.setattr("pathlib.Path.unlink", lambda *args, **_: None)  # nobody clears up after kill -9
        run(short(make), QUIET)
    assert any(path.name.startswith(".journal.json.") for path in (tmp_path / "run").iterdir())
    assert len(run(short(make), QUIET).steps) == 2
    assert not any(state.is_temporary(path) for path in (tmp_path / "run").iterdir())


@pytest.mark.matrix(1)
@pytest.mark.parametrize("name", ["journal.json", "run.json"])
def test_a_full_disk_is_told_with_the_file_and_the_same_command_goes_on(
    make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    write = state.write_json

    def full(path: Path, *args: Any) -> Path:
        if path.name == name:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return write(path, *args)

    with monkeypatch.context() as patch:
        patch.setattr(state, "write_json", full)
        with pytest.raises(TrainingError, match=rf"{name} can't be written \(No space left on device\): free some"):
            run(short(make), QUIET)
    assert len(run(short(make), QUIET).steps) == 2


@pytest.mark.slow
def test_planted_links_are_not_followed(make: Make, tmp_path: Path) -> None:
    """Names that anybody could have guessed, of every file that is written aside."""
    victim = tmp_path / "victim"
    (victim / "checkpoint-1").mkdir(parents=True)
    (victim / "keep").write_text("keep")
    with ExitStack() as locked:
        lock_folder(tmp_path / "run", locked)
    for name in (".report.html.writing", ".run.json.unfinished", ".journal.json.unfinished"):
        (tmp_path / "run" / name).symlink_to(victim / "keep")
    for name in (".unfinished", ".adapter.writing", ".adapter.old"):
        (tmp_path / "run" / name).symlink_to(victim)
    (tmp_path / "run/journal.json").write_text(json.dumps({"schema": "pronghorn-journal-v1"} | _begun(make)))
    run(short(make, report={"html": True}), QUIET)
    assert (victim / "keep").read_text() == "keep" and sorted(os.listdir(victim)) == ["checkpoint-1", "keep"]
    assert os.listdir(victim / "checkpoint-1") == []


def _begun(make: Make) -> dict[str, Any]:
    return {"recipe": short(make, report={"html": True}).to_dict()}


# ---- signals ----


def test_a_hangup_saves_and_leaves_although_the_terminal_is_gone(make: Make, tmp_path: Path) -> None:
    """The console is a terminal whose other end is closed: every write to it fails."""
    recipe = make("run", train={"max_steps": 5000, "save_steps": 5000, "logging_steps": 1})
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(recipe.to_dict()))
    process, terminal = pty.fork()
    if not process:
        try:  # the fork spares it the imports
            signal.signal(signal.SIGHUP, signal.SIG_DFL)  # whatever started the tests may ignore it (nohup)
            sys.stdout, sys.stderr = os.fdopen(1, "w"), os.fdopen(2, "w")
            app(["train", str(tmp_path / "recipe.yaml")])
        finally:
            os._exit(0)
    shown = b""
    while b"tokens/s" not in shown:  # the bar of a training that goes on
        shown += os.read(terminal, 65536)
    os.close(terminal)
    finish(process)
    [saved] = checkpoints(tmp_path / "run")
    assert state.check_manifest(saved, "pronghorn-checkpoint-v2", "") and saved.name != "checkpoint-5000"


def test_a_hangup_again_is_the_same_one_and_nohup_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pronghorn.train.control.SAME_SIGNAL", 0.1)
    gone: list[bool] = []
    control = RunControl(None, None, None)
    control.hang_up = lambda: gone.append(True)
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)  # whatever started the tests may ignore it
    with control.signals():
        signal.raise_signal(signal.SIGHUP)
        time.sleep(0.2)
        signal.raise_signal(signal.SIGHUP)
    assert control._asked == signal.SIGHUP and gone == [True, True]
    assert signal.getsignal(signal.SIGHUP) is signal.SIG_DFL
    control = RunControl(None, None, None)
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with control.signals():
            signal.raise_signal(signal.SIGHUP)
            signal.raise_signal(signal.SIGTERM)
    finally:
        signal.signal(signal.SIGHUP, before)
    assert control._asked == signal.SIGTERM


# ---- several GPUs ----


def test_one_process_that_sees_two_gpus_trains_on_the_first(
    make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    arguments = run_module.training_arguments

    def two(recipe: Recipe) -> Any:
        args = arguments(recipe)
        args._n_gpu = 2
        return args

    monkeypatch.setattr(run_module, "training_arguments", two)
    console = Console(record=True, width=200)
    assert len(run(short(make), console).steps) == 2
    assert "torchrun" not in console.export_text(), "the command that starts a run says how many GPUs it takes"


def test_only_several_gpus_are_told_of() -> None:
    args: Any = SimpleNamespace(n_gpu=2)
    assert "torchrun --nproc-per-node 2 SCRIPT.py" in (use_one_gpu(args) or "") and args._n_gpu == 1
    assert use_one_gpu(SimpleNamespace(n_gpu=1)) is None and use_one_gpu(SimpleNamespace(n_gpu=0)) is None


def test_fsdp_is_refused_before_anything_is_loaded(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    check_no_fsdp(SimpleNamespace(fsdp=None))
    with pytest.raises(UnsupportedError, match="FSDP is switched on"):
        check_no_fsdp(SimpleNamespace(fsdp=True))
    monkeypatch.setattr(run_module, "find", lambda *args: pytest.fail("the model is looked at"))
    monkeypatch.setenv("ACCELERATE_USE_FSDP", "true")
    with pytest.raises(UnsupportedError, match="switch it off"):
        run(make("run"), QUIET)
