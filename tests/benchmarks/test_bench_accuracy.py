"""The accuracy table's program: what it goes on from, and where an answer ends."""

from __future__ import annotations

import json
import shutil
from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import accuracy, fair_rows, load, precision
from benchmarks.record import check_out
from benchmarks.upcycled import EXPERTS, with_experts
from pronghorn.diagnose.shapes import byte_tokenizer
from pronghorn.errors import DataError, UnsupportedError
from support.tiny import tiny_model


def given(folder: Path, **changes: object) -> Namespace:
    values = {"out": folder / "out.json", "name": "m", "data": folder / "gsm8k", "steps": 3, "held_out": 2, "only": []}
    values |= {"tokens": 64, "experts": False}
    return Namespace(**values | {"commit": "c", "seeds": 5} | changes)


def test_a_run_that_was_cut_off_goes_on_after_its_finished_seeds(tmp_path: Path) -> None:
    asked = given(tmp_path)
    accuracy.keep(asked, 1, {"bf16": {"heldout": [1.0]}})
    accuracy.keep(asked, 0, {"bf16": {"heldout": [2.0]}})
    with accuracy.unfinished(asked).open("a") as file:
        file.write('{"settings": {')  # cut off here
    assert list(accuracy.finished(asked).items()) == [
        (0, {"bf16": {"heldout": [2.0]}}),
        (1, {"bf16": {"heldout": [1.0]}}),
    ]
    assert accuracy.finished(given(tmp_path, seeds=1)).keys() == {0}


@pytest.mark.parametrize(
    "change",
    [{"steps": 4}, {"name": "other"}, {"commit": "d"}, {"data": Path("dolly")}, {"tokens": 32}, {"experts": True}],
)
def test_seeds_of_other_settings_are_not_taken(tmp_path: Path, change: dict[str, object]) -> None:
    accuracy.keep(given(tmp_path), 0, {})
    assert accuracy.finished(given(tmp_path, **change)) == {}


@pytest.mark.parametrize(
    ("program", "name"),
    [(accuracy, "accuracy"), (fair_rows, "fair-rows-smollm2"), (load, "load-qwen3-14b"), (precision, "precision")],
)
def test_a_program_may_write_over_its_own_results_and_no_others(program: Any, name: str, tmp_path: Path) -> None:
    """So a run that is cut off can go on: what it has so far lies in the file that it writes."""
    out = tmp_path / "out.json"
    shutil.copy(Path(accuracy.__file__).parent / f"results/reports/{name}.json", out)
    check_out(out, program.SCHEMA)
    with pytest.raises(DataError, match=f"{program.SCHEMA}, not pronghorn-result-v1"):
        check_out(out)
    out.write_text('{"schema": "other-v3"}')
    with pytest.raises(DataError, match=f"other-v3, not {program.SCHEMA}"):
        check_out(out, program.SCHEMA)


@pytest.mark.parametrize("end", ["<|im_end|>", "<end_of_turn>"])
def test_an_answer_ends_as_the_chat_template_ends_it(end: str) -> None:
    tokenizer = byte_tokenizer(512)
    tokenizer.chat_template = (
        "{% for message in messages %}[{{ message.role }}]{{ message.content }}" + end + "\n{% endfor %}"
    )
    assert accuracy.end_of_turn(tokenizer) == end
    [(ids, labels)] = accuracy.documents([("one and one", "two")], tokenizer)
    assert [label for label in labels if label >= 0] == tokenizer(f"two{end}", add_special_tokens=False)["input_ids"]
    assert ids[-3:] == labels[-3:]


@pytest.mark.parametrize("family", ["llama", "gemma3_text"])
def test_a_model_with_outliers_is_the_same_function(family: str) -> None:
    model, ids = tiny_model(family).double().eval(), torch.arange(3, 43)[None]
    with torch.no_grad():
        right = model(ids).logits
        accuracy.with_outliers(model, 1024.0)
        torch.testing.assert_close(model(ids).logits, right, rtol=1e-5, atol=1e-5)
    norms = [p.abs().max() for name, p in model.named_parameters() if name.endswith("input_layernorm.weight")]
    assert min(norms) > 100


def test_experts_of_a_dense_model_are_the_same_function_but_for_their_noise() -> None:
    model, ids = tiny_model("llama").eval(), torch.arange(3, 43)[None]
    with torch.no_grad():
        right = model(ids).logits
        made = with_experts(model, noise=0.0).eval()
        torch.testing.assert_close(made(ids).logits, right, rtol=1e-5, atol=1e-5)
        noisy = with_experts(model).eval()
    one, *others = noisy.model.layers[1].mlp.experts.down_proj
    assert len(others) == EXPERTS - 1 and not any(torch.equal(one, other) for other in others)

    with pytest.raises(UnsupportedError, match="not of 'qwen3'"):
        with_experts(tiny_model("qwen3"))


def test_gradients_of_a_model_with_experts_and_over_nf4(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those over NF4 are compared twice; a row has as many tokens as asked for."""
    tokenizer = byte_tokenizer(512)
    tokenizer.chat_template = "{% for message in messages %}[{{ message.role }}]{{ message.content }}<e>{% endfor %}"
    model = tiny_model("llama", vocab_size=512, hidden_size=128, intermediate_size=192).bfloat16()
    monkeypatch.setattr(accuracy, "load", lambda path: (model, tokenizer))
    rows = [{"instruction": f"question {n}", "input": "", "output": "an answer " * (n + 1)} for n in range(6)]
    (tmp_path / "rows.json").write_text(json.dumps(rows))
    found = {}
    for flags in ([], ["--experts"]):
        out = tmp_path / "out.json"  # which is written over
        names = ["bf16", "int8", "nf4 in float32", "nf4", "nf4 + int8"]
        asked = ["--model", "m", "--data", f"{tmp_path}/rows.json", "--held-out", "1", "--gradients", "--tokens", "128"]
        accuracy.main(accuracy.arguments().parse_args([*asked, *flags, "--only", *names, "--out", f"{out}"]))
        found = json.loads(out.read_text())
        entries = found["candidates"]
        assert list(entries) == ["float32", *names] and found["tokens"] == 128 and found["experts"] is bool(flags)
        assert entries["float32"]["median"] == 1.0
        for name, entry in entries.items():
            assert ("with nf4 in float32" in entry) == name.startswith("nf4")
        assert entries["nf4 in float32"]["with nf4 in float32"]["median"] == 1.0
        own = entries["nf4"]["with nf4 in float32"]["median"]
        assert own > 0.99 and own > entries["nf4"]["median"]
    with pytest.raises(DataError, match="a row of 12 tokens"):
        accuracy.main(accuracy.arguments().parse_args([*asked[:-1], "12"]))
    assert "mlp.experts" in found["candidates"]["int8"]["each linear's least"]
