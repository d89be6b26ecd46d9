"""Weights of 16 bits through the house's loader: what transformers loads, to the bit."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

from pronghorn.diagnose.shapes import byte_tokenizer
from pronghorn.errors import DataError
from pronghorn.loading import load
from pronghorn.loading.load import find_model, load_model
from pronghorn.loading.one_by_one import load_one_by_one
from pronghorn.loading.weights import whole_model
from pronghorn.models.families import check_config
from support import causal_lms
from support.composites import SERVED, write_composite
from support.loaded import differences
from support.tiny import FAMILIES, MOE_FAMILIES, tiny_model

STOP = {"eos_token_id": 2, "bos_token_id": 1, "pad_token_id": 0}
TOWERS = {"fuyu", "mllama", "emu3"}
"""Their language models have classes of their own, which are tried by themselves."""

LEFT = {"bailing_hybrid", "hrm_text", "inkling2_text", "kimi_linear", "olmo_hybrid"}
"""Weights of these are joined in ways that only transformers knows."""
CLEARED = {"youtu": {"model.embed_tokens.weight", "lm_head.weight"}}
"""Transformers clears the row of the padding token, whatever the file holds."""


def saved(model: Any, folder: Path) -> Path:
    model.to(torch.bfloat16).save_pretrained(folder)
    byte_tokenizer(512).save_pretrained(folder)
    return folder


def both(folder: Path, dtype: torch.dtype) -> tuple[Any, Any, str]:
    """Load a folder by the house's loader, or say why not, and by transformers."""
    found, device = find_model(folder, max_seq_length=16), torch.device("cpu")
    attention = check_config(found.config).load_attention
    where = folder, found.config, None, dtype, device, found.hub, attention, found.composite
    model, reason = load_one_by_one(*where)
    options = {"config": found.config, "dtype": dtype, "attn_implementation": attention, "device_map": {"": device}}
    return model, whole_model(folder, found.composite, use_safetensors=True, **options, **found.hub), reason


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("family", FAMILIES | MOE_FAMILIES)
def test_a_family_is_what_transformers_loads(tmp_path: Path, family: str, dtype: torch.dtype) -> None:
    model, right, reason = both(saved(tiny_model(family, **STOP), tmp_path), dtype)
    assert differences(model, right) == [], reason


def test_what_config_json_says_of_generation_is_what_transformers_loads(tmp_path: Path) -> None:
    """Older checkpoints have no generation_config.json."""
    folder = saved(tiny_model("llama", **STOP), tmp_path)
    (folder / "generation_config.json").unlink()
    table = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**table, "temperature": 0.5, "do_sample": True}))
    model, right, reason = both(folder, torch.bfloat16)
    assert differences(model, right) == [], reason
    assert model.generation_config.temperature == 0.5 and model.generation_config.do_sample
    (folder / "generation_config.json").write_text('{"early_stopping": 3}')
    with pytest.raises(
        DataError, match=r"generation_config\.json can't be used .*early_stopping.*: fix it, or remove it"
    ):
        both(folder, torch.bfloat16)


@pytest.mark.parametrize("kind", ["gptj", "gpt2", "bloom", "falcon", "mamba", "mpt", "rwkv"])
def test_another_class_is_what_transformers_loads(tmp_path: Path, kind: str) -> None:
    """GPT-J computes its positions in float32, whatever its weights are; GPT-2 has weights that end like a buffer that
    old checkpoints hold and it doesn't."""
    model, right, _ = both(saved(causal_lms.tiny(kind), tmp_path), torch.bfloat16)
    assert differences(model, right) == []


@pytest.mark.parametrize("kind", SERVED)
def test_a_language_model_among_towers_is_what_transformers_loads(tmp_path: Path, kind: str) -> None:
    write_composite(tmp_path, kind)
    model, right, reason = both(tmp_path, torch.bfloat16)
    assert not reason and differences(model, right) == []


@pytest.mark.slow
@pytest.mark.parametrize("kind", sorted(causal_lms.causal_lms().keys() - causal_lms.NOT_RUN.keys()))
def test_every_class_is_what_transformers_loads(tmp_path: Path, kind: str) -> None:
    config = causal_lms.small_config(kind)
    if "text_config" in config.sub_configs or kind in TOWERS:
        pytest.skip("a model with towers: its language model is tried by itself")
    if kind in FAMILIES | MOE_FAMILIES:
        pytest.skip("tried as a family")
    model, right, reason = both(saved(causal_lms.tiny(kind), tmp_path), torch.bfloat16)
    assert bool(reason) is (kind in LEFT), reason
    assert reason or set(differences(model, right)) == CLEARED.get(kind, set())


def test_a_repository_without_safetensors_is_left_to_transformers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("huggingface_hub.snapshot_download", lambda *_, **__: str(tmp_path))
    config = causal_lms.small_config("llama")
    where = "owner/model", config, None, torch.float32, torch.device("cpu"), {}, "sdpa", None
    model, reason = load_one_by_one(*where)
    assert model is None and "no safetensors" in reason


def test_threads_load_side_by_side(tmp_path: Path) -> None:
    """What is changed of torch's classes and defaults while a model loads is as before in the end."""
    folder = saved(tiny_model("llama", **STOP, intermediate_size=128), tmp_path)
    before = torch.nn.Module.register_parameter, torch.get_default_dtype()

    def load_it(in_4_bits: bool) -> Any:
        found = find_model(folder, max_seq_length=16, load_in_4bit=in_4_bits)
        return found.model(torch.bfloat16, torch.device("cpu"))

    right = {in_4_bits: load_it(in_4_bits) for in_4_bits in (False, True)}
    with ThreadPoolExecutor(6) as threads:
        made = list(threads.map(load_it, [False, True] * 9))
    assert (torch.nn.Module.register_parameter, torch.get_default_dtype()) == before
    assert not [each for number, each in enumerate(made) if differences(each, right[bool(number % 2)])]


@pytest.mark.gpu
def test_a_gpu_s_model_comes_through_the_house_s_loader(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = saved(tiny_model("llama", **STOP), tmp_path)
    right = load_model(folder, dtype="bfloat16", max_seq_length=16, device=torch.device("cpu"))[0]
    monkeypatch.setattr(load, "whole_model", None)
    assert differences(load_model(folder, dtype="bfloat16", max_seq_length=16)[0], right) == []
