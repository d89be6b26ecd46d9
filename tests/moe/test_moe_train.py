"""Expert LoRA for users: a whole run from a recipe, its adapter in plain PEFT, a run taken up again, merging."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import trl
import yaml
from datasets import Dataset
from peft import LoraConfig, get_peft_model
from rich.console import Console
from transformers import AutoTokenizer
from trl import SFTConfig
from typer.testing import CliRunner

from pronghorn import SFTTrainer
from pronghorn.api import FastLanguageModel
from pronghorn.cli.main import app
from pronghorn.config.recipe import Recipe
from pronghorn.data.batch import Collator
from pronghorn.data.packed_rows import PackedRows
from pronghorn.diagnose.verify_reference import perturb
from pronghorn.errors import ConfigError, RunStopped
from pronghorn.export.merge import save_merged
from pronghorn.memory.plan import Plan, Policy
from pronghorn.models import experts
from pronghorn.models.attach import attach, attached
from pronghorn.models.lora import add_lora
from pronghorn.train import run as runs
from pronghorn.train.evaluate import heldout_loss
from support.resumed import same_run
from support.runs import stop_at
from support.tiny import MOE_FAMILIES, packed_row, stock_loss_on_cpu, tiny_model
from support.trainers import config

TARGETS = ["experts.gate_up_proj", "experts.down_proj"]
QUIET = Console(quiet=True)
IDS = torch.arange(5, 45)[None]


@pytest.fixture
def make(stories: Path, shared: Path, tmp_path: Path) -> Callable[..., Recipe]:
    """Recipes of a run in `tmp_path / name` on a tiny random model with experts and stories260k's tokenizer."""
    rows = (shared / "data/gsm8k/test.jsonl").read_text().splitlines()
    (tmp_path / "train.jsonl").write_text("\n".join(rows[:30]))

    def recipe(name: str, family: str, **packing: Any) -> Recipe:
        folder = tmp_path / family
        if not folder.exists():
            tiny_model(family, vocab_size=512).save_pretrained(folder)
            AutoTokenizer.from_pretrained(stories).save_pretrained(folder)
        table = {
            "model": {"name": str(folder), "max_seq_length": 512},
            "adapter": {"r": 2, "target_parameters": TARGETS},
            "data": {
                "train": str(tmp_path / "train.jsonl"),
                "columns": {"prompt": "question", "completion": "answer"},
                "overflow": "drop",
            },
            "packing": packing,
            "train": {
                "output": str(tmp_path / name),
                "max_steps": 6,
                "learning_rate": 1e-2,
                "save_steps": 2,
                "warmup_steps": 1,
                "deterministic": True,
            },
            "report": {"html": False},
        }
        (tmp_path / f"{name}.yaml").write_text(yaml.safe_dump(table))
        return Recipe.load(tmp_path / f"{name}.yaml")

    return recipe


@pytest.fixture(autouse=True)
def indeterministic_again() -> Iterator[None]:
    yield
    torch.use_deterministic_algorithms(False)


def plain_with(adapter: Path, family: Path) -> Any:
    """The adapter in transformers and PEFT alone."""
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    base = AutoModelForCausalLM.from_pretrained(family, dtype=torch.float32, experts_implementation="eager")
    return PeftModel.from_pretrained(base, adapter).eval()


@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss"])
def test_train_saves_an_adapter_that_plain_peft_loads(
    make: Any, family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make("run", family)
    kept: list[Any] = []
    load = runs.load
    monkeypatch.setattr(runs, "load", lambda *given: kept.append(load(*given)) or kept[-1])
    result = CliRunner().invoke(app, ["train", str(tmp_path / "run.yaml")])
    assert result.exit_code == 0, result.output
    (trained, handle), adapter = kept[0], tmp_path / "run" / "adapter"
    report = {line.part: line.path for line in handle.report}
    assert report["expert LoRA"] == "low-rank products beside the experts'"
    moved = [p.abs().max().item() for name, p in trained.named_parameters() if "experts" in name and ".lora_B." in name]
    assert len(moved) == 2 * trained.config.num_hidden_layers and min(moved) > 1e-3
    with torch.no_grad():
        mine, plain = trained.eval()(input_ids=IDS).logits, plain_with(adapter, tmp_path / family)(input_ids=IDS).logits
    torch.testing.assert_close(mine, plain, rtol=1e-4, atol=1e-4)


def test_a_run_goes_on_to_the_same_weights(make: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    runs.run(make("whole", "qwen3_moe"), QUIET)
    with monkeypatch.context() as patch, pytest.raises(RunStopped):
        patch.setattr(runs.RunControl, "on_step_begin", lambda self, args, state, *_, **__: stop_at(self, state, 3))
        runs.run(make("run", "qwen3_moe"), QUIET)
    assert runs.run(make("run", "qwen3_moe"), QUIET).resumed_at == [3]
    same_run(tmp_path / "whole", tmp_path / "run")


def test_full_fine_tuning_has_no_target_parameters(make: Any, tmp_path: Path) -> None:
    make("run", "qwen3_moe")
    with pytest.raises(ConfigError, match="target_parameters are LoRA's"):
        Recipe.load(tmp_path / "run.yaml", ["adapter.method=full"])


@pytest.mark.parametrize(
    ("family", "options", "message"),
    [
        ("llama", {"target_parameters": TARGETS}, "it has no experts"),
        ("mixtral", {"target_parameters": [*TARGETS, "experts.up_proj"]}, "use mlp.experts.down_proj or mlp.experts"),
        ("mixtral", {"target_parameters": TARGETS, "lora_dropout": 0.1}, "set lora_dropout to 0"),
        ("mixtral", {"target_parameters": TARGETS, "modules_to_save": ["mlp"]}, "lies in modules_to_save 'mlp'"),
        (
            "gpt_oss",
            {"target_parameters": TARGETS, "modules_to_save": ["experts"]},
            "lies in modules_to_save 'experts'",
        ),
        (  # as PEFT compares the ends of names
            "glm4_moe",
            {"target_modules": ["shared_experts.down_proj"], "modules_to_save": ["experts"]},
            "no linear is left for an adapter",
        ),
    ],
)
def test_targets_that_make_no_sense(family: str, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        add_lora(tiny_model(family), **options)


def test_targets_that_were_named_are_taken() -> None:
    model = add_lora(tiny_model("mixtral"), target_modules=["k_proj"])
    assert {name.split(".")[-4] for name, p in model.named_parameters() if p.requires_grad} == {"k_proj"}


def folded(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Calls that add an adapter to all weights of experts."""
    from peft.tuners.lora import layer

    calls: list[Any] = []
    for proxy in (layer._LoraFactorsProxy, layer._LoraParameterProxy):
        forward = proxy.forward
        monkeypatch.setattr(proxy, "forward", lambda self, *given, _of=forward: calls.append(self) or _of(self, *given))
    return calls


@pytest.mark.parametrize("how", ["get_peft_model", "attach again", "SFTTrainer", "PEFT alone"])
def test_adapters_that_come_after_attach_are_not_folded(
    how: str, stories: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = folded(monkeypatch)
    model = tiny_model("qwen3_moe", vocab_size=512)
    handle = attach(model)
    if how == "get_peft_model":
        model = FastLanguageModel.get_peft_model(model, r=2, target_parameters=TARGETS)
    elif how == "SFTTrainer":
        lora = LoraConfig(r=2, target_modules=["q_proj"], target_parameters=TARGETS)
        rows = Dataset.from_list([{"input_ids": [3, 4, 5], "labels": [3, 4, 5]}])
        args = SFTConfig(output_dir=str(tmp_path), packing=True, max_length=8, use_cpu=True, bf16=False)
        tokenizer = AutoTokenizer.from_pretrained(stories)
        model = SFTTrainer(model, args, train_dataset=rows, tokenizer=tokenizer, peft_config=lora).model
    else:
        model = add_lora(model, r=2, target_parameters=TARGETS)
    if how == "attach again":
        assert attach(model) is handle
    model(**packed_row([9, 14], 23)).loss.backward()
    line = next(line for line in handle.report if line.part == "expert LoRA")
    assert bool(calls) == (how == "PEFT alone") == (line.why == "the adapter came after attach: attach again")
    handle.detach()
    assert not any("_activate_lora" in type(module).__dict__ and type(module).__mro__[1].__name__ == "ParamWrapper"
                   for module in model.modules())  # fmt: skip


def gradients(model: Any) -> dict[str, torch.Tensor]:
    model.zero_grad()
    model(**packed_row([9, 14, 3], 32)).loss.backward()
    return {name: parameter.grad for name, parameter in model.named_parameters() if parameter.requires_grad}


def with_adapter(family: str) -> Any:
    """B away from zero."""
    model = add_lora(tiny_model(family), r=2, lora_alpha=4, target_parameters=TARGETS)
    perturb(model)
    return model


@pytest.mark.matrix(8)
@pytest.mark.parametrize("policy", [Policy.RECOMPUTE_MLP, Policy.RECOMPUTE_LAYER, Policy.OFFLOAD])
@pytest.mark.parametrize("family", MOE_FAMILIES)
def test_what_is_recomputed_is_routed_alike(family: str, policy: Policy) -> None:
    model = with_adapter(family)
    attach(model, Plan.keep())
    kept = gradients(model)
    attach(model, Plan((policy,) * model.config.num_hidden_layers))
    for name, gradient in gradients(model).items():
        assert torch.equal(gradient, kept[name]), name


def test_copies_and_adapters_merged_switched_off_and_on() -> None:
    model = with_adapter("gpt_oss").eval()
    base, wanted = tiny_model("gpt_oss").eval()(input_ids=IDS).logits, model(input_ids=IDS).logits
    handle = attach(model)
    same = functools.partial(torch.testing.assert_close, rtol=1e-4, atol=1e-4)
    other = copy.deepcopy(model)
    attached(other).detach()
    same(other(input_ids=IDS).logits, wanted)
    with model.disable_adapter():
        same(model(input_ids=IDS).logits, base)
    model.merge_adapter()
    same(model(input_ids=IDS).logits, wanted)
    model.unmerge_adapter()
    same(model(input_ids=IDS).logits, wanted)
    merged = model.merge_and_unload()
    handle.detach()
    assert merged.config._experts_implementation == "eager"
    same(merged(input_ids=IDS).logits, wanted)


@pytest.mark.matrix(4)
@pytest.mark.parametrize("family", MOE_FAMILIES)
def test_merged_experts(family: str, tmp_path: Path) -> None:
    """The saved checkpoint computes what the adapted model does; in 16 bits a token may go to other experts."""
    from transformers import AutoModelForCausalLM

    model = with_adapter(family)
    attach(model)
    FastLanguageModel.save_pretrained_merged(model, tmp_path / "16 bits")
    save_merged(model, None, tmp_path / "merged", dtype=torch.float32)
    found = AutoModelForCausalLM.from_pretrained(tmp_path / "merged", dtype=torch.float32)
    wanted = model.eval()(input_ids=IDS).logits
    torch.testing.assert_close(found(input_ids=IDS).logits, wanted, rtol=1e-4, atol=1e-4)
    with model.disable_adapter():
        assert not torch.allclose(model(input_ids=IDS).logits, wanted, atol=1e-2)


def test_a_merged_router(tmp_path: Path) -> None:
    model = get_peft_model(tiny_model("qwen3_moe"), LoraConfig(r=4, target_modules=["q_proj", "gate"]))
    perturb(model)
    names = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    assert any(".mlp.gate." in name for name in names)
    save_merged(model, None, tmp_path / "merged", dtype=torch.float32)  # which compares the logits


@pytest.mark.parametrize("normalised", [True, False])
def test_a_batch_without_labels_has_no_auxiliary_loss(normalised: bool) -> None:
    model = tiny_model("mixtral", output_router_logits=True, router_aux_loss_coef=0.5)
    attach(model)
    batch = packed_row([9, 14], 23)
    batch = {**batch, "labels": torch.full_like(batch["labels"], -100)}
    batch["packed"] = type(batch["packed"]).build([9, 14], tokens=23, labels=batch["labels"][0])
    loss = model(**batch, num_items_in_batch=7 if normalised else None).loss
    assert loss.item() == 0
    loss.backward()


@stock_loss_on_cpu
@pytest.mark.parametrize("coefficient", [None, 0.5])
def test_the_auxiliary_loss_of_padded_batches_is_trl_s(
    coefficient: float | None, stories: Path, tmp_path: Path
) -> None:
    """One a step however many micro-batches it has, by the coefficient of the arguments."""
    rows = Dataset.from_list(
        [{"input_ids": list(range(3, 9 + 5 * n)), "labels": list(range(3, 9 + 5 * n))} for n in range(8)]
    )
    found = []
    for kind in (SFTTrainer, trl.SFTTrainer):
        changes = {"packing": False, "gradient_accumulation_steps": 3, "router_aux_loss_coef": coefficient}
        trainer = kind(
            tiny_model("mixtral"),
            config(tmp_path, max_steps=2, eval_strategy="steps", eval_steps=2, **changes),
            train_dataset=rows,
            eval_dataset=rows,
            processing_class=AutoTokenizer.from_pretrained(stories),
        )
        trainer.train()
        names = ("loss", "grad_norm", "eval_loss")
        found.append([entry[name] for entry in trainer.state.log_history for name in names if name in entry])
    assert found[0] == pytest.approx(found[1], rel=2e-5) and len(found[0]) == 5


@pytest.mark.parametrize("family", MOE_FAMILIES)
def test_heldout_loss_is_the_cross_entropy_alone(family: str) -> None:
    """TRL switches the auxiliary loss on in the config."""
    rows = PackedRows(Dataset.from_list([{"input_ids": list(range(3, 30)), "labels": list(range(3, 30))}]), 40)
    model, collator = tiny_model(family), Collator(40, pad_token_id=0)
    attach(model)
    wanted = heldout_loss(model, rows, collator)
    model.config.output_router_logits = True
    assert heldout_loss(model, rows, collator) == wanted


def test_experts_in_float8_are_left_to_transformers() -> None:
    module = next(experts.expert_modules(tiny_model("mixtral")))
    assert experts.refusal(module) is None
    module.down_proj = torch.nn.Parameter(module.down_proj.to(torch.float8_e4m3fn), requires_grad=False)
    assert "float8_e4m3fn" in str(experts.refusal(module))


def test_default_targets_are_the_family_s_also_where_some_layers_are_dense() -> None:
    """PEFT would turn the dense MLP's names into adapters on all experts' weights."""
    model = add_lora(tiny_model("qwen3_moe", mlp_only_layers=[0]), r=2)
    adapted = {name.split(".lora_A")[0].rsplit(".", 1)[-1] for name, _ in model.named_parameters() if "lora_A" in name}
    assert adapted == {"q_proj", "k_proj", "v_proj", "o_proj"}
    dense = add_lora(tiny_model("llama"), r=2)
    assert len({name.split(".lora_A")[0].rsplit(".", 1)[-1] for name in dense.state_dict() if "lora_A" in name}) == 7
