"""Known shapes are the published ones, their checkpoints are written once and whole, and random documents fill rows."""

from __future__ import annotations

import errno
import json
import random
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

from pronghorn.data.packing import IGNORE_INDEX
from pronghorn.diagnose.shapes import (
    SHAPES,
    byte_tokenizer,
    checkpoint_of,
    lognormal_length,
    random_documents,
    write_checkpoint,
)


def test_random_documents_fill_the_row_and_end_in_labels() -> None:
    documents = random_documents(500, 512, 0.3, random.Random(1))
    assert documents == random_documents(500, 512, 0.3, random.Random(1))
    assert documents != random_documents(500, 512, 0.3, random.Random(2))
    assert sum(len(d.input_ids) for d in documents) == 500 and len(documents) > 1
    for d in documents:
        supervised = [label != IGNORE_INDEX for label in d.labels]
        assert not supervised[0] and supervised == sorted(supervised)
        assert sum(supervised) == min(max(1, round(0.3 * len(d.labels))), len(d.labels) - 1)
        assert all(label in (IGNORE_INDEX, token) for label, token in zip(d.labels, d.input_ids, strict=True))
        assert min(d.input_ids) >= 10 and max(d.input_ids) < 512


def test_a_document_of_one_token_has_no_label() -> None:
    (document,) = random_documents(1, 512, 1.0, random.Random(0))
    assert document.labels == [IGNORE_INDEX]


def test_log_normal_lengths() -> None:
    rng = random.Random(0)
    drawn = [lognormal_length(rng) for _ in range(4000)]
    assert min(drawn) >= 16 and max(drawn) <= 2048 and 165 < sum(drawn) / len(drawn) < 195


def test_a_checkpoint_is_written_once_and_loads_with_its_tokenizer(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder = checkpoint_of("tiny", tmp_path, seed=0)
    written = (folder / "model.safetensors").stat().st_mtime_ns
    assert checkpoint_of("tiny", tmp_path, seed=0) == folder
    assert (folder / "model.safetensors").stat().st_mtime_ns == written
    assert checkpoint_of("tiny", tmp_path, seed=1) != folder
    model, tokenizer = AutoModelForCausalLM.from_pretrained(folder, dtype="auto"), AutoTokenizer.from_pretrained(folder)
    assert model.dtype == torch.bfloat16 and (model.model.norm.weight == 1).all()
    assert model.model.embed_tokens.weight.float().std().item() == pytest.approx(0.02, rel=0.05)
    special = [(tokenizer, "bos"), (tokenizer, "eos"), (tokenizer, "pad")]
    assert [getattr(t, f"{name}_token_id") for t, name in special] == [0, 1, 2]
    assert [getattr(model.config, f"{name}_token_id") for _, name in special] == [0, 1, 2]
    assert tokenizer.decode(tokenizer("Größe, 大小").input_ids) == "Größe, 大小"


def test_scores_that_a_family_does_not_scale_have_a_deviation_of_one(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    few = {"num_hidden_layers": 2, "layer_types": ["sliding_attention", "full_attention"]}
    narrow = {"hidden_size": 64, "intermediate_size": 64, "vocab_size": 32, "num_attention_heads": 2}
    write_checkpoint(SHAPES["Gemma-4-12B"] | few | narrow | {"num_key_value_heads": 1}, tmp_path, 0)
    model = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    norms = [layer.self_attn.q_norm.weight for layer in model.model.layers]
    assert [(norm.shape[0], set(norm.tolist())) for norm in norms] == [(256, {256**-0.5}), (512, {0.044189453125})]


def test_processes_that_write_checkpoints_into_one_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two shapes whose names are alike up to the last dot, and one that two want: that one is written once."""
    written = []

    def write(shape: dict[str, Any], folder: Path, seed: int) -> None:
        (folder / "config.json").write_text(str(shape["hidden_size"]))
        time.sleep(0.2)
        (folder / "weights").write_text(str(shape["hidden_size"]))
        written.append(folder)

    monkeypatch.setattr("pronghorn.diagnose.shapes.write_checkpoint", write)
    names = ["Llama-3.2-1B", "Llama-3.2-3B", "Llama-3.2-1B"]
    with ThreadPoolExecutor(3) as pool:
        made = list(pool.map(lambda name: checkpoint_of(name, tmp_path / "new", 0), names))
    assert made[0] == made[2] and len(written) == 2
    for name, folder in zip(names, made, strict=True):
        for file in ("config.json", "weights"):
            assert (folder / file).read_text() == str(SHAPES[name]["hidden_size"])


def test_a_checkpoint_that_is_there_needs_nothing_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "tiny-seed0").mkdir()
    monkeypatch.setattr("pronghorn.diagnose.shapes.lock", None)
    assert checkpoint_of("tiny", tmp_path, seed=0) == tmp_path / "tiny-seed0"
    assert [path.name for path in tmp_path.iterdir()] == ["tiny-seed0"]


def test_a_checkpoint_that_the_disk_has_no_room_for_leaves_it_to_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def write(shape: dict[str, Any], folder: Path, seed: int) -> None:
        (folder / "model-00001-of-00009.safetensors").write_bytes(b"0")
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("pronghorn.diagnose.shapes.write_checkpoint", write)
    with pytest.raises(OSError, match="No space left"):
        checkpoint_of("tiny", tmp_path, seed=0)
    assert not [path for path in tmp_path.iterdir() if path.is_dir()]


def test_what_a_killed_process_left_is_cleared(tmp_path: Path) -> None:
    left = tmp_path / ".Llama-3.1-8B-seed0.0123456789abcdef.tmp"
    left.mkdir()
    checkpoint_of("tiny", tmp_path, seed=0)
    assert not left.exists()


NOT_AMONG_FACTS = "Llama-3.2-3B", "Mixtral-8x7B", "gpt-oss-120b", "StarCoder2-3B", "BLOOM-1B7", "Falcon-Mamba-7B"


def test_shapes_are_the_published_ones(shared: Path) -> None:
    facts = json.loads((shared / "data" / "model_shapes.json").read_text())["models"]
    newer = json.loads((shared / "data" / "model_shapes_2.json").read_text())
    names = {"Mistral-7B": "Mistral-7B-v0.3", "Gemma-3-1B": "gemma-3-1b", "Gemma-3-4B": "gemma-3-4b"}
    for name, shape in SHAPES.items():
        if name.startswith("tiny") or name in NOT_AMONG_FACTS:
            continue
        if name.startswith(("Gemma-4", "Qwen3.5", "Llama-3.3", "LFM2", "DeepSeek")):  # given as whole configurations
            known = newer[name.replace("Gemma", "gemma")]["config"]
            differing = {
                key: (shape[key], known[key]) for key in shape.keys() & known.keys() if shape[key] != known[key]
            }
            assert not differing, name
            continue
        known = facts[names.get(name, name)]
        assert {key: known[key] for key in shape if key in known} == {key: shape[key] for key in shape if key in known}
        rope = shape.get("rope_parameters", {"rope_theta": known["rope_theta"]})
        rope = rope.get("full_attention", rope)
        assert rope["rope_theta"] == known["rope_theta"]
        scaling = {key: value for key, value in (known["rope_scaling"] or {}).items() if key != "applies_to"}
        assert scaling.items() <= rope.items()


def test_the_tokenizer_covers_every_byte() -> None:
    assert len(byte_tokenizer(100)) == 4 + 256 <= SHAPES["tiny"]["vocab_size"]
