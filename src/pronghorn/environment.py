"""Every variable of the environment that Pronghorn reads or sets; nothing else here touches the environment.

docs/install.md lists them. What only libraries read (HF_HOME, HF_TOKEN) is their own.
"""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pronghorn.errors import ConfigError

API_KEY = "PRONGHORN_API_KEY"
"""The key of the server that `--served` asks."""
ERROR_FILE = "PRONGHORN_ERROR_FILE"
"""The file where a process that we started leaves its error, for us to show."""
RAN_OUT = "PRONGHORN_RAN_OUT"
"""The events of `MemoryRanOut` for which processes were started again, as JSON."""
_NUMBERS = ("WORLD_SIZE", "RANK", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_PORT")
_LAST_PORT = 65_535
_ALLOCATORS = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
_OWN_PYTHON = ("PYTHONPATH", "OMP_NUM_THREADS")


def variables() -> Mapping[str, str]:
    """Return all variables, for `pronghorn doctor`, which judges them."""
    return os.environ


def world_size() -> int:
    """Return how many processes were started to train together."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def main_process() -> bool:
    """Tell whether this process prints: torchrun's other ranks have nothing to add."""
    return os.environ.get("RANK", "0") == "0"


def chooses_gpus() -> bool:
    """Tell whether somebody chose which GPUs this process sees."""
    return "CUDA_VISIBLE_DEVICES" in os.environ


def error_file() -> Path | None:
    """Return where this process leaves its error; None where nobody waits for it."""
    path = os.environ.get(ERROR_FILE)
    return None if path is None else Path(path)


def restarts() -> list[dict[str, Any]]:
    """Return the events for which this training was started again."""
    events: list[dict[str, Any]] = json.loads(os.environ.get(RAN_OUT, "[]"))
    return events


def check_distributed() -> None:
    """Refuse variables of torch.distributed that are no numbers, or left over from another program: torch would
    read them while training is built."""
    for name in _NUMBERS:
        value = os.environ.get(name, "0")
        if not (value.isascii() and value.isdigit()):
            raise ConfigError(
                f"the environment's {name}={value!r} is not a number", f"unset {name}, or start by torchrun"
            )
    for name, harmless in (("WORLD_SIZE", "01"), ("LOCAL_RANK", "")):
        value = os.environ.get(name, "")
        if value not in ("", *harmless) and "MASTER_ADDR" not in os.environ:
            problem = f"the environment has {name}={value} of a distributed run, but no MASTER_ADDR"
            raise ConfigError(problem, f"unset {name}, or start by torchrun")
    size = int(os.environ.get("WORLD_SIZE") or 0)
    for name in ("RANK", "LOCAL_RANK") if joined() else ():
        value = os.environ.get(name) or "0"
        if int(value) >= size:  # it would wait for ever for a process that has this number
            problem = f"the environment has {name}={value} and WORLD_SIZE={size}, whose processes are 0 to {size - 1}"
            raise ConfigError(problem, f"unset {name} and WORLD_SIZE, or start by torchrun")
    if int(port := os.environ.get("MASTER_PORT", "0")) > _LAST_PORT:
        raise ConfigError(f"the environment's MASTER_PORT={port} is above {_LAST_PORT:,}", "give another port")


def joined() -> bool:
    """Tell whether somebody started this process as one of a group: torchrun, accelerate, or Slurm's `srun`."""
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


def join_slurm() -> None:
    """Take this process's place in a group from Slurm, where `srun` started several of a step and nobody else did."""
    environment = os.environ
    if joined() or "SLURM_STEP_ID" not in environment or int(environment.get("SLURM_NTASKS", "1")) < 2:
        return
    address = environment.get("SLURM_LAUNCH_NODE_IPADDR") or environment.get("SLURM_SRUN_COMM_HOST")
    nodes = int(environment.get("SLURM_NNODES", "1"))
    if nodes > 1 and "MASTER_ADDR" not in environment:
        hosts = subprocess.run(
            ["scontrol", "show", "hostnames", environment.get("SLURM_NODELIST", "")], capture_output=True, text=True
        ).stdout.split()
        address = hosts[0] if hosts else address
    environment.setdefault("MASTER_ADDR", address if nodes > 1 and address else "127.0.0.1")
    environment.setdefault("MASTER_PORT", str(20_000 + int(environment.get("SLURM_JOB_ID", "0")) % 20_000))
    environment |= {
        "RANK": environment["SLURM_PROCID"],
        "WORLD_SIZE": environment["SLURM_NTASKS"],
        "LOCAL_RANK": environment.get("SLURM_LOCALID", "0"),
        "LOCAL_WORLD_SIZE": str(int(environment["SLURM_NTASKS"]) // nodes),
    }


def environment_of_process(count: int, rank: int, port: int, more: Mapping[str, str]) -> dict[str, str]:
    """Return the environment of one of `count` processes on this machine, which meet at a port."""
    return {
        **os.environ,
        **more,
        "WORLD_SIZE": str(count),
        "LOCAL_WORLD_SIZE": str(count),
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", str(max((os.cpu_count() or 1) // count, 1))),
    }


def environment_of_another_python() -> dict[str, str]:
    """Return this process's environment without what is for its own Python."""
    return {key: value for key, value in os.environ.items() if key not in _OWN_PYTHON}


def grow_segments() -> None:
    """Let torch's allocator grow its segments, unless the environment tells it how to work: of a GPU that is nearly
    full it then holds about half as much in pieces that nothing fits into."""
    if not any(name in os.environ for name in _ALLOCATORS):
        os.environ["PYTORCH_ALLOC_CONF"] = "expandable_segments:True"


def stay_quiet() -> None:
    """Turn off what libraries tell the Hugging Face Hub of a run: TRL's telemetry, and huggingface_hub's list of coding
    agents, which it fetches to name one. `HF_HUB_DISABLE_TELEMETRY=0` in the environment leaves both on."""
    os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")


def draw_without_windows() -> None:
    """Forget which backend matplotlib shall show figures in: reports need none, and its import fails if that one isn't
    installed. A Jupyter kernel gives its own to every program that a cell starts."""
    os.environ.pop("MPLBACKEND", None)


def tokenize_in_one_thread() -> None:
    """Let tokenizers use one thread of this process, which is one of as many as there are cores."""
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
