"""Bases, computes and features together, as the table in docs/precision.md says: each cell is tried here.

A feature is a function of a setting that returns what the table says: "yes"; "falls: why" where layers are
transformers' and PEFT's in the model's dtype instead, or "in part: why" where some blocks are; "refused: why". First it
checks the numbers.
"""

from __future__ import annotations

import importlib
import json
import re
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from safetensors.torch import load

from pronghorn.config.recipe import Recipe
from pronghorn.errors import PronghornError
from pronghorn.export import merge
from pronghorn.memory.plan import Plan, Policy
from pronghorn.models.attach import attach
from pronghorn.parity.distance import relative_error
from support.documents import LENGTHS, ROW, gradients
from support.fused import loss_and_gradients, with_adapters
from support.tiny import in_4_bits, packed_row, tiny_model

DOCUMENT = Path(__file__).parents[2] / "docs" / "precision.md"
SIZES = {"intermediate_size": 128}  # 4-bit blocks end with the rows
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "float32": torch.float32, "NF4": torch.bfloat16}


class Setting(NamedTuple):
    """A column of the table."""

    base: str
    compute: str

    @property
    def in_8_bits(self) -> bool:
        return self.compute != "dtype"

    def products_in_8_bits(self, handle: Any) -> int:
        """How many of the products that are computed here are asked to be in 8 bits."""
        return len(handle.layers.linears()) if self.in_8_bits else 0

    def bare(self, family: str = "qwen3", **sizes: Any) -> Any:
        """A tiny model over this base."""
        model = tiny_model(family, **SIZES, **sizes).to(DTYPES[self.base])
        return in_4_bits(model) if self.base == "NF4" else model

    def adapted(self, **lora: Any) -> Any:
        """The same with adapters."""
        return with_adapters(self.bare(), **lora)

    def attach(self, model: Any, policy: Policy = Policy.KEEP, **options: Any) -> Any:
        """Attach it with this compute."""
        return attach(model, Plan((policy,)), **{"layers": "fused", "compute": self.compute, **options})


BATCH = packed_row(LENGTHS, ROW)


def step(setting: Setting, model: Any, policy: Policy = Policy.KEEP) -> str:
    """Take a step, and compare loss and every gradient with those of transformers' and PEFT's own layers."""
    handle = setting.attach(model, policy)
    loss, ours = loss_and_gradients(model, BATCH)
    reason, (in_8_bits, products) = handle.layers.reason(None), handle.layers.in_8_bits()
    told = [path for path in handle.report if path.part == "products of frozen weights"]
    assert len(told) == setting.in_8_bits
    assert in_8_bits == setting.products_in_8_bits(handle)
    if reason is None:
        assert products
        assert not told or told[0].path.startswith("8-bit integers" if setting.compute == "int8" else "FP8 by rows")
    elif told:
        assert told[0].path.startswith("the model's dtype in blocks that aren't fused") and told[0].why == reason
    attach(model, Plan.keep(), layers="stock")
    right, theirs = loss_and_gradients(model, BATCH)
    eight = in_8_bits > 0
    assert loss == pytest.approx(right, rel=0.05 if eight else 0.01)
    least = 0.9 if eight else 0.99999 if setting.base == "float32" else 0.99
    for name, gradient in ours.items():
        cosine = torch.nn.functional.cosine_similarity(gradient.double().flatten(), theirs[name].double().flatten(), 0)
        assert cosine > least or not gradient.any(), (name, cosine)
    return "yes" if reason is None else f"{'in part' if products else 'falls'}: {reason}"


def peft_step(setting: Setting, config: Any) -> str:
    """Take a step with an adapter of PEFT's."""
    from peft import get_peft_model

    model = get_peft_model(setting.bare(), config).train()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.requires_grad and "magnitude" not in name and not parameter.any():
                parameter.normal_(0, 0.05)
    return step(setting, model)


def same_as_keeping(policy: Policy) -> Callable[[Setting], str]:
    """A policy changes no bit of a step."""

    def feature(setting: Setting) -> str:
        for family in ("qwen3", "gemma3_text"):
            model = with_adapters(setting.bare(family))
            setting.attach(model)
            loss, kept = loss_and_gradients(model, BATCH)
            handle = setting.attach(model, policy)
            other_loss, other = loss_and_gradients(model, BATCH)
            assert handle.layers.in_8_bits() == (setting.products_in_8_bits(handle), 12)
            assert other_loss == loss and all(torch.equal(other[name], kept[name]) for name in kept)
        return "yes"

    return feature


def graphs(setting: Setting) -> str:
    """The reason that a GPU would give; on the CPU attention is always the last one."""
    module, model = importlib.import_module("pronghorn.models.attach"), setting.adapted()
    setting.attach(model)
    reason = module._graph_refusal(model.get_base_model(), "auto")
    return "yes" if reason.startswith("attention goes") else f"refused: {reason}"


def switched_off(setting: Setting) -> str:
    """A forward without adapters gives what zero adapters give."""
    model = setting.adapted()
    setting.attach(model)
    with torch.no_grad():
        on = model(**BATCH).loss
        with model.disable_adapter():
            off = model(**BATCH).loss
        assert model(**BATCH).loss == on != off
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.zero_()
        assert model(**BATCH).loss == off
    return "yes"


def second_adapter(setting: Setting) -> str:
    model = setting.adapted()
    setting.attach(model)
    with torch.no_grad():
        first = model(**BATCH).loss
    model.add_adapter("second", model.peft_config["default"])
    model.set_adapter("second")
    outcome = step(setting, model)
    setting.attach(model)
    model.set_adapter("default")
    with torch.no_grad():
        assert model(**BATCH).loss == first
    return outcome


def two_at_once(setting: Setting) -> str:
    model = setting.adapted()
    model.add_adapter("second", model.peft_config["default"])
    model.base_model.set_adapter(["default", "second"])
    return step(setting, model)


def dora(setting: Setting) -> str:
    from peft import LoraConfig

    return peft_step(setting, LoraConfig(r=4, use_dora=True, target_modules=["q_proj", "down_proj"]))


def ia3(setting: Setting) -> str:
    from peft import IA3Config

    targets = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
    return peft_step(setting, IA3Config(target_modules=targets, feedforward_modules=["down_proj"]))


def check_recipe(setting: Setting, **sections: Any) -> None:
    """Raise what a recipe of this setting raises."""
    precision = {"dtype": str(DTYPES[setting.base]).removeprefix("torch."), "compute": setting.compute}
    model = {"name": "x", "max_seq_length": 64, "load_in_4bit": setting.base == "NF4"}
    rest = {"data": {"train": str(DOCUMENT)}, "train": {"output": "x"}, "precision": precision}
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "recipe.yaml")
        path.write_text(json.dumps({"model": model, **rest, **sections}))  # which is YAML
        Recipe.load(path)


def full(setting: Setting) -> str:
    """Of float32 weights, under autocast for 16 bits."""
    check_recipe(setting, adapter={"method": "full"})
    model = tiny_model("qwen3")
    attach(model, Plan.keep(), layers="fused")
    with torch.autocast("cpu", DTYPES[setting.base], enabled=setting.base != "float32"):
        loss = model(**BATCH).loss
    loss.backward()
    assert gradients(model)
    return "yes"


def unpacked(setting: Setting) -> str:
    """By rows of documents end to end, as `train.padding_free` makes them."""
    check_recipe(setting, packing={"enabled": False})
    return step(setting, setting.adapted())


def padded_step(setting: Setting) -> str:
    """A step of a padded batch, whose real tokens alone go through the layers, against the detached model's."""
    model = setting.adapted()
    handle = setting.attach(model)
    ids = torch.randint(3, 100, (2, 9), generator=torch.Generator().manual_seed(0))
    mask = torch.ones_like(ids)
    mask[1, 5:] = 0
    given = {"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100)}
    ours = model(**given).loss
    ours.backward()
    found = gradients(model)
    assert found and (handle.layers.in_8_bits()[0] > 0) is setting.in_8_bits
    handle.detach()
    assert relative_error(ours.detach().double(), model(**given).loss.detach().double()) < (
        1e-5 if setting.base == "float32" else 0.02
    )
    return "yes"


def generate(setting: Setting) -> str:
    def answer(model: Any, ids: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        answered: torch.Tensor = model.eval().generate(input_ids=ids, attention_mask=mask, max_new_tokens=4)
        return answered

    return as_unattached(setting, answer)


def as_unattached(setting: Setting, run: Callable[..., torch.Tensor]) -> str:
    """For a padded batch an attached model gives what it gives detached, but for norms' roundings: no 8 bits."""
    model = setting.adapted()
    handle = setting.attach(model)
    ids = torch.randint(3, 100, (2, 9), generator=torch.Generator().manual_seed(0))
    mask = torch.ones_like(ids)
    mask[1, :3] = 0
    with torch.no_grad():
        ours = run(model, ids, mask).double()
        assert handle.layers.in_8_bits() == (0, 0)  # nothing was built
        handle.detach()
        assert relative_error(ours, run(model, ids, mask).double()) < (1e-5 if setting.base == "float32" else 0.02)
    [path] = [path for path in setting.attach(model).report if path.part == "padded batches, generate()"]
    assert path.path.endswith("products in the model's dtype") is setting.in_8_bits
    return f"falls: {path.why}" if setting.in_8_bits else "yes"


def evaluation(setting: Setting) -> str:
    model = setting.adapted()
    handle = setting.attach(model)
    loss = model(**BATCH).loss
    with torch.no_grad():
        assert model.eval()(**BATCH).loss == loss
    assert (handle.layers.in_8_bits()[0] > 0) is setting.in_8_bits
    return "yes"


def merged_adapter(setting: Setting) -> str:
    model = setting.adapted()
    handle = setting.attach(model)
    with torch.no_grad():
        before = model(**BATCH).loss.item()
        model.merge_adapter()
        assert model(**BATCH).loss.item() == pytest.approx(before, rel=0.1 if setting.base == "NF4" else 0.05)
        assert (handle.layers.in_8_bits()[0] > 0) is setting.in_8_bits
        model.unmerge_adapter()
        assert model(**BATCH).loss.item() == pytest.approx(before, rel=0.1 if setting.base == "NF4" else 0.05)
    return "yes"


def saved(setting: Setting) -> str:
    """Adapters and merged weights are the same bytes as an unattached model's."""
    model = setting.adapted()
    stored, whole = [], []
    for attached in (False, True):
        if attached:
            setting.attach(model)
            with torch.no_grad():
                model(**BATCH)
        with tempfile.TemporaryDirectory() as folder:
            model.save_pretrained(folder)
            stored.append(load(Path(folder, "adapter_model.safetensors").read_bytes()))
        whole.append(
            {tensor.name: tensor.read() for tensor in merge.merged_tensors(model.get_base_model(), torch.bfloat16)}
        )
    for before, after in (stored, whole):
        assert before.keys() == after.keys() and all(torch.equal(before[name], after[name]) for name in before)
    return "yes"


def dropout(setting: Setting) -> str:
    """The layers go transformers' way, whose noise is drawn anew each time: numbers are not compared."""
    model = setting.adapted(lora_dropout=0.1)
    handle = setting.attach(model)
    loss_and_gradients(model, BATCH)
    assert handle.layers.in_8_bits() == (0, 0)
    return f"falls: {handle.layers.reason(None)}"


def autocast(setting: Setting) -> str:
    """As float16 always is."""
    model = setting.adapted()
    handle = setting.attach(model)
    dtype = torch.bfloat16 if setting.base == "float32" else DTYPES[setting.base]
    losses = [loss_and_gradients(model, BATCH)[0]]
    with torch.autocast("cpu", dtype):
        losses.append(loss_and_gradients(model, BATCH)[0])
        reason, (in_8_bits, _) = handle.layers.reason(dtype), handle.layers.in_8_bits()
    assert losses[1] == pytest.approx(losses[0], rel=0.01)
    assert in_8_bits == setting.products_in_8_bits(handle)
    return "yes" if reason is None else f"falls: {reason}"


EXPERTS = {"num_experts_per_tok": 8}
"""All of them: rounding moves no token to another."""

FEATURES: dict[str, Callable[[Setting], str]] = {
    "LoRA on all linears": lambda setting: step(setting, setting.adapted()),
    "LoRA on some linears": lambda setting: step(setting, setting.adapted(target_modules=["q_proj", "down_proj"])),
    "recompute the norms": same_as_keeping(Policy.RECOMPUTE_NORMS),
    "recompute the MLP": same_as_keeping(Policy.RECOMPUTE_MLP),
    "recompute the layer": same_as_keeping(Policy.RECOMPUTE_LAYER),
    "recompute, inputs offloaded": same_as_keeping(Policy.OFFLOAD),
    "CUDA graphs": graphs,
    "adapters switched off": switched_off,
    "a second adapter, one active": second_adapter,
    "two adapters active": two_at_once,
    "LoRA dropout": dropout,
    "DoRA": dora,
    "IA3": ia3,
    "biases trained": lambda setting: step(setting, with_adapters(setting.bare("qwen2"), bias="all")),
    "`modules_to_save`: the head": lambda setting: step(setting, setting.adapted(modules_to_save=["lm_head"])),
    "`modules_to_save`: a layer's linear": lambda setting: step(
        setting, setting.adapted(target_modules=["q_proj"], modules_to_save=["down_proj"])
    ),
    "new tokens": lambda setting: step(setting, setting.adapted(trainable_token_indices={"embed_tokens": [3, 4]})),
    "full fine-tuning": full,
    "experts": lambda setting: step(setting, with_adapters(setting.bare("qwen3_moe", **EXPERTS))),
    "LoRA on experts": lambda setting: step(
        setting,
        with_adapters(
            setting.bare("qwen3_moe", **EXPERTS),
            target_parameters=["mlp.experts.gate_up_proj", "mlp.experts.down_proj"],
        ),
    ),
    "`packing.enabled: false`": unpacked,
    "padded batches, in training": padded_step,
    "padded batches, with a cache": lambda setting: as_unattached(
        setting, lambda model, ids, mask: model(input_ids=ids, attention_mask=mask).logits
    ),
    "packed rows under autocast": autocast,
    "evaluation of packed rows": evaluation,
    "`generate()`": generate,
    "merge and unmerge": merged_adapter,
    "saving": saved,
}


def outcome(setting: Setting, feature: str) -> str:
    """What happens: the table's word, and why where it isn't "yes"."""
    try:
        return FEATURES[feature](setting)
    except (PronghornError, ValueError) as error:
        text = getattr(error, "problem", None) or str(error)
        return f"refused: {text}"


def cells() -> list[tuple[str, str, str, str]]:
    """The cells of the document's table: feature, base, compute, and what happens, with the note's text."""
    section = DOCUMENT.read_text().split("## What goes together")[1].split("\n## ")[0]
    notes = dict(re.findall(r"^- \((\w)\) `(.*)`$", section, re.MULTILINE))
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in section.splitlines() if line[:1] == "|"]
    columns = [tuple(title.split(", ")) for title in rows[0][1:]]
    return [
        (row[0], base, compute, re.sub(r" \((\w)\)$", lambda match: f": {notes[match[1]]}", cell))
        for row in rows[2:]
        for (base, compute), cell in zip(columns, row[1:], strict=True)
    ]


def test_the_table_has_every_feature_base_and_compute() -> None:
    wanted = {(feature, base, compute) for feature in FEATURES for base in DTYPES for compute in ("dtype", "fp8")}
    assert {cell[:3] for cell in cells()} == wanted and len(cells()) == len(wanted)


@pytest.mark.matrix(5)
@pytest.mark.parametrize(("feature", "base", "compute", "said"), cells())
def test_a_cell_is_true(feature: str, base: str, compute: str, said: str) -> None:
    """And what is true of fp8 is true of fp8_both, fp8_exact and int8."""
    for each in ("fp8", "fp8_both", "fp8_exact", "int8") if compute == "fp8" else ("dtype",):
        assert outcome(Setting(base, each), feature).replace(each, compute) == said
