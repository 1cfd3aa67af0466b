"""Hand-computed steps and the limits in which one strategy becomes another."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from benchmarks.memory import tensor_count
from ddlbench.counts.counts import Rows
from ddlbench.errors import Unsupported
from ddlbench.frameworks.ddp import DDP
from ddlbench.frameworks.deepspeed.knobs import DeepSpeedOptions
from ddlbench.frameworks.fsdp import FSDP
from ddlbench.frameworks.local_sgd import LocalSGD
from ddlbench.frameworks.parameter_server.adapter import ParameterServer
from ddlbench.frameworks.pipeline.adapter import Pipeline
from ddlbench.frameworks.pipeline.pipedream import PipeDream
from ddlbench.frameworks.pipeline.stages import Plan
from ddlbench.frameworks.spatial.adapter import Spatial
from ddlbench.frameworks.spatial.layers import Window
from ddlbench.frameworks.tensor.adapter import TensorParallel
from ddlbench.job import Framework
from ddlbench.models.gpt2 import GPT2
from ddlbench.oracle.machine.machine import with_overlap
from ddlbench.oracle.memory.stages import rank_parameters
from ddlbench.oracle.predictor import strategy
from ddlbench.oracle.setting import Limit, Outcome
from ddlbench.oracle.strategies.data_parallel import Gradient, Sharded, buckets, sharded_step
from ddlbench.oracle.strategies.pipeline import cut_of
from ddlbench.oracle.timing.computation import Pass, Speeds
from tests.oracle.made import GPT, MACHINE, RESNET, VGG16, block, made, setting

CHANNELS = TensorParallel(convolutions="channels")


def volume(outcome: Outcome, word: str) -> float:
    return sum(message.bytes_ for message in outcome.messages if word in message.what)


def test_buckets_close_when_they_are_full() -> None:
    """First bucket from 2 bytes on, then from 4; gradients in reverse order of blocks."""
    sizes, backward = [[1], [9, 3], [], [1, 1]], [7.0, 2.0, 0.5, 1.0]
    assert buckets(sizes, backward, first=2, cap=4) == [Gradient(2, 1.0), Gradient(12, 3.5), Gradient(1, 10.5)]
    assert buckets([[], [3]], [7.0, 1.0], first=4) == [Gradient(3, 1.0)]


@pytest.mark.parametrize(
    ("blocks", "seconds"),
    [
        ([Sharded(1, 2, 0, 0, 0)] * 3, 9),  # only computing
        ([Sharded(1, 0, 10, 0, 0)] * 3, 31),  # gathers of 10 s one after the other, the last forward pass after them
        # Forward until 3. Backward until 4, 5 and 6; reductions of 10 s from 4 on, one after the other: until 34.
        ([Sharded(1, 1, 0, 0, 10)] * 3, 34),
        # Forward until 3. The link: gathers 3 to 5 and 5 to 7 (the second one beside the first backward pass, 5 to 6),
        # reduction 7 to 17 beside the second pass (7 to 8), gather 17 to 19, reduction 19 to 29 beside the third pass
        # (19 to 20), reduction 29 to 39.
        ([Sharded(1, 1, 0, 2, 10)] * 3, 39),
    ],
)
def test_gathers_and_reductions_of_shards_share_the_link(blocks: list[Sharded], seconds: float) -> None:
    assert sharded_step(blocks) == pytest.approx(seconds)


@pytest.mark.parametrize(("cost", "exposed"), [({}, 0.0), ({4: 0.0}, 0.0), ({4: 0.5}, 0.300003), ({4: 1.0}, 0.600006)])
def test_what_is_hidden_costs_what_was_measured(cost: dict[int, float], exposed: float) -> None:
    """Communication takes 0.6 s; on shared cores a share of it is taken from computing."""
    blocks = [block("a", 1, 2), block("b", 3, 4, numbers=10**9)]
    outcome = strategy(DDP(), made(4, blocks, 8, machine=replace(MACHINE, hidden_cost=cost)))
    assert outcome.exposed_s == pytest.approx(exposed)
    never = strategy(DDP(), made(4, blocks, 8, machine=with_overlap(replace(MACHINE, hidden_cost=cost), False)))
    assert never.exposed_s == pytest.approx(0.600006)


def test_hiding_that_costs_more_than_it_gains_hides_nothing() -> None:
    """As learned from slow runs: 0.6 s beside computing cost 1.2 s, and none of them is gained."""
    blocks = [block("a", 1, 2), block("b", 3, 4, numbers=10**9)]
    outcome = strategy(DDP(), made(4, blocks, 8, machine=replace(MACHINE, hidden_cost={4: 2.0})))
    assert (outcome.exposed_s, outcome.hidden_s) == (pytest.approx(1.200012), 0.0)
    assert [message.hidden for message in outcome.messages] == [0.0]


@pytest.mark.parametrize(
    ("framework", "moved"),
    [
        (DDP(), 8e9),
        (DDP(gradient_as_bucket_view=False), 16e9),
        (LocalSGD(local_steps=2), 8e9),
        (FSDP(reshard_after_forward=True), 24e9),
    ],
)
def test_a_device_packs_what_it_sends(framework: Framework, moved: float) -> None:
    """4 GB of gradients, read and written at 900 GB/s, and copied back unless they are views; 4 GB of weights every
    second step; of shards 8 GB of gathered weights and 4 GB of gradients, each copied once. No other seconds change."""
    blocks = [block("a", 1, 2), block("b", 3, 4, numbers=10**9)]
    packed, free = (
        strategy(framework, made(4, blocks, 8, machine=replace(MACHINE, packing=packing))) for packing in (4.0, 0.0)
    )
    assert packed.step_s - free.step_s == pytest.approx(moved / 900e9)
    assert packed.hidden_s == pytest.approx(free.hidden_s)


def test_the_largest_message_of_each_kind_is_known() -> None:
    """Of layers 8 samples x 8 tokens x 32 numbers in fp32, beside those of the loss. Of stages with outputs of 3, 5 and
    1 bytes a sample 8 x 5 bytes. Of BatchNorm the statistics of 2,048 channels of two parts."""
    blocks = [replace(block("made", 1, 2), output=output) for output in (3, 5, 1, 0)]
    stages = strategy(Pipeline(schedule="gpipe", pp=4), made(4, blocks, 8, micro_batch=8))
    tensor = strategy(TensorParallel(dp=1, tp=4), setting(4))
    spatial = strategy(Spatial(dp=1, sp=2), setting(2, model=RESNET))
    outcomes = stages, tensor, spatial
    sent = {message.what: message for outcome in outcomes for message in outcome.messages}
    assert sent["collectives of layers"].largest == 8 * 8 * 32 * 4
    assert sent["activations between stages"].largest == 8 * 5
    assert sent["statistics of BatchNorm"].largest == 4 * 2 * (2 * 2048 + 1)
    assert sent["halo exchange"].largest > sent["halo exchange"].bytes_ / sent["halo exchange"].count


@pytest.mark.parametrize(("framework", "times"), [(DDP(), 1), (DeepSpeedOptions(zero_stage=2), 2)], ids=str)
def test_accumulation_sends_once_but_zero_2_reduces_after_every_micro_batch(framework: Framework, times: int) -> None:
    one, two = (strategy(framework, setting(4, 32, micro_batch=micro)) for micro in (8, 4))
    assert volume(two, "gradients") == times * volume(one, "gradients")


@pytest.mark.parametrize(
    "framework", [DDP(), DeepSpeedOptions(zero_stage=1), TensorParallel(dp=4, tp=1), Spatial(dp=4, sp=1)], ids=type
)
def test_a_bucket_is_full_by_its_numbers(framework: Framework) -> None:
    """Each block has 32 MB of gradients in fp32, more than a bucket; in 16 bits a bucket has as many numbers."""
    rows = (Rows("conv", Window(64), 1.0),)
    blocks = [replace(block(name, 1, 2, numbers=8 * 10**6), rows=rows) for name in "abc"]
    full, half = (
        strategy(framework, made(4, blocks, 8, model=VGG16, reduce_dtype=dtype)) for dtype in ("fp32", "fp16")
    )
    sent = [next(item for item in outcome.messages if "gradients" in item.what) for outcome in (full, half)]
    assert [message.count for message in sent] == [3, 3]
    assert sent[1].bytes_ == sent[0].bytes_ / 2


def test_zero_sends_and_keeps_what_its_stages_say() -> None:
    """In parameters' worth: stage 0 sends one all-reduce, 1 and 2 an all-gather more. Stage 3 as DeepSpeed runs it: a
    gather and a reduction, for weights that are needed again before 1e9 others stay (stage3_max_reuse_distance). Memory
    by Rajbhandari et al. 2020, section 5, for SGD with momentum, with DeepSpeed's own copy of the weights."""
    stages = [DeepSpeedOptions(zero_stage=stage, persistence_threshold=0) for stage in range(4)]
    outcomes, full = [strategy(item, setting(4)) for item in stages], 4 * setting(4).counts.parameter_count
    assert [volume(outcome, "") / full for outcome in outcomes] == [1, 2, 2, 2]
    assert [outcome.memory.weights / full for outcome in outcomes] == [1, 1, 1, 1 / 4]
    assert [outcome.memory.optimizer / full for outcome in outcomes] == [1, 1 / 2, 1 / 2, 1 / 2]


def test_zero_3_gathers_twice_what_is_needed_again_too_late() -> None:
    """Blocks of 4e8 numbers: after the first come 2 x 8e8 before it is needed again, after the second 2 x 4e8."""
    blocks = [block(name, 1, 2, numbers=4 * 10**8) for name in "abc"]
    outcome = strategy(DeepSpeedOptions(zero_stage=3), made(4, blocks, 8))
    assert volume(outcome, "gathering") == 4 * (3 + 1 + 3) * 4e8
    assert outcome.messages[0].count == 3 + 1 + 3
    assert outcome.memory.activations > 4 * 3 * 4e8  # the others stay gathered


def test_zero_3_keeps_small_parameters_whole() -> None:
    """One of 100,000 numbers, the threshold of DeepSpeed, beside one of 100,001: gathered once, after the update; whole
    beside its shard."""
    parts = [block("a", 1, 2, numbers=100_000), block("b", 1, 2, numbers=100_001)]
    outcome = strategy(DeepSpeedOptions(zero_stage=3), made(4, parts, 8, micro_batch=1))
    assert volume(outcome, "small weights") == 4 * 100_000
    assert volume(outcome, "reduction") == 2 * 4 * (100_001 + 200_001)
    assert outcome.memory.weights == 4 * (200_001 / 4 + 100_000)


@pytest.mark.parametrize("framework", [FSDP(), DeepSpeedOptions(zero_stage=3, persistence_threshold=0)], ids=type)
def test_where_the_host_computes_shards_are_waited_for(framework: FSDP | DeepSpeedOptions) -> None:
    """torch's collectives over gloo return when they are done: nothing is hidden, asked for ahead or not."""
    hidden, waited = (strategy(framework, setting(4, device=torch.device(kind))) for kind in ("cuda", "cpu"))
    assert hidden.hidden_s > 0
    assert waited.hidden_s == pytest.approx(0)
    assert waited.exposed_s == pytest.approx(sum(message.seconds for message in hidden.messages))


def test_what_fsdp_gathers_again_for_the_backward_pass() -> None:
    """By default all but the root's group, of a tied embedding and head and of the last norm."""
    text = GPT2("gpt2_small", n_layer=2, n_embd=32, n_head=4, vocab_size=61, seq_len=16)
    once, default, always = (
        strategy(FSDP(reshard_after_forward=again), setting(4, model=text)) for again in (False, None, True)
    )
    numbers = {block.name: block.parameter_count for block in setting(4, model=text).counts.blocks}
    root = sum(count for name, count in numbers.items() if not name.startswith("h"))
    total = sum(numbers.values())
    assert 0 < root < total
    sent = [volume(item, "gathering") for item in (once, default, always)]
    assert sent == [4 * (2 * total), 4 * (3 * total - root), 4 * (3 * total)]


def test_megatron_sums_twice_forward_and_twice_backward_in_each_block() -> None:
    """Shoeybi et al. 2019, section 3: 4 all-reduces of B T E a block, one of the embedding, one before the head, two of
    the loss. 8 samples of 8 tokens of 32 numbers."""
    outcome = strategy(TensorParallel(), setting(2))
    message = next(message for message in outcome.messages if "layers" in message.what)
    assert message.count == 2 * 4 + 2 + 2
    assert message.bytes_ == (2 * 4 + 2) * 8 * 8 * 32 * 4 + 8 * 8 * 4 * 4


@pytest.mark.parametrize("framework", [TensorParallel(), Pipeline(schedule="gpipe", dp=1, tp=2, pp=1)], ids=type)
def test_layers_that_run_again_send_again(framework: Framework) -> None:
    """The two all-reduces of each block's forward pass and that of the embedding; not those of the loss."""
    once, again = (
        strategy(framework, setting(2, micro_batch=8, checkpoint_activations=value)) for value in (False, True)
    )
    before, after = (next(item for item in result.messages if "layers" in item.what) for result in (once, again))
    assert after.count - before.count == 2 * 2 + 1
    assert after.bytes_ - before.bytes_ == (2 * 2 + 1) * 8 * 8 * 32 * 4
    assert after.seconds > before.seconds


def test_with_sequence_parallelism_the_gradients_of_whole_layers_are_summed() -> None:
    """Norms, the biases after a sum, and positions: 4 bytes for each of their numbers."""
    given = setting(2)
    outcome, plain = (strategy(TensorParallel(sequence_parallel=value), given) for value in (True, False))
    unsplit = sum(block.parameter_count - block.split_parameters for block in given.counts.blocks)
    assert volume(outcome, "not split") == 4 * unsplit > 0
    assert volume(plain, "not split") == 0


def test_logits_that_are_gathered_are_sent_and_kept() -> None:
    """8 samples of 8 positions of 4,096 classes on each rank, instead of 1 + 3 numbers for each position."""
    given = setting(2, model=replace(GPT, vocab_size=4096))
    split, gathered = (strategy(TensorParallel(parallel_loss=value), given) for value in (True, False))
    assert volume(gathered, "layers") - volume(split, "layers") == 8 * 8 * 4096 * 4 - 8 * 8 * (1 + 3) * 4
    assert gathered.memory.activations > split.memory.activations


def test_parameters_of_a_tensor_parallel_rank() -> None:
    given = setting(2, model=RESNET)
    outcome = strategy(TensorParallel(), given)
    held = tensor_count(RESNET.build(), RESNET.tensor_plan(), 2)
    assert outcome.memory.weights == 4 * held
    gpt2 = setting(4).counts.blocks  # norms and positions are not split
    held = tensor_count(GPT.build(), GPT.tensor_plan(), 4)
    assert sum(block.parameters_of_part(4) for block in gpt2) == held


def test_spatial_by_hand() -> None:
    """The halo of a 3x3 convolution: a row of each of 8 samples for the neighbour, forward and backward. The images
    need no gradient; poolings by halves send nothing where heights divide."""
    outcome = strategy(Spatial(sp=2), setting(2, model=VGG16))
    halos = next(message for message in outcome.messages if "halo" in message.what)
    first, *others = (item for block in setting(1, model=VGG16).counts.blocks for item in block.rows)
    convolutions = [item for item in others if item.window.kernel == 3]
    assert (len(convolutions), first.row) == (12, 3 * 64 * 4)
    assert halos.bytes_ == 8 * (first.row + 2 * sum(item.row for item in convolutions))
    assert halos.count == 1 + 2 * 12
    assert outcome.limits[0].largest == 2


@pytest.mark.parametrize(("per_node", "alpha", "rate"), [(4, 1e-6, 10e9), (2, 10e-6, 1e9), (1, 10e-6, 1e9)])
def test_neighbours_in_two_nodes_set_the_pace_of_halos(per_node: int, alpha: float, rate: float) -> None:
    machine = replace(MACHINE, devices_per_node=per_node)
    outcome = strategy(Spatial(sp=4), setting(4, model=replace(VGG16, image_size=128), machine=machine))
    halos = next(message for message in outcome.messages if "halo" in message.what)
    assert halos.seconds == pytest.approx(halos.count * alpha + halos.bytes_ / rate)


@pytest.mark.parametrize(
    ("stages", "dp", "per_node", "exposed_s"),
    [
        (8, 1, 4, 2 * (6 * (1e-6 + 0.1) + 10e-6 + 1.0)),  # 6 messages within a node and one between, both ways
        (3, 2, 3, 2 * 2 * (10e-6 + 1.0)),  # a node cuts a stage: ranks 1 and 2 send to the other, one of each stage
    ],
)
def test_a_pipeline_over_two_nodes_sends_once_between_them(
    stages: int, dp: int, per_node: int, exposed_s: float
) -> None:
    """One micro batch of 8 samples in each replica, 1 GB each time."""
    blocks, machine = [block("a", 1, 2, output=1e9 / 8)] * stages, replace(MACHINE, devices_per_node=per_node)
    given = made(stages * dp, blocks, 8 * dp, machine, micro_batch=8)
    outcome = strategy(Pipeline(schedule="gpipe", dp=dp, balance=[1] * stages), given)
    (message,) = [item for item in outcome.messages if "between stages" in item.what]
    assert message.exposed == pytest.approx(exposed_s)


@pytest.mark.parametrize(("kind", "exposed"), [("cuda", 1.0), ("cpu", 2.0)])
def test_gloo_sends_when_the_receiver_asks(kind: str, exposed: float) -> None:
    """Two stages of 1 + 2 s, two micro batches, 0.5 s a message: 9 s without sending. Sent while the receiver computes,
    only the first message forward and the first one back delay the step; else all four do."""
    blocks = [block("a", 1, 2, output=5e9), block("b", 1, 2)]
    given = made(2, blocks, 2, micro_batch=1, device=torch.device(kind))
    outcome = strategy(Pipeline(schedule="gpipe", balance=[1, 1]), given)
    assert outcome.compute_s + outcome.bubble_s == pytest.approx(9)
    assert outcome.exposed_s == pytest.approx(exposed, rel=1e-4)


def test_parts_of_images_need_all_kernels() -> None:
    """A kernel takes 1 s beside its work. Block a has half of its 8 x 3 s and two kernels, block b all of 8 x 7 s."""
    rows = (Rows("conv", Window(64, 3, 1, 1), 768.0),)
    given = made(2, [replace(block("a", 1, 2), rows=rows), block("b", 3, 4)], 8, model=VGG16)
    given = replace(given, computation=replace(given.computation, speeds=Speeds(1.0, float("inf"), kernel_s=1.0)))
    assert strategy(Spatial(sp=2), given).compute_s == (12 + 2) + (56 + 2)


def test_channels_limit_the_ranks_that_share_them() -> None:
    """VGG of 8, 8, 16, ... channels: conv1_2 has 8 of them, conv1_1 the 3 of the images, which are not split."""
    outcome = strategy(CHANNELS, setting(8, model=VGG16))
    assert outcome.layout == {"dp": 1, "tp": 8}
    assert outcome.limits[0] == Limit("tp", 8, "channels of conv1_2.conv")


def test_on_a_v_no_rank_has_a_copy_of_the_tied_embedding() -> None:
    """And the turn of the V sends nothing: rank 0 of two sends one output and one gradient of each micro batch, and so
    does rank 1; round and round it would be two of them."""
    given = setting(2, 32, micro_batch=2)
    frameworks = {name: Pipeline(schedule=name, virtual_stages=2) for name in ("looped_bfs", "zbv", "dualpipev")}
    outcomes = {name: strategy(framework, given) for name, framework in frameworks.items()}
    tied = {name for name, result in outcomes.items() if "all-reduce of the tied embedding" in str(result.messages)}
    assert tied == {"looped_bfs"}
    sent = {name: result.messages[0].count for name, result in outcomes.items()}
    assert sent == {"looped_bfs": 16 * 3, "zbv": 16 * 2, "dualpipev": 16 * 2}
    parts = {name: rank_parameters(cut_of(framework, given)) for name, framework in frameworks.items()}
    assert sum(parts["zbv"]) == sum(block.parameter_count for block in given.counts.blocks)
    assert sum(parts["looped_bfs"]) == sum(parts["zbv"]) + given.counts.tied


def test_stages_are_cut_as_the_framework_cuts_them() -> None:
    given = setting(2, model=RESNET)
    sizes = Plan(given.job, [2, 2], 2, Pipeline()).sizes
    assert list(cut_of(Pipeline(), given).sizes) == sizes


def test_stages_by_seconds_are_cut_by_the_predicted_ones() -> None:
    """Blocks of equal FLOPs take 9, 4, 4 and 3 s; with recomputation 9, 7, 7 and 3 s."""
    given, framework = made(2, [block("a", 1, 2)] * 4, 8), Pipeline(balance_by="seconds")
    given.computation.measured[2] = [Pass(0, 9), Pass(3, 1), Pass(3, 1), Pass(0, 3)]
    assert cut_of(Pipeline(), given).sizes == (2, 2)
    assert cut_of(framework, given).sizes == (1, 3)
    again = replace(given, job=replace(given.job, checkpoint_activations=True))
    assert cut_of(framework, again).sizes == (2, 2)
    assert sum(cut_of(PipeDream(balance_by="seconds"), setting(2, model=RESNET)).sizes) == 6


def test_hybrid_communicates_in_three_ways() -> None:
    outcome = strategy(Pipeline(schedule="1f1b", dp=2, tp=2, pp=2), setting(8, 32))
    assert outcome.layout == {"dp": 2, "tp": 2, "pp": 2}
    assert {message.what for message in outcome.messages} == {
        "collectives of layers",
        "broadcast of the batch",
        "activations between stages",
        "all-reduce of gradients",
        "all-reduce of the tied embedding",
    }
    assert all(message.exposed > 0 for message in outcome.messages if message.what != "broadcast of the batch")


def test_ranks_that_share_cores_compute_longer() -> None:
    """4 ranks on 2 cores: twice as long; a pipeline on one core takes as long as all its work, one of 4 on 2 cores no
    less than half of it, and what it takes to fill and to empty it: 1 + 1 s and 2 + 2 s with one rank or another idle.
    """
    shared = replace(MACHINE, cores=2)
    blocks = [block(name, 1, 2) for name in "abcd"]
    assert (
        strategy(DDP(), made(4, blocks, 8, machine=shared)).compute_s
        == 2 * strategy(DDP(), made(4, blocks, 8)).compute_s
    )
    outcome = strategy(Pipeline(schedule="1f1b", balance=[1] * 4), made(4, blocks, 32, machine=shared, micro_batch=1))
    assert 32 * 12 / 2 < outcome.compute_s + outcome.bubble_s < 32 * 12 / 2 + 6
    one = replace(MACHINE, cores=1)
    outcome = strategy(Pipeline(schedule="1f1b", balance=[1, 1]), made(2, blocks[:2], 2, machine=one, micro_batch=1))
    assert outcome.compute_s + outcome.bubble_s == pytest.approx(2 * 6)


@pytest.mark.parametrize(
    ("framework", "world", "seconds"),
    [
        (DDP(), 4, 8.0),
        (DeepSpeedOptions(zero_stage=1), 4, 2.0),
        (FSDP(), 4, 2.0),
        (Pipeline(schedule="gpipe", balance=[1, 1]), 2, 6.0),
        (Pipeline(schedule="gpipe", dp=2, balance=[1, 1], sharded=True), 4, 3.0),
        (PipeDream(balance=[1, 1]), 2, 6.0),
    ],
    ids=str,
)
def test_an_update_is_that_of_a_rank_s_share_and_shared_cores_slow_it(
    framework: Framework, world: int, seconds: float
) -> None:
    """A second for 1e9 parameters, of which one block has 2e9 and the other 6e9; then half as many cores as ranks."""

    def compute_s(update_s: float, cores: int | None) -> float:
        blocks = [block("a", 1, 2, numbers=2 * 10**9), block("b", 3, 4, numbers=6 * 10**9)]
        given = made(world, blocks, 8, machine=replace(MACHINE, cores=cores), micro_batch=2)
        return strategy(framework, replace(given, computation=replace(given.computation, update_s=update_s))).compute_s

    assert compute_s(1e-9, None) - compute_s(0.0, None) == pytest.approx(seconds)
    assert compute_s(1e-9, world // 2) - compute_s(0.0, world // 2) == pytest.approx(2 * seconds)


@pytest.mark.parametrize(
    ("framework", "said"),
    [
        (
            DeepSpeedOptions(zero_stage=1, offload_optimizer=True),
            r"no model of offloading: set framework\.offload_optimizer",
        ),
        (
            FSDP(offload_parameters=True),
            r"no model of offloading: set framework\.offload_parameters=false",
        ),
        (PipeDream(correction="prediction"), r"framework\.correction: set it to none"),
        (ParameterServer(), "sends by gloo"),
    ],
    ids=lambda item: getattr(item, "name", ""),
)
def test_what_has_no_model_is_refused(framework: Framework, said: str) -> None:
    with pytest.raises(Unsupported, match=said):
        strategy(framework, setting(2))


@pytest.mark.parametrize("hook", ["topk", "noop"])
def test_what_hooks_send_is_counted_from_them(hook: str) -> None:
    """1 % of the numbers, 8 bytes each, of both ranks; memory has the errors that stay."""
    given = setting(2)
    outcome, plain = strategy(DDP(comm_hook=hook), given), strategy(DDP(), given)
    sent = sum(message.bytes_ for message in outcome.messages)
    whole = plain.messages[0].bytes_
    assert outcome.traced
    if hook == "noop":
        assert (sent, outcome.exposed_s) == (0, 0)
    else:
        assert 0.04 * whole <= sent < 0.05 * whole  # the least of a tensor is one number


@pytest.mark.parametrize("again", [False, True])
def test_what_is_traced_computes_what_its_blocks_take(again: bool) -> None:
    """A hook changes what is sent, not what is computed: with recomputation the forward passes count twice, too."""
    given = setting(2, checkpoint_activations=again)
    hooked, plain = (strategy(DDP(comm_hook=hook), given) for hook in ("topk", "none"))
    assert hooked.compute_s == pytest.approx(plain.compute_s, rel=0.01)


def test_the_memory_of_a_hook_is_that_of_a_gpu_s_kernels() -> None:
    """Measured on an H200: 32.3 GiB with int8, 31.4 GiB without; kernels of a CPU would need 88 GiB (attention)."""
    model = GPT2("gpt2_small", n_layer=2, n_embd=32, n_head=4, vocab_size=64, seq_len=256, dropout=0.1)
    hooked = strategy(DDP("ddp", comm_hook="int8"), setting(2, 8, model=model)).memory.total
    assert hooked == pytest.approx(strategy(DDP("ddp"), setting(2, 8, model=model)).memory.total, rel=0.1)


def test_a_parameter_server_sends_gradients_and_weights_once() -> None:
    on_cpu = setting(2, device=torch.device("cpu"))
    (message,) = strategy(ParameterServer(bound=2), on_cpu).messages
    assert (message.count, message.bytes_) == (2, 4 * (on_cpu.counts.parameter_count + 2))  # a number more in each
    assert message.exposed == message.seconds
