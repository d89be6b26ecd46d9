"""What `pronghorn doctor` says of several GPUs, with GPUs that aren't here."""

from __future__ import annotations

import pytest

from pronghorn.device import Device
from pronghorn.diagnose import links
from pronghorn.diagnose.links import LEAST_SHARED, links_in

H200 = Device("NVIDIA H200", "cuda", 0, (9, 0), 140 * 2**30, True, True, 8, 2**37)
TOPOLOGY = """\t\x1b[4mGPU0\tGPU1\tGPU2\tNIC0\tCPU Affinity\x1b[0m
GPU0\t X \tNV18\tSYS\tPIX\t0-31
GPU1\tNV18\t X \tSYS\tSYS\t0-31
GPU2\tSYS\tSYS\t X \tSYS\t32-63
NIC0\tPIX\tSYS\tSYS\t X

Legend:

  X    = Self
"""


def test_no_gpu_and_one_gpu_are_told_in_one_line() -> None:
    cpu = Device("CPU", "cpu", None, None, 2**33, False, False, 2, 2**33)
    for device, said in ((cpu, "no GPU"), (H200, "one GPU")):
        [finding] = links.link_findings([device])
        assert finding.status == "ok" and said in finding.found


def test_links_are_read_from_the_drivers_table() -> None:
    assert links_in(TOPOLOGY, 3) == {(0, 1): "NV18", (0, 2): "SYS", (1, 2): "SYS"}
    finding = links.topology_finding(3, TOPOLOGY)
    assert finding.status == "slow" and finding.found == "NVLink, 18 links: 0–1; PCIe (SYS): 0–2, 1–2"
    assert links.topology_finding(2, "\tGPU0\tGPU1\nGPU0\t X \tNV4\nGPU1\tNV4\t X\n").status == "ok"


@pytest.mark.parametrize(
    "text",
    ["", "No devices", TOPOLOGY.replace("NV18", "??"), TOPOLOGY.replace("GPU2\tSYS", "GPU9\tSYS"), None],
)
def test_a_table_that_is_not_understood_is_unknown(text: str | None) -> None:
    assert text is None or links_in(text, 3) is None
    finding = links.topology_finding(3, text)
    assert finding.found == "unknown" and finding.remedy == "nvidia-smi topo -m"
    assert links_in(TOPOLOGY, 2) is None, "another count than torch sees"


def test_unlike_cards_and_closed_ways_are_told() -> None:
    assert links.kinds_finding([H200, H200]).status == "ok"
    other = Device("Tesla T4", "cuda", 1, (7, 5), 15 * 2**30, False, False, 8, 2**37)
    assert "the plan counts with the smallest" in links.kinds_finding([H200, other]).effect
    assert links.peers_finding(2, lambda i, j: True).status == "ok"
    assert links.peers_finding(2, lambda i, j: i < j).found == "not 1→0"


def test_what_nccl_is_told_by_the_environment_is_shown() -> None:
    given = {"NCCL_P2P_DISABLE": "1", "NCCL_IB_DISABLE": "0", "NCCL_SOCKET_IFNAME": "eth0", "HOME": "/root"}
    told = {finding.part: finding.status for finding in links.environment_findings(given)}
    assert told == {"NCCL_P2P_DISABLE": "slow", "NCCL_SOCKET_IFNAME": "ok"}


def test_a_containers_shared_memory_and_a_lack_of_nccl_are_told() -> None:
    assert links.shared_memory_finding(64 * 2**20).found == "64 MiB"
    sizes = (64 * 2**20, LEAST_SHARED - 1, LEAST_SHARED, None)
    assert [links.shared_memory_finding(size).status for size in sizes] == ["slow", "slow", "ok", "slow"]
    assert links.nccl_finding("2.28.9").status == "ok" and "can't train together" in links.nccl_finding(None).effect
