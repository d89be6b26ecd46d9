"""The diagnosis: the support window, what each lack costs, and that devices are described once."""

from __future__ import annotations

import dataclasses
import io
import subprocess
import sys
import tomllib
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from packaging.requirements import Requirement
from rich.console import Console

from conftest import ROOT
from pronghorn.device import Device, probe
from pronghorn.diagnose import doctor
from pronghorn.diagnose.doctor import EXTRAS, Finding, Package, cache_finding, healthy, package_finding, packages
from pronghorn.errors import ConfigError

TORCH = Package(Requirement("torch>=2.11,<2.15"))
EXTRA = Package(Requirement("gguf>=0.19"), without="no GGUF", install="pronghorn[gguf]")
ARCHS = ["sm_75", "sm_80", "sm_86", "sm_90", "sm_100", "sm_120", "compute_120"]
"""Of torch's wheels for CUDA 13."""
H200 = Device("NVIDIA H200", "cuda", 0, (9, 0), 139 * 2**30, True, True, 16, 128 * 2**30)


@pytest.mark.parametrize(
    ("version", "status"),
    [
        ("2.11.0", "ok"),
        ("2.11", "ok"),
        ("2.13.0+cu130", "ok"),
        ("2.14.9", "ok"),
        ("2.10.1", "missing"),
        ("2.9.1", "missing"),
        ("2.15.0", "missing"),
        ("2.15.0.dev20270101", "missing"),
        (None, "missing"),
    ],
)
def test_window(version: str | None, status: str) -> None:
    finding = package_finding(TORCH, version)
    assert finding.status == status
    assert finding.remedy == ("" if status == "ok" else "pip install 'torch<2.15,>=2.11'")


def test_lack_of_an_extra_only_costs_its_feature() -> None:
    finding = package_finding(EXTRA, None)
    assert (finding.status, finding.effect) == ("optional", "no GGUF")
    assert package_finding(EXTRA, "0.0.1").status == "slow", "another version is there, and not right"
    assert finding.remedy == "pip install 'pronghorn[gguf]'"
    assert healthy([finding]) and not healthy([finding, package_finding(TORCH, None)])


def test_windows_are_those_of_the_package(monkeypatch: pytest.MonkeyPatch) -> None:
    """As an installation of this tree declares them; the one at hand may be older."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    assert set(EXTRAS) == {extra for extra, needs in extras.items() if needs} - {"dev"}
    optional = [
        f"{text}{' and' if ';' in text else ';'} extra == '{extra}'" for extra in extras for text in extras[extra]
    ]
    monkeypatch.setattr(doctor.importlib.metadata, "requires", lambda name: [*project["dependencies"], *optional])
    wanted = {package.requirement.name: package for package in packages()}
    for text in project["dependencies"]:
        declared = Requirement(text)
        assert wanted[declared.name].requirement.specifier == declared.specifier
        assert wanted[declared.name].without is None
    for extra in EXTRAS:
        for declared in map(Requirement, extras[extra]):
            found = wanted[declared.name]
            assert found.requirement.specifier == declared.specifier
            assert (found.without, found.install) == (EXTRAS[extra], f"pronghorn[{extra}]")
    assert not {"pytest", "triton"} & set(wanted), "what only developers need is not asked for"


def test_a_full_disk_under_the_cache_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    missing = tmp_path / "not" / "made yet"
    for free, status in ((doctor.LEAST_FREE, "ok"), (doctor.LEAST_FREE - 1, "slow")):
        monkeypatch.setattr(doctor.shutil, "disk_usage", lambda path, free=free: SimpleNamespace(free=free))
        finding = cache_finding(missing)
        assert finding.status == status and finding.found.startswith(f"{missing}, 20.0 GiB")


@pytest.mark.parametrize(
    ("cuda", "hip", "driver", "available", "status"),
    [
        ("13.0", None, True, True, "ok"),
        ("13.0", None, True, False, "slow"),
        ("13.0", None, False, False, "ok"),
        (None, None, True, False, "slow"),
        (None, None, False, False, "ok"),
        (None, "7.1", False, True, "slow"),
    ],
)
def test_torch_build(cuda: str | None, hip: str | None, driver: bool, available: bool, status: str) -> None:
    assert doctor.build_finding(cuda, hip, driver, available).status == status


def test_gpus() -> None:
    assert {finding.status for finding in doctor.device_findings(H200, ARCHS)} == {"ok"}
    t4 = dataclasses.replace(H200, name="Tesla T4", capability=(7, 5), bf16=False, flash_varlen=False)
    found = {finding.part: finding for finding in doctor.device_findings(t4, ARCHS)}
    assert found["GPU 0"].status == "ok" and "7.5" in found["GPU 0"].found
    assert found["GPU 0 bf16"].status == found["GPU 0 flash varlen"].status == "slow"
    assert "older than Ampere" in found["GPU 0 flash varlen"].effect
    no_kernel = doctor.device_findings(dataclasses.replace(H200, flash_varlen=False), ARCHS)[-1]
    assert "heads of unusual sizes" in no_kernel.effect and "lacks the kernel" in no_kernel.effect  # others take tiles


@pytest.mark.parametrize(
    ("capability", "archs", "runs"),
    [
        ((7, 0), ARCHS, False),  # V100
        ((8, 9), ARCHS, True),
        ((12, 1), ARCHS, True),
        ((13, 0), ARCHS, True),  # by the driver's compiler
        ((12, 0), ["sm_80", "sm_90a"], False),
        ((9, 0), ["sm_80", "sm_90a"], True),
        ((9, 0), ["gfx90a", "gfx942"], True),  # ROCm, which another line is about
    ],
)
def test_a_gpu_that_torch_has_no_kernels_for(capability: tuple[int, int], archs: list[str], runs: bool) -> None:
    """torch says that it is available; its first kernel fails."""
    found = doctor.device_findings(dataclasses.replace(H200, capability=capability), archs)
    assert healthy(found) is runs and (runs or "sm_80" in found[0].effect)


@pytest.mark.parametrize("there", [True, False])
def test_a_gpu_needs_triton(monkeypatch: pytest.MonkeyPatch, there: bool) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_arch_list", lambda: ARCHS)
    monkeypatch.setattr(doctor, "probe", lambda index: dataclasses.replace(H200, index=index))
    monkeypatch.setattr(doctor, "has_triton", lambda: there)
    monkeypatch.setattr(torch.cuda, "can_device_access_peer", lambda i, j: True)
    findings = doctor.diagnose()
    assert [finding.status for finding in findings if finding.part == "Triton"] == ["ok" if there else "missing"]
    assert healthy(findings) is there and sum(finding.part.startswith("GPU 1") for finding in findings) == 3


def test_host() -> None:
    assert {finding.status for finding in doctor.host_findings(H200)} == {"ok"}
    small = dataclasses.replace(H200, cores=1, ram_bytes=2**30)
    assert [finding.status for finding in doctor.host_findings(small)] == ["slow", "slow"]
    assert doctor.host_findings(dataclasses.replace(H200, ram_bytes=0))[1].found == "unknown"


def test_diagnosis_of_this_machine() -> None:
    findings = doctor.diagnose()
    parts = [finding.part for finding in findings]
    assert len(parts) == len(set(parts))
    assert {
        "Python",
        "torch",
        "torch build",
        "CPU cores",
        "RAM",
        *(package.requirement.name for package in packages()),
    } <= set(parts)
    assert all(finding.effect for finding in findings if finding.status != "ok")


def test_table_shows_brackets_as_they_are() -> None:
    console = Console(file=io.StringIO(), width=120)
    console.print(doctor.render([Finding("gguf", "[0.1]", "slow", "no [GGUF]", "pip install 'pronghorn[gguf]'")]))
    text = console.file.getvalue()  # type: ignore[attr-defined]
    assert "[0.1]" in text and "no [GGUF]" in text and "pip install 'pronghorn[gguf]'" in text


def test_probe() -> None:
    device = probe()
    assert device.cores >= 1 and device.total_memory_bytes > 0
    assert device.type == ("cuda" if torch.cuda.is_available() else "cpu")
    with pytest.raises(ConfigError, match="GPU 99 of"):
        probe(99)


def test_importing_device_loads_no_torch() -> None:
    code = "import sys, pronghorn.device, pronghorn.diagnose.doctor; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)
