"""Exports that are wrong in the ways that were seen in the field: each is named, and put nowhere."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from pronghorn.diagnose import export_run as exporting
from pronghorn.diagnose.export_run import export_run
from pronghorn.diagnose.verify_reference import perturb
from pronghorn.errors import ConfigError, DataError, TrainingError
from pronghorn.export.comparison import Cause
from pronghorn.models.lora import add_lora
from support.tiny import tiny_model

WEIGHTS = Cause.WEIGHTS.value.format("merged")


def rewritten(folder: Path, change: Callable[[dict[str, torch.Tensor]], None]) -> None:
    """Change the tensors of a merged folder."""
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})


def set_keys(file: Path, **keys: Any) -> None:
    file.write_text(json.dumps(json.loads(file.read_text()) | keys))


def other_template(folder: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.chat_template = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}assistant:"
    tokenizer.save_pretrained(folder)


def no_stop_token(folder: Path) -> None:
    """Another token ends answers than in training."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.eos_token = tokenizer.unk_token
    tokenizer.save_pretrained(folder)
    for name in ("config.json", "generation_config.json"):
        set_keys(folder / name, eos_token_id=tokenizer.unk_token_id)


def another_base(folder: Path) -> None:
    torch.manual_seed(0)

    def change(tensors: dict[str, torch.Tensor]) -> None:
        for name, tensor in tensors.items():
            if name.endswith("proj.weight"):
                tensors[name] = tensor + 0.3 * tensor.float().std() * torch.randn(tensor.shape).to(tensor)

    rewritten(folder, change)


def transposed_expert(folder: Path) -> None:
    rewritten(folder, lambda tensors: tensors.update({name: tensors[name].mT.contiguous() for name in EXPERT}))


EXPERT = [f"model.layers.{layer}.mlp.experts.3.down_proj.weight" for layer in (0, 1)]


def forgotten_head(folder: Path) -> None:
    """A head that was trained apart from the embeddings it was tied to, which it becomes again."""
    assert json.loads((folder / "config.json").read_text())["tie_word_embeddings"] is False
    rewritten(folder, lambda tensors: tensors.pop("lm_head.weight"))
    set_keys(folder / "config.json", tie_word_embeddings=True)


def export(run: Path, target: Path, monkeypatch: pytest.MonkeyPatch, fault: Callable[[Path], None] | None) -> None:
    """Export a run merged; what is written gets a fault before it is compared."""
    write = exporting._write

    def wrong(to: str, model: Any, tokenizer: Any, folder: Path, *rest: Any) -> str | None:
        limits = write(to, model, tokenizer, folder, *rest)
        if fault is not None:
            fault(folder)
        return limits

    monkeypatch.setattr(exporting, "_write", wrong)
    assert all(comparison.ok for comparison in export_run(run, "merged", target, "q8_0").comparisons)


def check(run: Path, folder: Path, monkeypatch: pytest.MonkeyPatch, fault: Callable[[Path], None], cause: str) -> None:
    with pytest.raises(TrainingError) as raised:
        export(run, folder / "out", monkeypatch, fault)
    assert cause in raised.value.problem and not (folder / "out").exists()
    assert "--to merged" not in raised.value.remedy  # which it is
    monkeypatch.undo()
    export(run, folder / "out", monkeypatch, None)


@pytest.mark.matrix(1)
@pytest.mark.parametrize(
    ("fault", "cause"),
    [
        (other_template, "template differs: "),
        (no_stop_token, "stop token missing: after "),
        (another_base, WEIGHTS),
    ],
)
def test_a_fault_is_named(
    answering_run: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    fault: Callable[[Path], None],
    cause: str,
) -> None:
    check(answering_run, tmp_path, monkeypatch, fault, cause)


@pytest.mark.slow
def test_a_transposed_expert_is_named(answering_run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = AutoTokenizer.from_pretrained(answering_run / "adapter")
    shape = {"moe_intermediate_size": 64, "num_experts_per_tok": 8}  # all of them: rounding sends no token elsewhere
    base = tiny_model("qwen3_moe", vocab_size=len(tokenizer), max_position_embeddings=512, eos_token_id=2, **shape)
    with torch.no_grad():
        for name, parameter in base.named_parameters():
            if "down_proj" in name or "lm_head" in name:
                parameter.mul_(8.0)  # so that experts show
    base.bfloat16().float()  # what is written rounds the adapter's change alone
    base.save_pretrained(tmp_path / "base")
    base.config._name_or_path = base.name_or_path = str(tmp_path / "base")
    model = add_lora(base, r=8, target_parameters=["experts.gate_up_proj", "experts.down_proj"])
    perturb(model)
    model.save_pretrained(tmp_path / "adapter")
    tokenizer.save_pretrained(tmp_path / "adapter")
    check(tmp_path / "adapter", tmp_path, monkeypatch, transposed_expert, WEIGHTS)


@pytest.mark.slow
def test_a_forgotten_head_is_named(
    answering_run: Path, stories: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    base = AutoModelForCausalLM.from_pretrained(stories)
    assert base.config.tie_word_embeddings
    model = get_peft_model(base, LoraConfig(r=4, target_modules=["q_proj"], modules_to_save=["lm_head"]))
    torch.manual_seed(0)
    with torch.no_grad():
        head = model.get_base_model().lm_head.modules_to_save["default"].weight
        head.add_(0.3 * head.std() * torch.randn_like(head))
    model.save_pretrained(tmp_path / "adapter")
    AutoTokenizer.from_pretrained(answering_run / "adapter").save_pretrained(tmp_path / "adapter")
    check(tmp_path / "adapter", tmp_path, monkeypatch, forgotten_head, Cause.BASE.value)  # the head is all it trained


def test_what_is_made_of_a_checkpoint_doesn_t_go_into_it(tmp_path: Path) -> None:
    """Training deletes it."""
    checkpoint = tmp_path / "checkpoint-4"
    checkpoint.mkdir()
    for name in ("adapter_config.json", "trainer_state.json"):
        (checkpoint / name).write_text("{}")
    with pytest.raises(ConfigError, match="checkpoint-4 is a checkpoint, which training deletes in time"):
        export_run(checkpoint, "merged", None, "q8_0")
    with pytest.raises(DataError, match="holds no safetensors weights"):
        export_run(checkpoint, "merged", tmp_path / "out", "q8_0")
