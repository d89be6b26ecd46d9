"""What a run's record counts."""

from __future__ import annotations

from pathlib import Path

import pytest

from pronghorn import FastLanguageModel
from pronghorn.records.record import peak_of, trainable_parameters


def test_weights_in_4_bits_count_as_many_as_they_are(stories: Path) -> None:
    """bitsandbytes stores two in a byte: the trained share would be up to twice as high."""
    pytest.importorskip("bitsandbytes")
    counted = []
    for in_4bit in (False, True):
        model, _ = FastLanguageModel.from_pretrained(str(stories), max_seq_length=64, load_in_4bit=in_4bit)
        counted.append(trainable_parameters(FastLanguageModel.get_peft_model(model, r=2)))
    assert counted[0] == counted[1]


def test_the_peak_of_a_resumed_run_is_that_of_all_its_processes() -> None:
    history = [{"loss": 1.0, "peak_memory_gib": 40.0}, {"eval_loss": 1.0}, {"loss": 1.0, "peak_memory_gib": 1.0}]
    assert peak_of(history, 2**30) == 40 * 2**30
    assert peak_of(history, 50 * 2**30) == 50 * 2**30 and peak_of([], 7) == 7
