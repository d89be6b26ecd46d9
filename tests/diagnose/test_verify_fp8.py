"""verify where frozen weights multiply in 8 bits: sound models pass every family, and each planted defect is named."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from rich.console import Console
from torch import Tensor
from typer.testing import CliRunner

from pronghorn.cli.main import app
from pronghorn.data.batch import Collator, PackedBatch
from pronghorn.diagnose.verify_checks import cosines, verify
from pronghorn.diagnose.verify_reference import Passes
from pronghorn.diagnose.verify_report import Cause, Name, Report, render
from pronghorn.diagnose.verify_subject import Subject, rows_of
from pronghorn.kernels.quantise import RowCodes, quantise_rows
from pronghorn.layers.fused_linear import FusedLinear
from pronghorn.loading.load import load_model
from pronghorn.models.attach import attach, attached
from pronghorn.models.lora import add_lora
from pronghorn.precision.compute import Compute
from pronghorn.precision.fp8 import BackwardSource, FP8Source, FP8Weight, scaled_product
from pronghorn.precision.source import Activation, DenseSource
from support.packed_linears import packed_linears
from support.tiny import in_4_bits, tiny_model
from support.verified import TOKENS, documents


def subject_of(family: str = "llama", base: str = "bf16", compute: str = "fp8_both", **lora: Any) -> Subject:
    """A tiny model with adapters, over a base in 16 or 4 bits."""

    def load() -> Any:
        model = tiny_model(family, intermediate_size=128).to(torch.float16 if base == "fp16" else torch.bfloat16)
        return in_4_bits(model) if base == "nf4" else model

    return Subject(
        name=family,
        build=lambda: add_lora(load(), **{"r": 4, **lora}),
        attach=lambda model: attach(model, layers="fused", compute=compute),
        collate=Collator(TOKENS, pad_token_id=0),
        reload=lambda folder: PeftModel.from_pretrained(load(), folder),
        rows=rows_of(documents(), TOKENS),
        row_tokens=TOKENS,
        autocast=torch.float16 if base == "fp16" else None,
        compute=Compute.of(compute),
    )


@pytest.mark.slow
@pytest.mark.matrix(1)
@pytest.mark.parametrize("compute", ["fp8_both", "int8"])
@pytest.mark.parametrize("kind", ["rows", "blocks", "nvfp4"])
def test_packed_bases_are_judged_by_the_codes_that_they_multiply(kind: str, compute: str, tmp_path: Path) -> None:
    """A checkpoint's own codes where it has a scale a row, else those that are made of it."""
    packed_linears(tmp_path, kind, **({"hidden_size": 192, "intermediate_size": 320} if compute == "int8" else {}))

    def load() -> Any:
        return load_model(tmp_path, dtype="bfloat16", max_seq_length=TOKENS)[0]

    def with_another_scale(model: Any) -> None:
        source = product(model, 1, "self_attn.o_proj").source
        assert isinstance(source, BackwardSource if compute == "int8" else FP8Source)
        source = getattr(source, "plain", source)
        source.weight.scales[3] *= 1.5

    subject = replace(
        subject_of(compute=compute),
        build=lambda: add_lora(load(), r=4),
        reload=lambda folder: PeftModel.from_pretrained(load(), folder),
    )
    assert failed(verify(subject)) == set()
    assert Name.PRODUCTS in failed(planted(subject, with_another_scale))


def planted(subject: Subject, plant: Callable[[Any], object]) -> Report:
    """The verdict with a defect put into the attached model, whose layers are built."""

    def attach_and_plant(model: Any) -> None:
        subject.attach(model)
        with torch.no_grad():
            model(**subject.collate([{"input_ids": [5, 6], "labels": [5, 6], "lengths": [2]}]))
        plant(model)

    return verify(replace(subject, attach=attach_and_plant))


def failed(report: Report) -> set[Name]:
    """What fails, besides the cost of sound 8 bits."""
    return {check.name for check in report.checks if not check.ok} - {Name.COSINE}


def only_cause(report: Report, words: str) -> None:
    causes = [str(finding) for finding in report.findings if finding.cause is not Cause.TOO_COARSE]
    assert not report.ok and len(causes) == 1 and words in causes[0], (report.causes, report.checks)


def product(model: Any, layer: int, name: str) -> FusedLinear:
    """The built product that a layer's linear is part of."""
    handle: Any = attached(model)
    base = model.get_submodule(f"base_model.model.model.layers.{layer}.{name}.base_layer")
    return next(linear for linear in handle.layers.linears() if base in linear.bases)


@pytest.mark.matrix(1)
@pytest.mark.parametrize("compute", ["fp8", "fp8_both", "fp8_exact"])
@pytest.mark.parametrize("family", ["llama", "mistral", "qwen2", "qwen3", "gemma3_text", "gpt_oss", "qwen3_moe"])
def test_sound_products_pass(family: str, compute: str) -> None:
    report = verify(subject_of(family, compute=compute))
    assert not failed(report), [check for check in report.checks if not check.ok]
    checks = {check.name: check for check in report.checks}
    layers = 2 if family == "gpt_oss" else 3
    products = layers * 4  # of attention two, and two of an MLP or of experts
    assert checks[Name.PRODUCTS].detail == f"{products} of frozen weights"
    assert checks[Name.ALONE].detail == "bit-equal"
    assert report.ok and checks[Name.COSINE].detail.startswith("least 0.9")


@pytest.mark.matrix(1)
@pytest.mark.parametrize("family", ["gpt_oss", "mixtral"])
def test_experts_in_integers_are_judged_by_the_same_operands(family: str) -> None:
    """Sound ones pass, both ways; a factor that is off is seen."""
    subject = subject_of(family, compute="int8")
    report = verify(subject)
    assert not failed(report), [check for check in report.checks if not check.ok]
    [detail] = [check.detail for check in report.checks if check.name is Name.PRODUCTS]
    layers = 2 if family == "gpt_oss" else 3
    assert detail == f"{layers * 4} of frozen weights"  # of attention two, and two of the experts

    def with_another_factor(model: Any) -> None:
        handle: Any = attached(model)
        handle.layers.lent_codes()[1].codes[1].backward.factors[3] *= 1.5

    assert Name.PRODUCTS in failed(planted(subject, with_another_factor))


@pytest.mark.matrix(1)
@pytest.mark.parametrize("base", ["bf16", "nf4"])
def test_input_gradients_in_8_bits_pass(base: str) -> None:
    report = verify(subject_of("qwen3", base, compute="fp8"))
    assert not failed(report), [check for check in report.checks if not check.ok]
    [products] = [check for check in report.checks if check.name is Name.PRODUCTS]
    assert products.detail == "12 of frozen weights"
    [cosine] = [check for check in report.checks if check.name is Name.COSINE]
    assert cosine.ok


@pytest.mark.matrix(1)
@pytest.mark.parametrize("base", ["nf4", "fp16"])
def test_sound_products_over_other_bases_pass(base: str) -> None:
    report = verify(subject_of("qwen3", base))
    assert not failed(report), [check for check in report.checks if not check.ok]
    assert report.dtype == ("float16" if base == "fp16" else "bfloat16")


@pytest.mark.slow
@pytest.mark.matrix(1)
@pytest.mark.parametrize(
    ("family", "base"),
    [
        *((family, "bf16") for family in ("llama", "gemma3_text", "qwen3_5_text", "phi3")),
        ("llama", "nf4"),
        ("qwen3", "fp16"),
    ],
)
def test_integers_pass_and_a_wrong_scale_and_a_product_left_out_show(family: str, base: str) -> None:
    subject = subject_of(family, base, "int8")
    report = verify(subject)
    assert not failed(report), [check for check in report.checks if not check.ok]
    [sound] = [check for check in report.checks if check.name is Name.PRODUCTS]
    assert sound.detail == "12 of frozen weights"

    def with_another_scale(model: Any) -> None:
        product(model, 1, "mlp.down_proj").source.coded.weight.scales[3] *= 1.5

    only_cause(planted(subject, with_another_scale), "off: model.layers.1.mlp.down_proj (input gradient)")

    def left_out(model: Any) -> None:
        linear = product(model, 1, "self_attn.o_proj")
        linear.source, linear.in_8_bits = DenseSource(linear.bases[0].weight, linear.bases[0].out_features), False

    if base != "nf4":
        only_cause(planted(subject, left_out), "products in 8 bits: 1 of 12 are not in 8 bits")


@pytest.mark.gpu
@pytest.mark.parametrize("compute", ["fp8", "fp8_both", "fp8_exact"])
@pytest.mark.parametrize("family", ["gpt_oss", "qwen3_moe"])
def test_sound_experts_pass_on_the_gpu(family: str, compute: str) -> None:
    subject = subject_of(family, "bf16", compute)
    report = verify(replace(subject, build=lambda: subject.build().to("cuda"),
                            reload=lambda folder: subject.reload(folder).to("cuda")))  # fmt: skip
    assert not failed(report), [check for check in report.checks if not check.ok]


@pytest.mark.gpu
@pytest.mark.parametrize("compute", ["fp8", "fp8_both", "fp8_exact", "int8"])
@pytest.mark.parametrize("base", ["bf16", "nf4"])
def test_sound_products_pass_on_the_gpu(base: str, compute: str) -> None:
    subject = subject_of("qwen3", base, compute)
    report = verify(replace(subject, build=lambda: subject.build().to("cuda"),
                            reload=lambda folder: subject.reload(folder).to("cuda")))  # fmt: skip
    assert not failed(report), [check for check in report.checks if not check.ok]


def test_a_forgotten_scale_of_a_row() -> None:
    def plant(model: Any) -> None:
        product(model, 1, "self_attn.v_proj").source.weight.scales[70] = 1.0

    only_cause(
        planted(subject_of(), plant),
        "products in 8 bits: off: model.layers.1.self_attn.q_proj, model.layers.1.self_attn.k_proj, "
        "model.layers.1.self_attn.v_proj (forward)",
    )


@pytest.mark.matrix(1)
@pytest.mark.parametrize("side", ["forward", "backward"])
def test_a_wrong_scale_of_one_expert(side: str) -> None:
    def with_another_scale(model: Any) -> None:
        handle: Any = attached(model)
        getattr(handle.layers.lent_codes()[1].codes[1], side).scales[3, 5] *= 1.5

    report = planted(subject_of("gpt_oss"), with_another_scale)
    assert Name.PRODUCTS in failed(report)
    [check] = [check for check in report.checks if check.name is Name.PRODUCTS]
    what = "forward" if side == "forward" else "input gradient"
    assert check.detail == f"off: model.layers.1.mlp.experts.down ({what})"


def test_sound_experts_pass_with_adapters_on_them() -> None:
    names = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
    report = verify(subject_of("gpt_oss", target_parameters=names))
    assert not failed(report), [check for check in report.checks if not check.ok]


def test_scales_of_the_forward_on_the_wrong_side_of_the_input_gradient() -> None:
    """The rows' scales are of what is summed over: after the sum they are too late."""

    class WrongSide(FP8Source):
        def input_grad(self, dy: Activation, low_rank: Any) -> Tensor:
            codes, scales = quantise_rows(dy.dense)
            size = self.weight.across.shape[0]
            late = self.weight.scales.repeat(-(-size // len(self.weight.scales)))[:size]
            dx = scaled_product(codes, scales, self.weight.across, late, dy.dense.dtype, True)
            return dx if low_rank is None else dx.addmm_(low_rank.dya, low_rank.a)

    def plant(model: Any) -> None:
        linear = product(model, 2, "mlp.down_proj")
        linear.source = WrongSide(linear.source.weight, True)

    report = planted(subject_of(), plant)
    only_cause(report, "products in 8 bits: off: model.layers.2.mlp.down_proj (input gradient)")
    assert Name.GRADIENTS in failed(report) and Name.LOGITS not in failed(report)


@pytest.mark.matrix(1)
@pytest.mark.parametrize("factor", [2.0, 1.05])
def test_codes_that_do_not_follow_the_weights(factor: float) -> None:
    """The codes were made before somebody wrote to the weight, unseen (4-bit weights are read for each product)."""

    def plant(model: Any) -> None:
        linear = product(model, 0, "mlp.up_proj")
        linear.source = FP8Source(FP8Weight.of([base.weight * factor for base in linear.bases]), False)

    only_cause(
        planted(subject_of(), plant),
        "products in 8 bits: off: model.layers.0.mlp.gate_proj, model.layers.0.mlp.up_proj (forward)",
    )


def test_a_product_that_silently_is_not_in_8_bits() -> None:
    """Its numbers are better than they should be, and its bytes and milliseconds aren't what was asked for."""

    def plant(model: Any) -> None:
        linear = product(model, 1, "self_attn.o_proj")
        weight = linear.bases[0].weight
        linear.source, linear.in_8_bits = DenseSource(weight, len(weight)), False

    only_cause(planted(subject_of(), plant), "products in 8 bits: 1 of 12 are not in 8 bits")


@pytest.mark.slow
@pytest.mark.matrix(1)
@pytest.mark.parametrize(("by", "learns"), [(1, "itself"), (-1, "the one after the next")])
def test_shifted_labels(by: int, learns: str) -> None:
    subject = subject_of()

    def collate(rows: list[dict[str, Any]]) -> dict[str, Any]:
        batch = subject.collate(rows)
        return batch | {"labels": batch["labels"].roll(by, dims=-1)}

    only_cause(verify(replace(subject, collate=collate)), f"label shift: each token learns {learns}")


@pytest.mark.slow
def test_mixed_documents() -> None:
    subject = subject_of()

    def leak(rows: list[dict[str, Any]]) -> dict[str, Any]:
        batch = subject.collate(rows)
        return batch | {"packed": PackedBatch.build([TOKENS], tokens=TOKENS, labels=batch["labels"][0])}

    only_cause(verify(replace(subject, collate=leak)), "leaking mask: a token is seen by another document")


def test_one_scale_for_all_rows_mixes_documents() -> None:
    """With a scale a tensor a document's numbers depend on its neighbours'."""

    class OneScale(FP8Source):
        def forward(self, x: Activation, bias: Tensor | None) -> Tensor:
            scale = (x.dense.float().abs().amax() / 448).expand(len(x.dense), 1)
            codes = (x.dense.float() / scale).to(torch.float8_e4m3fn)
            return super().forward(Activation(x.dense, RowCodes(codes, scale)), bias)

    def plant(model: Any) -> None:
        linear = product(model, 1, "mlp.down_proj")
        linear.source = OneScale(linear.source.weight, True)

    report = planted(subject_of(), plant)
    only_cause(report, "products in 8 bits: off: model.layers.1.mlp.down_proj (forward)")
    assert next(check.detail for check in report.checks if check.name is Name.ALONE) != "bit-equal"


@pytest.mark.slow
def test_blocks_that_are_not_fused_are_judged_as_they_are() -> None:
    """With LoRA dropout the blocks multiply in the model's dtype, and so do the references."""
    report = verify(subject_of(lora_dropout=0.1))
    assert report.ok, [check for check in report.checks if not check.ok]
    details = {check.name: check.detail for check in report.checks}
    assert details[Name.PRODUCTS].startswith("none:") and Name.COSINE not in details


def passes(*gradients: Sequence[float]) -> Passes:
    named = {f"w{number}": torch.tensor(each) for number, each in enumerate(gradients)}
    return Passes(0.0, [], torch.empty(0), named, [])


def test_cosines_are_judged_where_16_bits_reach_them() -> None:
    exact, plain = passes([1.0, 0.0], [1.0, 0.0], [0.0, 0.0]), passes([1.0, 0.01], [1.0, 1.0], [0.0, 0.0])
    sound = cosines(passes([1.0, 0.1], [1.0, -1.0], [0.0, 0.0]), plain, exact)
    assert sound.ok and sound.value == pytest.approx(0.995, abs=1e-3)
    assert sound.detail == (
        "least 0.7071, median 0.8511; without 8 bits 0.7071 and 0.8535; "
        "1 not judged, which have less than 0.98 without 8 bits, too"
    )
    coarse = cosines(passes([1.0, 0.3], [1.0, 0.0], [0.0, 0.0]), plain, exact)
    assert not coarse.ok and coarse.finding is not None
    about = str(coarse.finding)
    assert "coarser than asked for" in about and about.endswith(
        "1 of 2 gradients have a cosine below 0.98 to float32's: w0"
    )
    assert not cosines(passes([torch.nan, 0.0], [1.0, 0.0], [0.0, 0.0]), plain, exact).ok


@pytest.mark.slow
def test_the_report_says_which_rule_judged() -> None:
    report = verify(subject_of("gemma3_text"))
    console = Console(width=400)
    with console.capture() as capture:
        console.print(render(report))
    for text in (capture.get(), json.dumps(report.to_dict())):
        assert "Limits: " in text or '"rule": ' in text
        assert "2 times plain's own error" in text and "multiply the same operands in 8 bits" in text
        assert "cosine to float32" in text
    assert failed(report) == set() and report.ok
    assert "The numbers are what 8 bits give; some gradients turn further than is asked for." in capture.get()


@pytest.mark.matrix(1)
@pytest.mark.parametrize("fused", [True, False])
def test_the_command_on_a_recipe(stories: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fused: bool) -> None:
    """Products in 8 bits need fused layers, which are for CUDA, but for whoever asks (as this test does)."""
    from pronghorn.train.build import attach_options

    folder = tmp_path / "model"
    shutil.copytree(stories, folder)
    tiny_model("llama", intermediate_size=96, vocab_size=512).to(torch.bfloat16).save_pretrained(folder)
    data = tmp_path / "data.jsonl"
    data.write_text("".join(json.dumps({"text": "Once upon a time there was a dog. " * n}) + "\n" for n in range(1, 9)))
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(
        f"model: {{name: {folder}, max_seq_length: 128}}\ndata: {{train: {data}, loss_on: all}}\n"
        f"precision: {{dtype: bfloat16, compute: fp8}}\ntrain: {{output: {tmp_path / 'run'}}}\n"
    )
    for module in ("train.build", "diagnose.verify_subject") if fused else ():
        monkeypatch.setattr(f"pronghorn.{module}.attach_options", lambda r: {**attach_options(r), "layers": "fused"})
    result = CliRunner().invoke(app, ["verify", str(recipe), "--tokens", "128", "--json"])
    if not fused:
        assert result.exit_code == 1 and "compute = 'fp8' needs fused layers" in result.output
        remedy = " ".join(result.output.split("remedy: ")[1].split())
        assert "precision.compute" in remedy  # layers is not a recipe's key
        return
    found = json.loads(result.stdout)
    checks = {check["name"]: check for check in found["checks"]}
    assert {name for name, check in checks.items() if not check["ok"]} <= {"cosine to float32"}, checks
    assert checks["8-bit products"]["detail"] == "12 of frozen weights" and "in 8 bits" in found["rule"]


@pytest.mark.slow
def test_the_command_on_a_folder_in_4_bits(stories: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As bitsandbytes loads it, its statistics nested."""
    from pronghorn.train.build import attach_options

    shutil.copytree(stories, tmp_path / "model")
    tiny_model("llama", intermediate_size=128, vocab_size=512).to(torch.bfloat16).save_pretrained(tmp_path / "model")
    for module in ("train.build", "diagnose.verify_subject"):
        monkeypatch.setattr(f"pronghorn.{module}.attach_options", lambda r: {**attach_options(r), "layers": "fused"})
    options = ["--model", str(tmp_path / "model"), "--method", "qlora", "--dtype", "bfloat16", "--compute", "fp8"]
    result = CliRunner().invoke(app, ["verify", *options, "--tokens", "256", "--json"])
    checks = {check["name"]: check for check in json.loads(result.stdout)["checks"]}
    assert {name for name, check in checks.items() if not check["ok"]} <= {"cosine to float32"}, checks
    assert checks["8-bit products"]["detail"] == "12 of frozen weights"


@pytest.mark.slow
def test_the_command_on_a_shape(monkeypatch: pytest.MonkeyPatch) -> None:
    from pronghorn.train.build import attach_options

    for module in ("train.build", "diagnose.verify_subject"):
        monkeypatch.setattr(f"pronghorn.{module}.attach_options", lambda r: {**attach_options(r), "layers": "fused"})
    options = ["--model", "tiny", "--dtype", "bfloat16", "--compute", "fp8_exact", "--tokens", "128"]
    result = CliRunner().invoke(app, ["verify", *options])
    assert "8-bit products" in result.stdout and "of frozen weights" in result.stdout, result.output
    assert "The numbers are wrong." not in result.stdout
