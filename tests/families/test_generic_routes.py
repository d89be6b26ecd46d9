"""Where tokens may go to experts bits aren't compared: whose products' shapes depend on a batch's other tokens."""

from __future__ import annotations

import pytest

from pronghorn.families.generic import routes
from pronghorn.models.families import base_causal_lm, decoder_layers
from support.causal_lms import tiny


@pytest.mark.parametrize(
    ("model_type", "found"), [("dbrx", True), ("deepseek_v2", True), ("starcoder2", False), ("doge", False)]
)
def test_experts_are_seen_by_what_lies_in_layers_or_by_name(model_type: str, found: bool) -> None:
    assert routes(decoder_layers(base_causal_lm(tiny(model_type)))) is found
