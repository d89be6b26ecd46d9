"""Check the installation: versions against the package's metadata, GPU, memory, and what each lack costs."""

from __future__ import annotations

import importlib.metadata
import platform
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from huggingface_hub.constants import HF_HOME

from pronghorn.device import Device, has_triton, installed, probe
from pronghorn.environment import variables

if TYPE_CHECKING:
    from packaging.requirements import Requirement
    from rich.table import Table

Status = Literal["ok", "optional", "slow", "missing"]


@dataclass(frozen=True)
class Finding:
    """One line of the diagnosis."""

    part: str
    found: str
    status: Status
    """ok; optional: not installed, and only what is named needs it; slow: works, but something is slower or not
    available; missing: Pronghorn can't work like this."""
    effect: str = ""
    """What follows from it, if not ok."""
    remedy: str = ""
    """The command that fixes it, if one does."""


@dataclass(frozen=True)
class Package:
    """A package, and what it is for if Pronghorn works without it."""

    requirement: Requirement
    without: str | None = None
    """What can't be done without it; None: nothing can."""
    install: str | None = None
    """What pip is told to install; None: the requirement."""


EXTRAS = {
    "nf4": "load_in_4bit is not available",
    "lowbit": "torchao's optimisers with states in 8 and 4 bits are not available",
    "gguf": "GGUF files can't be read or written",
}
"""What can't be done without each extra of Pronghorn."""
TRACKERS = ("tensorboard", "wandb", "trackio")
LEAST_FREE = 20 * 2**30
"""Bytes: a model of 8 billion parameters is downloaded as 16 GB."""


def packages() -> list[Package]:
    """List what the installed Pronghorn declares that it needs, alone and for its extras, and the trackers."""
    from packaging.requirements import Requirement

    declared = importlib.metadata.requires("pronghorn") or () if installed("pronghorn") else ()
    wanted = []
    for requirement in map(Requirement, declared):
        bare, marker = Requirement(f"{requirement.name}{requirement.specifier}"), requirement.marker
        if marker is None or marker.evaluate({"extra": ""}):
            wanted.append(Package(bare))
        else:
            extras = [extra for extra in EXTRAS if marker.evaluate({"extra": extra})]
            wanted += [Package(bare, EXTRAS[extra], f"pronghorn[{extra}]") for extra in extras]
    return wanted + [Package(Requirement(name), f"train.report_to: {name} is not available") for name in TRACKERS]


def diagnose() -> list[Finding]:
    """Look at everything; imports torch and asks the devices, changes nothing."""
    findings = [Finding("Python", platform.python_version(), "ok")]
    if installed("pronghorn") is None:
        effect = "its metadata is not found, so the versions of what it needs aren't judged"
        findings.append(Finding("pronghorn", "not installed", "slow", effect, "pip install pronghorn"))
    wanted = packages()
    findings += [package_finding(package, installed(package.requirement.name)) for package in wanted]
    findings += [*network_findings(variables()), cache_finding(Path(HF_HOME))]
    if installed("torch") is None:
        return findings
    needed = [f"pip install '{p.requirement}' --force-reinstall" for p in wanted if p.requirement.name == "torch"]
    reinstall = "".join(needed[:1])
    try:
        import torch
    except (ImportError, OSError) as error:
        return [*findings, Finding("torch import", str(error), "missing", "torch can't be loaded", reinstall)]
    cuda, driver = torch.cuda.is_available(), shutil.which("nvidia-smi") is not None
    findings.append(build_finding(torch.version.cuda, torch.version.hip, driver, cuda, reinstall))
    devices = [probe(i) for i in range(torch.cuda.device_count())] if cuda else [probe()]
    if cuda and has_triton():
        findings.append(Finding("Triton", installed("triton") or "installed", "ok"))
    elif cuda:
        effect = "the kernels of norms, RoPE, attention and loss can't run"
        findings.append(Finding("Triton", "not installed", "missing", effect, "pip install triton"))
    for device in devices:
        findings += device_findings(device, torch.cuda.get_arch_list() if cuda else [])
    from pronghorn.diagnose.links import link_findings

    return [*findings, *link_findings(devices), *host_findings(devices[0])]


def healthy(findings: list[Finding]) -> bool:
    """Return whether nothing needed is missing."""
    return all(finding.status != "missing" for finding in findings)


def package_finding(package: Package, version: str | None) -> Finding:
    """Judge an installed version (None: not installed) against the window."""
    from packaging.version import Version

    name, window = package.requirement.name, package.requirement.specifier
    needed = package.without is None
    if version is None:
        remedy = f"pip install '{package.install or package.requirement}'"
        effect = package.without or "Pronghorn needs it"
        return Finding(name, "not installed", "missing" if needed else "optional", effect, remedy)
    if window.contains(Version(version).base_version):  # 2.13.0+cu130 and 2.13.0rc1 count as 2.13.0
        return Finding(name, version, "ok")
    remedy = f"pip install '{package.requirement}'"
    return Finding(name, version, "missing" if needed else "slow", f"outside {window}", remedy)


def build_finding(cuda: str | None, hip: str | None, driver: bool, available: bool, reinstall: str = "") -> Finding:
    """Judge what this build of torch is for, and whether it finds a GPU; `driver`: NVIDIA's is on this machine."""
    build = f"ROCm {hip}" if hip is not None else f"CUDA {cuda}" if cuda is not None else "CPU only"
    if hip is not None:
        return Finding("torch build", build, "slow", "Pronghorn is tested on NVIDIA GPUs only")
    if not driver or available:
        return Finding("torch build", build, "ok")
    if cuda is None:
        return Finding("torch build", build, "slow", "the GPU of this machine is not used", reinstall)
    effect = "it finds no GPU: the driver is too old, or hides it"
    return Finding("torch build", build, "slow", effect, "nvidia-smi")


def device_findings(device: Device, archs: Sequence[str]) -> list[Finding]:
    """Describe a GPU and judge what its kernels need, or say that there is none. `archs`: what torch was built for."""
    if device.type != "cuda":
        return [Finding("GPU", "none", "slow", "training runs on the CPU: right, but for tiny models only")]
    part = f"GPU {device.index}"
    major, minor = device.capability or (0, 0)
    numbers = f"{device.name}, {_gib(device.total_memory_bytes)}, capability {major}.{minor}"
    archs = [arch for arch in archs if arch.startswith(("sm_", "compute_"))]  # ROCm's are named otherwise
    if archs and not any(_runs(arch, major, minor) for arch in archs):
        effect = f"this build of torch has kernels for {', '.join(archs)} only"
        remedy = f"install a build for capability {major}.{minor} (https://pytorch.org/get-started)"
        return [Finding(part, numbers, "missing", effect, remedy)]
    old = f"{device.name} is older than Ampere"
    flash = f"{old}: all attention heads run document by document"
    if device.bf16:
        flash = "heads of unusual sizes run document by document: this build of torch lacks the kernel"
    findings = [Finding(part, numbers, "ok")]
    for what, has, effect in (
        ("bf16", device.bf16, f"{old}: float16 with loss scaling is used"),
        ("flash varlen", device.flash_varlen, flash),
    ):
        name = f"{part} {what}"
        findings.append(Finding(name, "yes", "ok") if has else Finding(name, "no", "slow", effect))
    return findings


def _runs(arch: str, major: int, minor: int) -> bool:
    """Return whether a GPU of that capability runs a build: `sm_86` runs on its generation, no older than it;
    `compute_90` is compiled again by the driver for any newer one."""
    kind, _, number = arch.partition("_")
    built = divmod(int(number.rstrip("af")), 10)
    return built <= (major, minor) and (kind == "compute" or built[0] == major)


def host_findings(device: Device) -> list[Finding]:
    """Judge the cores and memory around the device."""
    cores, ram = Finding("CPU cores", str(device.cores), "ok"), device.ram_bytes
    if device.cores < 2:
        cores = replace(cores, status="slow", effect="reading data competes with the training loop")
    memory = Finding("RAM", _gib(ram) if ram else "unknown", "ok")
    if 0 < ram < 8 * 2**30:
        memory = replace(memory, status="slow", effect="loading a model of some billion parameters will not fit")
    return [cores, memory]


def network_findings(environment: Mapping[str, str]) -> list[Finding]:
    """Return what a run would contact: nothing, or the Hub for names that are no local path, and for telemetry."""

    def on(*names: str) -> bool:
        return any(environment.get(name, "").upper() in ("1", "ON", "YES", "TRUE") for name in names)

    offline = [name for name in ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE") if on(name)]
    if offline:
        return [Finding("Network", f"offline by {' and '.join(offline)}: nothing is contacted", "ok")]
    hub = environment.get("HF_ENDPOINT", "https://huggingface.co")
    telemetry = "off" if on("HF_HUB_DISABLE_TELEMETRY", "DISABLE_TELEMETRY", "DO_NOT_TRACK") else f"on: sent to {hub}"
    return [
        Finding("Network", f"{hub}, for models and data that aren't local", "ok"),
        Finding("TRL's telemetry", f"{telemetry} (HF_HUB_DISABLE_TELEMETRY)", "ok"),
    ]


def cache_finding(folder: Path) -> Finding:
    """Return how much room is left where models and tokenised data are kept."""
    existing = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    free = shutil.disk_usage(existing).free
    room = f"{folder}, {_gib(free)} free"
    if free >= LEAST_FREE:
        return Finding("Cache", room, "ok")
    effect = "models of some billion parameters will not fit"
    return Finding("Cache", room, "slow", effect, "export HF_HOME=a folder on a larger disk")


def _gib(size: int) -> str:
    return f"{size / 2**30:.1f} GiB"


def render(findings: list[Finding]) -> Table:
    """Return the findings as a table for a terminal."""
    from rich.text import Text

    from pronghorn.diagnose.tables import plain_table

    colours = {"ok": "green", "optional": "cyan", "slow": "yellow", "missing": "bold red"}
    table = plain_table()
    for name in ("Part", "Found", "Status", "What follows, and what fixes it"):
        table.add_column(name, no_wrap=name in ("Part", "Status"), overflow="fold")
    for finding in findings:
        advice = Text("\n").join(filter(None, (Text(finding.effect), Text(finding.remedy, "cyan"))))
        table.add_row(Text(finding.part), Text(finding.found), Text(finding.status, colours[finding.status]), advice)
    return table
