"""Judge what several GPUs of a machine need to train together: links, NCCL, shared memory, cards of one kind."""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from pronghorn.device import Device
from pronghorn.diagnose.doctor import Finding
from pronghorn.environment import chooses_gpus, variables

LEAST_SHARED = 2**30
"""Bytes of /dev/shm for NCCL and worker processes; a Docker container has 64 MiB unless told otherwise."""
_PCIE = ("PIX", "PXB", "PHB", "NODE", "SYS")
"""Ways over PCIe in `nvidia-smi topo -m`, the last ones over the host's bridges and between its processors."""
_SLOWER = {
    "NCCL_P2P_DISABLE": "GPUs exchange through the host's memory",
    "NCCL_SHM_DISABLE": "GPUs without peer access exchange through the network",
    "NCCL_IB_DISABLE": "machines exchange by TCP, not InfiniBand",
}


def link_findings(devices: Sequence[Device]) -> list[Finding]:
    """Look at what several GPUs need; says in one line that there aren't several."""
    if len(devices) < 2 or devices[0].type != "cuda":
        count = "no GPU" if not devices or devices[0].type != "cuda" else "one GPU"
        return [Finding("Several GPUs", f"{count}: links and NCCL are not looked at", "ok")]
    import torch

    has_nccl = torch.distributed.is_available() and torch.distributed.is_nccl_available()
    version = ".".join(map(str, torch.cuda.nccl.version())) if has_nccl else None
    shared = shutil.disk_usage("/dev/shm").total if Path("/dev/shm").exists() else None
    return [
        kinds_finding(devices),
        peers_finding(len(devices), torch.cuda.can_device_access_peer),
        topology_finding(len(devices), topology()),
        nccl_finding(version),
        *environment_findings(variables()),
        shared_memory_finding(shared),
    ]


def kinds_finding(devices: Sequence[Device]) -> Finding:
    """Judge whether all cards are alike."""
    kinds = sorted({f"{device.name}, {device.total_memory_bytes / 2**30:.1f} GiB" for device in devices})
    if len(kinds) == 1:
        return Finding("Several GPUs", f"{len(devices)} × {kinds[0]}", "ok")
    effect = "each step takes as long as the slowest, and the plan counts with the smallest"
    remedy = "export CUDA_VISIBLE_DEVICES=the numbers of those of one kind"
    return Finding("Several GPUs", "; ".join(kinds), "slow", effect, remedy)


def peers_finding(count: int, can_access: Callable[[int, int], bool]) -> Finding:
    """Judge whether each GPU reads every other's memory."""
    pairs = [(i, j) for i in range(count) for j in range(count) if i != j]
    without = [f"{i}→{j}" for i, j in pairs if not can_access(i, j)]
    if not without:
        return Finding("Peer access", "between all GPUs", "ok")
    return Finding("Peer access", f"not {', '.join(without)}", "slow", _SLOWER["NCCL_P2P_DISABLE"])


def topology() -> str | None:
    """Return what `nvidia-smi topo -m` prints, None where it can't be asked."""
    if shutil.which("nvidia-smi") is None or chooses_gpus():
        return None  # it counts all GPUs in an order of its own
    try:
        done = subprocess.run(["nvidia-smi", "topo", "-m"], capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout


def links_in(text: str, count: int) -> dict[tuple[int, int], str] | None:
    """Read the links between GPUs from `nvidia-smi topo -m`; None for anything that isn't understood entirely."""
    lines = [re.sub(r"\x1b\[[\d;]*m", "", line).split() for line in text.splitlines()]
    header = next((line for line in lines if line[:1] == ["GPU0"]), [])
    gpus = [name for name in header if re.fullmatch(r"GPU\d+", name)]
    if gpus != [f"GPU{i}" for i in range(count)] or header[:count] != gpus:
        return None
    rows = {line[0]: line[1 : count + 1] for line in lines if line and line is not header and line[0] in gpus}
    links: dict[tuple[int, int], str] = {}
    for i, gpu in enumerate(gpus):
        row = rows.get(gpu, [])
        if len(row) != count or row[i] != "X":
            return None
        for j in range(count):
            if i != j and not (row[j] in _PCIE or re.fullmatch(r"NV\d+", row[j])):
                return None
            links[i, j] = row[j]
    return {pair: link for pair, link in links.items() if pair[0] < pair[1]}


def topology_finding(count: int, text: str | None) -> Finding:
    """Judge the links between GPUs."""
    links = None if text is None else links_in(text, count)
    if links is None:
        effect = "how GPUs are linked is not told; the plan takes the datasheet's rate unless --link says another"
        return Finding("GPU links", "unknown", "slow", effect, "nvidia-smi topo -m")
    by_link: dict[str, list[str]] = {}
    for (i, j), link in links.items():
        by_link.setdefault(link, []).append(f"{i}–{j}")
    words = "; ".join(f"{_words(link)}: {', '.join(pairs)}" for link, pairs in by_link.items())
    if all(link.startswith("NV") for link in by_link):
        return Finding("GPU links", words, "ok")
    return Finding("GPU links", words, "slow", "shards over PCIe are waited for: see pronghorn plan --gpus, --link")


def _words(link: str) -> str:
    return f"NVLink, {link[2:]} links" if link.startswith("NV") else f"PCIe ({link})"


def nccl_finding(version: str | None) -> Finding:
    """Judge NCCL; None: this build of torch has none."""
    if version is not None:
        return Finding("NCCL", version, "ok")
    effect = "several GPUs can't train together; one can"
    return Finding("NCCL", "not in this build of torch", "slow", effect, "install torch's CUDA build for Linux")


def environment_findings(environment: Mapping[str, str]) -> list[Finding]:
    """Judge NCCL's environment variables."""
    findings = []
    for name, value in sorted(environment.items()):
        if name in _SLOWER and value.strip() not in ("", "0"):
            findings.append(Finding(name, value, "slow", _SLOWER[name], f"unset {name}"))
        elif name in ("NCCL_SOCKET_IFNAME", "NCCL_IB_HCA", "NCCL_P2P_LEVEL", "NCCL_ALGO", "NCCL_PROTO"):
            findings.append(Finding(name, value, "ok"))
    return findings


def shared_memory_finding(size: int | None) -> Finding:
    """Judge /dev/shm; None: there is none."""
    found = "none" if size is None else f"{size / 2**20:,.0f} MiB"
    if size is not None and size >= LEAST_SHARED:
        return Finding("/dev/shm", found, "ok")
    effect = "NCCL may fail with 'unhandled system error'"
    return Finding("/dev/shm", found, "slow", effect, "docker run --shm-size=8g (or --ipc=host)")
