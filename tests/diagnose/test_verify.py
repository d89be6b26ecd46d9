"""verify passes every family, and names each planted defect; defects are planted into what is attached or written."""

from __future__ import annotations

import errno
import json
import shutil
import weakref
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import GPT2Config, GPT2LMHeadModel
from transformers.models.llama.modeling_llama import LlamaMLP
from typer.testing import CliRunner

from pronghorn.cli.main import app
from pronghorn.config.recipe import Recipe
from pronghorn.data.batch import PackedBatch
from pronghorn.diagnose import verify_checks as checks
from pronghorn.diagnose.verify_checks import verify
from pronghorn.diagnose.verify_reference import CRESTS, Passes, Run, perturb
from pronghorn.diagnose.verify_report import Name
from pronghorn.diagnose.verify_subject import Subject, rows_of
from pronghorn.diagnose.verify_subject import subject_of as of_recipe
from pronghorn.errors import TrainingError
from pronghorn.export import merge
from pronghorn.memory.plan import Plan, Policy
from pronghorn.models.attach import attach, attached
from pronghorn.models.lora import add_lora
from pronghorn.parity.distance import BaselineNoise
from pronghorn.parity.parameters import trainable
from pronghorn.precision.loader import StoredTensor
from support.tiny import FAMILIES, MOE_FAMILIES, tiny_model
from support.verified import TOKENS, documents, only_cause, planted, subjects


@pytest.fixture(scope="module")
def subject_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Subject]:
    return subjects(tmp_path_factory.mktemp)


both_dtypes = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])


@pytest.mark.matrix(3)
@pytest.mark.parametrize("family", [*FAMILIES, *MOE_FAMILIES])
def test_clean_runs_pass(subject_of: Any, family: str) -> None:
    report = verify(subject_of(family))
    assert report.ok and report.causes == [], [check for check in report.checks if not check.ok]
    layers, linears = 2 if family == "gpt_oss" else 3, 4 if family in MOE_FAMILIES or family == "phi3" else 7
    adapted = {
        "gemma4_text": 5 * 9 - 2 * 2,  # with those of the layers' own inputs; two layers have neither k nor v
        "gemma4_unified_text": 3 * 7 - 1,  # one layer's values are its keys
        "gemma4_text with experts": 2 * 7 - 1,
        # two gated delta nets, of five linears or three, and one attention
        "qwen3_5_text": 2 * 8 + 7,
        "qwen3_5_moe_text": 2 * 5 + 4,
        "qwen3_next": 2 * 3 + 4,
        "granitemoehybrid": 3 * 6,  # gate and up are one
    }.get(family, layers * linears)
    assert report.tensors == adapted * 2 and len(report.worst) == 10
    assert [check.name for check in report.checks][-2:] == ["merged weights", "saved and reloaded"]


EXPERTS = ("experts.gate_up_proj", "experts.down_proj")


@pytest.mark.matrix(1)
@pytest.mark.parametrize("family", MOE_FAMILIES)
def test_clean_expert_lora_passes(subject_of: Any, family: str) -> None:
    report = verify(subject_of(family, experts=EXPERTS))
    assert report.ok and report.causes == [], [check for check in report.checks if not check.ok]
    found = {check.name: check.detail for check in report.checks}
    assert found["experts train"].startswith("every expert that saw tokens trains")
    weights = {"gpt_oss": 2 * (4 + 2), "gemma4_text with experts": 2 * (7 + 2) - 1}
    weights |= {"glm4_moe": 3 * 4 + 2 * 2}  # its first layer is dense
    weights |= {"qwen3_5_moe_text": 2 * 5 + 4 + 3 * 2, "qwen3_next": 2 * 3 + 4 + 3 * 2}
    assert found["merged weights"] == f"{weights.get(family, 3 * (4 + 2))} weights hold their adapter"


@pytest.mark.matrix(2)
@pytest.mark.parametrize("family", ["qwen3_moe", "olmoe", "mixtral", "gpt_oss"])
def test_a_configuration_that_asks_for_the_auxiliary_loss_is_no_wrong_loss(subject_of: Any, family: str) -> None:
    """TRL sets it where it adds that loss, and a merged model's config.json keeps it."""
    subject = subject_of(family)

    def asking() -> Any:
        model = subject.build()
        model.config.output_router_logits = True
        return model

    report = verify(replace(subject, build=asking))
    assert report.ok, [check for check in report.checks if not check.ok]


@pytest.mark.matrix(1)
@pytest.mark.parametrize("part", ["A", "B"])
def test_an_expert_that_never_trains(subject_of: Any, part: str) -> None:
    """Its slice of the adapter gets no gradient, though tokens go to it: the tensor as a whole looks alive."""
    name = f"model.layers.1.mlp.experts.lora_{part}.weight"

    def plant(model: Any) -> None:
        experts = model.get_base_model().model.layers[1].mlp.experts.get_base_layer().num_experts

        def forget(gradient: torch.Tensor) -> torch.Tensor:
            slices = gradient.clone().view(experts, -1) if part == "A" else gradient.clone().view(-1, experts).t()
            slices[3] = 0
            return (slices if part == "A" else slices.t()).reshape(gradient.shape)

        trainable(model)[name].register_hook(forget)

    only_cause(
        planted(subject_of("qwen3_moe", experts=EXPERTS), plant), f"an expert that never trains: {name}, expert 3 ("
    )


@pytest.mark.matrix(1)
@pytest.mark.parametrize("family", FAMILIES)
def test_clean_full_fine_tuning_passes(subject_of: Any, family: str) -> None:
    report = verify(subject_of(family, full=True))
    assert report.ok and report.causes == [], [check for check in report.checks if not check.ok]
    assert "merged weights" not in {check.name for check in report.checks}


@pytest.mark.matrix(1)
@pytest.mark.parametrize("family", FAMILIES)
def test_clean_bf16_passes(subject_of: Any, family: str) -> None:
    report = verify(subject_of(family, dtype=torch.bfloat16))
    assert (report.dtype, report.reference) == ("bfloat16", "float32")
    assert report.ok and report.causes == [], [check for check in report.checks if not check.ok]


@pytest.mark.gpu
@both_dtypes
@pytest.mark.parametrize("family", FAMILIES)
def test_clean_runs_pass_on_the_gpu(subject_of: Any, family: str, dtype: torch.dtype) -> None:
    report = verify(subject_of(family, dtype=dtype, device="cuda"))
    assert report.ok and report.causes == [], ([check for check in report.checks if not check.ok], report.worst[:4])


@pytest.mark.matrix(1)
@both_dtypes
def test_a_leaking_mask_in_the_batch(subject_of: Any, dtype: torch.dtype) -> None:
    """The collator forgets where documents end; positions and labels stay right."""
    subject = subject_of("llama", dtype=dtype)

    def leak(rows: list[dict[str, Any]]) -> dict[str, Any]:
        batch = subject.collate(rows)
        return batch | {"packed": PackedBatch.build([TOKENS], tokens=TOKENS, labels=batch["labels"][0])}

    only_cause(verify(replace(subject, collate=leak)), "leaking mask: a token is seen by another document")


@pytest.mark.matrix(1)
@pytest.mark.parametrize("family", ["llama", "gemma3_text"])
def test_a_leaking_mask_in_the_model(subject_of: Any, family: str) -> None:
    def plant(model: Any) -> None:
        def forget(module: Any, args: Any, kwargs: dict[str, Any]) -> Any:
            if kwargs.get("packed") is None:
                return None
            return args, kwargs | {"packed": PackedBatch.build([TOKENS], tokens=TOKENS)}

        last = model.base_model.model.model.layers[-1].self_attn
        last.register_forward_pre_hook(forget, with_kwargs=True, prepend=True)
        module = last.forward  # the probe calls forward itself, without hooks
        last.forward = lambda *args, packed=None, **kwargs: module(
            *args, **kwargs, packed=packed and PackedBatch.build([TOKENS], tokens=TOKENS)
        )

    only_cause(planted(subject_of(family), plant), "leaking mask: a token is seen by another document in layers 2")


@pytest.mark.matrix(1)
@pytest.mark.parametrize(
    ("change", "dtype"),
    [
        (lambda p: p + (p > 0), torch.float32),
        (lambda p: p + (p > 0), torch.bfloat16),
        (lambda p: p // 2, torch.float32),
        (lambda p: p * 2, torch.bfloat16),
    ],
)
def test_a_wrong_rope_position(subject_of: Any, change: Callable[[Any], Any], dtype: torch.dtype) -> None:
    subject = subject_of("qwen3", dtype=dtype)

    def collate(rows: list[dict[str, Any]]) -> dict[str, Any]:
        batch = subject.collate(rows)
        return batch | {"position_ids": change(batch["position_ids"])}

    only_cause(verify(replace(subject, collate=collate)), "wrong RoPE position")


@pytest.mark.matrix(1)
@both_dtypes
def test_queries_turned_one_position_further_than_keys(subject_of: Any, dtype: torch.dtype) -> None:
    """Which a loss doesn't show."""

    def plant(model: Any) -> None:
        for layer in model.base_model.model.model.layers:
            layer.self_attn.q_proj.register_forward_hook(lambda module, args, q: turned(q))

    def turned(q: torch.Tensor) -> torch.Tensor:
        """Turn every head by one more position; the model then turns it by its own."""
        heads = q.unflatten(-1, (4, 16))
        angle = 10000.0 ** -(torch.arange(8) / 8)
        cos, sin = angle.cos().to(q), angle.sin().to(q)
        x, y = heads.chunk(2, dim=-1)
        return torch.cat([x * cos - y * sin, y * cos + x * sin], dim=-1).flatten(-2)

    only_cause(planted(subject_of("llama", dtype=dtype), plant), "wrong RoPE position")


NAME = "model.layers.1.mlp.up_proj.lora_A.weight"


@pytest.mark.matrix(1)
@pytest.mark.parametrize("gradient", [torch.zeros_like, lambda g: g * torch.inf, None])
def test_an_adapter_that_gets_no_gradient(subject_of: Any, gradient: Any) -> None:
    def plant(model: Any) -> None:
        parameter = trainable(model)[NAME]
        parameter.requires_grad_(False) if gradient is None else parameter.register_hook(gradient)

    report = planted(subject_of("llama"), plant)
    only_cause(report, f"adapter or weight that gets no gradient: {NAME}")
    assert report.worst[0].name == NAME


@pytest.mark.matrix(1)
@pytest.mark.parametrize(
    ("by", "learns", "dtype"), [(1, "itself", torch.float32), (-1, "the one after the next", torch.bfloat16)]
)
def test_a_dropped_label_shift(subject_of: Any, by: int, learns: str, dtype: torch.dtype) -> None:
    subject = subject_of("llama", dtype=dtype)

    def collate(rows: list[dict[str, Any]]) -> dict[str, Any]:
        batch = subject.collate(rows)
        return batch | {"labels": batch["labels"].roll(by, dims=-1)}

    only_cause(verify(replace(subject, collate=collate)), f"label shift: each token learns {learns}")


@pytest.mark.matrix(1)
@both_dtypes
def test_mis_scaled_accumulation(subject_of: Any, dtype: torch.dtype) -> None:
    def plant(model: Any) -> None:
        base = model.get_base_model()
        sound = base.forward
        base.forward = lambda *args, num_items_in_batch=None, **kwargs: sound(*args, **kwargs)

    report = planted(subject_of("llama", dtype=dtype), plant)
    only_cause(report, "accumulation: a micro-batch's loss is not divided by the labels of the whole accumulated batch")


@pytest.mark.parametrize("count", [1, 2])
def test_data_that_one_row_holds_are_two_rows(subject_of: Any, count: int) -> None:
    """A loss that is divided by its own row's labels is right where there is one row."""

    def plant(model: Any) -> None:
        base = model.get_base_model()
        sound = base.forward
        base.forward = lambda *args, num_items_in_batch=None, **kwargs: sound(*args, **kwargs)

    subject = replace(subject_of("llama"), rows=rows_of(documents(count), TOKENS))
    assert [len(row) for row in subject.rows] == [count, 1] and verify(subject).ok
    only_cause(planted(subject, plant), "accumulation: a micro-batch's loss")


@both_dtypes
def test_a_copy_of_a_weight_that_stays_as_it_was_when_an_optimiser_steps(subject_of: Any, dtype: torch.dtype) -> None:
    def plant(model: Any) -> None:
        linear = model.get_base_model().model.layers[1].mlp.up_proj.lora_A["default"]
        kept: list[torch.Tensor] = []

        def forward(x: torch.Tensor) -> torch.Tensor:
            kept.append(linear.weight.detach().clone())
            return torch.nn.functional.linear(x, linear.weight + (kept[0] - linear.weight).detach())

        linear.forward = forward

    report = planted(subject_of("llama", dtype=dtype), plant)
    assert {"logits", "gradients"} <= {check.name for check in report.checks if not check.ok}, report.checks


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_weights_are_what_they_were_after_the_pass_with_others(subject_of: Any, dtype: torch.dtype) -> None:
    run = Run(subject_of("llama", full=True, dtype=dtype))
    least = torch.finfo(dtype).smallest_normal / 3
    run.parameters["model.norm.weight"].data[:2] = torch.tensor([least, 3 * least])
    before = {name: parameter.detach().clone() for name, parameter in run.parameters.items()}
    attach(run.model)
    run.with_other_weights()
    for name, parameter in run.parameters.items():
        assert torch.equal(parameter, before[name]) and parameter.grad is None


@pytest.mark.matrix(1)
@pytest.mark.parametrize(
    ("family", "by", "dtype"),
    [  # every pair of two of the three
        ("mistral", 1, torch.float32),
        ("mistral", -1, torch.bfloat16),
        ("qwen2", 1, torch.bfloat16),
        ("qwen2", -1, torch.float32),
        ("gemma3_text", 1, torch.float32),
        ("gemma3_text", -1, torch.bfloat16),
        ("gemma4_text", 1, torch.float32),  # where keys and values are another layer's, too
    ],
)
def test_an_off_by_one_window(subject_of: Any, family: str, by: int, dtype: torch.dtype) -> None:
    def plant(model: Any) -> None:
        config = model.config
        config.sliding_window += by  # Mistral reads it in every forward
        for layer in model.get_base_model().model.layers:
            if getattr(layer.self_attn, "sliding_window", None):
                layer.self_attn.sliding_window += by

    window = FAMILIES[family]["sliding_window"]
    words = f"sliding window: a token is seen by {window + by} tokens and not by {window} in layers"
    only_cause(planted(subject_of(family, dtype=dtype), plant), words)


def test_an_attention_that_sees_the_future(subject_of: Any) -> None:
    def plant(model: Any) -> None:
        attention = model.get_base_model().model.layers[1].self_attn
        sound = attention.forward

        def forward(hidden_states: Any, *args: Any, **kwargs: Any) -> Any:
            output, weights = sound(hidden_states, *args, **kwargs)
            return output + output.roll(-1, dims=1), weights

        attention.forward = forward

    report = planted(subject_of("llama"), plant)
    assert "a token is seen by those before it" in report.causes[0] or "another document" in report.causes[0]


def test_a_backward_pass_that_differs_the_second_time(subject_of: Any) -> None:
    calls = []

    def more_each_time(gradient: torch.Tensor) -> torch.Tensor:
        calls.append(1)
        return gradient * (1 if len(calls) <= 2 else 1.01)  # two rows a pass

    report = planted(subject_of("llama"), lambda model: trainable(model)[NAME].register_hook(more_each_time) and None)
    only_cause(report, "not repeatable: 1 of 42 gradients not bit-equal")


@pytest.mark.parametrize(
    ("family", "options", "weights"),
    [
        ("llama", {"use_dora": True}, 21),
        ("llama", {"target_modules": ["embed_tokens", "v_proj"]}, 4),
        ("gpt2", {"target_modules": ["c_attn", "c_proj", "wte"]}, 7),
        ("gpt2", {"target_modules": ["c_attn"], "use_dora": True}, 2),
    ],
    ids=["magnitudes", "embeddings", "GPT-2", "GPT-2's magnitudes"],
)
def test_merged_weights_hold_their_adapter(
    family: str, options: dict[str, Any], weights: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    gpt2 = GPT2Config(n_embd=32, n_layer=2, n_head=2, vocab_size=96)
    bare = GPT2LMHeadModel(gpt2) if family == "gpt2" else tiny_model(family)
    model = get_peft_model(bare, LoraConfig(task_type="CAUSAL_LM", r=4, **{"target_modules": "all-linear", **options}))
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter += torch.randn_like(parameter) * 0.05
    (check,) = checks.merged(model)
    assert check.ok and check.detail == f"{weights} weights hold their adapter"
    sound = checks._delta
    monkeypatch.setattr(checks, "_delta", lambda *given: sound(*given) * 1.1)
    assert not checks.merged(model)[0].ok


def test_a_merged_weight_that_forgot_its_adapter(subject_of: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    sound, name = merge.merged_tensors, "model.layers.1.self_attn.v_proj"

    def forgetful(base: Any, dtype: torch.dtype) -> Iterator[StoredTensor]:
        bare = base.get_submodule(name).get_base_layer().weight.detach()
        for tensor in sound(base, dtype):
            forgot = replace(tensor, rows=lambda start, stop: bare[start:stop].to("cpu", dtype))
            yield forgot if tensor.name == f"{name}.weight" else tensor

    monkeypatch.setattr(merge, "merged_tensors", forgetful)
    only_cause(verify(subject_of("llama")), f"merged weight forgot its adapter: {name}")


def test_an_adapter_saved_wrong(subject_of: Any) -> None:
    def plant(model: Any) -> None:
        sound = model.save_pretrained

        def save(folder: Any) -> None:
            with torch.no_grad():
                trainable(model)[NAME].mul_(1.5)
            sound(folder)

        model.save_pretrained = save

    only_cause(planted(subject_of("llama"), plant), f"saving or loading: tensors that differ: {NAME}")


def test_every_kind_of_weight_is_compared_where_not_all_have_room(
    subject_of: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of an 8B model's full fine-tuning not one gradient of the MLP was: smaller tensors of all layers came first."""
    monkeypatch.setattr("pronghorn.parity.reference.KEPT_ELEMENTS", 40_000)

    def plant(model: Any) -> None:
        model.model.layers[0].mlp.down_proj.weight.register_hook(lambda gradient: gradient * 1.01)

    subject = subject_of("llama", full=True)
    report = verify(subject)
    detail = next(check.detail for check in report.checks if check.name == "gradients")
    assert report.ok and report.tensors < 30 and detail.startswith(f"{report.tensors} of 30 trained tensors; worst ")
    only_cause(planted(subject, plant), "gradients are not: model.layers.0.mlp.down_proj.weight")


def test_a_full_disk_is_told(subject_of: Any) -> None:
    """The copy of a large model that is saved and loaded again may have no room among temporary files."""

    def full(folder: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with pytest.raises(TrainingError, match=r"the disk of .* is full"):
        planted(subject_of("llama"), lambda model: setattr(model, "save_pretrained", full))


def test_a_reference_that_overflows_judges_nothing() -> None:
    """What is allowed is made of plain's error: an infinite one would allow anything."""
    exact, ours = torch.ones(8), torch.full((8,), 100.0)
    plain = exact.index_fill(0, torch.tensor(0), torch.inf)
    passes = {n: Passes(x.max().item(), [x], x, {"w": x}, []) for n, x in (("plain", plain), ("exact", exact))}
    distances = checks.gradient_distances(
        Passes(100.0, [], ours, {"w": ours}, []), **passes, noise=BaselineNoise({"w": 0.0}, 1.0)
    )
    assert not checks.logits(ours, **passes).ok and not checks.gradients(distances, 1).ok
    assert not checks.loss(Name.LOSS, 100.0, **passes).ok and not checks.loss(Name.LOSS, torch.inf, **passes).ok
    assert not passes["plain"].finite and passes["exact"].finite


def test_inputs_rounded_otherwise_tell_how_far_single_numbers_go(
    subject_of: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They count for the largest number of a tensor, not for its mean error, and only where a model has few tensors."""
    exact, plain = torch.zeros(16), torch.ones(16)
    far = torch.zeros(16).index_fill(0, torch.tensor(3), 40.0)
    alone, among = (BaselineNoise.of({"w": plain}, {"w": exact}, rounded) for rounded in ((), [{"w": far}]))
    assert (alone.crest, among.crest) == (1.0, pytest.approx(4.0)) and alone.typical == among.typical

    run = Run(subject_of("llama"))
    references, _ = run.references(torch.float64, lambda text: None)
    attach(run.model)
    said: list[str] = []
    rounded = run.rounded(said.append)
    assert len(said) == 1
    assert len(rounded) == CRESTS // len(references.gradients) > 2 and attached(run.model) is not None
    for name, gradient in references.gradients.items():
        found = [each[name] for each in rounded]
        assert not any(torch.equal(gradient, each) for each in found) and not torch.equal(*found[:2])
        for each in found:
            torch.testing.assert_close(each, gradient, rtol=1e-3, atol=1e-5 * gradient.abs().max().item())
    monkeypatch.setattr("pronghorn.diagnose.verify_reference.SMALL", 1000)
    assert run.rounded(said.append) == [] and len(said) == 1, "a large model has no second beside it"


@pytest.mark.parametrize("explained", [True, False])
def test_plain_is_asked_again_where_single_numbers_are_off(
    subject_of: Any, monkeypatch: pytest.MonkeyPatch, explained: bool
) -> None:
    """And a number that no rounding explains is told."""
    asked: list[Run] = []
    rounded, judge = Run.rounded, checks.gradient_distances

    def off(*given: Any) -> Any:
        first, *rest = judge(*given)
        beyond = replace(first, maximum=2 * first.maximum_limit)
        return [first if asked and explained else beyond, *rest]

    monkeypatch.setattr(checks, "gradient_distances", off)
    monkeypatch.setattr(Run, "rounded", lambda run, say, routes=None: asked.append(run) or rounded(run, say, routes))
    report = verify(subject_of("llama"))
    [gradients] = [check for check in report.checks if check.name is Name.GRADIENTS]
    assert len(asked) == 1 and gradients.ok is explained


def test_a_model_that_overflows_is_named(subject_of: Any) -> None:
    subject = subject_of("llama")

    def build() -> Any:
        model = subject.build()
        with torch.no_grad():
            model.get_base_model().model.norm.weight.mul_(1e10)
            model.get_output_embeddings().weight.mul_(1e30)
        return model

    report = verify(replace(subject, build=build))
    assert not report.ok and "plain transformers and PEFT give infinities or NaN themselves" in report.causes[0]


def test_nothing_is_judged_by_a_reference_that_another_package_changed(
    subject_of: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The attached model has the change, too, so that all else agrees."""
    monkeypatch.setattr(LlamaMLP, "forward", lambda self, x: self.down_proj(self.up_proj(x)))
    report = verify(subject_of("llama"))
    only_cause(report, "the reference isn't transformers' own code, so nothing is judged; import nothing that replaces")
    assert [check.name for check in report.checks if not check.ok] == [Name.REFERENCE]
    assert report.causes[0].endswith(f": LlamaMLP.forward ({__name__})")


def test_nan_fails(subject_of: Any) -> None:
    def plant(model: Any) -> None:
        with torch.no_grad():
            model.get_base_model().get_input_embeddings().weight.fill_(torch.nan)

    report = planted(subject_of("llama"), plant)
    failed = {check.name for check in report.checks if not check.ok}
    assert failed >= {"loss", "accumulated loss", "logits", "gradients", "no dead gradient", "packed as alone"}
    assert report.causes
    json.loads(json.dumps(report.to_dict(), allow_nan=False))


def test_nothing_of_the_users_is_touched(subject_of: Any, tmp_path: Path) -> None:
    subject = subject_of("llama")
    folder = Path(str(subject.build().get_base_model().config._name_or_path))
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    verify(subject)
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before


def test_one_model_at_a_time_is_in_memory(subject_of: Any) -> None:
    """What is saved is loaded again where a second copy may have no room."""
    subject, models, left = subject_of("llama"), [], []

    def build() -> Any:
        model = subject.build()
        models.append(weakref.ref(model))
        return model

    def reload(folder: Path) -> Any:
        left.extend(ref for ref in models if ref() is not None)
        return subject.reload(folder)

    assert verify(replace(subject, build=build, reload=reload)).ok
    assert len(models) == 1 and not left


@pytest.fixture
def recipe(stories: Path, tmp_path: Path) -> Path:
    data = tmp_path / "data.jsonl"
    data.write_text("".join(json.dumps({"text": "Once upon a time there was a dog. " * n}) + "\n" for n in range(1, 9)))
    path = tmp_path / "recipe.yaml"
    path.write_text(
        f"model: {{name: {stories}, max_seq_length: 128}}\ndata: {{train: {data}, loss_on: all}}\n"
        f"adapter: {{lora_dropout: 0.1}}\ntrain: {{output: {tmp_path / 'run'}}}\n"
    )
    return path


def test_the_command_on_a_recipe(recipe: Path, tmp_path: Path) -> None:
    files = sorted(tmp_path.iterdir())
    result = CliRunner().invoke(app, ["verify", str(recipe), "adapter.r=4", "--tokens", "128", "--json"])
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    assert found["schema"] == "pronghorn-verify-v1" and found["ok"] and found["causes"] == []
    assert len(found["rows"]) == 2 and len(found["rows"][0]) >= 3 and len(found["worst"]) == 10
    assert sorted(tmp_path.iterdir()) == files


@pytest.mark.slow
def test_the_command_on_a_saved_adapter(recipe: Path, stories: Path, tmp_path: Path) -> None:
    """A trained adapter is judged as it is: its B isn't zero."""
    from transformers import AutoModelForCausalLM

    model = add_lora(AutoModelForCausalLM.from_pretrained(stories), r=4)
    perturb(model)
    model.save_pretrained(tmp_path / "adapter")
    result = CliRunner().invoke(app, ["verify", str(recipe), f"model.name={tmp_path / 'adapter'}", "--tokens", "128"])
    assert result.exit_code == 0, result.output


def test_four_bits_in_float32_have_nothing_to_compare_with() -> None:
    pytest.importorskip("bitsandbytes")
    result = CliRunner().invoke(app, ["verify", "--model", "tiny", "--method", "qlora", "--dtype", "float32"])
    assert result.exit_code == 1 and "set precision.dtype (or --dtype) to bfloat16" in result.output


@pytest.mark.parametrize("method", ["lora", "full"])
def test_the_command_on_a_shape(method: str) -> None:
    result = CliRunner().invoke(app, ["verify", "--model", "tiny", "--method", method, "--tokens", "128"])
    assert result.exit_code == 0, result.output
    assert "The numbers are right." in result.stdout and "self_attn" in result.stdout


def test_the_command_on_experts_in_4_bits(stories: Path, tmp_path: Path) -> None:
    """With the model in bfloat16, quantised as it loads."""
    shutil.copytree(stories, tmp_path / "model")
    model = tiny_model("qwen3_moe", vocab_size=512, num_experts_per_tok=8).to(torch.bfloat16)
    model.save_pretrained(tmp_path / "model")
    options = ["--model", str(tmp_path / "model"), "--method", "qlora", "--dtype", "bfloat16", "--tokens", "128"]
    result = CliRunner().invoke(app, ["verify", *options, "--json"])
    found = json.loads(result.stdout)
    assert result.exit_code == 0 and found["ok"], result.output


def test_the_command_says_no(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pronghorn.diagnose.verify_subject.attach", lambda model, *args, **kwargs: dead(model))

    def dead(model: Any) -> None:
        attach(model)
        trainable(model)[NAME].register_hook(torch.zeros_like)

    result = CliRunner().invoke(app, ["verify", "--model", "tiny", "--tokens", "128"])
    assert result.exit_code == 1
    assert "The numbers are wrong." in result.stdout and "gets no gradient" in result.stdout


@pytest.mark.parametrize(
    "option", [["--method", "full"], ["--dtype", "float32"], ["--compute", "fp8"], ["--seed", "0"]]
)
def test_what_makes_a_bare_model_is_not_passed_over_with_a_recipe(recipe: Path, option: list[str]) -> None:
    result = CliRunner().invoke(app, ["verify", str(recipe), *option])
    assert result.exit_code == 1 and f"{option[0]} is for --model" in result.output


def test_padded_batches_are_not_called_right(recipe: Path) -> None:
    result = CliRunner().invoke(app, ["verify", str(recipe), "packing.enabled=false"])
    assert result.exit_code == 1 and "packing.enabled is false" in result.output


def test_rows_are_not_longer_than_training_s(recipe: Path) -> None:
    subject = of_recipe(Recipe.load(recipe), tokens=2048)
    assert max(sum(map(len, row)) for row in subject.rows) <= 128


def test_the_plan_is_training_s(recipe: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Decided by what the trainer decides by: its rows, not those that are judged."""
    asked: list[Any] = []

    def decide(handle: Any, *sizes: int, **options: Any) -> Plan:
        assert handle.plan.undecided and handle.plan.budget_bytes == 2**30
        asked.append((sizes, options))
        return Plan((Policy.RECOMPUTE_MLP,))

    monkeypatch.setattr("pronghorn.diagnose.verify_subject.resolve", decide)
    changes = ["packing.rows_per_step=3", "train.gradient_accumulation_steps=2", "memory.budget=1GiB"]
    report = verify(of_recipe(Recipe.load(recipe, changes), tokens=64))
    assert asked == [
        ((3, 128), {"packs": True, "autocast": None, "accumulates": True, "optimizer": "adamw_torch_fused"})
    ]
    assert report.ok, report.checks
    assert [path.path for path in report.paths if path.part == "activations"] == ["recompute the MLP"]


@pytest.mark.gpu
def test_what_fits_is_kept_on_the_gpu(recipe: Path) -> None:
    report = verify(of_recipe(Recipe.load(recipe), tokens=128))
    found = {path.part: path.path for path in report.paths}
    assert report.ok and found["activations"] == "keep", (found, report.checks)


def test_a_long_window_makes_no_row_longer_that_is_trained_on(recipe: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The plan has room for training's rows, and the probe of a window keeps nothing."""
    monkeypatch.setattr("pronghorn.diagnose.verify_reference.probe_tokens", lambda model: 192)
    subject = of_recipe(Recipe.load(recipe), tokens=128)
    for length, wanted in ((1, 128), (128, 128), (200, 200)):
        columns = {"input_ids": [1] * length, "labels": [-100] * length, "lengths": [length]}
        assert subject.collate([columns])["input_ids"].shape == (1, wanted)


@pytest.mark.parametrize("arguments", [["r.yaml", "--model", "tiny"], ["--tokens", "64"]])
def test_a_recipe_or_a_model(arguments: list[str]) -> None:
    result = CliRunner().invoke(app, ["verify", *arguments])
    assert result.exit_code == 1 and "a recipe or --model" in result.output
