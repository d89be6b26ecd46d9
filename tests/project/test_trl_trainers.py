"""Every trainer of TRL that runs without a server: what it logs and learns with an attached model is what it does with
plain transformers and PEFT."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from pronghorn import attach
from pronghorn.diagnose.shapes import byte_tokenizer
from pronghorn.models.attach import attached
from pronghorn.models.lora import add_lora
from pronghorn.models.unpadded import UNPADDED
from support.tiny import MOE_FAMILIES, tiny_model
from support.trl_cases import CASES, OVER_PADDING, TIES

TEMPLATE = (
    "{% for m in messages %}<{{ m['role'] }}>{% generation %}{{ m['content'] }}{{ eos_token }}{% endgeneration %}"
    "{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
)
NOT_COMPARED = ("runtime", "per_second", "step_time", "flos")
WITH_A_REFERENCE_TO_SYNC = [name for name in CASES if name.endswith("-synced")]
BALANCED = [name for name in CASES if name.endswith("-balanced")]
SOME = [
    "DPO-sigmoid", "KTO-kto", "ORPO", "CPO-simpo", "TPO-sigmoid", "GRPO-beta", "GRPO-gspo", "RLOO", "GMPO", "A2PO",
    "OnlineDPO-sigmoid", "Distillation-0.5", "GKD-0.5", "GOLD-0.0", "IWOPD-iw_opd", "SDFT-ema", "SDPO-ema",
]  # fmt: skip
Run = tuple[list[dict[str, float]], dict[str, torch.Tensor], float]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """Give the folder of a small model: of a family, and of a seed."""
    root = tmp_path_factory.mktemp("models")

    def folder(family: str, seed: int = 0) -> Path:
        path = root / f"{family}-{seed}"
        if not path.exists():
            ends = {"bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 2}
            model = tiny_model(family, seed, vocab_size=264, num_hidden_layers=2, **ends)
            model.generation_config.eos_token_id = [1, *range(20, 90)]  # answers of all lengths
            model.save_pretrained(path)
            tokenizer().save_pretrained(path)
        return path

    yield folder


def tokenizer() -> Any:
    made = byte_tokenizer(256)
    made.chat_template, made.padding_side = TEMPLATE, "left"
    return made


def load(folder: Path) -> Any:
    """Load a model whose experts, where it has some, are computed one by one."""
    experts = {"experts_implementation": "eager"} if folder.name.rpartition("-")[0] in MOE_FAMILIES else {}
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, **experts)


def reward(completions: list[str], **columns: Any) -> list[float]:
    return [float(len(set(text)) % 3 > 1 or ord(text[:1] or "a") % 2) for text in completions]


async def async_reward(completions: list[str], **columns: Any) -> list[float]:
    return reward(completions)


def train(name: str, models: Any, family: str, full: bool, layers: str | None, out: Path) -> Run:
    """Train three steps; return what was logged, the trained weights, and how far these moved at most."""
    case, model = CASES[name], load(models(family))
    if layers is not None:
        attach(model, layers=layers)  # type: ignore[arg-type]
    seen: set[str] = set()
    base = model.base_model
    base.register_forward_hook(lambda module, args, kwargs, output: seen.update(kwargs), with_kwargs=True)
    if not full:
        model = add_lora(model, r=4)
        for parameter_name, parameter in model.named_parameters():
            if ".lora_B" in parameter_name:  # zeros at first
                generator = torch.Generator().manual_seed(len(parameter_name))
                torch.nn.init.normal_(parameter, 0, 0.05, generator=generator)
    trainer_class, config_class = case.classes
    usual: dict[str, Any] = {
        "max_steps": 3, "per_device_train_batch_size": 4, "learning_rate": 0.05, "optim": "sgd", "logging_steps": 1,
        "lr_scheduler_type": "constant", "gradient_checkpointing": False, "bf16": False, "use_cpu": True,
        "save_strategy": "no", "report_to": "none", "disable_tqdm": True,
    }  # fmt: skip
    given: dict[str, Any] = {}
    if "reward" in case.needs or "async_reward" in case.needs:
        given["reward_funcs"] = async_reward if "async_reward" in case.needs else reward
    if "teacher" in case.needs:
        given["teacher_model"] = load(models(family, seed=5))
    if "reference" in case.needs:
        given["ref_model"] = load(models(family, seed=5))
    if "evaluation" in case.needs:
        given["eval_dataset"] = case.data().select(range(4))
    args = config_class(str(out), **usual | case.settings)
    trainer = trainer_class(model, args=args, processing_class=tokenizer(), train_dataset=case.data(), **given)
    trained = {key: p for key, p in model.named_parameters() if p.requires_grad}
    before = {key: p.detach().clone() for key, p in trained.items()}
    trainer.train()
    assert (attached(model) is not None) == (layers is not None)
    assert (UNPADDED in seen) == (layers == "fused")
    logs = [
        {key: value for key, value in entry.items() if isinstance(value, int | float)}
        for entry in trainer.state.log_history
    ]
    moved = max(float((p - before[key]).abs().max()) for key, p in trained.items())
    return logs, {key: p.detach().clone() for key, p in trained.items()}, moved


def compare(
    name: str, models: Any, out: Path, family: str = "llama", full: bool = False, layers: str = "fused"
) -> None:
    plain, weights, moved = train(name, models, family, full, None, out)
    logs, ours, _ = train(name, models, family, full, layers, out)
    padded = OVER_PADDING.get(CASES[name].trainer, ()) if layers == "fused" else ()
    assert len(logs) == len(plain) and moved > 1e-5
    for entry, right in zip(logs, plain, strict=True):
        assert entry.keys() == right.keys()
        for key, value in right.items():
            if key.startswith((*padded, *TIES)) or any(part in key for part in NOT_COMPARED) or math.isnan(value):
                continue
            near = 1e-4 if key == "grad_norm" else 2e-5  # gradients may be a small difference of policy and reference
            assert entry[key] == pytest.approx(value, rel=1e-4, abs=near), key
    assert ours.keys() == weights.keys()
    for key, tensor in weights.items():
        assert (ours[key] - tensor).abs().max() <= 1e-5 * max(moved, 1), key


def test_rloo_learns_alike(models: Any, tmp_path: Path) -> None:
    compare("RLOO", models, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in CASES if name not in (*WITH_A_REFERENCE_TO_SYNC, *BALANCED)])
def test_adapters_learn_alike(name: str, models: Any, tmp_path: Path) -> None:
    compare(name, models, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("name", SOME)
def test_adapters_of_transformers_layers_learn_alike(name: str, models: Any, tmp_path: Path) -> None:
    compare(name, models, tmp_path, layers="stock")


@pytest.mark.slow
@pytest.mark.parametrize("name", [*SOME, *WITH_A_REFERENCE_TO_SYNC])
def test_full_fine_tuning_learns_alike(name: str, models: Any, tmp_path: Path) -> None:
    compare(name, models, tmp_path, full=True)


@pytest.mark.slow
@pytest.mark.parametrize("name", SOME)
def test_windows_learn_alike(name: str, models: Any, tmp_path: Path) -> None:
    compare(name, models, tmp_path, "gemma3_text")


@pytest.mark.slow
@pytest.mark.parametrize("name", [*(name for name in SOME if name != "GKD-0.5"), "GKD-0.0", *BALANCED])
def test_experts_learn_alike(name: str, models: Any, tmp_path: Path) -> None:
    """GKD and GOLD that generate fail with transformers alone, too: while they do, they ask for routers' logits."""
    compare(name, models, tmp_path, "qwen3_moe")
