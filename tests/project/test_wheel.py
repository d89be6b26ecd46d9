"""What is installed is whole: the wheel, in a folder of its own, away from the repository."""

from __future__ import annotations

import importlib
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.version import Version
from typer.testing import CliRunner

from pronghorn import __version__ as VERSION
from release import build, dated, environment

ROOT = Path(__file__).parents[2]
OPTIONS = ("--no-deps", "--disable-pip-version-check", "--no-index", "-q")
READ = """
import pronghorn
from importlib.resources import files
from pathlib import Path
assert Path(pronghorn.__file__).is_relative_to(Path.cwd()), pronghorn.__file__
for package, name in (("diagnose", "inspect.html.j2"), ("diagnose", "profile.html.j2"), ("records", "page.html.j2"),
                      ("records", "report.html.j2")):
    text = (files(f"pronghorn.{package}") / name).read_text(encoding="utf-8")
    assert "{%" in text or "{{" in text, name
assert (files("pronghorn") / "py.typed").is_file()
assert (files("pronghorn") / "export" / "conversations.jsonl").is_file()
from pronghorn.chat_templates import get_chat_template
"""
QLORA = "base_model: a/b\nadapter: qlora\nsequence_len: 64\noutput_dir: out\ndatasets: [{path: a/c, type: alpaca}]\n"


def run(folder: Path, *command: str) -> str:
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.slow
def test_the_wheel_runs_outside_the_repository(tmp_path: Path) -> None:
    source, installed = tmp_path / "source", tmp_path / "installed"
    source.mkdir()
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    shutil.copytree(  # with what links in it lead to
        ROOT / "src" / "pronghorn", source / "src" / "pronghorn", ignore=shutil.ignore_patterns("__pycache__")
    )
    pip = (sys.executable, "-m", "pip")
    run(tmp_path, *pip, "wheel", *OPTIONS, "--no-build-isolation", "-w", "wheels", str(source))
    [wheel] = (tmp_path / "wheels").glob("pronghorn-*.whl")
    run(tmp_path, *pip, "install", *OPTIONS, "--target", str(installed), str(wheel))
    assert run(installed, sys.executable, "-m", "pronghorn", "--version").startswith("pronghorn 0.")
    run(installed, sys.executable, "-c", READ)
    assert "pronghorn" in {path.name for path in (installed / "bin").iterdir()}
    run(installed, sys.executable, "-m", "pronghorn", "init", "first.yaml")
    run(installed, sys.executable, "-m", "pronghorn", "init", "copied.yaml", "--recipe", "gpu-lora")
    assert "docs/" not in run(installed, sys.executable, "-m", "pronghorn", "docs")
    assert run(installed, sys.executable, "-m", "pronghorn", "docs", "faq").startswith("# Questions")
    (installed / "qlora.yml").write_text(QLORA)
    run(installed, sys.executable, "-m", "pronghorn", "convert", "qlora.yml")
    assert (installed / "first.yaml").is_file() and "load_in_4bit: true" in (installed / "recipe.yaml").read_text()


def hide_extras(python: Path) -> None:
    """Make an environment find none of the packages that only an extra of Pronghorn brings."""
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    names = {Requirement(text).name.replace("-", "_") for texts in extras.values() for text in texts}
    hidden = sorted(names - {"pandas", "triton"})  # which datasets and torch bring
    site = Path(run(python.parent, str(python), "-c", "import sysconfig; print(sysconfig.get_path('purelib'))").strip())
    (site / "without_extras.pth").write_text(f"import sys; sys.modules.update(dict.fromkeys({hidden}))\n")
    for name in ("bitsandbytes", "gguf"):
        run(python.parent, str(python), "-c", f"import importlib.util; assert not importlib.util.find_spec({name!r})")


@pytest.mark.slow
def test_three_commands_of_the_readme_lead_to_an_adapter(tmp_path: Path, stories: Path) -> None:
    """On a machine that has the dependencies alone, with the wheel from a folder as index, and rows of one's own."""
    place, wheels = tmp_path / "place", tmp_path / "wheels"
    place.mkdir()
    _, wheel = build(wheels, offline=True)
    python = environment(tmp_path / "machine", offline=True)
    hide_extras(python)
    rows = [{"prompt": f"Once upon {number}", "completion": f" a cat sat by {number} trees."} for number in range(40)]
    (place / "my-data.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    block = re.findall(r"```bash\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)[0]
    commands = block.replace("Qwen/Qwen3-0.6B", str(stories)).splitlines()
    assert len(commands) == 3
    changed = f"{python} -m pip install {' '.join(OPTIONS)} --ignore-installed --find-links {wheels} pronghorn"
    assert commands[0] == "pip install ."
    for command in (changed, *(f"{python.parent}/{line}" for line in commands[1:])):
        run(place, *shlex.split(command))
    where = run(place, str(python), "-c", "import pronghorn; print(pronghorn.__file__)")
    assert Path(where.strip()).is_relative_to(tmp_path / "machine") and wheel.parent == wheels
    assert (place / "runs/my-data/adapter/adapter_model.safetensors").is_file()
    assert (place / "runs/my-data/report.html").is_file()


@pytest.mark.slow
def test_a_release_is_built_checked_and_dated(tmp_path: Path) -> None:
    source = tmp_path / "source"
    shutil.copytree(ROOT / "src", source / "src", ignore=shutil.ignore_patterns("__pycache__", "*.egg-info"))
    for name in ("pyproject.toml", "README.md", "LICENSE", "CHANGELOG.md", "release.py"):
        shutil.copy(ROOT / name, source)
    told = run(source, sys.executable, "release.py", "--offline")
    assert "warning: pyproject.toml has no [project.urls]" in told
    assert told.count("is whole") == 2 and {path.suffix for path in (source / "dist").iterdir()} == {".whl", ".gz"}
    assert f"## {VERSION} (20" in (source / "CHANGELOG.md").read_text()


def test_unreleased_changes_get_the_version_and_the_day() -> None:
    before = "# Changelog\n\n## Unreleased\n\n- One.\n\n## 0.1.0 (2026-01-01)\n\n- Two.\n"
    after = dated(before, "0.2.0", "2026-02-02")
    assert after.index("## Unreleased\n") < after.index("## 0.2.0 (2026-02-02)\n\n- One.") < after.index("## 0.1.0")
    for changelog, version in ((before, "0.1.0"), (before.replace("- One.\n", ""), "0.2.0"), ("", "0.2.0")):
        with pytest.raises(SystemExit):
            dated(changelog, version, "2026-02-02")


def test_the_version_is_said_once() -> None:
    """pyproject.toml's and the package's are the same, and the changelog has something to release."""
    assert tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"] == VERSION
    dated((ROOT / "CHANGELOG.md").read_text(), f"{VERSION}.next", "2026-01-01")


def instructions() -> list[tuple[str, str]]:
    """Return the Dockerfile's instructions and what each is given."""
    lines = (ROOT / "Dockerfile").read_text().splitlines()
    return [(name, given) for name, _, given in (line.partition(" ") for line in lines) if name.isupper()]


def test_the_image_is_made_of_what_is_there() -> None:
    """The image itself isn't built: its base, its files, its torch, the extras and the command it names go together."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    steps = instructions()
    whole = {name: given for name, given in steps if name not in ("RUN", "COPY")}
    python = Version(re.fullmatch(r"python:([\d.]+)-slim", whole["FROM"])[1])  # type: ignore[index]
    assert python in SpecifierSet(project["requires-python"])
    torch, version = whole["ARG"].removeprefix("TORCH=").split("==")
    [wanted] = [Requirement(text) for text in project["dependencies"] if Requirement(text).name == torch]
    assert Version(version) in wanted.specifier
    copied = [path for name, given in steps if name == "COPY" for path in given.split()[:-1]]
    sent = {line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")}
    assert all((ROOT / path).exists() for path in copied) and {Path(path).parts[0] for path in copied} == sent
    needed = {project["readme"], *project["license-files"], "pyproject.toml"}
    assert needed <= set(copied)
    [extras] = [found for _, given in steps for found in re.findall(r"/source\[(.*?)\]", given)]
    assert set(extras.split(",")) <= project["optional-dependencies"].keys()
    command, default = json.loads(whole["ENTRYPOINT"]), json.loads(whole["CMD"])
    module, _, name = project["scripts"][command[0]].partition(":")
    asked = CliRunner().invoke(getattr(importlib.import_module(module), name), [*command[1:], *default, "--help"])
    assert asked.exit_code == 0, asked.output


def test_the_image_s_users_need_no_home() -> None:
    """What is written beside a run goes where the pages mount a folder, and to a place that anyone can write to."""
    steps = instructions()
    assert ("RUN", "mkdir -m 1777 /cache") in steps
    [places] = [given for name, given in steps if name == "ENV"]
    assert all(place.partition("=")[2].startswith("/cache/") for place in places.split())
    run = [line.strip("# ") for line in (ROOT / "Dockerfile").read_text().splitlines() if "docker run" in line]
    assert run == [line.strip() for line in (ROOT / "docs/install.md").read_text().splitlines() if "docker run" in line]
    assert ':/cache"' in run[0] and ':/work"' in run[0] and ("WORKDIR", "/work") in steps
