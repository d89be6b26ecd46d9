"""Both modes on a real small model: equal settings give one trajectory, and what goes wrong stops the run."""

from __future__ import annotations

import ast
import errno
import math
import os
import pickle
import re
import time
import warnings
from collections.abc import Callable
from functools import partial
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import peft
import pytest
import torch
import transformers
import trl
from datasets import Dataset, DatasetDict
from peft import AdaptionPromptConfig, LoraConfig, PromptTuningConfig, get_peft_model
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor
from torch.nn.functional import cross_entropy
from transformers import TrainerCallback, TrainingArguments
from transformers.trainer_utils import rotate_checkpoints

from pronghorn import FastLanguageModel, SFTTrainer
from pronghorn.data.batch import Collator
from pronghorn.data.packed_rows import PackedRows
from pronghorn.errors import ConfigError, DataError, TrainingError, UnsupportedError
from pronghorn.models.attach import attach, attached
from pronghorn.models.families import recomputes_layers
from pronghorn.train.check_turns import check_rendered, check_turns
from pronghorn.train.checkpoint import checkpoints, keep_newest, name_best
from pronghorn.train.control import trained_seconds
from pronghorn.train.counters import StepCounters
from pronghorn.train.gradients import GradientWatch, _Pending, gradient_flags, gradient_norms
from pronghorn.train.prepared_model import attached_on_its_device
from support.chats import CHATML
from support.tiny import stock_loss_on_cpu, tiny_model
from support.trainers import LINEARS, ROW, adapted, config


@pytest.fixture(scope="session")
def texts(shared: Path) -> list[str]:
    stories = (shared / "data" / "tinystories" / "tinystories_10k.txt").read_text()[:60_000].split("<|endoftext|>")
    return [story.strip()[: 60 + 22 * (i % 7)] for i, story in enumerate(stories) if len(story.strip()) > 300][:48]


@pytest.fixture(scope="session")
def documents(texts: list[str], stories: Path) -> Dataset:
    """Tokenised documents with very different numbers of labels."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(stories)
    ids = [tokenizer(text)["input_ids"] for text in texts]
    labels = [
        [-100] * (1 if i % 3 else len(row) - 5) + row[1 if i % 3 else len(row) - 5 :] for i, row in enumerate(ids)
    ]
    return Dataset.from_dict({"input_ids": ids, "labels": labels})


def whole(stories: Path) -> tuple[Any, Any]:
    """The model with every weight trained."""
    return FastLanguageModel.from_pretrained(
        str(stories), max_seq_length=512, full_finetuning=True, use_gradient_checkpointing=False
    )


def trained(model: Any) -> dict[str, Tensor]:
    return {name: p.detach().clone() for name, p in model.named_parameters() if p.requires_grad}


def losses(trainer: Any) -> list[float]:
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


def assert_equal_weights(ours: dict[str, Tensor], theirs: dict[str, Tensor], rel: float = 1e-5) -> None:
    """Equal to `rel` in the maximum, per tensor."""
    assert ours.keys() == theirs.keys()
    for name, value in ours.items():
        error = (value - theirs[name]).abs().max() / theirs[name].abs().max()
        assert error <= rel, f"{name}: {error:.2e}"


def document_loss(model: Any, rows: list[dict[str, list[int]]]) -> Tensor:
    """Plain torch: every document on its own, summed, over all labels."""
    total, labels = torch.zeros(()), 0
    for row in rows:
        logits = model(input_ids=torch.tensor([row["input_ids"]])).logits[0, :-1].float()
        targets = torch.tensor(row["labels"])[1:]
        total = total + cross_entropy(logits, targets, ignore_index=-100, reduction="sum")
        labels += int((targets != -100).sum())
    return total / labels


def documents_of(packed_rows: list[dict[str, list[int]]]) -> list[dict[str, list[int]]]:
    out = []
    for row in packed_rows:
        start = 0
        for length in row["lengths"]:
            out.append({key: row[key][start : start + length] for key in ("input_ids", "labels")})
            start += length
    return out


# ---- one trajectory ----


def test_the_trainer_is_a_twenty_line_loop(stories: Path, documents: Dataset, tmp_path: Path) -> None:
    model, tokenizer = adapted(stories)
    trainer = SFTTrainer(model, config(tmp_path, gradient_accumulation_steps=2), train_dataset=documents,
                         tokenizer=tokenizer)  # fmt: skip
    trainer.train()

    model_2, _ = adapted(stories)
    rows, collate = PackedRows(documents, ROW, seed=1), Collator(ROW, tokenizer.pad_token_id)
    optimizer = torch.optim.AdamW([p for p in model_2.parameters() if p.requires_grad], lr=5e-3, weight_decay=0.0)
    ours = []
    for step in range(4):
        batches = [collate([rows[2 * step]]), collate([rows[2 * step + 1]])]
        labels = sum(batch["packed"].n_labels for batch in batches)
        total = 0.0
        for batch in batches:
            loss = model_2(**batch, num_items_in_batch=labels).loss
            loss.backward()
            total += loss.item()
        torch.nn.utils.clip_grad_norm_(model_2.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        ours.append(total)
    assert losses(trainer) == pytest.approx(ours, rel=1e-5)
    assert_equal_weights(trained(model), trained(model_2), rel=1e-4)
    assert trainer.state.global_step == 4


@stock_loss_on_cpu
def test_compatible_mode_learns_the_same_rows_alike(stories: Path, documents: Dataset, tmp_path: Path) -> None:
    """An unchanged trl.SFTTrainer over the very rows of packed mode: TRL's own loss, our attention."""

    def collate_as_trl(rows: list[dict[str, Any]]) -> dict[str, Any]:
        batch = Collator(ROW, 0)(rows)
        batch.pop("packed")
        return batch

    results = []
    for mode in ("packed", "compatible"):
        model, tokenizer = adapted(stories)
        rows = PackedRows(documents, ROW, seed=1)
        common: dict[str, Any] = {"train_dataset": documents, "processing_class": tokenizer}
        if mode == "packed":
            trainer: Any = SFTTrainer(model, config(tmp_path), **common)
        else:
            ready = Dataset.from_list([rows[i] for i in range(4)])
            settings = config(tmp_path, packing=False, remove_unused_columns=False)
            settings.dataset_kwargs = {"skip_prepare_dataset": True}
            trainer = trl.SFTTrainer(
                model, settings, **(common | {"train_dataset": ready}), data_collator=collate_as_trl
            )
        trainer.train()
        results.append((losses(trainer), trained(model)))
    assert results[0][0] == pytest.approx(results[1][0], rel=1e-4)
    assert_equal_weights(results[0][1], results[1][1], rel=1e-3)


def test_operations_are_counted_as_stock_does(stories: Path, documents: Dataset, tmp_path: Path) -> None:
    """Without a walk through the model in every micro-batch."""
    model, tokenizer = adapted(stories)
    trainer = SFTTrainer(model, config(tmp_path), train_dataset=documents, processing_class=tokenizer)
    for tokens in (ROW, 7):
        inputs = {"input_ids": torch.zeros(1, tokens, dtype=torch.long)}
        assert trainer.floating_point_ops(inputs) == transformers.Trainer.floating_point_ops(trainer, inputs) > 0
    trainer.model = None  # not asked again
    assert trainer.floating_point_ops({"input_ids": torch.zeros(2, 7)}) == 2 * trainer.floating_point_ops(inputs)


@stock_loss_on_cpu
def test_an_unchanged_trl_script_runs(stories: Path, texts: list[str], tmp_path: Path) -> None:
    """packing=True as TRL does it; its first loss is that of each document alone."""
    model, tokenizer = adapted(stories)
    args = config(tmp_path, max_steps=3, gradient_checkpointing=True)
    short = Dataset.from_dict({"text": [text[:80] for text in texts]})
    trainer = trl.SFTTrainer(model, args, train_dataset=short, processing_class=tokenizer)
    batch = next(iter(trainer.get_train_dataloader()))
    assert "packed" not in batch and int((batch["position_ids"] == 0).sum()) > 1
    plain, _ = FastLanguageModel.from_pretrained(str(stories), max_seq_length=ROW, packing=False)
    assert attached(plain) is None
    bounds = [*(batch["position_ids"][0] == 0).nonzero().flatten().tolist(), batch["input_ids"].shape[1]]
    parts = [{key: batch[key][0, a:b].tolist() for key in ("input_ids", "labels")} for a, b in pairwise(bounds)]
    with torch.no_grad():
        expected = document_loss(plain, parts).item()
    trainer.train()
    assert losses(trainer)[0] == pytest.approx(expected, rel=1e-5)
    assert len(losses(trainer)) == 3


def trained_by(config_of_peft: Any, stories: Path, documents: Dataset, folder: Path) -> tuple[SFTTrainer, list[str]]:
    model = transformers.AutoModelForCausalLM.from_pretrained(stories, dtype=torch.float32)
    trainer = SFTTrainer(model, config(folder, max_steps=2), train_dataset=documents, peft_config=config_of_peft)
    said: list[str] = []
    trainer.note = said.append
    trainer.train()
    return trainer, said


def test_a_module_that_peft_put_around_attention_is_trained(stories: Path, documents: Dataset, tmp_path: Path) -> None:
    wraps = AdaptionPromptConfig(adapter_len=4, adapter_layers=2, task_type="CAUSAL_LM")
    trainer, _ = trained_by(wraps, stories, documents, tmp_path)
    assert len(trainer.state.log_history) >= 2


def test_shadow_s_last_update_which_nobody_reads_is_no_dead_gradient(
    stories: Path, documents: Dataset, tmp_path: Path
) -> None:
    model = transformers.AutoModelForCausalLM.from_pretrained(stories, dtype=torch.float32)
    shadow = getattr(peft, "ShadowConfig", None) or pytest.skip("this PEFT has no ShadowPEFT")
    settings = config(tmp_path, packing=False, max_steps=3)
    lora = shadow(task_type="CAUSAL_LM")
    SFTTrainer(model, settings, train_dataset=documents, peft_config=lora).train()


@pytest.mark.parametrize(("init", "told"), [("pissa_niter_1", True), ("pissa", False)])
def test_an_adapter_that_fits_no_other_base_is_told_of(
    stories: Path, documents: Dataset, tmp_path: Path, init: Any, told: bool
) -> None:
    lora = LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=init, task_type="CAUSAL_LM")
    _, said = trained_by(lora, stories, documents, tmp_path)
    assert any("path_initial_model_for_weight_conversion" in each for each in said) is told


def test_text_datasets_pack_and_the_loss_falls(stories: Path, texts: list[str], tmp_path: Path) -> None:
    model, tokenizer = adapted(stories)
    args = config(tmp_path, max_steps=6)
    trainer = SFTTrainer(model, args, train_dataset=Dataset.from_dict({"text": texts}), tokenizer=tokenizer)
    assert isinstance(trainer.train_dataset, PackedRows)
    before = trainer.evaluate(trainer.train_dataset)["eval_loss"]
    trainer.train()
    assert trainer.evaluate(trainer.train_dataset)["eval_loss"] < before
    entry = next(entry for entry in trainer.state.log_history if "loss" in entry)
    assert 0 < entry["labelled_tokens"] < entry["tokens"] <= ROW and entry["tokens_per_second"] > 0
    assert entry["supervised_share"] == entry["labelled_tokens"] / entry["tokens"]
    assert entry["packing_efficiency"] == entry["tokens"] / ROW and entry["skipped_steps"] == 0


@pytest.mark.parametrize("packing", [True, False])
def test_a_text_that_begins_with_bos_gets_no_second_one(stories: Path, tmp_path: Path, packing: bool) -> None:
    model, tokenizer = adapted(stories)
    begins = tokenizer.bos_token
    alike = {
        "text": [{"text": "A cat sat."}, {"text": f"{begins}A cat sat."}],
        "prompt": [{"prompt": p, "completion": " A cat."} for p in ("Who?", f"{begins}Who?")],
    }
    for rows in alike.values():
        with pytest.warns(UserWarning, match="texts begin with"):
            trainer = SFTTrainer(
                model, config(tmp_path, packing=packing), train_dataset=Dataset.from_list(rows), tokenizer=tokenizer
            )
        first, second = getattr(trainer.train_dataset, "documents", trainer.train_dataset)
        assert first["input_ids"] == second["input_ids"] and first["labels"][1:] == second["labels"][1:]
        assert first["input_ids"].count(tokenizer.bos_token_id) == 1
    tokenised = Dataset.from_list([{"input_ids": [1, 1, 5], "attention_mask": [1, 1, 1]}])  # as somebody wanted it
    trainer = SFTTrainer(model, config(tmp_path, packing=packing), train_dataset=tokenised, tokenizer=tokenizer)
    assert getattr(trainer.train_dataset, "documents", trainer.train_dataset)[0]["input_ids"] == [1, 1, 5]


def test_columns_of_names_that_mean_something_here(stories: Path, tmp_path: Path) -> None:
    model, tokenizer = adapted(stories)
    rows = Dataset.from_list([{"text": "A cat sat.", "lengths": 3}] * 4)
    trainer = SFTTrainer(model, config(tmp_path, packing=False), train_dataset=rows, tokenizer=tokenizer)
    trainer.train()
    assert len(losses(trainer)) == 4
    rows = Dataset.from_list([{"input_ids": [1, 5, 6], "lengths": 3}] * 4)
    SFTTrainer(model, config(tmp_path, packing=False, max_steps=1), train_dataset=rows, tokenizer=tokenizer).train()
    packed = Dataset.from_list([{"input_ids": [1, 5, 6, 1, 7], "labels": [1, 5, 6, 1, 7], "lengths": [3, 2]}])
    trainer = SFTTrainer(model, config(tmp_path, packing=False), train_dataset=packed, tokenizer=tokenizer)
    assert trainer.train_dataset[0]["lengths"] == [3, 2]  # of the documents, which stay apart
    by_trl = trl.pack_dataset(packed.remove_columns(["labels", "lengths"]), ROW)
    for rows, packing in ((packed, True), (by_trl, True), (by_trl, False)):
        with pytest.raises(DataError, match="train_dataset is packed already"):
            SFTTrainer(model, config(tmp_path, packing=packing), train_dataset=rows, tokenizer=tokenizer)
    for labels in ([1, 2, 3], "good", 0):
        rows = Dataset.from_list([{"text": "A cat sat.", "labels": labels}])
        with pytest.raises(DataError, match="remove_columns"):
            SFTTrainer(model, config(tmp_path, packing=False), train_dataset=rows, tokenizer=tokenizer)


@pytest.mark.parametrize("packing", [False, True])
def test_a_completion_mask_that_nothing_would_read_is_refused(stories: Path, tmp_path: Path, packing: bool) -> None:
    model, tokenizer = adapted(stories)
    rows = Dataset.from_list([{"input_ids": [1, 5, 6, 7], "completion_mask": [0, 0, 1, 1]}] * 4)
    with pytest.raises(ConfigError, match="completion_mask") as caught:
        SFTTrainer(model, config(tmp_path, packing=packing), train_dataset=rows, tokenizer=tokenizer)
    assert "completion_only_loss=True" in caught.value.remedy
    for only, trained in ((True, [-100, -100, 6, 7]), (False, [1, 5, 6, 7])):
        args = config(tmp_path, packing=packing, completion_only_loss=only)
        trainer = SFTTrainer(model, args, train_dataset=rows, tokenizer=tokenizer)
        [labels, *_] = getattr(trainer.train_dataset, "documents", trainer.train_dataset)["labels"]
        assert labels[1:] == trained[1:]


TURNS = [{"role": "user", "content": "Who?"}, {"role": "assistant", "content": "A cat."}]
SPOKEN = [{"from": turn["role"], "value": turn["content"]} for turn in TURNS]
PLAIN = "{% for m in messages %}[{{ m['role'] }}]{{ m['content'] }}{% endfor %}"


@pytest.mark.parametrize("packing", [True, False])
@pytest.mark.parametrize(
    ("row", "ends", "told"),
    [
        ({"prompt": "One day", "text": "A dog."}, "<s> A dog.</s>", None),
        ({"prompt": "One day", "messages": TURNS, "rejected": "No."}, "[user]Who?[assistant]A cat.", None),
        (
            {"messages": TURNS, "text": "A dog."},
            "[user]Who?[assistant]A cat.",
            "has messages beside text: messages are",
        ),
        ({"prompt": "One", "completion": " day", "text": "A dog."}, "<s> One day</s>", "completion beside text"),
        ({"prompt": "One", "completion": " day", "messages": TURNS}, "<s> One day</s>", "completion beside messages"),
        # TRL takes turns of from and value before all else
        ({"conversations": SPOKEN, "text": "A dog."}, "<s> A dog.</s>", "text beside conversations: text is trained"),
        ({"conversations": TURNS, "text": "A dog."}, "<s> A dog.</s>", None),
        ({"conversations": [], "text": "A dog."}, "<s> A dog.</s>", None),
    ],
)
def test_rows_of_several_formats(
    stories: Path, tmp_path: Path, row: dict[str, Any], ends: str, told: str | None, packing: bool
) -> None:
    """Of which TRL asks one column, another in each process, whether they are conversations, and so whether a
    completion gets its end; beside a text it never does."""
    model, tokenizer = adapted(stories)
    tokenizer.chat_template = PLAIN
    given: dict[str, Any] = {"train_dataset": Dataset.from_list([row] * 4), "tokenizer": tokenizer}
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer = SFTTrainer(model, config(tmp_path, packing=packing), **given)
    document = getattr(trainer.train_dataset, "documents", trainer.train_dataset)[0]
    assert tokenizer.decode(document["input_ids"]).replace("</s> [", "[").lstrip().startswith(ends)
    assert (document["labels"][0] == -100) == ("completion" in row)
    notes = [str(each.message) for each in caught if "beside" in str(each.message)]
    assert (told is None and not notes) or (told is not None and told in notes[0] and len(notes) == 1)
    if told is not None:  # what the warning says to do is quiet
        [columns] = re.findall(r"remove_columns\((.*)\)", notes[0])
        chosen = given["train_dataset"].remove_columns(ast.literal_eval(columns))
        with warnings.catch_warnings():
            warnings.filterwarnings("error", message=".*beside")
            SFTTrainer(model, config(tmp_path, packing=packing), **(given | {"train_dataset": chosen}))


@pytest.mark.parametrize("packing", [True, False])
def test_documents_cut_elsewhere_than_the_model_was_loaded_for_are_told_of(
    stories: Path, tmp_path: Path, packing: bool
) -> None:
    """Unsloth cuts at the model's `max_seq_length` where a script leaves `max_length` out, TRL at its default."""
    model, tokenizer = adapted(stories)  # of 128 tokens
    rows = Dataset.from_list([{"text": "One day a cat sat. " * 8}, {"text": "A cat."}])
    told = r"1 of 2 documents has 32 tokens or more, where TRL cuts them \(max_length = 32\).*set max_length=128"
    with pytest.warns(UserWarning, match=told):
        SFTTrainer(model, config(tmp_path, packing=packing, max_length=32), train_dataset=rows, tokenizer=tokenizer)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*tokens or more")
        SFTTrainer(model, config(tmp_path, packing=packing, max_length=128), train_dataset=rows, tokenizer=tokenizer)
        short = rows.select([1])
        SFTTrainer(model, config(tmp_path, packing=packing, max_length=32), train_dataset=short, tokenizer=tokenizer)
    if not packing:
        model.max_seq_length = 32
        with pytest.warns(
            UserWarning, match="1 of 2 documents has 33 tokens or more; the model's max_seq_length is 32"
        ):
            SFTTrainer(model, config(tmp_path, packing=False), train_dataset=rows, tokenizer=tokenizer)


def test_a_chat_template_of_the_arguments_is_taken(stories: Path, tmp_path: Path) -> None:
    """By a tokenizer that has none, too."""
    model, tokenizer = adapted(stories)
    template = tmp_path / "turns.jinja"
    template.write_text(PLAIN)
    given: dict[str, Any] = {"train_dataset": Dataset.from_list([{"messages": TURNS}] * 4), "tokenizer": tokenizer}
    trainer = SFTTrainer(model, config(tmp_path, chat_template_path=str(template), max_steps=1), **given)
    trainer.train()
    assert tokenizer.decode(trainer.train_dataset.documents[0]["input_ids"]).endswith("[assistant]A cat.")
    for name, problem in (("other.jinja", "is not there"), ("turns.txt", r"is no \.jinja file")):
        (tmp_path / "turns.txt").write_text(PLAIN)
        with pytest.raises(ConfigError, match=problem):
            SFTTrainer(model, config(tmp_path, chat_template_path=str(tmp_path / name)), **given)


@pytest.mark.parametrize("streamed", [True, False])
@pytest.mark.parametrize(
    ("row", "changes"),
    [
        ({"messages": TURNS}, {}),
        ({"prompt": "One day", "response": "a cat"}, {}),
        ({"prompt": "One day", "completion": "a cat"}, {"completion_only_loss": False}),
        ({"story": "One day"}, {"dataset_text_field": "story"}),
        ({"tale": "One day"}, {"dataset_text_field": "story"}),
    ],
)
def test_what_a_formatting_function_returns_is_trained(
    stories: Path, tmp_path: Path, row: dict[str, Any], changes: dict[str, Any], streamed: bool
) -> None:
    """TRL trains the messages or the prompt that the row has besides, or looks for another column."""
    model, tokenizer = adapted(stories)
    tokenizer.chat_template = PLAIN
    rows = Dataset.from_list([row] * 4)
    trainer = SFTTrainer(
        model,
        config(tmp_path, packing=False, **changes),
        train_dataset=rows.to_iterable_dataset() if streamed else rows,
        eval_dataset=rows,
        tokenizer=tokenizer,
        formatting_func=lambda row: "A dog of " + " ".join(sorted(row)),
    )
    for dataset in (trainer.train_dataset, trainer.eval_dataset):
        text = tokenizer.decode(next(iter(dataset))["input_ids"])
        assert text == f"<s> A dog of {' '.join(sorted(row))}</s>"


def test_messages_that_say_nothing_are_refused(stories: Path, tmp_path: Path) -> None:
    model, tokenizer = adapted(stories)
    tokenizer.chat_template = CHATML
    asked, said = {"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}
    call = {"tool_calls": [{"type": "function", "function": {"name": "f", "arguments": {"x": 1}}}]}
    whole = [asked, {"role": "assistant", "content": None, **call}, said]
    for messages, told in (
        ([], "row 2: messages is empty"),
        ([asked, {"role": "assistant", "content": None}], "row 2: messages has no content in message 2"),
    ):
        for rows in ([whole, messages], [[asked, said], messages]):
            dataset = Dataset.from_list([{"messages": row} for row in rows])
            with pytest.raises(DataError, match=told):
                SFTTrainer(model, config(tmp_path), train_dataset=dataset, tokenizer=tokenizer)
            with pytest.raises(DataError, match=told.replace("row 2", "row 1")):
                SFTTrainer(model, config(tmp_path), train_dataset=dataset.select([1, 0]), tokenizer=tokenizer)
            check_turns("train_dataset", dataset.select([0]), "messages")  # a call needs no content


def test_second_calls_that_the_template_leaves_out_are_refused(stories: Path, tmp_path: Path) -> None:
    model, tokenizer = adapted(stories)
    tokenizer.chat_template = CHATML.replace("{{ m.content }}", "{{ m.content or m.tool_calls[0].function.name }}")
    calls = [{"type": "function", "function": {"name": "f", "arguments": {"x": x}}} for x in (1, 2)]
    one, two = ([{"role": "user", "content": "a"}, {"role": "assistant", "tool_calls": calls[:n]}] for n in (1, 2))
    for rows in ([one, two], [two]):
        with pytest.raises(DataError, match="leaves the tool call 'f' out: "):
            dataset = Dataset.from_list([{"messages": row} for row in rows])
            SFTTrainer(model, config(tmp_path), train_dataset=dataset, tokenizer=tokenizer)
    check_rendered("train_dataset", Dataset.from_list([{"messages": one}]), tokenizer, False)


def test_prompts_that_their_completion_rewrites_are_refused(stories: Path, tmp_path: Path) -> None:
    """As Mistral Nemo's, whose system message stands before the last question: TRL would train the question."""
    model, tokenizer = adapted(stories)
    moved = "{% if m.role == 'user' and loop.last %}{{ messages[0].content }}{% endif %}{{ m.content }}"
    words = ["be kind", "why", "so", "really", "yes"]
    system, *turns = (
        {"role": role, "content": word}
        for role, word in zip(("system", *("user", "assistant") * 2), words, strict=True)
    )
    rows = Dataset.from_list([{"prompt": [system, *turns[:3]], "completion": turns[3:]}] * 2)
    tokenizer.chat_template = CHATML.replace("{{ m.content }}", moved)
    with pytest.raises(DataError, match="train_dataset row 1: the chat template renders the prompt otherwise"):
        SFTTrainer(model, config(tmp_path), train_dataset=rows, tokenizer=tokenizer)
    tokenizer.chat_template = CHATML.replace("assistant\n{% endif %}", "assistant\n<think>\n{% endif %}")  # is not said
    check_rendered("train_dataset", rows, tokenizer, False)
    same = [{**turn, "content": "yes"} for turn in turns]
    check_rendered("train_dataset", Dataset.from_list([{"prompt": same[:3], "completion": same[3:]}]), tokenizer, False)
    short = [{"prompt": [{"role": "user", "content": "end"}], "completion": turns[3:]}]  # of <|im_end|>, too
    check_rendered("train_dataset", Dataset.from_list(short), tokenizer, False)


def test_what_the_template_leaves_out_of_last_answers_is_told(stories: Path, tmp_path: Path) -> None:
    _, tokenizer = adapted(stories)
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|im_end|>"]})
    asked, said = {"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}
    plain, thought = [asked, said], [asked, {**said, "reasoning_content": "hm"}]
    inline = [asked, {**said, "content": "<think>hm</think>b"}]
    parts = [{"prompt": row[:1], "completion": row[1:]} for row in (plain, inline)]
    sets = [Dataset.from_list(parts), Dataset.from_list([{"messages": row} for row in (plain, thought)])]
    stripped = CHATML.replace("{{ m.content }}", "{{ m.content.split('</think>')[-1] }}")  # as DeepSeek R1's
    unended = CHATML.replace("<|im_end|>", "{{ '' if loop.last else '<|im_end|>' }}")  # as Apertus'
    for rows, template, told in (
        (sets[0], stripped, "leaves out what the assistant thinks"),
        (sets[1], CHATML, "leaves out what the assistant thinks"),
        (sets[1], unended, "not trained to stop"),
    ):
        tokenizer.chat_template = template
        with pytest.warns(UserWarning, match=f"train_dataset: .*{told}"):
            check_rendered("train_dataset", rows, tokenizer, False)
    tokenizer.chat_template = CHATML
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        check_rendered("train_dataset", sets[0], tokenizer, False)
        check_rendered("train_dataset", sets[1], tokenizer, True)


def test_texts_that_the_template_leaves_out_are_refused(stories: Path, tmp_path: Path) -> None:
    model, tokenizer = adapted(stories)
    tokenizer.chat_template = CHATML.replace(  # as SmolVLM's
        "{{ m.content }}",
        "{% for part in m.content %}{% if part.type == 'text' %}{{ part.text }}{% endif %}{% endfor %}",
    )
    rows = Dataset.from_list([{"messages": [{"role": role, "content": "Who?"} for role in ("user", "assistant")]}])
    with pytest.raises(DataError, match="contents are texts, and the chat template leaves them out"):
        SFTTrainer(model, config(tmp_path), train_dataset=rows, tokenizer=tokenizer)


def test_parts_are_trained_where_the_template_reads_them(stories: Path, tmp_path: Path) -> None:
    model, tokenizer = adapted(stories)
    parts = [{"type": "text", "text": "Who?"}]
    rows = Dataset.from_list([{"messages": [{"role": r, "content": parts} for r in ("user", "assistant")]}])
    texts_alone = CHATML.replace("m.content", "m.content if m.content is string else ''")  # as Qwen 3
    for template, told in ((CHATML, "writes such a list as it is"), (texts_alone, "leaves their text out")):
        tokenizer.chat_template = template
        with pytest.raises(DataError, match=told):
            SFTTrainer(model, config(tmp_path), train_dataset=rows, tokenizer=tokenizer)
    tokenizer.chat_template = CHATML.replace("{{ m.content }}", "{{ m.content[0].text }}")
    trainer = SFTTrainer(model, config(tmp_path), train_dataset=rows, tokenizer=tokenizer)
    assert tokenizer.decode(trainer.train_dataset[0]["input_ids"]).count("\nWho?<|im_end|>") == 2


@pytest.mark.slow
@pytest.mark.matrix(1)
@pytest.mark.parametrize("packing", [True, False])
def test_waiting_for_data_is_told(stories: Path, texts: list[str], tmp_path: Path, packing: bool) -> None:
    """A collator that sleeps a second a step takes most of the time; without it hardly any."""
    shares = []
    for seconds in (0.0, 1.0):
        model, tokenizer = adapted(stories)
        data = Dataset.from_dict({"text": texts})
        args = config(tmp_path, max_steps=2, packing=packing)
        trainer = SFTTrainer(model, args, train_dataset=data, processing_class=tokenizer)
        collate = trainer.data_collator
        trainer.data_collator = lambda rows, wait=seconds, collate=collate: time.sleep(wait) or collate(rows)
        trainer.train()
        [*_, entry] = [entry for entry in trainer.state.log_history if "loss" in entry]
        shares.append(entry["data_wait_share"])
        assert 0 < entry["packing_efficiency"] <= 1
    assert shares[0] < 0.3 and 0.5 < shares[1] <= 1


def test_padding_and_first_tokens_are_not_counted() -> None:
    mask = torch.tensor([[1, 1, 1, 1], [1, 1, 0, 0]])
    batch = {"input_ids": mask, "attention_mask": mask, "labels": mask.masked_fill(mask == 0, -100)}
    counters = StepCounters()
    counters.add(batch)
    counters.add(batch)
    counted = counters.take(torch.device("cpu"))
    assert (counted["tokens"], counted["labelled_tokens"], counted["packing_efficiency"]) == (12, 8, 0.75)
    assert counters.take(torch.device("cpu"))["tokens"] == 0


# ---- gradient accumulation and normalisation ----


def test_accumulation_equals_one_large_step(stories: Path, documents: Dataset, tmp_path: Path) -> None:
    """4 rows at once == 4 micro-batches of very different label counts; both equal plain torch."""
    rows = PackedRows(documents, ROW, seed=1)
    first = [rows[i] for i in range(4)]
    labels = [sum(label != -100 for label in row["labels"]) for row in first]
    assert max(labels) > 1.3 * min(labels)
    results = []
    for rows_per_step, accumulation in ((4, 1), (1, 4), (2, 2)):
        model, tokenizer = whole(stories)
        start = trained(model)
        args = config(tmp_path, max_steps=1, optim="sgd", learning_rate=0.1, max_grad_norm=0.0,
                      per_device_train_batch_size=rows_per_step, gradient_accumulation_steps=accumulation)  # fmt: skip
        trainer = SFTTrainer(model, args, train_dataset=documents, tokenizer=tokenizer)
        trainer.train()
        moved = {name: value - start[name] for name, value in trained(model).items()}
        results.append((losses(trainer)[0], trained(model), moved))
    plain, _ = FastLanguageModel.from_pretrained(str(stories), max_seq_length=512, packing=False)
    loss = document_loss(plain, documents_of(first))
    loss.backward()
    gradient = {name: -0.1 * p.grad for name, p in plain.named_parameters()}
    for reported, weights, moved in results:
        assert reported == pytest.approx(loss.item(), rel=1e-5)
        assert_equal_weights(weights, results[0][1], rel=1e-5)
        assert_equal_weights(moved, gradient, rel=1e-3)  # the step is a small difference of float32 weights


def test_packed_training_equals_padded_training(stories: Path, documents: Dataset, tmp_path: Path) -> None:
    """One step over the same documents, packed in rows or padded to the longest: one gradient."""
    few = documents.select(range(7))
    results = []
    for packing in (True, False):
        model, tokenizer = whole(stories)
        args = config(tmp_path, packing=packing, max_steps=1, optim="sgd", learning_rate=0.1, max_grad_norm=0.0,
                      max_length=512, per_device_train_batch_size=7)  # fmt: skip
        trainer = SFTTrainer(model, args, train_dataset=few, tokenizer=tokenizer)
        trainer.train()
        results.append((losses(trainer)[0], trained(model)))
    assert results[0][0] == pytest.approx(results[1][0], rel=1e-5)
    assert_equal_weights(results[0][1], results[1][1], rel=1e-5)


def test_evaluation_packed_and_unpacked_agree(stories: Path, documents: Dataset, tmp_path: Path) -> None:
    few = documents.select(range(6))
    found = []
    for eval_packing in (True, False, None):
        model, tokenizer = whole(stories)
        args = config(tmp_path, max_length=512, eval_packing=eval_packing, per_device_eval_batch_size=8)
        trainer = SFTTrainer(model, args, train_dataset=documents, eval_dataset=few, tokenizer=tokenizer)
        assert isinstance(trainer.eval_dataset, PackedRows) == (eval_packing is not False)
        found.append(trainer.evaluate()["eval_loss"])
    with torch.no_grad():
        expected = document_loss(whole(stories)[0], [few[i] for i in range(6)]).item()
    assert found == pytest.approx([expected] * 3, rel=1e-5)


@pytest.mark.matrix(1)
@pytest.mark.parametrize("packed", [True, False])
def test_evaluation_in_16_bits_casts_the_model_as_stock_does(
    stories: Path, documents: Dataset, tmp_path: Path, packed: bool
) -> None:
    """Outside of training, and for good."""
    model, tokenizer = adapted(stories)
    during: list[set[torch.dtype]] = []

    class Look(TrainerCallback):
        def on_evaluate(self, *_: Any, **__: Any) -> None:
            during.append({p.dtype for p in model.parameters()})

    args = config(tmp_path, max_steps=1, bf16_full_eval=True, eval_packing=packed, eval_strategy="steps", eval_steps=1)
    trainer = SFTTrainer(model, args, train_dataset=documents, eval_dataset=documents.select(range(8)),
                         processing_class=tokenizer, callbacks=[Look()])  # fmt: skip
    trainer.train()
    within = trainer.state.log_history[-2]["eval_loss"]
    after = trainer.evaluate()["eval_loss"]
    assert during == [{torch.float32}, {torch.bfloat16}]
    assert after == pytest.approx(within, rel=1e-2) and after != within
    if packed:
        with torch.no_grad():
            plain = document_loss(model.eval(), documents_of(list(trainer.eval_dataset)))
        assert after == pytest.approx(plain.item(), rel=2e-3)
    shared = SimpleNamespace(processes=2)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("pronghorn.parallel.state.sharded", lambda _: shared)
        if packed:
            with pytest.raises(UnsupportedError, match="bf16_full_eval needs all of the model's weights"):
                trainer.evaluate()


def test_documents_given_to_evaluate_are_packed_too(stories: Path, documents: Dataset, tmp_path: Path) -> None:
    """Batches of few labels and of many: the mean over batches would be another."""
    model, tokenizer = whole(stories)
    args = config(tmp_path, max_length=512, per_device_eval_batch_size=1)
    trainer = SFTTrainer(model, args, train_dataset=documents, eval_dataset=documents, tokenizer=tokenizer)
    expected = trainer.evaluate()["eval_loss"]
    assert trainer.evaluate(documents)["eval_loss"] == expected
    assert trainer.evaluate({"held": documents})["eval_held_loss"] == expected
    with pytest.raises(DataError, match="eval_dataset is empty"):
        trainer.evaluate(documents.select([]))


def test_several_held_out_sets(stories: Path, documents: Dataset, tmp_path: Path) -> None:
    """A DatasetDict given to `evaluate`; and one called "train" is evaluated as `eval_packing` says."""
    model, tokenizer = whole(stories)
    held = DatasetDict({"train": documents.select(range(4)), "test": documents.select(range(4))})
    args = config(tmp_path, max_length=512, eval_packing=False)
    trainer = SFTTrainer(model, args, train_dataset=documents, eval_dataset=held, tokenizer=tokenizer,
                         compute_metrics=lambda found: {"documents": len(found.predictions)})  # fmt: skip
    assert isinstance(trainer.train_dataset, PackedRows)
    for found in (trainer.evaluate(), trainer.evaluate(held)):
        assert found["eval_train_documents"] == found["eval_test_documents"] == 4
        assert found["eval_train_loss"] == found["eval_test_loss"]
    packed = SFTTrainer(model, config(tmp_path, max_length=512), train_dataset=documents, tokenizer=tokenizer)
    assert packed.evaluate(held)["eval_test_loss"] == pytest.approx(packed.evaluate(held["test"])["eval_loss"])


def test_evaluation_before_training_computes_in_16_bits_too(stories: Path, documents: Dataset, tmp_path: Path) -> None:
    model, tokenizer = whole(stories)
    args = config(tmp_path, bf16=True, max_steps=1, learning_rate=1e-12)
    trainer = SFTTrainer(model, args, train_dataset=documents, eval_dataset=documents, tokenizer=tokenizer)
    before = trainer.evaluate()["eval_loss"]
    trainer.train()
    assert trainer.evaluate()["eval_loss"] == before


def test_evaluating_is_no_time_of_a_step(
    stories: Path, documents: Dataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock, hours = time.perf_counter, list[int]()
    monkeypatch.setattr(time, "perf_counter", lambda: clock() + 3600 * len(hours))
    monkeypatch.setattr("pronghorn.train.evaluating.heldout_loss", lambda *args: hours.append(0) or 1.0)
    model, tokenizer = adapted(stories)
    args = config(tmp_path, max_steps=2, eval_strategy="steps", eval_steps=1)
    trainer = SFTTrainer(model, args, train_dataset=documents, eval_dataset=documents, tokenizer=tokenizer)
    trainer.train()
    steps = [entry["step_seconds"] for entry in trainer.state.log_history if "loss" in entry]
    assert len(steps) == 2 and max(steps) < 3600 and trained_seconds(trainer.state) > 7200
    hours.append(0)
    trainer.train()
    assert trainer.state.log_history[0]["step_seconds"] < 3600


def test_packed_rows_have_no_predictions(stories: Path, tmp_path: Path, documents: Dataset) -> None:
    model, tokenizer = adapted(stories)
    few = documents.select(range(4))
    trainer = SFTTrainer(model, config(tmp_path), train_dataset=documents, eval_dataset=few, tokenizer=tokenizer)
    with pytest.raises(UnsupportedError, match=r"packed rows.*give it the documents"):
        trainer.predict(trainer.eval_dataset)
    predictions: Any = trainer.predict(few).predictions
    assert predictions.shape == (4, max(map(len, few["input_ids"])), model.config.vocab_size)


def test_a_step_without_labels_has_loss_zero_in_evaluation(stories: Path, tmp_path: Path, documents: Dataset) -> None:
    silent = Dataset.from_dict({"input_ids": [[5, 6, 7]], "labels": [[-100] * 3]})
    model, tokenizer = whole(stories)
    trainer = SFTTrainer(model, config(tmp_path), train_dataset=documents, eval_dataset=silent, tokenizer=tokenizer)
    assert trainer.evaluate()["eval_loss"] == 0.0


def test_tokenised_documents_without_a_label_are_left_out(stories: Path, tmp_path: Path, documents: Dataset) -> None:
    silent = {"input_ids": [5] * (ROW - 1), "labels": [7] + [-100] * (ROW - 2)}  # the first predicts nothing
    rows = [row for each in documents.to_list()[:8] for row in (each, silent)]
    model, tokenizer = adapted(stories)
    with pytest.warns(UserWarning, match="8 of 16 documents have no token to train"):
        trainer = SFTTrainer(model, config(tmp_path), train_dataset=Dataset.from_list(rows), tokenizer=tokenizer)
    assert trainer.train_dataset.documents.to_list() == documents.to_list()[:8]
    trainer.train()  # a step without a label would be stopped: all gradients are zero

    with pytest.raises(DataError, match="no document of the train data set has a token to train"):
        SFTTrainer(model, config(tmp_path), train_dataset=Dataset.from_list([silent]), tokenizer=tokenizer)


# ---- the watch over gradients ----


def test_a_dead_gradient_stops_the_second_step_by_name(stories: Path, documents: Dataset, tmp_path: Path) -> None:
    model, tokenizer = adapted(stories)
    name, dead = next((n, p) for n, p in model.named_parameters() if "layers.2.self_attn.v_proj.lora_B" in n)
    dead.register_hook(torch.zeros_like)
    trainer = SFTTrainer(model, config(tmp_path), train_dataset=documents, tokenizer=tokenizer)
    with pytest.raises(TrainingError, match=r"step 2: the gradient of 2 trainable tensors was exactly zero") as error:
        trainer.train()
    assert name in str(error.value) and name.replace("lora_B", "lora_A") in str(error.value)
    assert trainer.state.global_step == 1


def test_a_weight_of_zeros_is_named_beside_what_it_keeps_from_training(
    stories: Path, documents: Dataset, tmp_path: Path
) -> None:
    """As a checkpoint has it whose writing was cut short."""
    model, tokenizer = adapted(stories)
    model.get_submodule("base_model.model.model.layers.2.mlp.down_proj.base_layer").weight.data.zero_()
    model.get_submodule("base_model.model.model.layers.2.mlp.down_proj.lora_B.default").weight.requires_grad_(False)
    trainer = SFTTrainer(model, config(tmp_path), train_dataset=documents, tokenizer=tokenizer)
    with pytest.raises(TrainingError, match=r"exactly zero, and so is all of .*layers.2.mlp.down_proj.base"):
        trainer.train()


def test_a_tensor_outside_the_graph_is_dead_too(stories: Path, documents: Dataset, tmp_path: Path) -> None:
    model, tokenizer = adapted(stories)
    model.register_parameter("forgotten", torch.nn.Parameter(torch.ones(3)))
    trainer = SFTTrainer(model, config(tmp_path), train_dataset=documents, tokenizer=tokenizer)
    with pytest.raises(TrainingError, match=r"step 2.*exactly zero: forgotten"):
        trainer.train()


@pytest.mark.parametrize("warmup", [1, 3])
def test_warm_up_from_zero_raises_no_false_alarm(
    stories: Path, documents: Dataset, tmp_path: Path, warmup: int
) -> None:
    model, tokenizer = adapted(stories)
    args = config(tmp_path, warmup_steps=warmup, lr_scheduler_type="linear")
    trainer = SFTTrainer(model, args, train_dataset=documents, tokenizer=tokenizer)
    trainer.train()
    assert trainer.state.log_history[0]["learning_rate"] == 0.0 and len(losses(trainer)) == 4


def test_resuming_does_not_forget_that_weights_moved(stories: Path, documents: Dataset, tmp_path: Path) -> None:
    """A trained adapter has no excuse at its first step, but is not judged before weights move again."""
    model, tokenizer = adapted(stories)
    with torch.no_grad():
        for name, p in model.named_parameters():
            if "lora_B" in name:
                p.normal_(std=0.02)
    trainer = SFTTrainer(model, config(tmp_path, max_steps=2), train_dataset=documents, tokenizer=tokenizer)
    trainer.train()
    assert trainer.state.global_step == 2


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("clip", [0.0, 1.0])
def test_a_non_finite_gradient_stops_the_run_before_the_update(
    stories: Path, documents: Dataset, tmp_path: Path, bad: float, clip: float
) -> None:
    model, tokenizer = adapted(stories)
    calls: list[dict[str, Tensor]] = []
    victim = next(p for n, p in model.named_parameters() if "layers.1.mlp.down_proj.lora_B" in n)

    def poison(gradient: Tensor) -> Tensor:
        calls.append(trained(model))
        return torch.full_like(gradient, bad) if len(calls) == 3 else gradient

    victim.register_hook(poison)
    trainer = SFTTrainer(model, config(tmp_path, max_grad_norm=clip), train_dataset=documents, tokenizer=tokenizer)
    with pytest.raises(TrainingError, match=r"step 3: .* not finite") as error:
        trainer.train()
    assert len(calls) == 3
    assert "step 3: 1 gradients are not finite, first base_model.model.model.layers.1.mlp" in str(error.value)
    after = trained(model)
    assert all(torch.equal(after[name], value) for name, value in calls[-1].items())


@pytest.mark.matrix(1)
@pytest.mark.parametrize("most", [0.0, 0.5])
def test_norms_of_gradients_are_taken_once(
    stories: Path, documents: Dataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, most: float
) -> None:
    """Those that the watch takes are clipped by and logged: stock's don't run, clipping or not, and are the same."""

    def trained_once() -> tuple[list[float], dict[str, Tensor]]:
        model, tokenizer = adapted(stories)
        settings = config(tmp_path, max_steps=3, max_grad_norm=most)
        trainer = SFTTrainer(model, settings, train_dataset=documents, tokenizer=tokenizer)
        if ours:
            monkeypatch.setattr(trainer.accelerator, "clip_grad_norm_", refuse)
        trainer.train()
        return [entry["grad_norm"] for entry in trainer.state.log_history if "grad_norm" in entry], trained(model)

    def refuse(*_: Any) -> None:
        raise AssertionError("stock takes the norms again")

    ours = True
    found = trained_once()
    ours = False
    monkeypatch.setattr(GradientWatch, "clip", lambda *_: None)
    stock = trained_once()
    assert len(found[0]) == 3 and found[0] == pytest.approx(stock[0], rel=1e-6)
    assert_equal_weights(found[1], stock[1])


@pytest.mark.parametrize("packing", [False, True])
def test_a_model_without_routers_is_not_asked_for_their_logits(
    stories: Path, documents: Dataset, tmp_path: Path, packing: bool
) -> None:
    """TRL asks whatever has the field in its configuration, and leaves its answer there for who loads the result."""
    tiny_model("granitemoehybrid", vocab_size=512).save_pretrained(tmp_path / "model")
    transformers.AutoTokenizer.from_pretrained(stories).save_pretrained(tmp_path / "model")
    model, tokenizer = FastLanguageModel.from_pretrained(str(tmp_path / "model"), max_seq_length=ROW)
    model = FastLanguageModel.get_peft_model(model, r=4)
    settings = config(tmp_path / "out", max_steps=1, packing=packing)
    trainer = SFTTrainer(model, settings, train_dataset=documents, tokenizer=tokenizer)
    trainer.train()
    assert len(losses(trainer)) == 1 and not model.config.output_router_logits


@pytest.mark.parametrize("asked", [False, True])
def test_the_models_plan_decides_about_recompute(
    stories: Path, documents: Dataset, tmp_path: Path, asked: bool
) -> None:
    """SFTConfig's default would recompute a model that was told to keep its activations."""
    model, tokenizer = FastLanguageModel.from_pretrained(
        str(stories), max_seq_length=ROW, use_gradient_checkpointing=not asked
    )
    model = FastLanguageModel.get_peft_model(model, r=4, use_gradient_checkpointing=asked)  # the last one wins
    settings = config(tmp_path, max_steps=1, gradient_checkpointing=not asked)
    trainer = SFTTrainer(model, settings, train_dataset=documents, tokenizer=tokenizer)
    during: list[bool] = []  # transformers switches off what it switched on
    look = TrainerCallback()
    look.on_step_end = lambda *_, **__: during.append(recomputes_layers(model))  # type: ignore[method-assign]
    trainer.add_callback(look)
    trainer.train()
    assert recomputes_layers(model) is asked and during == [asked]


class _Watched:
    """Drives the watch as transformers' loop does, with a loss scaler."""

    def __init__(self, scaler: object | None) -> None:
        self.model = torch.nn.Linear(2, 2)
        inner = torch.optim.SGD(self.model.parameters(), lr=0.1)
        self.optimizer = SimpleNamespace(optimizer=inner, scaler=scaler)
        self.watch = GradientWatch()
        self.step = 0

    def __call__(self, weight: float, bias: float) -> None:
        self.model.weight.grad = torch.full((2, 2), weight)
        self.model.bias.grad = torch.full((2,), bias) if self.model.bias.requires_grad else None
        state = SimpleNamespace(global_step=self.step)
        self.watch.on_pre_optimizer_step(None, state, None, model=self.model, optimizer=self.optimizer)
        assert self.watch._norms is None, "gradients would be kept until the next step"
        self.step += 1


def test_an_overflow_of_scaled_float16_is_left_to_the_scaler() -> None:
    run = _Watched(scaler=object())
    run(float("nan"), 0.0)  # clipping by an infinite norm: nothing moves
    run(1.0, 0.0)  # so a zero is still excused
    run(float("nan"), 0.0)  # after movement the zero that clipping made is not a dead gradient
    run(1.0, 1.0)
    assert run.watch.skipped == 2
    with pytest.raises(TrainingError, match=r"step 5: .*: bias"):
        run(1.0, 0.0)


def test_a_learning_rate_of_zero_excuses_no_step_after_movement() -> None:
    run = _Watched(scaler=None)
    run(1.0, 1.0)
    run.optimizer.optimizer.param_groups[0]["lr"] = 0.0  # a schedule with restarts
    run(1.0, 1.0)
    with pytest.raises(TrainingError, match=r"step 3: .*: bias"):
        run(1.0, 0.0)


@pytest.mark.parametrize("full", [False, True])
def test_a_weight_that_was_loaded_broken_is_named(
    stories: Path, documents: Dataset, tmp_path: Path, full: bool
) -> None:
    """No learning rate fixes it."""
    model, tokenizer = adapted(stories)
    if full:
        model, _ = FastLanguageModel.from_pretrained(str(stories), max_seq_length=ROW, full_finetuning=True)
    name, weight = next((n, p) for n, p in model.named_parameters() if "layers.2.mlp.up_proj" in n)
    weight.data.view(-1)[5] = math.nan
    trainer = SFTTrainer(model, config(tmp_path), train_dataset=documents, tokenizer=tokenizer)
    with pytest.raises(TrainingError, match=f"step 1: .* the model's weight {re.escape(name)}: download or copy"):
        trainer.train()


def test_an_overflow_without_a_scaler_stops() -> None:
    run = _Watched(scaler=None)
    with pytest.raises(TrainingError, match="step 1: 1 gradients are not finite, first weight"):
        run(float("inf"), 1.0)


@pytest.mark.parametrize("most", [0.5, 100.0])
def test_the_watch_clips_as_torch_does(most: float) -> None:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(9, 5), torch.nn.Linear(5, 3))
    watch = GradientWatch()
    for parameter in model.parameters():
        parameter.grad = torch.randn_like(parameter)
    whole = {name: parameter.grad.clone() for name, parameter in model.named_parameters()}
    watch.observe(model)
    ours = watch.clip(most, model.parameters())
    clipped = {name: parameter.grad.clone() for name, parameter in model.named_parameters()}
    assert watch.clip(most, model.parameters()) is None, "the norms are of gradients that were clipped since"
    for name, parameter in model.named_parameters():
        parameter.grad = whole[name]
    assert ours == torch.nn.utils.clip_grad_norm_(model.parameters(), most)
    assert all(torch.equal(clipped[name], parameter.grad) for name, parameter in model.named_parameters())
    written = [parameter.grad._version for parameter in model.parameters()]
    watch.observe(model)
    assert watch.clip(float("inf"), model.parameters()) == torch.nn.utils.get_total_norm(
        [parameter.grad for parameter in model.parameters()]
    )
    assert [parameter.grad._version for parameter in model.parameters()] == written, "scaled by one"
    watch.observe(model)
    assert watch.clip(most, list(model.parameters())[1:]) is None, "another set is trained than was observed"
    model[0].weight.grad.mul_(2)
    assert watch.clip(most, model.parameters()) is None, "changed since"
    model[0].bias.grad = None
    watch.observe(model)
    assert watch.clip(most, model.parameters()) is None, "left to stock"


def test_the_watch_over_several_devices_leaves_clipping_to_stock() -> None:
    model = torch.nn.ModuleList([torch.nn.Linear(3, 2, device="meta"), torch.nn.Linear(3, 2)])
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    watch = GradientWatch()
    watch.observe(model)
    assert watch.clip(1.0, model.parameters()) is None and watch.clip(float("inf"), model.parameters()) is None
    model[0].weight.grad = model[1].weight.grad = None
    watch.observe(model)


def test_norms_of_16_bits_have_float32_s_range() -> None:
    finite = torch.full((300, 300), 300.0, dtype=torch.float16)
    norms = gradient_norms([finite, torch.ones(4), torch.zeros(2)], torch.device("cpu"))
    assert norms[0] == pytest.approx(9e4, rel=1e-3)
    assert gradient_flags(norms).tolist() == [[1, 1, 0], [0, 0, 0]]


def test_a_second_training_is_not_judged_by_the_first() -> None:
    """One that was interrupted leaves flags; and adapters put on since have the right to a first step."""
    run = _Watched(scaler=object())
    run(1.0, 1.0)
    run.model.bias.requires_grad_(False)
    run(1.0, 0.0)  # frozen since
    run.watch._pending = _Pending(["weight"], torch.ones(2, 1), None, scaled=False, moves=True, step=2)
    begin = SimpleNamespace(log_history=[])
    run.watch.on_train_begin(None, begin, None)
    run.watch._trained = [("weight", run.model.weight)]  # all that this training had
    run(1.0, 0.0)
    run.watch.on_train_begin(None, begin, None)
    run.model.bias.requires_grad_(True)
    run(1.0, 0.0)
    with pytest.raises(TrainingError, match=r"step 5: .*: bias"):
        run(1.0, 0.0)


def test_skipped_steps_are_those_of_one_training() -> None:
    """A training begun anew counts from zero, a resumed one goes on from its log."""
    run = _Watched(scaler=object())
    run(float("nan"), 0.0)
    assert run.watch.skipped == 1
    logged = [{"loss": 1.0, "skipped_steps": 1}, {"loss": 1.0, "skipped_steps": 2}, {"eval_loss": 1.0}]
    for history, skipped in ((logged, 2), ([], 0)):
        run.watch.on_train_begin(None, SimpleNamespace(log_history=history), None)
        assert run.watch.skipped == skipped


# ---- several GPUs ----


def test_one_process_with_two_gpus_trains_on_the_first_and_is_told(
    stories: Path, documents: Dataset, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model, tokenizer = adapted(stories)
    args = config(tmp_path, max_steps=1)
    args._n_gpu = 2
    trainer = SFTTrainer(model, args, train_dataset=documents, tokenizer=tokenizer)
    trainer.train()
    assert trainer.state.global_step == 1 and "sees 2 GPUs and trains on the first" in caplog.text
    assert "torchrun --nproc-per-node 2 SCRIPT.py" in caplog.text


@pytest.mark.parametrize("way", ["arguments", "environment"])
def test_sharded_training_is_refused(
    stories: Path, documents: Dataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, way: str
) -> None:
    model, tokenizer = adapted(stories)
    args = config(tmp_path)
    if way == "arguments":
        args.fsdp = True
    else:
        monkeypatch.setenv("ACCELERATE_USE_FSDP", "true")
    with pytest.raises(UnsupportedError, match="FSDP is switched on"):
        SFTTrainer(model, args, train_dataset=documents, tokenizer=tokenizer)


# ---- checkpoints ----


def full_disk(*_: Any, **__: Any) -> None:
    raise OSError(errno.ENOSPC, "No space left on device")


def full_disk_to_safetensors(*_: Any, **__: Any) -> None:
    raise SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)")


def full_disk_to_torch(*_: Any, **__: Any) -> None:
    raise RuntimeError("[enforce fail at inline_container.cc:672] . unexpected pos 64 vs 0")


def too_large_for_safetensors(*_: Any, **__: Any) -> None:
    raise SafetensorError("Error while serializing: I/O error: File too large (os error 27)")


def ctrl_c(*_: Any, **__: Any) -> None:
    raise KeyboardInterrupt


@pytest.mark.matrix(1)
@pytest.mark.parametrize("where", ["optimizer", "weights"])
@pytest.mark.parametrize(
    ("failure", "free", "raised"),
    [
        (full_disk, 2**30, TrainingError),
        (full_disk_to_safetensors, 2**30, TrainingError),
        (full_disk_to_torch, 0, TrainingError),
        (full_disk_to_torch, 2**30, TrainingError),
        (too_large_for_safetensors, 2**30, TrainingError),
        (ctrl_c, 2**30, KeyboardInterrupt),
    ],
)
def test_a_save_that_fails_midway_leaves_earlier_checkpoints_whole(
    stories: Path,
    documents: Dataset,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    where: str,
    failure: Callable[..., None],
    free: int,
    raised: type[BaseException],
) -> None:
    model, tokenizer = adapted(stories)
    args = config(tmp_path / "run", save_strategy="steps", save_steps=1, save_total_limit=1)
    trainer = SFTTrainer(model, args, train_dataset=documents, tokenizer=tokenizer)
    save = trainer._save_checkpoint

    def second_fails(*args: Any, **kwargs: Any) -> None:
        if trainer.state.global_step == 2:
            monkeypatch.setattr("shutil.disk_usage", lambda folder: SimpleNamespace(free=free))
            if where == "optimizer":
                monkeypatch.setattr(torch, "save", failure)
            else:
                monkeypatch.setattr(model, "save_pretrained", failure)
        save(*args, **kwargs)

    trainer._save_checkpoint = second_fails
    with pytest.raises(raised) as error:
        trainer.train()
    monkeypatch.undo()
    assert error.type is raised
    assert [p.name for p in (tmp_path / "run").iterdir() if p.is_dir()] == ["checkpoint-1"]
    model_2, _ = adapted(stories)
    again = SFTTrainer(model_2, args, train_dataset=documents, tokenizer=tokenizer)
    again.train(resume_from_checkpoint=str(tmp_path / "run" / "checkpoint-1"))
    assert again.state.global_step == 4


def test_an_earlier_checkpoint_of_the_same_name_survives_a_failed_save(
    stories: Path, documents: Dataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A second run in the same folder must not destroy the first one's checkpoint of the same step."""
    args = config(tmp_path / "run", max_steps=1, save_strategy="steps", save_steps=1)
    for attempt in range(2):
        model, tokenizer = adapted(stories)
        trainer = SFTTrainer(model, args, train_dataset=documents, tokenizer=tokenizer)
        if attempt == 0:
            trainer.train()
            before = {p.name: p.read_bytes() for p in (tmp_path / "run" / "checkpoint-1").iterdir()}
            assert "adapter_model.safetensors" in before
            continue
        monkeypatch.setattr(torch, "save", full_disk)
        with pytest.raises(TrainingError, match="checkpoint-1 is full"):
            trainer.train()
        monkeypatch.undo()
    folder = tmp_path / "run" / "checkpoint-1"
    assert folder.is_dir() and {p.name: p.read_bytes() for p in folder.iterdir()} == before


def test_a_script_resumes_from_what_its_manifest_says_or_from_a_stock_checkpoint_without_one(
    stories: Path, documents: Dataset, tmp_path: Path
) -> None:
    args = config(tmp_path, max_steps=2, save_strategy="steps", save_steps=1)
    model, tokenizer = adapted(stories)
    SFTTrainer(model, args, train_dataset=documents, tokenizer=tokenizer).train()
    folder = tmp_path / "checkpoint-1"
    content = bytearray((folder / "optimizer.pt").read_bytes())
    content[len(content) // 2] ^= 1
    again = SFTTrainer(adapted(stories)[0], args, train_dataset=documents, tokenizer=tokenizer)
    whole = (folder / "optimizer.pt").read_bytes()
    (folder / "optimizer.pt").write_bytes(content)
    with pytest.raises(DataError, match=r"optimizer\.pt: its contents changed"):
        again.train(resume_from_checkpoint=str(folder))
    (folder / "optimizer.pt").write_bytes(whole)
    (folder / "manifest.json").unlink()
    again.train(resume_from_checkpoint=str(folder))
    assert again.state.global_step == 2


@pytest.mark.matrix(2)
@pytest.mark.parametrize("limit", [None, 0, -1, 3])
def test_no_limit_of_checkpoints_deletes_none(
    stories: Path, documents: Dataset, tmp_path: Path, limit: int | None
) -> None:
    """transformers takes every limit below 1 for none; nor does one that isn't reached."""
    model, tokenizer = adapted(stories)
    args = config(tmp_path / "run", max_steps=2, save_strategy="steps", save_steps=1, save_total_limit=limit)
    SFTTrainer(model, args, train_dataset=documents, tokenizer=tokenizer).train()
    assert [path.name for path in checkpoints(tmp_path / "run")] == ["checkpoint-1", "checkpoint-2"]


def test_a_training_begun_anew_keeps_its_own_checkpoints(stories: Path, documents: Dataset, tmp_path: Path) -> None:
    """In the folder of a longer one: what is kept is what was written last, not what has the most steps."""
    for steps, every, kept in ((6, 3, [3, 6]), (2, 1, [1, 2])):
        model, tokenizer = adapted(stories)
        args = config(tmp_path / "run", max_steps=steps, save_strategy="steps", save_steps=every, save_total_limit=2)
        SFTTrainer(model, args, train_dataset=documents, tokenizer=tokenizer).train()
        assert [path.name for path in checkpoints(tmp_path / "run")] == [f"checkpoint-{step}" for step in kept]


def test_a_clock_that_was_set_back_costs_no_new_checkpoint(tmp_path: Path) -> None:
    for step, seconds in ((10, 900), (20, 1000), (30, 500)):
        (tmp_path / f"checkpoint-{step}").mkdir()
        os.utime(tmp_path / f"checkpoint-{step}", (seconds, seconds))
    keep_newest(tmp_path, 1, "checkpoint-30")
    assert [path.name for path in checkpoints(tmp_path)] == ["checkpoint-20", "checkpoint-30"]


@pytest.mark.parametrize("limit", [None, 0, 1, 2, 3, 9])
def test_as_many_checkpoints_stay_as_transformers_keeps(tmp_path: Path, limit: int | None) -> None:
    for best in (1, 3, 5):
        for folder in ("ours", "theirs"):
            for step in range(1, 6):
                (tmp_path / folder / f"checkpoint-{step}").mkdir(parents=True, exist_ok=True)
                os.utime(tmp_path / folder / f"checkpoint-{step}", (step, step))
        keep_newest(tmp_path / "ours", limit, "checkpoint-5", f"checkpoint-{best}", among=True)
        theirs = tmp_path / "theirs"
        rotate_checkpoints(str(theirs), limit, str(theirs / f"checkpoint-{best}"), use_mtime=True)
        ours = [path.name for path in checkpoints(tmp_path / "ours")]
        assert ours == [path.name for path in checkpoints(theirs)], (best, ours)


def test_the_best_checkpoint_is_one_of_the_limit(
    stories: Path, documents: Dataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a script; beside the newest of a recipe's there is another to go on from."""
    for keep, kept in ((None, [1, 4]), (2, [1, 3, 4])):
        evaluations = iter([2.0, 2.5, 2.4, 2.6])
        monkeypatch.setattr("pronghorn.train.evaluating.heldout_loss", lambda *args, e=evaluations: next(e))
        model, tokenizer = adapted(stories)
        args = config(tmp_path / str(keep), save_strategy="steps", save_steps=1, save_total_limit=2,
                      eval_strategy="steps", eval_steps=1, load_best_model_at_end=True)  # fmt: skip
        trainer = SFTTrainer(model, args, train_dataset=documents, eval_dataset=documents, tokenizer=tokenizer)
        trainer.keep = keep
        trainer.train()
        assert [path.name for path in checkpoints(tmp_path / str(keep))] == [f"checkpoint-{step}" for step in kept]


@pytest.mark.parametrize("moved", [False, True])
def test_the_best_checkpoint_stays_known(
    stories: Path, documents: Dataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, moved: bool
) -> None:
    """Where a better step was not saved, and where the run goes on in another folder."""
    evaluations = iter([3.0, 2.5, 2.6, 2.7] if moved else [3.0, 2.5, 2.4, 2.6])
    monkeypatch.setattr("pronghorn.train.evaluating.heldout_loss", lambda *args: next(evaluations))

    def trainer(folder: str, steps: int) -> SFTTrainer:
        model, tokenizer = adapted(stories)
        args = config(tmp_path / folder, max_steps=steps, save_strategy="steps", save_steps=2, save_total_limit=1,
                      eval_strategy="steps", eval_steps=1, load_best_model_at_end=True,
                      metric_for_best_model="eval_loss", greater_is_better=False)  # fmt: skip
        return SFTTrainer(model, args, train_dataset=documents, eval_dataset=documents, tokenizer=tokenizer)

    best = tmp_path / "run" / "checkpoint-2"
    last = trainer("run", 2 if moved else 4)
    last.train()
    if moved:
        last = trainer("other", 4)
        last.train(resume_from_checkpoint=str(best))
    assert last.state.best_model_checkpoint == str(best) and best.is_dir()
    saved = load_file(best / "adapter_model.safetensors")
    ours = {name.replace(".default", ""): value for name, value in trained(last.model).items()}
    assert_equal_weights(ours, saved, rel=0.0)


def test_the_best_checkpoint_is_named_where_it_is(tmp_path: Path) -> None:
    """In a run's folder that was moved; what is nowhere isn't named."""
    state = SimpleNamespace(best_global_step=2)
    for expected in (tmp_path / "checkpoint-2", None):
        if expected is not None:
            expected.mkdir()
        state.best_model_checkpoint = str(tmp_path / "before" / "checkpoint-2")
        name_best(state, tmp_path, "checkpoint-4")
        assert state.best_model_checkpoint == (expected and str(expected))
        if expected is not None:
            expected.rmdir()


@pytest.mark.parametrize("steps", [3, 2])
def test_a_training_that_is_done_is_not_trained_on(
    stories: Path, documents: Dataset, tmp_path: Path, steps: int
) -> None:
    """Transformers trains a step more, each time, where the last one isn't at an epoch's end."""
    first, again = adapted(stories), adapted(stories, random_state=9)
    SFTTrainer(
        first[0], config(tmp_path, save_strategy="steps", max_steps=3), train_dataset=documents, tokenizer=first[1]
    ).train()
    args = config(tmp_path, save_strategy="steps", max_steps=steps)
    trainer, told = SFTTrainer(again[0], args, train_dataset=documents, tokenizer=again[1]), list[str]()
    trainer.note = told.append
    trainer.train(resume_from_checkpoint=True)
    assert trainer.state.global_step == 3 and len(losses(trainer)) == 3
    assert_equal_weights(trained(again[0]), trained(first[0]), rel=0.0)
    assert [path.name for path in tmp_path.glob("checkpoint-*")] == ["checkpoint-3"]
    assert told == [f"nothing is left to train: 3 steps are done, and the training has {steps}"]


def test_resuming_continues_the_trajectory(stories: Path, documents: Dataset, tmp_path: Path) -> None:
    straight, resumed = adapted(stories), adapted(stories, random_state=9)
    args = config(tmp_path / "run", save_strategy="steps", save_steps=2, lr_scheduler_type="cosine")
    first = SFTTrainer(straight[0], args, train_dataset=documents, tokenizer=straight[1])
    first.train()
    second = SFTTrainer(resumed[0], args, train_dataset=documents, tokenizer=resumed[1])
    second.train(resume_from_checkpoint=str(tmp_path / "run" / "checkpoint-2"))
    assert losses(second)[-2:] == losses(first)[-2:]
    assert_equal_weights(trained(resumed[0]), trained(straight[0]), rel=0.0)


@pytest.mark.parametrize("shards", ["50GB", "20KB"])
def test_experts_that_are_saved_apart_go_on(
    stories: Path, documents: Dataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, shards: str
) -> None:
    """transformers joins experts when it loads a model, but not when it loads a checkpoint: they were the base's."""
    evaluations = iter([3.0, 4.0, 2.0])
    monkeypatch.setattr("pronghorn.train.evaluating.heldout_loss", lambda *args: next(evaluations))
    tokenizer = transformers.AutoTokenizer.from_pretrained(stories)
    args = config(tmp_path / "run", save_strategy="steps", save_steps=2, eval_strategy="steps", eval_steps=2,
                  load_best_model_at_end=True, metric_for_best_model="eval_loss", greater_is_better=False)  # fmt: skip

    def trainer(seed: int) -> SFTTrainer:
        model = attach(tiny_model("qwen3_moe", seed=seed, vocab_size=512)).model
        save = partial(type(model).save_pretrained, model, max_shard_size=shards)
        monkeypatch.setattr(model, "save_pretrained", save, raising=False)
        return SFTTrainer(model, args, train_dataset=documents, eval_dataset=documents, tokenizer=tokenizer)

    first, second = trainer(0), trainer(9)
    first.train()
    best = tmp_path / "run" / "checkpoint-2"
    assert (best / "model.safetensors.index.json").exists() == (shards != "50GB")
    assert first.state.best_model_checkpoint == str(best)
    second.load_weights(best)
    assert_equal_weights(trained(second.model), trained(first.model), rel=0.0)
    second.train(resume_from_checkpoint=str(best))
    assert losses(second)[-2:] == losses(first)[-2:]


# ---- refusals ----


@pytest.mark.parametrize(
    ("changes", "given", "message"),
    [
        ({"loss_type": "dft"}, {}, "loss_type = 'dft'"),
        ({"label_smoothing_factor": 0.1}, {}, "label_smoothing_factor = 0.1"),
        ({"auto_find_batch_size": True}, {}, "auto_find_batch_size = True"),
        ({}, {"data_collator": len}, "data_collator = "),
        ({}, {"compute_loss_func": len}, "compute_loss_func = "),
        ({}, {"compute_metrics": len}, "compute_metrics over packed rows, which have no logits: set eval_packing=Fal"),
        ({"metric_for_best_model": "eval_mean_token_accuracy"}, {}, "'eval_mean_token_accuracy', which .*: use 'loss'"),
        ({"packing_strategy": "wrapped"}, {}, "packing_strategy = 'wrapped'"),
        ({"dataset_kwargs": {"skip_prepare_dataset": True}}, {}, "skip_prepare_dataset = True"),
    ],
)
def test_what_the_packed_trainer_does_not_serve_is_refused(
    stories: Path, documents: Dataset, tmp_path: Path, changes: dict[str, Any], given: dict[str, Any], message: str
) -> None:
    model, tokenizer = adapted(stories)
    with pytest.raises(UnsupportedError, match=message):
        SFTTrainer(model, config(tmp_path, **changes), train_dataset=documents, tokenizer=tokenizer, **given)


@pytest.mark.parametrize("wrapped", [False, True])
def test_virtual_tokens_are_refused_before_packed_rows_only(
    stories: Path, documents: Dataset, tmp_path: Path, wrapped: bool
) -> None:
    model, tokenizer = FastLanguageModel.from_pretrained(str(stories), max_seq_length=512)
    virtual = PromptTuningConfig("CAUSAL_LM", num_virtual_tokens=4)
    adapters: dict[str, Any] = {} if wrapped else {"peft_config": virtual}
    model = get_peft_model(model, virtual) if wrapped else model
    data = {"train_dataset": documents, "tokenizer": tokenizer}
    with pytest.raises(UnsupportedError, match=r"PROMPT_TUNING puts virtual tokens .*: set packing=False"):
        SFTTrainer(model, config(tmp_path), **data, **adapters)
    padded = SFTTrainer(model, config(tmp_path, packing=False, max_steps=1), **data, **adapters)
    padded.train()
    assert losses(padded)[0] > 0


@pytest.mark.parametrize("packing", [False, True])
def test_tokens_that_the_model_lacks_are_refused(
    stories: Path, documents: Dataset, tmp_path: Path, packing: bool
) -> None:
    """Tokens that only the tokenizer knows, where documents have them; and what they say to do helps."""
    model, tokenizer = FastLanguageModel.from_pretrained(str(stories), max_seq_length=512)
    tokenizer.add_tokens(["<note>"])
    tagged = Dataset.from_dict({"text": ["Once upon a time.", "<note>A cat sat."] * 4})
    args = config(tmp_path, packing=packing, max_steps=1)
    lora = LoraConfig(r=2, target_modules=["q_proj"], modules_to_save=["embed_tokens", "lm_head"])
    given: dict[str, Any] = {"tokenizer": tokenizer, "peft_config": lora}
    remedy = r"resize_token_embeddings\(len\(tokenizer\)\) .*modules_to_save"
    with pytest.raises(DataError, match=f"train_dataset holds the token '<note>' of id 512, .* 512 tokens: .*{remedy}"):
        SFTTrainer(model, args, train_dataset=tagged, **given)
    model, _ = FastLanguageModel.from_pretrained(str(stories), max_seq_length=512)
    with pytest.raises(DataError, match="eval_dataset holds the token '<note>'"):
        SFTTrainer(model, args, train_dataset=documents, eval_dataset={"one": documents, "two": tagged}, **given)
    model, _ = FastLanguageModel.from_pretrained(str(stories), max_seq_length=512)
    model.resize_token_embeddings(len(tokenizer))
    SFTTrainer(model, args, train_dataset=tagged, **given).train()


@pytest.mark.parametrize("packing", [False, True])
def test_padding_that_the_model_lacks_is_another_token(
    stories: Path, documents: Dataset, tmp_path: Path, packing: bool
) -> None:
    """Nothing attends to it, so the losses are those of any."""
    found = []
    for pad in ("[PAD]", None):
        model, tokenizer = adapted(stories)
        tokenizer.add_special_tokens({"pad_token": pad or tokenizer.eos_token})
        trainer = SFTTrainer(
            model, config(tmp_path, packing=packing, max_steps=1), train_dataset=documents, tokenizer=tokenizer
        )
        trainer.train()
        found.append(losses(trainer))
    assert found[0] == found[1] and found[0]


def test_arguments_are_as_they_were_after_an_error(stories: Path, documents: Dataset, tmp_path: Path) -> None:
    """What a notebook fixes and tries again still packs."""
    model, tokenizer = adapted(stories)
    args = config(tmp_path, eval_packing=False)
    with pytest.raises(KeyError):
        SFTTrainer(
            model,
            args,
            train_dataset=Dataset.from_dict({"story": ["once"]}),
            tokenizer=tokenizer,
            formatting_func=lambda row: row["tale"],
        )
    assert args.packing is True and args.eval_packing is False
    with pytest.raises(ConfigError, match=r"args is a TrainingArguments: give a trl\.SFTConfig"):
        other = TrainingArguments(output_dir=str(tmp_path), use_cpu=True)
        SFTTrainer(model, other, train_dataset=documents, tokenizer=tokenizer)


def test_padding_to_a_multiple(stories: Path, documents: Dataset, tmp_path: Path) -> None:
    model, tokenizer = adapted(stories)
    args = config(tmp_path, packing=False, pad_to_multiple_of=64)
    trainer = SFTTrainer(model, args, train_dataset=documents, tokenizer=tokenizer)
    assert all(batch["input_ids"].shape[1] % 64 == 0 for batch in trainer.get_train_dataloader())


def test_empty_and_streamed_datasets_are_refused(stories: Path, documents: Dataset, tmp_path: Path) -> None:
    model, tokenizer = adapted(stories)
    with pytest.raises(DataError, match="train_dataset is empty"):
        SFTTrainer(model, config(tmp_path), train_dataset=documents.select([]), tokenizer=tokenizer)
    with pytest.raises(DataError, match="eval_dataset is empty"):
        held_out = {"a": documents, "b": documents.select([])}
        SFTTrainer(model, config(tmp_path), train_dataset=documents, eval_dataset=held_out, tokenizer=tokenizer)
    with pytest.raises(UnsupportedError, match="train_dataset is streamed"):
        SFTTrainer(model, config(tmp_path), train_dataset=documents.to_iterable_dataset(), tokenizer=tokenizer)
    streamed = documents.to_iterable_dataset()
    with pytest.raises(UnsupportedError, match=r"eval_dataset is streamed.*or set eval_packing=False"):
        SFTTrainer(model, config(tmp_path), train_dataset=documents, eval_dataset=streamed, tokenizer=tokenizer)
    args = config(tmp_path, eval_packing=False)
    trainer = SFTTrainer(model, args, train_dataset=documents, eval_dataset=streamed, tokenizer=tokenizer)
    assert trainer.evaluate()["eval_loss"] > 0


@pytest.mark.parametrize("packing", [True, False])
def test_data_that_truncation_leaves_no_label_are_refused(stories: Path, tmp_path: Path, packing: bool) -> None:
    """TRL drops them one by one: a training of no steps would end well."""
    rows = [Dataset.from_list([{"prompt": "Once upon a time " * n, "completion": "there was."}] * 3) for n in (1, 90)]
    model, tokenizer = adapted(stories)
    args = config(tmp_path, packing=packing)
    with pytest.raises(DataError, match="no document of the train data set has a token to train among"):
        SFTTrainer(model, args, train_dataset=rows[1], tokenizer=tokenizer)
    with pytest.raises(DataError, match="no document of the eval data set"):
        SFTTrainer(model, args, train_dataset=rows[0], eval_dataset=rows[1], tokenizer=tokenizer)
    args = config(tmp_path, packing=packing, max_length=1)  # a document's first token is never trained
    with pytest.raises(DataError, match="no document of the train data set has a token to train among its first 1"):
        SFTTrainer(model, args, train_dataset=Dataset.from_list([{"text": "One day"}] * 3), tokenizer=tokenizer)


@pytest.mark.parametrize("packing", [True, False])
def test_what_collates_can_be_sent_to_another_process(
    stories: Path, documents: Dataset, tmp_path: Path, packing: bool
) -> None:
    """As a loader's workers need where they aren't forked, by default from Python 3.14 on."""
    model, tokenizer = adapted(stories)
    trainer = SFTTrainer(model, config(tmp_path, packing=packing), train_dataset=documents, tokenizer=tokenizer)
    rows = [trainer.train_dataset[0]]
    ours, sent = trainer.data_collator(rows), pickle.loads(pickle.dumps(trainer.data_collator))(rows)
    assert ours.keys() == sent.keys() and torch.equal(ours["labels"], sent["labels"])


def test_without_arguments_rows_are_the_models(
    stories: Path, documents: Dataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """TRL's own default, 1024, would be over what the model was loaded for."""

    monkeypatch.chdir(tmp_path)
    model, tokenizer = adapted(stories)
    trainer = SFTTrainer(model, train_dataset=documents, tokenizer=tokenizer)
    assert trainer.args.max_length == ROW


def test_a_model_made_anew_for_each_training_is_refused(stories: Path, tmp_path: Path) -> None:
    model, tokenizer = adapted(stories)
    given: dict[str, Any] = {"train_dataset": Dataset.from_list([{"text": "One day."}]), "tokenizer": tokenizer}
    with pytest.raises(UnsupportedError, match="model_init") as caught:
        SFTTrainer(None, config(tmp_path), model_init=lambda: model, **given)
    assert "a trainer for each trial" in caught.value.remedy
    for packing in (True, False):
        trainer = SFTTrainer(model, config(tmp_path, packing=packing), **given)
        trainer.model_init = lambda: adapted(stories)[0]
        with pytest.raises(UnsupportedError, match="model_init"):
            trainer.train()


def test_row_lengths(stories: Path, documents: Dataset, tmp_path: Path) -> None:
    model, tokenizer = adapted(stories)
    with pytest.raises(ConfigError, match="max_length 129 > 128, the model's max_seq_length"):
        SFTTrainer(model, config(tmp_path, max_length=129), train_dataset=documents, tokenizer=tokenizer)
    trainer = SFTTrainer(model, config(tmp_path, max_length=None), train_dataset=documents, tokenizer=tokenizer)
    assert next(iter(trainer.get_train_dataloader()))["input_ids"].shape == (1, ROW)
    with pytest.raises(DataError, match="> row length 16: raise max_length in SFTConfig"):
        SFTTrainer(model, config(tmp_path, max_length=16), train_dataset=documents, tokenizer=tokenizer)
    with pytest.raises(UnsupportedError, match="given by name"):
        SFTTrainer(str(stories), config(tmp_path), train_dataset=documents)
    del model.max_seq_length, model.get_base_model().max_seq_length
    with pytest.raises(ConfigError, match="packing without a row length"):
        SFTTrainer(model, config(tmp_path, max_length=None), train_dataset=documents, tokenizer=tokenizer)


def test_an_unattached_model_is_attached_by_the_trainer(stories: Path, documents: Dataset, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(stories)
    args = config(tmp_path, max_steps=2)
    trainer = SFTTrainer(model, args, train_dataset=documents, processing_class=AutoTokenizer.from_pretrained(stories))
    trainer.train()
    assert attached(model) is not None and len(losses(trainer)) == 2


def test_packed_rows_need_a_model_that_is_still_attached(stories: Path, documents: Dataset, tmp_path: Path) -> None:
    model, tokenizer = whole(stories)
    args = config(tmp_path, max_steps=2)
    trainer = SFTTrainer(model, args, train_dataset=documents, eval_dataset=documents, tokenizer=tokenizer)
    before = trainer.evaluate()["eval_loss"]
    attach(model).detach()
    for method in (trainer.train, trainer.evaluate):
        with pytest.raises(ConfigError, match=r"was detached after its trainer was made.*attach\(model\) again"):
            method()
    attach(model)
    assert trainer.evaluate()["eval_loss"] == before
    trainer.train()
    assert len(losses(trainer)) == 2


@pytest.mark.parametrize("before", [True, False])
def test_a_model_is_attached_where_the_trainer_brings_it(before: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_model("llama")
    if before:
        attach(model)
    args: Any = SimpleNamespace(place_model_on_device=None, device=torch.device("cuda"))
    cuda = property(lambda tensor: True)
    monkeypatch.setattr(model, "to", lambda device: monkeypatch.setattr(torch.Tensor, "is_cuda", cuda))
    handle = attached_on_its_device(model, args)
    monkeypatch.undo()
    assert handle is attached(model) and handle.fuses
    args.place_model_on_device = False
    assert attached_on_its_device(model, args) is handle
    args.place_model_on_device = None
    monkeypatch.setattr(model, "to", lambda device: pytest.fail("moved"))
    for place, name in ((args, "deepspeed"), (model, "hf_device_map"), (model, "is_quantized")):
        with monkeypatch.context() as patch:
            patch.setattr(place, name, True, raising=False)
            assert attached_on_its_device(model, args) is handle


def test_checkpointing_asked_of_the_model_is_kept(stories: Path, documents: Dataset, tmp_path: Path) -> None:
    """The trajectory is the same whether layers are recomputed or not."""
    found = []
    for recompute in (False, True):
        model, tokenizer = adapted(stories)
        args = config(tmp_path, max_steps=3, gradient_checkpointing=recompute)
        trainer = SFTTrainer(model, args, train_dataset=documents, tokenizer=tokenizer)
        trainer.train()
        found.append(losses(trainer))
    assert found[0] == pytest.approx(found[1], rel=1e-6)


def test_adapters_of_a_4_bit_base_stay_float32(stories: Path, documents: Dataset, tmp_path: Path) -> None:
    """TRL's constructor would round them to bfloat16."""
    model, tokenizer = FastLanguageModel.from_pretrained(
        str(stories), max_seq_length=ROW, load_in_4bit=True, use_gradient_checkpointing=False
    )
    model = FastLanguageModel.get_peft_model(model, r=4, target_modules=LINEARS)
    before = trained(model)
    trainer = SFTTrainer(model, config(tmp_path, max_steps=1), train_dataset=documents, tokenizer=tokenizer)
    assert all(torch.equal(value, before[name]) for name, value in trained(trainer.model).items())
    assert {value.dtype for value in before.values()} == {torch.float32}
    trainer.train()
    base = FastLanguageModel.from_pretrained(str(stories), max_seq_length=ROW, load_in_4bit=True)[0]
    lora = LoraConfig(r=4, target_modules=LINEARS)
    args = config(tmp_path)
    trainer = SFTTrainer(base, args, train_dataset=documents, tokenizer=tokenizer, peft_config=lora)
    assert {value.dtype for value in trained(trainer.model).values()} == {torch.float32}
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.data = parameter.data.bfloat16()  # somebody's own choice
    trainer = SFTTrainer(model, config(tmp_path), train_dataset=documents, tokenizer=tokenizer)
    assert {value.dtype for value in trained(trainer.model).values()} == {torch.bfloat16}


def test_whole_16_bit_models_are_not_trained(stories: Path, documents: Dataset, tmp_path: Path) -> None:
    model, tokenizer = FastLanguageModel.from_pretrained(str(stories), max_seq_length=ROW, dtype="bf16")
    with pytest.raises(ConfigError, match=r"every weight is trained in torch\.bfloat16"):
        SFTTrainer(model, config(tmp_path), train_dataset=documents, tokenizer=tokenizer)
    with pytest.raises(ConfigError, match="full_finetuning with dtype bf16"):
        FastLanguageModel.from_pretrained(str(stories), max_seq_length=ROW, dtype="bf16", full_finetuning=True)
    for dtype in ("fp32", "float32", torch.float32, "auto", None):
        model, _ = FastLanguageModel.from_pretrained(
            str(stories), max_seq_length=ROW, dtype=dtype, full_finetuning=True
        )
        assert model.dtype is torch.float32


def test_a_model_from_nowhere_without_a_tokenizer_is_refused(tmp_path: Path) -> None:
    data = Dataset.from_list([{"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}])
    with pytest.raises(ConfigError, match="given no tokenizer, and the model doesn't say where it was loaded from"):
        SFTTrainer(tiny_model("llama"), config(tmp_path), train_dataset=data)
