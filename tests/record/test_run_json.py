"""The sections of run.json that are counted rather than copied."""

from __future__ import annotations

from ddlbench.models.gpt2 import GPT2
from ddlbench.record.run_json import model_section
from tests.support.jobs import checkpoint_all

TINY = GPT2("gpt2_small", n_layer=1, n_embd=8, n_head=2, vocab_size=11, seq_len=4)


def test_flops_of_a_sample_are_those_of_forward_and_backward() -> None:
    """By hand: 2 for a multiply-accumulate of 4 tokens of width 8, the backward pass twice the forward one."""
    projections = 2 * 4 * 8 * (3 * 8 + 8 + 4 * 8 + 4 * 8)
    attention = 2 * 2 * 4 * 4 * 8
    head = 2 * 4 * 8 * 11
    section = model_section(TINY, TINY.build().state_dict())
    assert section["flops_per_sample"] == 3 * (projections + attention + head)
    assert section["tokens_per_sample"] == 4


def test_what_is_computed_again_is_no_work_of_the_model() -> None:
    plain = model_section(TINY, TINY.build().state_dict())
    again = model_section(TINY, TINY.build().state_dict(), checkpoint_all)
    assert again["flops_per_sample"] == plain["flops_per_sample"] == plain["hardware_flops_per_sample"]
    assert again["hardware_flops_per_sample"] > plain["hardware_flops_per_sample"]


def test_a_model_that_was_not_built_has_no_flops() -> None:
    assert "flops_per_sample" not in model_section(TINY, None)
