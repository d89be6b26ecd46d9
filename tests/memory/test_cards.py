"""Cards by the names that people and drivers give them, a screen's share, and remedies that fit apart from others."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

from pronghorn.cli.main import app
from pronghorn.config.recipe import Recipe
from pronghorn.errors import ConfigError
from pronghorn.memory.cards import CARDS, find_card, too_old
from pronghorn.memory.devices import DISPLAY_BYTES, device_spec, parse_bytes
from pronghorn.memory.estimate import GIB

NAMES = {
    "rtx 4090": "rtx4090",
    "4090": "rtx4090",
    "4090 laptop 16gb": "rtx4090laptop",
    "NVIDIA GeForce RTX 4090 Laptop GPU": "rtx4090laptop",
    "RTX 2080 with Max-Q Design": "rtx2080laptop",
    "4070 Ti Super": "rtx4070tisuper",
    "4060ti 16GB": "rtx4060ti-16",
    "rtx 4060 ti": "rtx4060ti-8",
    "Tesla T4": "t4",
    "V100 32GB": "v100-32",
    "Tesla V100-SXM2-16GB": "v100-16",
    "a100": "a100-40",
    "A100 80GB PCIe": "a100-80",
    "a100-80": "a100-80",
    "a10080": "a100-80",
    "NVIDIA A10G": "a10g",
    "NVIDIA L4": "l4",
    "L40S": "l40s",
    "rtx a6000": "a6000",
    "NVIDIA RTX 6000 Ada Generation": "rtx6000ada",
    "NVIDIA H100 80GB HBM3": "h100",
    "H200 SXM": "h200",
    "b200": "b200",
    "B300": "b300",
    "NVIDIA H800": "h800",
    "H800 80GB": "h800",
    "NVIDIA A800-SXM4-80GB": "a800-80",
    "a800": "a800-40",
    "h20": "h20-96",
    "H20 141GB": "h20-141",
    "T4G": "t4g",
    "a30": "a30",
    "RTX PRO 6000": "rtxpro6000",
    "NVIDIA RTX PRO 6000 Blackwell Server Edition": "rtxpro6000",
    "NVIDIA RTX PRO 6000 Blackwell Max-Q Workstation Edition": "rtxpro6000",
    "RTX A2000 12GB": "a2000-12",
    "NVIDIA RTX 4000 Ada Generation": "rtx4000ada",
    "TITAN RTX": "titanrtx",
    "mi300": None,
    "my laptop": None,
    "gtx 1080": None,
}


@pytest.mark.parametrize(("text", "name"), NAMES.items())
def test_a_card_is_known_by_what_people_call_it(text: str, name: str | None) -> None:
    assert find_card(text) == name


@pytest.mark.parametrize("name", CARDS)
def test_each_card_s_own_name_finds_it(name: str) -> None:
    spec, card = device_spec(name), CARDS[name]
    assert find_card(name) == name and spec.memory_bytes == int(card.gib * GIB)
    assert 0.85 <= card.gib / card.gb <= 1 and spec.fp8 <= spec.bf16
    assert ("not measured" in spec.source) is (name not in ("h100", "h200"))


OLD = {"P100": "p100", "Tesla P100-PCIE-16GB": "p100", "gtx 1080 Ti": "gtx 1080 ti", "TITAN X": "titan x", "k80": "k80"}


@pytest.mark.parametrize(("text", "name"), OLD.items())
def test_a_card_before_volta_is_told_that_it_is_too_old(text: str, name: str) -> None:
    with pytest.raises(ConfigError, match=f"{name} is older than Volta, and kernels need a compute capability of 7.0"):
        device_spec(text)
    assert all(not too_old(each) for each in (*CARDS, "p5", "m1")) and min(c.capability for c in CARDS.values()) >= 7


def test_an_amount_that_no_card_of_the_name_has_is_taken_with_its_rates() -> None:
    spec = device_spec("rtx 3060 8gb")
    assert spec.memory_bytes == 8 * GIB and spec.matmul == device_spec("rtx3060").matmul


def test_the_memory_there_is_chooses_among_cards_of_one_name() -> None:
    assert device_spec("NVIDIA A100-SXM4-80GB", 85 * 10**9).bandwidth == device_spec("a100-80").bandwidth
    assert device_spec("NVIDIA GeForce RTX 4060 Ti", 17 * 10**9).memory_bytes == 17 * 10**9


@pytest.mark.parametrize("name", ["2x T4", "T4 x2", "2 × T4", "t4*2"])
def test_several_cards_are_asked_for_by_gpus(name: str) -> None:
    with pytest.raises(ConfigError, match="several: name one: --device t4; pronghorn plan takes --gpus 2"):
        device_spec(name)


def test_names_near_an_unknown_one_are_told() -> None:
    with pytest.raises(ConfigError, match=r"'rtx 4099' is unknown: use a name like rtx4090"):
        device_spec("rtx 4099")


@pytest.fixture
def recipe(tmp_path: Path, stories: Path) -> Path:
    """Return a recipe of the small model, whose data aren't counted."""
    (tmp_path / "a.jsonl").write_text('{"prompt": "a", "completion": "b"}\n')
    path = tmp_path / "recipe.yaml"
    table = {
        "model": {"name": str(stories), "max_seq_length": 512},
        "data": {"train": str(tmp_path / "a.jsonl")},
        "train": {"output": str(tmp_path / "out")},
    }
    path.write_text(yaml.safe_dump(table))
    return path


def plan(recipe: Path, *arguments: str) -> Any:
    environment = {"COLUMNS": "200", "NO_COLOR": "1"}
    return CliRunner().invoke(app, ["plan", str(recipe), *arguments], env=environment)


def test_a_screen_s_share_is_left_out_and_told(recipe: Path) -> None:
    budget = json.loads(plan(recipe, "--device", "rtx 4060", "--json").stdout)["plan"]["budget_bytes"]
    assert budget == device_spec("rtx4060").memory_bytes - DISPLAY_BYTES
    assert "0.5 GiB are left to a screen" in plan(recipe, "--device", "rtx 4060").stdout
    assert "screen" not in plan(recipe, "--device", "h100").stdout
    asked = json.loads(plan(recipe, "memory.budget=7GiB", "--device", "rtx 4060", "--json").stdout)
    assert asked["plan"]["budget_bytes"] == 7 * GIB


def test_the_lines_to_paste_are_a_recipe_s(recipe: Path) -> None:
    told = plan(recipe, "--device", "t4").stdout
    line = next(line for line in told.splitlines() if line.startswith("for the recipe: "))
    table = yaml.safe_load(recipe.read_text()) | yaml.safe_load(line.removeprefix("for the recipe: "))
    memory = Recipe.model_validate(table).memory
    assert memory.gradient_checkpointing is False and memory.budget == "14.6GiB"


@pytest.mark.parametrize("more", [2**10, 2**20, 2**24, 2**28])
def test_the_budget_to_paste_holds_the_plan(recipe: Path, more: int) -> None:
    """As one that the plan fills is cut to fewer digits."""
    made = json.loads(plan(recipe, "--device", "t4", "--json").stdout)["plan"]["predicted"]
    most = (int(made["process"]) + more) // 2**10
    told = plan(recipe, f"memory.budget={most / 2**10}MiB", "--device", "t4").stdout
    line = yaml.safe_load(told[told.index("for the recipe: ") :].removeprefix("for the recipe: "))
    assert made["process"] <= parse_bytes(line["memory"]["budget"], "memory.budget") <= most * 2**10


def test_the_budget_to_paste_is_the_one_that_was_given(recipe: Path) -> None:
    """18.3GiB is cut to whole bytes, which are less."""
    assert "budget: 18.3GiB}" in plan(recipe, "memory.budget=18.3GiB", "--device", "h100").stdout


def test_a_card_before_ampere_is_planned_in_float16(recipe: Path) -> None:
    assert plan(recipe, "--device", "rtx 2080 ti").exit_code == 0
    assert not device_spec("t4").bf16 and device_spec("rtx3060").bf16


def test_remedies_that_fit_stand_apart(recipe: Path) -> None:
    done = plan(recipe, "memory.budget=600MiB", "--device", "h100")
    assert done.exit_code == 1 and ("fits: " in done.stderr or "nothing of this fits alone" in done.stderr)
