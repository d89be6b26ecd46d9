"""The scripts of docs/preference-training.md run as printed, on a small model and for two steps."""

from __future__ import annotations

import json
import re
import runpy
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from support.forked import forked

PAGE = Path(__file__).parents[2] / "docs/preference-training.md"
SCRIPTS = dict(re.findall(r"## (\w+)\n.*?```python\n(.*?)```", PAGE.read_text(), re.DOTALL))
ROWS: dict[str, list[dict[str, Any]]] = {
    "pairs": [{"prompt": "One day", "chosen": " a cat sat.", "rejected": " no."}] * 8,
    "labels": [{"prompt": "One day", "completion": f" cat {i}.", "label": bool(i % 2)} for i in range(8)],
    "prompts": [{"prompt": "One day a cat"}] * 8,
}


def test_the_page_has_a_script_for_each_task() -> None:
    assert list(SCRIPTS) == ["DPO", "KTO", "ORPO", "GRPO"]


@pytest.mark.matrix(1)
@pytest.mark.parametrize("task", SCRIPTS)
def test_a_script_trains_as_printed(task: str, tmp_path: Path, stories: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script = SCRIPTS[task]
    for printed, here in {
        '"Qwen/Qwen3-0.6B"': repr(str(stories)),
        "max_steps=100": "max_steps=2, use_cpu=True, report_to='none'",
        "max_seq_length=2048": "max_seq_length=256",
    }.items():
        assert printed in script, printed
        script = script.replace(printed, here)
    script = script.replace("max_length=1024", "max_length=128").replace(
        "max_completion_length=256", "max_completion_length=8"
    )
    (tmp_path / "script.py").write_text(script)
    for name, rows in ROWS.items():
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    done = forked(tmp_path, partial(runpy.run_path, "script.py", run_name="__main__"))
    assert done.returncode == 0, done.stderr[-3000:]
    weights = load_file(tmp_path / f"runs/{task.lower()}/adapter/adapter_model.safetensors")
    trained = [tensor for name, tensor in weights.items() if "lora_B" in name]
    assert trained and all(torch.isfinite(tensor).all() for tensor in trained)
    assert any(tensor.any() for tensor in trained)  # they begin at zero
