"""Every pipeline and every tied weight under NCCL's rules, replayed from trainings over gloo (docs/adr/0014)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import pytest

from ddlbench.frameworks.megatron.adapter import Megatron
from ddlbench.frameworks.pipeline.adapter import Pipeline
from ddlbench.frameworks.pipeline.pipedream import PipeDream
from ddlbench.frameworks.spatial.adapter import Spatial
from ddlbench.frameworks.tensor.adapter import TensorParallel
from ddlbench.job import Framework
from ddlbench.models.gpt2 import GPT2
from tests.equality.cases import MODELS
from tests.equality.nccl import Replay
from tests.support.equal import train_case
from tests.support.ranks import run_ranks
from tests.support.reference import Case, Outcome
from tests.support.trace import NUMBERS, Event

TIED = GPT2("gpt2", n_layer=6, n_embd=16, n_head=4, vocab_size=32, seq_len=8, dropout=0.0)
CASE = Case("gpt2", TIED, micro_batch=2, steps=4)
TWO_STAGES_A_RANK = ("interleaved", "looped_bfs", "zbv", "dualpipev")


def frameworks(world: int) -> Mapping[str, Framework]:
    """Tied GPT-2; pipedream refuses it, so its weights are not tied. A ResNet whose last images have two rows."""
    result: dict[str, Framework] = {"tensor": TensorParallel(), "megatron": Megatron(), "hybrid-tp": Pipeline(tp=2)}
    result |= {"channel": TensorParallel(convolutions="channels")} | ({"spatial": Spatial()} if world == 2 else {})
    for dp in (1, 2) if world == 4 else (1,):
        result |= {
            f"gpipe-dp{dp}": Pipeline(dp=dp),
            f"1f1b-dp{dp}": Pipeline(schedule="1f1b", dp=dp),
            f"zero_bubble-dp{dp}": Pipeline(schedule="zero_bubble", dp=dp),
            **{f"{name}-dp{dp}": Pipeline(schedule=name, virtual_stages=2, dp=dp) for name in TWO_STAGES_A_RANK},
            f"pipedream-dp{dp}": PipeDream(dp=dp),
            f"pipedream_2bw-dp{dp}": PipeDream("pipedream_2bw", True, dp=dp),
        }
    if world == 4:
        result |= {
            "hybrid-tp-1f1b": Pipeline(schedule="1f1b", tp=2),
            "hybrid-shards-1f1b": Pipeline(schedule="1f1b", dp=2, sharded=True),
            "hybrid-shards-tp": Pipeline(dp=2, tp=2, sharded=True),
            "tensor-dp2": TensorParallel(dp=2, sequence_parallel=True),
            "spatial-dp2": Spatial(dp=2),
        }
    else:
        result |= {"hybrid-shards": Pipeline(dp=2, sharded=True), "gpipe-dp2": Pipeline(dp=2)}
    return result


def case_of(world: int, framework: Framework) -> Case:
    if isinstance(framework, Spatial) or getattr(framework, "convolutions", "") == "channels":
        return replace(CASE, model=MODELS["resnet"], global_batch=8 * world)
    tied = not (isinstance(framework, PipeDream) and not framework.double_buffered)
    # With the model's ends, blocks for two stages a rank.
    model = replace(TIED, n_layer=2 * world - 2, tie_weights=tied)
    return replace(CASE, model=model, global_batch=8 * world)


@pytest.mark.parametrize("world", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_every_pipeline_and_tied_weight_ends_under_nccls_rules(world: int) -> None:
    asked = frameworks(world)
    work = [(case_of(world, framework), framework) for framework in asked.values()]
    ranks = run_ranks(world, record, work)
    for one_queue in (False, True):
        stuck = {name: replay([outcomes[index] for outcomes in ranks], one_queue) for index, name in enumerate(asked)}
        result = [f"{name}: {where}" for name, where in stuck.items() if where]
        assert not result, "\n".join([f"one queue a rank: {one_queue}", *result])


def record(work: Sequence[tuple[Case, Framework]]) -> list[Outcome]:
    return [train_case(case, framework, timeout_s=None) for case, framework in work]


def replay(outcomes: Sequence[Outcome], one_queue: bool) -> dict[int, str]:
    """Replay what each rank recorded."""
    events, members = zip(*(outcome.trace for outcome in outcomes), strict=True)
    assert all(sum(event[0] == "collective" for event in each) for each in events)
    return Replay(events, members, [NUMBERS], one_queue).stuck()


PAIR = {"a": (0, 1), "b": (0, 1)}


def stuck(*traces: list[Event], made: Sequence[str] = ("a", "b"), one_queue: bool = False) -> dict[int, str]:
    return Replay(traces, [PAIR] * len(traces), made, one_queue).stuck()


def total(communicator: str, number: int) -> list[Event]:
    """A sum and its wait."""
    return [("collective", communicator, number, "allreduce"), ("wait", number)]


def message(number: int, kind: str, peer: int) -> list[Event]:
    return [("messages", "a", number, [(kind, peer)]), ("wait", number)]


def test_a_program_that_ends_is_not_reported_as_a_deadlock() -> None:
    assert not stuck(total("a", 1), total("a", 7), made=())
    assert not stuck(message(1, "send", 1) + message(2, "recv", 1), message(1, "recv", 0) + message(2, "send", 0))
    both: list[Event] = [("messages", "a", 1, [("send", 1), ("recv", 1)]), ("synchronize",)]
    assert not stuck(both, [("messages", "a", 1, [("recv", 0), ("send", 0)]), ("synchronize",)])


def test_a_planted_hang_is_found() -> None:
    """A sum that one rank starts before both ranks wait for each other and the other rank after it, with an idle device
    before."""
    early: list[Event] = [("collective", "a", 1, "allreduce"), ("synchronize",), ("meet",), ("wait", 1)]
    late: list[Event] = [("synchronize",), ("meet",), *total("a", 1)]
    result = stuck(early, late)
    assert result.keys() == {0, 1}
    assert "host at event 1: ('synchronize',)" in result[0]
    assert "host at event 1: ('meet',); device: idle" in result[1]
    assert not stuck([early[0], *early[2:]], late), "the host alone need not wait"


def test_sends_that_wait_for_each_other_are_found() -> None:
    crossed = message(1, "send", 1) + message(2, "recv", 1), message(1, "send", 0) + message(2, "recv", 0)
    assert stuck(*crossed).keys() == {0, 1}


def test_a_crossing_order_of_two_communicators_is_found() -> None:
    started: list[Event] = [("collective", "a", 1, "allreduce"), ("collective", "b", 2, "allreduce")]
    assert not stuck(started, started[::-1]), "made before, both run at once"
    assert stuck(started, started[::-1], one_queue=True).keys() == {0, 1}, "one waits for the other in a shared queue"
    assert not stuck(started, started, one_queue=True)
    assert stuck(started, started[::-1], made=()).keys() == {0, 1}, "made at first use, each host waits for the other"
    waited = total("a", 1) + total("b", 2), total("b", 2) + total("a", 1)
    assert stuck(*waited).keys() == {0, 1}


def test_one_communicator_runs_in_the_order_of_launches() -> None:
    first: list[Event] = [("collective", "a", 1, "allreduce"), *message(2, "send", 1)]
    assert stuck(first, message(2, "recv", 0) + total("a", 1)).keys() == {0, 1}
