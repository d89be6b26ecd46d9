"""Unpacked training without padding: a micro-batch is one row, with stock's documents, losses and weights."""

from __future__ import annotations

import pickle
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import trl
from datasets import Dataset
from peft import PromptTuningConfig, get_peft_model

from pronghorn import SFTTrainer, attach
from pronghorn.data.batch import TILE_ROWS, PackedBatch
from pronghorn.data.dealing import ByLength
from pronghorn.diagnose.shapes import byte_tokenizer
from pronghorn.errors import ConfigError, UnsupportedError
from pronghorn.models.attach import attached
from pronghorn.models.families import base_causal_lm
from pronghorn.models.lora import add_lora
from pronghorn.precision.compute import Compute
from pronghorn.train import padding_free
from support.causal_lms import generic, small_config
from support.generic import generic_model
from support.tiny import tiny_model
from support.trainers import config

ROWS, BATCH, MICRO_BATCHES, STEPS = 22, 3, 2, 5


def documents() -> Dataset:
    """Few labels, many, none but the last; of one token, too."""
    draw = torch.Generator().manual_seed(0)
    found = []
    for index in range(ROWS):
        length = int(torch.randint(1, 60, (), generator=draw)) if index % 5 else 2
        ids = torch.randint(3, 131, (length,), generator=draw).tolist()
        unsupervised = index % 2 + index % 3 * (length // 3)  # the first token never counts
        found.append({"input_ids": ids, "labels": [-100] * unsupervised + ids[unsupervised:]})
    return Dataset.from_list(found)


def trainer_of(cls: Any, folder: Path, model: Any, **changes: Any) -> Any:
    data = {name: changes.pop(name) for name in ("train_dataset", "eval_dataset", "compute_metrics") if name in changes}
    settings = {
        "packing": False,
        "max_length": 64,
        "per_device_train_batch_size": BATCH,
        "gradient_accumulation_steps": MICRO_BATCHES,
        "max_steps": STEPS,
        "train_sampling_strategy": "random",
    }
    args = config(folder, **(settings | changes))
    return cls(model, args, **{"train_dataset": documents(), **data}, processing_class=byte_tokenizer(64))


def losses(trainer: Any) -> list[float]:
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


@pytest.mark.parametrize("model_type", ["llama", "gemma3_text", "gpt_oss", "starcoder2", "qwen2_moe"])
def test_a_run_learns_what_stock_trl_s_padded_batches_teach(tmp_path: Path, model_type: str) -> None:
    balances = model_type == "qwen2_moe"  # by transformers' auxiliary loss, which counts every token of a row
    make = generic_model if balances or model_type == "starcoder2" else tiny_model
    changes = {"router_aux_loss_coef": 0.5} if balances else {}
    found = []
    for cls in (SFTTrainer, trl.SFTTrainer):
        model = make(model_type)
        model = model if hasattr(model, "peft_config") else add_lora(model, r=2)
        if cls is trl.SFTTrainer and attached(model) is not None:
            attached(model).detach()  # type: ignore[union-attr]
        if model_type == "gpt_oss" and cls is trl.SFTTrainer:
            model.set_attn_implementation("eager")
        trainer = trainer_of(cls, tmp_path, model, **changes)
        if cls is SFTTrainer:
            batch = next(iter(trainer.get_train_dataloader()))
            packed, multiple = batch["packed"], 1 if balances else TILE_ROWS
            assert trainer.padded is None and packed.padding < multiple and packed.tokens % multiple == 0
            assert len(packed.lengths) == BATCH + (not balances), "the filled up tail is the last one"
        trainer.train()
        trained = {name: p for name, p in trainer.model.named_parameters() if p.requires_grad}
        found.append((losses(trainer), trained))
    assert found[0][0] == pytest.approx(found[1][0], rel=1e-4)
    for (name, ours), theirs in zip(found[0][1].items(), found[1][1].values(), strict=True):
        assert (ours - theirs).norm() <= 2e-3 * theirs.norm() + 1e-6, name


def test_documents_without_a_label_add_nothing(tmp_path: Path) -> None:
    batch = padding_free.EndToEnd(pad_token_id=0)(
        [{"input_ids": [5], "labels": [5]}, {"input_ids": [6, 7]}, {"input_ids": [8, 9], "labels": [-100, -100]}]
    )
    assert batch["labels"][0, :5].tolist() == [-100, -100, 7, -100, -100]
    assert batch["position_ids"][0, :5].tolist() == [0, 0, 1, 0, 1] and batch["packed"].n_labels == 1
    assert batch["packed"].lengths[:3] == (1, 2, 2) and batch["packed"].real_tokens == 5
    assert pickle.loads(pickle.dumps(padding_free.EndToEnd(3, 64))) == padding_free.EndToEnd(3, 64)


def test_evaluations_have_padded_batches_whose_logits_can_be_read(tmp_path: Path) -> None:
    seen = []

    def metrics(given: Any) -> dict[str, float]:
        seen.append(given.predictions.shape)
        return {}

    model, rows = add_lora(tiny_model("llama"), r=2), documents()
    trainer = trainer_of(SFTTrainer, tmp_path, model, eval_dataset=rows, compute_metrics=metrics)
    trainer.train()
    trainer.evaluate()
    assert seen == [(ROWS, max(map(len, rows["input_ids"])), model.config.vocab_size)]


@pytest.mark.parametrize("model_type", ["llama", "starcoder2", "qwen2_moe"])
def test_evaluations_whose_loss_alone_is_asked_for_make_no_logits(tmp_path: Path, model_type: str) -> None:
    """The loss is that of padded batches, a mean of batches' means. Experts' auxiliary loss has these still."""
    make = tiny_model if model_type == "llama" else generic_model
    model, rows = make(model_type), documents()
    model = model if hasattr(model, "peft_config") else add_lora(model, r=2)
    changes = {"router_aux_loss_coef": 0.5} if model_type == "qwen2_moe" else {}
    found, shapes = [], []
    for metrics in (None, lambda given: {}):
        trainer = trainer_of(SFTTrainer, tmp_path, model, eval_dataset=rows, compute_metrics=metrics,
                             per_device_eval_batch_size=3, **changes)  # fmt: skip
        seen: list[Any] = []
        hook = base_causal_lm(model).base_model.register_forward_hook(
            lambda module, args, kwargs, out, seen=seen: seen.append(kwargs["input_ids"].shape),
            with_kwargs=True,
        )
        found.append(trainer.evaluate()["eval_loss"])
        hook.remove()
        shapes.append(seen)
    assert found[0] == pytest.approx(found[1], rel=2e-5)
    joined = model_type != "qwen2_moe"
    assert len(shapes[0]) == len(shapes[1]) == -(-ROWS // 3)
    assert {shape[0] for shape in shapes[0][:-1]} == {1 if joined else 3} and shapes[1][0][0] == 3


def test_a_run_that_was_taken_up_in_an_epoch_goes_on_alike(tmp_path: Path) -> None:
    first = trainer_of(SFTTrainer, tmp_path, add_lora(tiny_model("llama"), r=2), save_strategy="steps", save_steps=2)
    first.train()
    second = trainer_of(SFTTrainer, tmp_path, add_lora(tiny_model("llama"), r=2))
    second.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    assert losses(second) == losses(first)


def virtual() -> Any:
    model = tiny_model("llama")
    attach(model)
    return get_peft_model(model, PromptTuningConfig("CAUSAL_LM", num_virtual_tokens=4))


def own_loss() -> Any:
    model = add_lora(tiny_model("llama"), r=2)
    model.base_model.model.loss_function = lambda logits, labels, **_: logits.float().square().mean()
    return model


def dynamic() -> Any:
    rope = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}
    return add_lora(tiny_model("llama", max_position_embeddings=32, rope_parameters=rope), r=2)


def llama4() -> Any:
    config = small_config("llama4_text")
    config.no_rope_layers, config.layer_types = [1, 0, 1], ["chunked_attention", "full_attention", "chunked_attention"]
    return generic(config)


@pytest.mark.parametrize(
    ("make", "changes", "why"),
    [
        (lambda: add_lora(tiny_model("llama"), r=2), {"neftune_noise_alpha": 5.0}, "NEFTune's noise"),
        (virtual, {}, "PROMPT_TUNING puts virtual tokens"),
        (own_loss, {}, "loss_function is its own"),
        (dynamic, {}, "beyond 32 tokens this model's RoPE"),
        (llama4, {}, "scales queries of tokens beyond 8,191 by their place in a row"),
        (lambda: generic_model("mamba2"), {}, "mamba2 can't be trained on packed rows here: documents mix"),
    ],
)
def test_what_reads_a_batch_as_a_whole_is_padded_and_says_why(
    tmp_path: Path, make: Any, changes: dict[str, Any], why: str, caplog: pytest.LogCaptureFixture
) -> None:
    trainer = trainer_of(SFTTrainer, tmp_path, make(), max_steps=1, **changes)
    assert trainer.padded is not None and why in trainer.padded and why in caplog.text
    assert "attention_mask" in next(iter(trainer.get_train_dataloader()))
    trainer.train()
    with pytest.raises(UnsupportedError, match="padding_free with documents that have to be padded"):
        trainer_of(SFTTrainer, tmp_path, make(), padding_free=True, **changes)


@pytest.mark.parametrize("packing", [False, True])
def test_padding_free_asks_for_what_is_done_anyway(tmp_path: Path, packing: bool) -> None:
    model = add_lora(tiny_model("llama"), r=2)
    trainer = trainer_of(SFTTrainer, tmp_path, model, padding_free=True, packing=packing)
    assert trainer.args.padding_free and "packed" in next(iter(trainer.get_train_dataloader()))


def test_products_in_8_bits_are_refused_where_documents_are_padded(tmp_path: Path) -> None:
    trainer = trainer_of(SFTTrainer, tmp_path, add_lora(tiny_model("llama"), r=2))
    handle: Any = SimpleNamespace(model=trainer.model.base_model.model, options=SimpleNamespace(compute=Compute.FP8))
    assert padding_free.settle(trainer, handle, packs_train=False, packs_eval=False) is None
    trainer.args.neftune_noise_alpha = 5.0
    with pytest.raises(UnsupportedError, match=r"compute with documents that have to be padded: NEFTune.*: leave comp"):
        padding_free.settle(trainer, handle, packs_train=False, packs_eval=False)


@pytest.mark.parametrize("kind", ["torch", "numpy"])
def test_documents_may_be_tensors_or_arrays(tmp_path: Path, kind: str) -> None:
    whole = [[5, 6, 7], [8, 9], [3]]
    rows = Dataset.from_dict({"input_ids": whole, "labels": [[-100, 6, 7], [-100, 9], [3]]})
    collate = padding_free.EndToEnd(pad_token_id=0)
    expected, found = collate(rows.to_list()), collate([*rows.with_format(kind)])
    assert found["packed"].lengths == expected["packed"].lengths == (3, 2, 1, TILE_ROWS - 6)
    assert all(torch.equal(found[name], expected[name]) for name in ("input_ids", "labels", "position_ids"))


@pytest.mark.parametrize("multiple", [None, 16, 1024])
def test_a_row_s_tail_is_no_longer_than_a_document_may_be(tmp_path: Path, multiple: int | None) -> None:
    trainer = trainer_of(SFTTrainer, tmp_path, dynamic(), max_length=32, max_steps=1, pad_to_multiple_of=multiple)
    assert trainer.padded is None
    trainer.train()


def test_a_collator_that_was_set_after_the_trainer_was_made_is_used(tmp_path: Path) -> None:
    trainer = trainer_of(SFTTrainer, tmp_path, add_lora(tiny_model("llama"), r=2), max_steps=1)
    collate, seen = trainer.data_collator, []
    trainer.data_collator = lambda rows: seen.append(len(rows)) or collate(rows)
    trainer.train()
    assert set(seen) == {BATCH}


def test_a_multiple_that_was_asked_for_is_kept_where_documents_may_be_so_long(tmp_path: Path) -> None:
    model = add_lora(tiny_model("llama", max_position_embeddings=8192), r=2)
    trainer = trainer_of(SFTTrainer, tmp_path, model, pad_to_multiple_of=4096)
    assert next(iter(trainer.get_train_dataloader()))["packed"].tokens == 4096


class ReadsLogits(SFTTrainer):
    def compute_loss(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        assert self.args.padding_free or model(**inputs).logits is not None
        return super().compute_loss(model, inputs, *args, **kwargs)


def test_a_loss_that_may_read_logits_has_padded_batches_unless_it_says_that_it_does_not(tmp_path: Path) -> None:
    padded = trainer_of(ReadsLogits, tmp_path, add_lora(tiny_model("llama"), r=2), max_steps=1)
    assert padded.padded is not None and "may read logits" in padded.padded
    assert not isinstance(padded.get_train_dataloader().batch_sampler.sampler, ByLength), "it may be no sum"
    joined = trainer_of(ReadsLogits, tmp_path, add_lora(tiny_model("llama"), r=2), max_steps=1, padding_free=True)
    assert joined.padded is None
    for trainer in (padded, joined):
        trainer.train()
    assert losses(padded) == pytest.approx(losses(joined), rel=1e-5)


def test_a_model_that_was_detached_after_its_trainer_was_made_is_refused(tmp_path: Path) -> None:
    trainer = trainer_of(SFTTrainer, tmp_path, add_lora(tiny_model("llama"), r=2))
    attach(trainer.model).detach()
    with pytest.raises(ConfigError, match=r"was detached after its trainer was made.*attach\(model\) again"):
        trainer.train()


@pytest.mark.parametrize(("streams", "asked", "pads"), [(False, None, False), (False, True, True), (True, None, False)])
def test_batches_that_one_process_reads_for_all_are_padded(
    tmp_path: Path, streams: bool, asked: bool | None, pads: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(padding_free, "processes", lambda: 2)
    rows = documents().to_iterable_dataset() if streams else documents()
    model, how = add_lora(tiny_model("llama"), r=2), {"dispatch_batches": asked}
    trainer = trainer_of(SFTTrainer, tmp_path, model, train_dataset=rows, accelerator_config=how)
    assert ("one process read for all" in (trainer.padded or "")) == pads


def test_rows_have_few_lengths_while_graphs_of_them_are_replayed() -> None:
    """Else a graph would be captured for nearly every micro-batch, and hardly one replayed."""
    collate = padding_free.EndToEnd(0, TILE_ROWS, torch.ones(1, dtype=torch.bool), longest_tail=1024)
    assert collate.few is not None

    def row(tokens: int) -> PackedBatch:
        return collate([{"input_ids": [5] * (tokens - 9)}, {"input_ids": [6] * 9}])["packed"]

    found = [row(tokens) for tokens in range(1000, 6000, 7)]
    lengths = {packed.tokens for packed in found}
    assert lengths == {1024, 1280, 1536, 1792, 2048, 2560, 3072, 3584, 4096, 5120, 6144}
    assert max(packed.padding / packed.tokens for packed in found) <= 0.2
    assert max(packed.padding for packed in found) <= 1024
    assert {row(tokens).tokens for tokens in (10, 64, 65, 300)} == {64, 128, 320}
    assert row(20_000).tokens == 20_480, "no document of a tail is longer than the model's may be"
    assert all(map(collate.is_one_of_few, found))
    collate.few.fill_(False)
    assert not any(collate.is_one_of_few(row(tokens)) for tokens in (1030, 4100))
    assert row(1000).tokens == 1024 and row(5000).tokens == 5056


@pytest.mark.parametrize("workers", [0, 2])
def test_workers_learn_that_few_lengths_are_wanted(
    tmp_path: Path, workers: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Within an epoch; rows that they had made before go without a graph."""
    graphs = SimpleNamespace(replayed=False, paused=False)
    monkeypatch.setattr(padding_free, "attached", lambda model: SimpleNamespace(graphs=graphs))
    rows = Dataset.from_list([{"input_ids": [5 + i % 9] * (400 + 7 * i)} for i in range(72)])
    seen: list[tuple[int, bool, bool]] = []

    class Noting(SFTTrainer):
        def compute_loss(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
            seen.append((inputs["packed"].tokens, graphs.replayed, graphs.paused))
            graphs.replayed = len(seen) >= 4
            return super().compute_loss(model, inputs, *args, **kwargs)

    model = add_lora(tiny_model("llama", max_position_embeddings=2048), r=2)
    trainer = trainer_of(Noting, tmp_path, model, train_dataset=rows, max_length=1024, max_steps=18,
                         padding_free=True, gradient_accumulation_steps=1, dataloader_num_workers=workers)  # fmt: skip
    trainer.train()
    few = [tokens % 256 == 0 for tokens, *_ in seen]
    assert len(seen) == 18 and not all(few[:4])
    ahead = 2 * workers + 2  # loaders read so far ahead, accelerate one more, and the next step tells them
    assert all(few[4 + ahead :]), seen
    for one, (_, replayed, paused) in zip(few, seen, strict=True):
        assert paused == (replayed and not one)
    assert not graphs.paused


def test_a_user_s_multiple_is_kept_where_few_lengths_are_wanted() -> None:
    collate = padding_free.EndToEnd(0, 48, torch.ones(1, dtype=torch.bool))
    for tokens in (10, 100, 1000, 5000):
        packed = collate([{"input_ids": [5] * tokens}])["packed"]
        assert packed.tokens % 48 == 0 and collate.is_one_of_few(packed), "else no graph would serve it"


@pytest.mark.parametrize("packing", [False, True])
def test_tokens_that_look_like_padding_are_counted(tmp_path: Path, packing: bool) -> None:
    """Where the end of a text has padding's id, and nothing masks it."""
    end = byte_tokenizer(64).pad_token_id
    rows = Dataset.from_list([{"input_ids": [5] * (4 + i) + [end]} for i in range(6)])
    model = add_lora(tiny_model("llama", max_position_embeddings=64), r=2)
    trainer = trainer_of(SFTTrainer, tmp_path, model, train_dataset=rows, packing=packing, max_steps=-1,
                         num_train_epochs=2, include_num_input_tokens_seen="non_padding")  # fmt: skip
    trainer.train()
    assert trainer.state.num_input_tokens_seen == 2 * sum(len(row["input_ids"]) for row in rows)
