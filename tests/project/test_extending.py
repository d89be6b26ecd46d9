"""The files of docs/extending.md do what the page says, exactly as printed."""

from __future__ import annotations

import json
import re
import runpy
import subprocess
from functools import partial
from pathlib import Path

import pytest

from pronghorn.cli.main import app
from support.forked import forked

ROOT = Path(__file__).parents[2]
FILES = {
    block.split("\n", 1)[0].removeprefix("# "): block
    for block in re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "extending.md").read_text(), re.DOTALL)
}


def run(folder: Path, files: dict[str, str]) -> subprocess.CompletedProcess[str]:
    for name, text in files.items():
        (folder / name).write_text(text)
    return python(folder, "check_ibex.py")


def python(folder: Path, script: str) -> subprocess.CompletedProcess[str]:
    """Run a script of a folder, where its other files can be imported."""
    return forked(folder, partial(runpy.run_path, script, run_name="__main__"))


def pronghorn(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run a command in a folder."""
    return forked(folder, partial(app, arguments))


def test_a_family_from_outside_is_fused_and_equals_one_document_at_a_time(tmp_path: Path) -> None:
    assert list(FILES) == ["modeling_ibex.py", "ibex_family.py", "check_ibex.py"]
    done = run(tmp_path, FILES)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "fused, and equal" in done.stdout


@pytest.mark.slow
@pytest.mark.matrix(1)
@pytest.mark.parametrize(
    ("name", "before", "after"),
    [
        ("ibex_family.py", '"wq", "wk", "wv"', '"wq", "wv", "wk"'),
        ("ibex_family.py", 'before="ffn_norm"', 'before="ffn_norm", multiplier=0.5'),
        ("modeling_ibex.py", "gate, up = self.w13(x)", "up, gate = self.w13(x)"),
    ],
)
def test_the_check_of_the_page_can_fail(tmp_path: Path, name: str, before: str, after: str) -> None:
    """A wrong description of the family is seen. Norms are alike in a fresh model, so theirs show in the gradients."""
    assert FILES[name].count(before) == 1
    done = run(tmp_path, {**FILES, name: FILES[name].replace(before, after)})
    assert done.returncode == 1 and "not close" in done.stderr, done.stdout + done.stderr


@pytest.mark.parametrize(
    ("before", "after", "told"),
    [
        (', before="ffn_norm"', "", "no block or norm that holds 'ffn_norm.weight' of IbexLayer"),
        ('"silu"', '"act"', "names 'feed_forward.act', which IbexLayer has not"),
    ],
)
def test_a_description_that_doesn_t_fit_the_layer_is_refused(
    tmp_path: Path, before: str, after: str, told: str
) -> None:
    """Without its norm a layer was computed all the same."""
    assert FILES["ibex_family.py"].count(before) == 1
    done = run(tmp_path, {**FILES, "ibex_family.py": FILES["ibex_family.py"].replace(before, after)})
    assert done.returncode == 1 and "ConfigError" in done.stderr and told in done.stderr, done.stdout + done.stderr


SAVE = """
import modeling_ibex
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

words = {chr(33 + i): i for i in range(94)} | {"<pad>": 94, "<eos>": 95}
tokenizer = Tokenizer(models.WordLevel(words, unk_token="!"))
tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
torch.manual_seed(0)
modeling_ibex.IbexForCausalLM(modeling_ibex.IbexConfig()).save_pretrained("model")
PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>").save_pretrained("model")
"""
RECIPE = """
model: {name: model, max_seq_length: 64, plugins: [modeling_ibex, ibex_family]}
data: {train: train.jsonl, format: text, cache: cache}
train: {output: out, max_steps: 2}
"""


@pytest.fixture(scope="module")
def ibex(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with Ibex's files, a saved model, data and a recipe."""
    folder = tmp_path_factory.mktemp("ibex")
    files = {**FILES, "save.py": SAVE, "recipe.yaml": RECIPE, "train.jsonl": '{"text": "hello"}\n' * 64}
    for name, text in files.items():
        (folder / name).write_text(text)
    done = python(folder, "save.py")
    assert done.returncode == 0, done.stderr
    return folder


def test_the_planner_knows_a_family_from_outside(ibex: Path) -> None:
    done = pronghorn(ibex, "plan", "recipe.yaml", "--device", "24GiB", "--json")
    assert done.returncode == 0, done.stdout + done.stderr
    setup = json.loads(done.stdout)["work"]
    linears = ["attention.wq", "attention.wk", "attention.wv", "attention.wo", "feed_forward.w13", "feed_forward.w2"]
    assert setup["ranks"] == dict.fromkeys(linears, 16), "LoRA's default targets"


@pytest.mark.slow
def test_a_family_from_outside_recomputes_its_mlp(ibex: Path) -> None:
    """The loss and gradients are those of layers that keep everything."""
    script = """
import ibex_family, modeling_ibex, torch
from pronghorn.memory.plan import Plan, Policy
from pronghorn.memory.recompute import install
from pronghorn.parity.reference import accumulate
from pronghorn.data.packing import Document
model = modeling_ibex.IbexForCausalLM(modeling_ibex.IbexConfig()).train()
ids = list(range(9))
def passed():
    model.zero_grad()
    [one] = accumulate(model, [Document(ids, [-100, *ids[1:]])], 8, [[0, 3]])
    return one.losses, one.logits, [p.grad.clone() for p in model.parameters()]
kept = passed()
calls = []
module = model.model.layers[0].feed_forward.w13
module.register_forward_hook(lambda *_: calls.append(1))
install(model, model.model.layers, Plan(policies=(Policy.RECOMPUTE_MLP,)))
again = passed()
assert len(calls) == 2, "once more in the backward pass"
assert torch.equal(kept[0], again[0]) and torch.equal(kept[1], again[1]) and kept[1].shape == (2, 128)
assert all(map(torch.equal, kept[2], again[2]))
"""
    (ibex / "recompute.py").write_text(script)
    done = python(ibex, "recompute.py")
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
def test_a_family_from_outside_is_verified(ibex: Path) -> None:
    """Its forward takes no `logits_to_keep`."""
    done = pronghorn(ibex, "verify", "recipe.yaml", "--json")
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr
    checks = json.loads(done.stdout)["checks"]
    assert len(checks) > 5 and all(check["ok"] for check in checks)


@pytest.mark.slow
def test_a_plugin_that_can_t_be_imported_is_a_plain_error(ibex: Path) -> None:
    done = pronghorn(ibex, "plan", "recipe.yaml", "model.plugins=no_such_family", "--device", "24GiB")
    assert done.returncode != 0 and "Traceback" not in done.stderr
    text = " ".join(done.stderr.split())
    assert "no_such_family" in text and "PYTHONPATH" in text, done.stderr
