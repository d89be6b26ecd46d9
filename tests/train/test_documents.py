"""The tokenizer of a recipe."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from pronghorn.config.recipe import Recipe
from pronghorn.errors import DataError
from pronghorn.train.documents import find, tokenizer_for


def test_a_tokenizer_without_eos_and_padding_is_refused(stories: Path, tmp_path: Path) -> None:
    model = shutil.copytree(stories, tmp_path / "model", copy_function=shutil.copyfile)
    settings = json.loads((model / "tokenizer_config.json").read_text())
    recipe = Recipe.model_validate(
        {
            "model": {"name": str(model), "max_seq_length": 64},
            "data": {"train": "a.jsonl"},
            "train": {"output": str(tmp_path / "run")},
        }
    )
    for lacking, refused in (({"eos_token"}, False), ({"eos_token", "pad_token"}, True)):
        left = {name: value for name, value in settings.items() if name not in lacking}
        (model / "tokenizer_config.json").write_text(json.dumps(left))
        if refused:
            with pytest.raises(DataError, match=r"neither an EOS nor a padding token: set eos_token in"):
                tokenizer_for(recipe, find(recipe))
        else:
            assert tokenizer_for(recipe, find(recipe)).eos_token is None
