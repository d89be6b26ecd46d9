"""`bf16=True` over a model that is in bfloat16 itself: no autocast where fused layers compute the same without."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset

from pronghorn import SFTTrainer, attach
from pronghorn.diagnose.shapes import byte_tokenizer
from pronghorn.errors import UnsupportedError
from pronghorn.models.lora import add_lora
from pronghorn.train import prepared_model
from pronghorn.train.build import training_arguments
from support.tiny import tiny_model
from support.trainers import config

ROWS = Dataset.from_list(
    [
        {"input_ids": torch.randint(3, 131, (n,), generator=torch.Generator().manual_seed(n)).tolist()}
        for n in range(5, 45)
    ]
)


def run(folder: Path, model: Any, layers: Any = "fused", **changes: Any) -> tuple[list[float], bool, list[Any]]:
    """Train; return losses, whether layers ran under autocast, and what was trained."""
    attach(model, layers=layers)
    settings: dict[str, Any] = {"bf16": True, "max_steps": 3, **changes}
    trainer = SFTTrainer(model, config(folder, **settings), train_dataset=ROWS, processing_class=byte_tokenizer(128))
    under: set[bool] = set()
    layer = next(each for name, each in model.named_modules() if name.endswith("layers.0"))
    layer.register_forward_pre_hook(lambda *_: under.add(torch.is_autocast_enabled("cpu")))
    trainer.train()
    found = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    assert len(under) == 1
    return found, under.pop(), [p.detach().clone() for p in model.parameters() if p.requires_grad]


@pytest.mark.parametrize("packing", [True, False])
@pytest.mark.parametrize("model_type", ["llama", "qwen3_moe", "gpt_oss", "qwen3_5_text"])
def test_fused_layers_give_the_same_bits_without(
    tmp_path: Path, model_type: str, packing: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = []
    for left in (True, False):
        if not left:
            monkeypatch.setattr(
                prepared_model, "settled", lambda *given: {"padded": given[-1], "autocast": torch.bfloat16}
            )
        model = add_lora(tiny_model(model_type).to(torch.bfloat16), r=2)
        found.append(run(tmp_path, model, packing=packing))
    assert found[0][1] is False and found[1][1] is True
    assert found[0][0] == found[1][0]
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(found[0][2], found[1][2], strict=True))


@pytest.mark.parametrize(
    ("make", "changes"),
    [
        (lambda: add_lora(tiny_model("llama").to(torch.bfloat16), r=2), {"layers": "stock"}),
        (lambda: add_lora(tiny_model("llama").to(torch.bfloat16), r=2, lora_dropout=0.1), {}),
        (lambda: add_lora(tiny_model("llama").to(torch.bfloat16), r=2), {"packing": False, "neftune_noise_alpha": 5.0}),
        (lambda: tiny_model("llama"), {}),
    ],
)
def test_it_stays_where_something_needs_it(tmp_path: Path, make: Any, changes: dict[str, Any]) -> None:
    assert run(tmp_path, make(), **changes)[1] is True


def test_accelerate_s_configuration_is_no_other_way(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "bf16")
    model = add_lora(tiny_model("llama").to(torch.bfloat16), r=2)
    assert run(tmp_path, model, bf16=False, max_steps=1)[1] is False


@pytest.mark.parametrize("left", ["bf16", "fp16", "nonsense"])
def test_a_recipe_says_what_is_computed_in(make: Any, left: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", left)
    assert training_arguments(make("out")).mixed_precision == "no"
    full = make("out", adapter={"method": "full", "r": 8}, precision={"dtype": "bfloat16"})
    assert training_arguments(full).mixed_precision == "bf16"


@pytest.mark.parametrize(
    ("name", "what"),
    [("DEEPSPEED", "DeepSpeed"), ("MEGATRON_LM", "Megatron-LM"), ("PARALLELISM_CONFIG", "another parallelism")],
)
def test_deepspeed_and_its_like_are_refused_before_anything_is_loaded(
    make: Any, monkeypatch: pytest.MonkeyPatch, name: str, what: str
) -> None:
    monkeypatch.setenv(f"ACCELERATE_USE_{name}", "true")
    with pytest.raises(UnsupportedError, match=rf"{what} is switched on .*: switch it off; launch.strategy: sharded"):
        training_arguments(make("out"))
