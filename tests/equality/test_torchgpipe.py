"""Against an implementation of GPipe that shares nothing with ours: torchgpipe (Kim et al. 2020), on CPU devices."""

from __future__ import annotations

from dataclasses import replace

import pytest

from ddlbench.frameworks.pipeline.adapter import Pipeline
from ddlbench.models.gpt2 import GPT2
from tests.equality.cases import CASES
from tests.equality.distances import TOLERANCES, assert_equal
from tests.support.equal import train_cases
from tests.support.ranks import run_ranks
from tests.support.reference import Case, Outcome, begin, cross_entropy, make_optimizer, order, snapshot, validate

torchgpipe = pytest.importorskip("torchgpipe")

# torchgpipe refuses tied parameters, so here GPT-2's head has its own.
GPT = GPT2(name="gpt2", n_layer=2, n_embd=32, n_head=4, vocab_size=61, seq_len=16, dropout=0.0, tie_weights=False)
BALANCES = {"resnet": [2, 4], "vgg": [9, 7], "gpt2": [2, 3]}
MICRO_BATCHES = 6  # of two samples


def trained(case: Case, balance: list[int]) -> Outcome:
    model, _ = begin(case)
    start = snapshot(model)
    pipe = torchgpipe.GPipe(model, balance, devices=["cpu", "cpu"], chunks=MICRO_BATCHES, checkpoint="never")
    optimizer = make_optimizer(case, pipe.parameters())
    samples = case.data.split(True, case.model, case.seed)
    losses: list[float] = []
    for chosen in order(case).split(case.global_batch)[: case.steps]:
        loss = cross_entropy(pipe(samples.inputs[chosen]), samples.targets[chosen])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return Outcome(losses, model.state_dict(), validate(case, model), case.steps, start)


@pytest.mark.slow
def test_gpipe_trains_what_torchgpipe_trains() -> None:
    cases = [
        replace(case, model=GPT if case.model.name == "gpt2" else case.model)
        for case in CASES
        if case.name.endswith("fp32-accumulated")
    ]
    pipelines = [Pipeline(balance=BALANCES[case.model.name]) for case in cases]
    result = run_ranks(2, train_cases, list(zip(cases, pipelines, strict=True)))[0]
    for case, outcome in zip(cases, result, strict=True):
        assert_equal(outcome, trained(case, BALANCES[case.model.name]), TOLERANCES[case.model.name, case.precision])
