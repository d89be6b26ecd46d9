"""GGUF files in llama.cpp itself: every family that is written computes what transformers does."""

from __future__ import annotations

import re
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoTokenizer

from pronghorn.diagnose import export_run
from pronghorn.errors import ServerError, TrainingError, UnsupportedError
from pronghorn.export import gguf
from pronghorn.export.comparison import Check, Comparison, Name
from pronghorn.export.engines import llama_cpp
from pronghorn.export.engines.llama_cpp import serve_gguf
from pronghorn.export.engines.transformers import TransformersEngine
from pronghorn.export.gguf import write_gguf
from pronghorn.families.gguf_spec import Gguf, Part
from pronghorn.families.glm4_moe import GLM4_MOE
from pronghorn.families.gpt_oss import GPT_OSS as GPT_OSS_SPEC
from pronghorn.families.olmo3 import OLMO3 as OLMO3_SPEC
from pronghorn.families.registry import FAMILIES
from support.tiny import tiny_model

pytest.importorskip("gguf")
needs_llama_cpp = pytest.mark.skipif(not llama_cpp.has_llama_cpp(), reason="needs the package xllamacpp")
GEMMA3: dict[str, Any] = {
    "num_hidden_layers": 6,
    "layer_types": [*["sliding_attention"] * 5, "full_attention"],
    "rope_parameters": {
        "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
        "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
    },
}
"""As the 4B model has it; smaller ones have no scaling."""
GPT_OSS_FORM, OLMO3_FORM, GLM_FORM = (spec.gguf for spec in (GPT_OSS_SPEC, OLMO3_SPEC, GLM4_MOE))
assert GPT_OSS_FORM is not None and OLMO3_FORM is not None and GLM_FORM is not None
YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 8.0, "original_max_position_embeddings": 12}
NO_YARN = {"rope_type": "default", "rope_theta": 1e4}
GPT_OSS: dict[str, Any] = {
    "num_hidden_layers": 3,
    "rope_parameters": YARN | {"rope_theta": 150000.0, "original_max_position_embeddings": 64, "truncate": True},
}
OLMO3: dict[str, Any] = {
    "num_hidden_layers": 4,
    "layer_types": [*["sliding_attention"] * 3, "full_attention"],
    "rope_parameters": {"full_attention": YARN | {"attention_factor": 1.4}, "sliding_attention": NO_YARN},
}
MINISTRAL3: dict[str, Any] = {
    "head_dim": 24,
    "rope_parameters": YARN | {"llama_4_scaling_beta": 0.4, "mscale": 1.0, "mscale_all_dim": 1.0},
}
GLM_4_5: dict[str, Any] = {"n_group": 2, "topk_group": 2, "use_qk_norm": False, "first_k_dense_replace": 2}
FULL = {"layer_types": ["full_attention"] * 3}
TEXT = "Once upon a time, there was a girl. She was very happy, and one day she went to the park with her mom."
"""More tokens than the windows of tiny models have."""


def farthest(model: Any, tokenizer: Any, folder: Path) -> tuple[float, float]:
    """Return how far llama.cpp's log-probabilities are from transformers' at most, in nats, and how far transformers'
    own in float16 are, in which llama.cpp's CPU kernels look activations up and keep parts of attention."""
    model = model.float().eval()
    with torch.no_grad():  # uniform distributions would hide differences
        for parameter in model.parameters():
            parameter.mul_(3.0) if parameter.ndim > 1 else parameter.add_(0.1 * torch.rand_like(parameter))
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    reference = TransformersEngine(model, tokenizer)
    ids = list(AutoTokenizer.from_pretrained(folder)(TEXT)["input_ids"])
    exact = reference.distribution(ids)
    with serve_gguf(write_gguf(folder, folder / "model.gguf", "f32"), 64) as engine:
        scored = engine.logprobs(ids)
    assert len(scored) == min(len(ids) - 1, engine.steps or 0)
    assert exact.std() > 0.3
    rounded = TransformersEngine(model.half(), tokenizer).distribution(ids)
    found, own = (
        max(abs(exact[at - 1, ids[at]].item() - told(at)) for at in scored)
        for told in (lambda at: scored[at].logprob, lambda at: rounded[at - 1, ids[at]].item())
    )
    return found, own


@needs_llama_cpp
@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "changes"),
    [
        ("llama", {}),
        ("qwen2", {"use_sliding_window": False}),
        ("qwen3", {}),
        ("qwen3", {"rope_parameters": YARN}),
        ("qwen2", {"use_sliding_window": False, "rope_parameters": YARN}),
        ("llama", {"rope_parameters": YARN}),
        ("mistral", {"sliding_window": None}),
        ("granite", {}),
        ("olmo2", {}),
        ("smollm3", {"num_hidden_layers": 4, "no_rope_layers": [1, 1, 1, 0]}),
        ("phi3", {"sliding_window": None}),
        ("gemma3_text", GEMMA3),
        ("seed_oss", {}),
        ("mixtral", {"sliding_window": None}),
        ("olmoe", {"num_key_value_heads": 4}),
        ("qwen3_moe", {"mlp_only_layers": [], "decoder_sparse_step": 1}),
        ("gpt_oss", GPT_OSS),
        ("gpt_oss", {"rope_parameters": NO_YARN}),
        ("ministral3", MINISTRAL3),
        ("ministral3", {"rope_parameters": YARN | {"llama_4_scaling_beta": 0.1}, "tie_word_embeddings": True}),
        ("ministral", FULL | {"rope_parameters": YARN}),
        ("mistral", {"sliding_window": 512}),
        ("olmo3", OLMO3),
        ("olmo3", OLMO3 | {"rope_parameters": dict.fromkeys(("full_attention", "sliding_attention"), NO_YARN)}),
        ("glm4_moe", {}),
        ("glm4_moe", GLM_4_5),
        ("glm4_moe", {"rope_parameters": YARN | {"partial_rotary_factor": 0.5}}),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_llama_cpp_computes_the_same(stories: Path, tmp_path: Path, family: str, changes: dict[str, Any]) -> None:
    tokenizer = AutoTokenizer.from_pretrained(stories)
    torch.manual_seed(0)
    found, own = farthest(tiny_model(family, vocab_size=len(tokenizer), **changes), tokenizer, tmp_path)
    assert found <= 2 * own, (found, own)


@needs_llama_cpp
@pytest.mark.slow
def test_rows_in_transformers_order_show(stories: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The check above can fail: llama.cpp's order of rows forgotten."""
    tokenizer = AutoTokenizer.from_pretrained(stories)
    plain = gguf._tensors
    monkeypatch.setattr(gguf, "_tensors", lambda *given: ((name, stored, None) for name, stored, _ in plain(*given)))
    found, own = farthest(tiny_model("llama", vocab_size=len(tokenizer)), tokenizer, tmp_path)
    assert found > 4 * own, (found, own)


def swapped(name: str, config: Any) -> Mapping[str, Part]:
    names = {"gate_proj": "up_proj", "up_proj": "gate_proj"}
    right = GPT_OSS_FORM.parts(name, config)
    return {re.sub("gate_proj|up_proj", lambda found: names[found[0]], own): part for own, part in right.items()}


def without(leaf: str, form: Gguf) -> dict[str, Any]:
    def none(rows: torch.Tensor) -> torch.Tensor:
        return torch.full_like(rows, -100.0 if leaf == "sinks" else 0.0)

    def parts(name: str, config: Any) -> Mapping[str, Part]:
        return {own: none if name.endswith(leaf) else part for own, part in form.parts(name, config).items()}

    return {"parts": parts}


def other(form: Gguf, **values: Any) -> dict[str, Any]:
    return {"values": lambda config: {**form.values(config), **values}}


@needs_llama_cpp
@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "changes", "fault"),
    [
        ("gpt_oss", GPT_OSS, {"parts": swapped}),
        ("gpt_oss", GPT_OSS, without("sinks", GPT_OSS_FORM)),
        ("gpt_oss", GPT_OSS, without("down_proj_bias", GPT_OSS_FORM)),
        ("gpt_oss", GPT_OSS, other(GPT_OSS_FORM, sliding_window=6)),
        ("gpt_oss", GPT_OSS, {"rope": lambda config: {**config.rope_parameters, "attention_factor": 1.0}}),
        ("ministral3", MINISTRAL3, {"values": lambda config: {}}),
        ("ministral3", MINISTRAL3, {"interleaved": False}),
        ("olmo3", OLMO3, other(OLMO3_FORM, sliding_window=7)),
        ("olmo3", OLMO3, {"rope": lambda config: config.rope_parameters["sliding_attention"]}),
        ("glm4_moe", {}, without("e_score_correction_bias", GLM_FORM)),
        ("glm4_moe", {}, other(GLM_FORM, expert_group_used_count=1)),
        ("glm4_moe", {}, {"rope": lambda config: {**config.rope_parameters, "partial_rotary_factor": 1.0}}),
        ("glm4_moe", {}, other(GLM_FORM, expert_weights_scale=1.0)),
    ],
)
def test_faults_of_a_family_show(
    stories: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    family: str,
    changes: dict[str, Any],
    fault: dict[str, Any],
) -> None:
    """The check above can fail for each thing that these families alone have."""
    right = FAMILIES[family]
    assert right.gguf is not None
    wrong = replace(right, gguf=replace(right.gguf, **fault))
    monkeypatch.setattr(gguf, "written_family", lambda config: wrong)
    tokenizer = AutoTokenizer.from_pretrained(stories)
    torch.manual_seed(0)
    found, own = farthest(tiny_model(family, vocab_size=len(tokenizer), **changes), tokenizer, tmp_path)
    assert found > 4 * own, (found, own)


@needs_llama_cpp
@pytest.mark.slow
def test_where_llama_cpp_rounds_the_ends_of_yarn_is_all_that_differs(
    stories: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """gpt-oss as published: its file is written, with a warning, and is that of a model that rounds them, too."""
    tokenizer = AutoTokenizer.from_pretrained(stories)
    models, file = [], tmp_path / "model.gguf"
    for truncate in (True, False):
        rope = GPT_OSS["rope_parameters"] | {"truncate": truncate}
        changes = GPT_OSS | {"rope_parameters": rope}
        models.append(tiny_model("gpt_oss", vocab_size=len(tokenizer), **changes).float().eval())
        models[-1].save_pretrained(tmp_path / str(truncate))
        tokenizer.save_pretrained(tmp_path / str(truncate))
        assert "llama.cpp" not in caplog.text
        write_gguf(tmp_path / str(truncate), file, "f32")
    assert "llama.cpp begins and ends YaRN's ramp at whole frequencies" in caplog.text
    ids = tokenizer(TEXT)["input_ids"]
    rounded, exact = (TransformersEngine(model, tokenizer).distribution(ids) for model in models)
    with serve_gguf(file, 64) as engine:
        scored = engine.logprobs(ids)
    found, off = (
        max(abs(told[at - 1, ids[at]].item() - scored[at].logprob) for at in scored) for told in (rounded, exact)
    )
    assert found < 1e-4 < off / 10, (found, off)


def test_without_llama_cpp_the_remedy_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(llama_cpp, "has_llama_cpp", lambda: False)
    with pytest.raises(UnsupportedError, match="pip install xllamacpp"), serve_gguf(tmp_path / "model.gguf"):
        pass


@needs_llama_cpp
def test_what_llama_cpp_does_not_load_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "model.gguf").write_bytes(b"GGUF" + bytes(100))
    with pytest.raises(ServerError, match=r"llama\.cpp doesn't load"), serve_gguf(tmp_path / "model.gguf"):
        pass


def test_an_export_that_llama_cpp_answers_otherwise_is_not_published(
    stories: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where it is installed every file is compared there, too."""

    class Engine:
        name = "llama.cpp"

    def compare(reference: Any, engine: Any, **_: Any) -> Comparison:
        ok = engine.name != "llama.cpp"
        check = Check(Name.LOGPROBS, ok, "", "")
        causes = () if ok else ("weights differ",)
        return Comparison(engine.name, "run", "f16", 0, (), 0, "", None, None, None, (check,), causes)

    monkeypatch.setattr(export_run, "compare", compare)
    monkeypatch.setattr(export_run, "has_llama_cpp", lambda: False)
    done = export_run.export_run(stories, "gguf", tmp_path / "alone", "f16")
    assert [each.engine for each in done.comparisons] == ["gguf in transformers"]
    monkeypatch.setattr(export_run, "has_llama_cpp", lambda: True)
    monkeypatch.setattr(export_run, "serve_gguf", lambda file: nullcontext(Engine()))
    with pytest.raises(TrainingError, match=r"not what was trained \(llama\.cpp\): weights differ"):
        export_run.export_run(stories, "gguf", tmp_path / "both", "f16")
    assert not (tmp_path / "both").exists()
