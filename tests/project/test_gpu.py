"""What only a GPU shows: no synchronisation in a step, loss scaling, updates skipped on the device, 4-bit bases."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from pronghorn.api import FastLanguageModel
from pronghorn.errors import TrainingError
from pronghorn.models.attach import attach
from pronghorn.models.families import recompute_layers
from pronghorn.models.lora import add_lora
from pronghorn.train.gradients import GradientWatch
from support.tiny import packed_row, tiny_model

pytestmark = pytest.mark.gpu


@pytest.fixture
def no_synchronisation() -> Any:
    """Any device-to-host synchronisation inside the block is an error."""

    class Block:
        def __enter__(self) -> None:
            torch.cuda.set_sync_debug_mode("error")

        def __exit__(self, *_: object) -> None:
            torch.cuda.set_sync_debug_mode("default")

    yield Block()
    torch.cuda.set_sync_debug_mode("default")


def step(model: Any, batch: dict[str, Any]) -> None:
    model(**batch).loss.backward()


@pytest.mark.parametrize("recompute", [False, True], ids=["keep", "recompute"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bf16", "fp32"])
@pytest.mark.parametrize("family", ["llama", "mistral", "qwen2", "qwen3", "gemma3_text"])
def test_packed_mode_never_synchronises(
    family: str, dtype: torch.dtype, recompute: bool, no_synchronisation: Any
) -> None:
    model = add_lora(tiny_model(family).to("cuda", dtype))
    attach(model)
    recompute_layers(model.get_base_model(), recompute)
    host = packed_row([1, 40, 13], 64)
    batch = {name: value.pin_memory().to("cuda", non_blocking=True) for name, value in host.items()}
    step(model, batch)  # first calls create handles and workspaces
    fresh = packed_row([20, 1, 30], 64, seed=1)
    batch = {name: value.pin_memory().to("cuda", non_blocking=True) for name, value in fresh.items()}
    torch.cuda.synchronize()
    with no_synchronisation:
        step(model, batch)


def test_the_synchronisation_test_can_fail(no_synchronisation: Any) -> None:
    """transformers' per-layer metadata waits for the device, and the debug mode sees it."""
    model = tiny_model("llama").to("cuda", torch.bfloat16)
    attach(model, experimental={"packing_metadata": "per_layer"})
    batch = {name: value.to("cuda") for name, value in packed_row([20, 1, 30], 64).items()}
    step(model, batch)
    with pytest.raises(RuntimeError, match="synchroniz"), no_synchronisation:
        step(model, batch)


def test_a_non_finite_gradient_skips_the_update_on_the_device() -> None:
    parameter = torch.nn.Parameter(torch.ones(4, device="cuda"))
    model = torch.nn.ParameterList([parameter])
    optimizer = torch.optim.AdamW([parameter], lr=0.1, fused=True)
    watch = GradientWatch()

    class State:
        global_step = 0

    def one(gradient: float) -> None:
        parameter.grad = torch.full((4,), gradient, device="cuda")
        watch.on_pre_optimizer_step(None, State, None, model=model, optimizer=optimizer)
        optimizer.step()
        State.global_step += 1

    one(1.0)
    moved = parameter.detach().clone()
    assert not torch.equal(moved, torch.ones_like(moved))
    one(float("nan"))
    assert torch.equal(parameter, moved), "the update was not skipped"
    with pytest.raises(TrainingError, match="step 2: 1 gradients are not finite"):
        one(1.0)


def test_the_watch_clips_as_torch_does_and_never_waits(no_synchronisation: Any) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(900, 500), torch.nn.Linear(500, 3)).to("cuda")
    watch = GradientWatch()

    def once(most: float) -> Any:
        torch.manual_seed(0)
        for parameter in model.parameters():
            parameter.grad = torch.randn_like(parameter)
        watch.observe(model)
        return watch.clip(most, model.parameters())

    once(0.5)
    torch.cuda.synchronize()
    with no_synchronisation:
        once(float("inf"))
        ours = once(0.5)
    clipped = [parameter.grad for parameter in model.parameters()]
    once(float("inf"))
    torch.testing.assert_close(ours, torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5))
    torch.testing.assert_close(clipped, [parameter.grad for parameter in model.parameters()])


@pytest.mark.parametrize("precision", ["bf16", "fp16", "fp32"])
def test_trainer_in_every_precision(stories: Path, shared: Path, tmp_path: Path, precision: str) -> None:
    from datasets import Dataset
    from trl import SFTConfig

    from pronghorn.train.trainer import SFTTrainer

    texts = (shared / "data/tinystories/tinystories_10k.txt").read_text().split("<|endoftext|>")[:12]
    data = Dataset.from_dict(
        {"text": [text.strip()[:400] for text in texts if len(text.strip()) > 50]}
    )  # learnt by heart
    model, tokenizer = FastLanguageModel.from_pretrained(str(stories), max_seq_length=512, dtype=precision)
    model = FastLanguageModel.get_peft_model(model, r=8, lora_alpha=16)
    config = SFTConfig(
        output_dir=str(tmp_path),
        packing=True,
        max_length=512,
        max_steps=20,
        learning_rate=1e-2,
        gradient_accumulation_steps=2,
        per_device_train_batch_size=2,
        logging_steps=1,
        bf16=False,
        fp16=precision == "fp16",
        report_to="none",
        save_strategy="no",
        disable_tqdm=True,
    )
    trainer = SFTTrainer(model, config, train_dataset=data, tokenizer=tokenizer)
    trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    assert sum(losses[-5:]) < 0.9 * sum(losses[:5]), losses
    if precision == "fp16":
        assert trainer.accelerator.scaler is not None and trainer.accelerator.scaler.get_scale() > 1


def test_four_bit_base_trains(stories: Path, tmp_path: Path) -> None:
    model, _ = FastLanguageModel.from_pretrained(str(stories), max_seq_length=512, load_in_4bit=True)
    assert type(model.model.layers[0].self_attn.q_proj).__name__ == "Linear4bit"
    model = FastLanguageModel.get_peft_model(model, r=8, lora_alpha=16)
    batch = {name: value.to("cuda") for name, value in packed_row([50, 60], 128, vocab=512).items()}
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    losses = []
    for _ in range(8):
        loss = model(**batch).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[-1] < losses[0]
    model.save_pretrained_merged(tmp_path / "merged")


def test_generate_on_the_gpu(stories: Path) -> None:
    model, tokenizer = FastLanguageModel.from_pretrained(str(stories), max_seq_length=512)
    FastLanguageModel.for_inference(model)
    prompt = tokenizer("Once upon a time", return_tensors="pt").to("cuda")
    text = tokenizer.decode(model.generate(**prompt, max_new_tokens=20, do_sample=False)[0])
    assert "Once upon a time" in text and len(text) > 30


def test_full_fine_tuning_in_bf16_keeps_float32_masters(stories: Path) -> None:
    model, _ = FastLanguageModel.from_pretrained(str(stories), max_seq_length=512, full_finetuning=True)
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    batch = {name: value.to("cuda") for name, value in packed_row([50, 60], 128, vocab=512).items()}
    with torch.autocast("cuda", torch.bfloat16):
        model(**batch).loss.backward()
    assert all(p.grad is not None and torch.isfinite(p.grad).all() for p in model.parameters())


def test_an_unchanged_trl_script_trains_packed(stories: Path, shared: Path, tmp_path: Path) -> None:
    """Compatible mode: TRL's own trainer, collator and loss around an attached model; with packed mode's first loss."""
    import trl
    from datasets import Dataset

    from pronghorn.train.trainer import SFTTrainer

    texts = (shared / "data/tinystories/tinystories_10k.txt").read_text().split("<|endoftext|>")[:12]
    data = Dataset.from_dict({"text": [text.strip()[:400] for text in texts if len(text.strip()) > 50]})
    losses = {}
    for trainer_class in (trl.SFTTrainer, SFTTrainer):
        model, tokenizer = FastLanguageModel.from_pretrained(str(stories), max_seq_length=512, dtype="bf16")
        model = FastLanguageModel.get_peft_model(model, r=8, lora_alpha=16)
        config = trl.SFTConfig(
            output_dir=str(tmp_path),
            packing=True,
            max_length=512,
            max_steps=15,
            learning_rate=1e-2,
            per_device_train_batch_size=8,  # all rows in every step, so that the two see the same
            logging_steps=1,
            bf16=False,
            report_to="none",
            save_strategy="no",
            disable_tqdm=True,
        )
        trainer = trainer_class(model=model, args=config, train_dataset=data, processing_class=tokenizer)
        trainer.train()
        losses[trainer_class] = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    stock, ours = losses.values()
    assert abs(stock[0] - ours[0]) < 1e-2 * ours[0], (stock[0], ours[0])
    assert stock[-1] < 0.9 * stock[0] and ours[-1] < 0.9 * ours[0], (stock, ours)
