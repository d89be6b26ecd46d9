"""What a run's record counts."""

from __future__ import annotations

from pathlib import Path

import pytest

from pronghorn import FastLanguageModel
from pronghorn.records.record import trainable_parameters


def test_weights_in_4_bits_count_as_many_as_they_are(stories: Path) -> None:
    """bitsandbytes stores two in a byte: the trained share would be up to twice as high."""
    pytest.importorskip("bitsandbytes")
    counted = []
    for in_4bit in (False, True):
        model, _ = FastLanguageModel.from_pretrained(str(stories), max_seq_length=64, load_in_4bit=in_4bit)
        counted.append(trainable_parameters(FastLanguageModel.get_peft_model(model, r=2)))
    assert counted[0] == counted[1]
