"""Build a release: `python release.py [--output dist] [--offline]`. The version is pyproject.toml's.

The wheel is built from the sdist, which shows that the sdist is whole. Each is installed into an environment of its own
and writes a recipe there, away from the repository. Last, the changelog's "Unreleased" gets the version and the day.
"""

from __future__ import annotations

import argparse
import datetime
import os
import subprocess
import sys
import tempfile
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parent
UNRELEASED = "## Unreleased\n"
SDIST = "import sys; from setuptools import build_meta; print(build_meta.build_sdist(sys.argv[1]))"


def run(*command: str | Path, folder: Path = ROOT) -> str:
    """Run a command without this environment's search path; return its output."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(f"{' '.join(map(str, command))}:\n{done.stdout}{done.stderr}")
    return done.stdout


def environment(folder: Path, offline: bool) -> Path:
    """Make an environment and return its Python. Offline it sees the packages that are installed here."""
    run(sys.executable, "-m", "venv", *(["--without-pip"] if offline else []), folder)
    python = folder / "bin" / "python"
    if offline:  # pip and setuptools, too: a venv's own may be too old
        site = run(python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))").strip()
        ours = [path for path in sys.path if path.endswith("-packages")]
        (Path(site) / "outer.pth").write_text("\n".join(ours))
    return python


def build(output: Path, offline: bool) -> tuple[Path, Path]:
    """Return the paths of the sdist and of the wheel that is built from it."""
    output.mkdir(parents=True, exist_ok=True)
    isolation = ["--no-build-isolation", "--no-index"] if offline else []
    with tempfile.TemporaryDirectory() as folder:
        python = environment(Path(folder) / "build", offline)
        if not offline:
            run(python, "-m", "pip", "install", "-q", "setuptools>=77")
        sdist = output / run(python, "-c", SDIST, output).splitlines()[-1]
        run(python, "-m", "pip", "wheel", "-q", "--no-deps", *isolation, "-w", output, sdist)
    return sdist, max(output.glob("pronghorn-*.whl"), key=lambda path: path.stat().st_mtime)


def check(package: Path, version: str, offline: bool) -> None:
    """Install a package into an environment of its own, and write a recipe with it."""
    without = ["--no-deps", "--no-build-isolation", "--no-index"] if offline else []
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder)
        python = environment(place / "clean", offline)
        run(python, "-m", "pip", "install", "-q", *without, package)
        version_line = run(place / "clean/bin/pronghorn", "--version", folder=place).strip()
        if version_line != f"pronghorn {version}":
            sys.exit(f"{package.name} says {version_line!r}, not {version}")
        where = run(python, "-c", "import pronghorn; print(pronghorn.__file__)", folder=place).strip()
        if not Path(where).is_relative_to(place.resolve()):
            sys.exit(f"{package.name} was not what was imported: {where}")
        run(place / "clean/bin/pronghorn", "init", "recipe.yaml", folder=place)
        if not (place / "recipe.yaml").is_file():
            sys.exit(f"{package.name} wrote no recipe")
        run(place / "clean/bin/pronghorn", "init", "copy.yaml", "--recipe", "gpu-lora", folder=place)
        if "finetune" not in run(place / "clean/bin/pronghorn", "docs", folder=place):
            sys.exit(f"{package.name} has no pages")


def dated(changelog: str, version: str, day: str) -> str:
    """Return the changelog with its unreleased changes under the version and the day."""
    heading = f"## {version} ({day})\n"
    if f"## {version} " in changelog:
        sys.exit(f"CHANGELOG.md has {version} already: raise the version in pyproject.toml and pronghorn/__init__.py")
    before, heading_found, after = changelog.partition(UNRELEASED)
    if not heading_found or not after.partition("\n## ")[0].strip():
        sys.exit("CHANGELOG.md names no unreleased changes")
    return f"{before}{UNRELEASED}\n{heading}{after}"


def main() -> None:
    """Build, check and date a release."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=ROOT / "dist", help="where wheel and sdist go")
    parser.add_argument("--offline", action="store_true", help="use the packages installed here, and no index")
    parser.add_argument("--changelog", type=Path, default=ROOT / "CHANGELOG.md", help="whose version is dated")
    given = parser.parse_args()
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    version = project["version"]
    changelog = dated(given.changelog.read_text(encoding="utf-8"), version, datetime.date.today().isoformat())
    for package in build(given.output.resolve(), given.offline):
        check(package, version, given.offline)
        print(f"{package} is whole")
    given.changelog.write_text(changelog, encoding="utf-8")
    print(f"{given.changelog} names {version}")
    if not project.get("urls"):
        print("warning: pyproject.toml has no [project.urls]: add them once the project has a public address")


if __name__ == "__main__":
    main()
