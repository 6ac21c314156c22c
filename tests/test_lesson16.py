"""Lesson 16: an analyser that is right on known traces, fair comparisons, a model that
predicts, and a program whose switches change its speed only.
"""

import json
import math
import random
import time
from contextlib import redirect_stdout
from functools import partial
from io import StringIO

import pytest
import torch
import torch.distributed as dist
from conftest import THOROUGH
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

from ddp_course import UsageError, lesson04, lesson16
from ddp_course.checks.ex16.choose import Sleepy
from ddp_course.detectors.step_profile import StepProfile, profile_step
from ddp_course.detectors.traces import read_trace, record_trace, time_use
from ddp_course.estimates import traffic
from ddp_course.estimates.scaling import amdahl, gustafson, noise_scale
from ddp_course.lesson16 import exposed_seconds
from ddp_course.models.convnets import MLP, ConvNet
from ddp_course.notebook import profiling
from ddp_course.notebook.plots import speed
from ddp_course.ranks.environment import process_group
from ddp_course.ranks.launch import RankError, launch

# ---- where a step's time goes ----

KNOWN = {  # communication, computing, and: computing, exposed, idle, hidden
    "one after the other": ([(5, 7)], [(0, 5)], (5, 2, 3, 0)),
    "half hidden": ([(2, 6)], [(0, 4)], (4, 2, 4, 2)),
    "two streams that overlap": ([(0, 4), (1, 6)], [(5, 8)], (3, 5, 2, 1)),
    "one stream inside the other": ([(0, 9), (3, 4)], [(3, 5)], (2, 7, 1, 2)),
    "nested operators": ([(1, 3)], [(0, 8), (1, 7), (2, 3)], (8, 0, 2, 2)),
    "not in order": ([(8, 9), (1, 2)], [(5, 6), (0, 2)], (3, 1, 6, 1)),
    "the same span twice": ([(1, 3), (1, 3)], [(2, 4), (2, 4)], (2, 1, 7, 1)),
    "touching": ([(0, 5)], [(5, 10)], (5, 5, 0, 0)),
    "of no length": ([(3, 3)], [(4, 4)], (0, 0, 10, 0)),
    "longer than the step": ([(-5, 2)], [(9, 20)], (1, 2, 7, 0)),
    "outside of the step": ([(-5, -1)], [(11, 20)], (0, 0, 10, 0)),
    "nothing": ([], [], (0, 0, 10, 0)),
}


@pytest.mark.parametrize("name", KNOWN)
def test_the_analyser_is_right_where_the_answer_is_known(name):
    communication, computing, answer = KNOWN[name]
    used = time_use(communication, computing, (0, 10))
    assert tuple(used.values()) == answer


def counted(communication, computing, length):
    """The answer by counting ticks."""
    inside = lambda t, spans: any(begin <= t < end for begin, end in spans)
    states = [
        (inside(tick, communication), inside(tick, computing)) for tick in range(length)
    ]
    hidden = states.count((True, True))
    return {
        "computing": states.count((False, True)) + hidden,
        "exposed": states.count((True, False)),
        "idle": states.count((False, False)),
        "hidden": hidden,
    }


def random_spans(draw, length):
    ends = range(-length // 5, length + length // 5)
    return [tuple(sorted(draw.choices(ends, k=2))) for _ in range(draw.randrange(12))]


def test_the_analyser_agrees_with_counting_on_random_traces():
    draw = random.Random(0)
    for _ in range(400):
        length = draw.randrange(1, 80)
        communication, computing = (random_spans(draw, length) for _ in range(2))
        used = time_use(communication, computing, (0, length))
        assert used == counted(communication, computing, length)
        assert math.isclose(used["computing"] + used["exposed"] + used["idle"], length)


def test_the_picture_has_the_lengths_that_the_analyser_has():
    draw = random.Random(1)
    for _ in range(200):
        spans = {
            kind: random_spans(draw, 60) for kind in ("communication", "computing")
        }
        used = time_use(**spans, step=(0, 60))
        lanes = speed.in_lanes(**spans, step=(0, 60))
        for what in ("computing", "exposed", "hidden"):
            assert sum(length for _, length in lanes[what]) == used[what]


def event(name, cat, begin, end, **more):
    return {
        "ph": "X",
        "name": name,
        "cat": cat,
        "ts": begin,
        "dur": end - begin,
        **more,
    }


def written(folder, *events):
    path = folder / "trace.json"
    noise = [{"ph": "M", "name": "process_name"}, {"ph": "i", "ts": 3, "name": "mark"}]
    path.write_text(json.dumps({"traceEvents": [*noise, *events]}))
    return path


def test_a_trace_of_a_cpu_is_read_in_milliseconds_from_the_steps_begin(tmp_path):
    path = written(
        tmp_path,
        event("the step", "user_annotation", 5_000, 25_000),
        event("aten::addmm", "cpu_op", 6_000, 9_000),
        event("autograd::engine::evaluate_function: X", "cpu_op", 6_000, 20_000),
        event("c10d::allreduce_", "cpu_op", 9_000, 9_500),
        event("gloo:all_reduce", "user_annotation", 9_000, 15_000),
        event("DistributedDataParallel.forward", "user_annotation", 5_000, 10_000),
    )
    spans = read_trace(path)
    assert spans == {
        "communication": [(4.0, 10.0)],
        "computing": [(1.0, 4.0)],
        "step": (0.0, 20.0),
    }


def test_an_operator_that_waits_for_a_dtensors_collective_does_not_compute(tmp_path):
    """The collective has returned before; who needs its result waits, inside."""
    path = written(
        tmp_path,
        event("the step", "user_annotation", 0, 20_000),
        event("_c10d_functional::all_reduce", "cpu_op", 1_000, 2_000),
        event("gloo:all_reduce", "user_annotation", 1_500, 15_000),
        event("aten::add", "cpu_op", 3_000, 17_000),
        event("_c10d_functional::wait_tensor", "cpu_op", 4_000, 15_000),
    )
    spans = read_trace(path)
    assert spans["communication"] == [(1.5, 15.0)]
    assert spans["computing"] == [(3.0, 4.0), (15.0, 17.0)]


def test_in_a_trace_of_a_gpu_its_kernels_count_until_the_last_one(tmp_path):
    path = written(
        tmp_path,
        event("the step", "user_annotation", 0, 5_000),
        event("the step", "gpu_user_annotation", 2_000, 9_000),
        event("aten::addmm", "cpu_op", 1_000, 2_000),
        event("nccl:all_reduce", "user_annotation", 2_000, 2_100),
        event("sm90_xmma_gemm", "kernel", 2_000, 6_000),
        event("ncclDevKernel_AllReduce_Sum_f32_RING_LL", "kernel", 4_000, 9_000),
    )
    used = time_use(**read_trace(path))
    assert used == {"computing": 4.0, "exposed": 3.0, "idle": 2.0, "hidden": 2.0}


def trace_some_steps(folder, bucket_mb, by=record_trace):
    """A real trace of this rank: what was read from it, and the all-reduces of DDP."""
    with process_group() as (rank, _):
        torch.manual_seed(0)
        model = DistributedDataParallel(MLP(256, 8), bucket_cap_mb=bucket_mb)
        inputs = torch.randn(64, 784)
        step = lambda: model(inputs).sum().backward()
        step(), step(), step()
        dist.barrier()
        path = folder / f"{bucket_mb}-{rank}.json"
        by(step, path)
        return read_trace(path)


@pytest.mark.parametrize("network", [None, (2e-3, 1e8)])
def test_a_real_trace_has_one_transfer_per_bucket_and_adds_up(network, tmp_path):
    sent = {}
    for bucket_mb in (0.5, 100):
        spans = launch(
            trace_some_steps, tmp_path, bucket_mb, profiling.trace, network=network
        )
        for of_rank in spans:
            used = time_use(**of_rank)
            assert of_rank["computing"] and used["computing"] > 0
            parts = used["computing"] + used["exposed"] + used["idle"]
            assert parts == pytest.approx(of_rank["step"][1])
            for begin, end in of_rank["communication"]:
                assert 0 <= begin < end
        sent[bucket_mb] = [len(of_rank["communication"]) for of_rank in spans]
    assert sent[100] == [1, 1] and min(sent[0.5]) == max(sent[0.5]) > 2


def test_on_a_slow_network_one_bucket_is_exposed_for_as_long_as_it_travels(tmp_path):
    network = (0.0, 2e7)
    size = sum(parameter.nbytes for parameter in MLP(256, 8).parameters())
    for of_rank in launch(
        trace_some_steps, tmp_path, 100, profiling.trace, network=network
    ):
        used = time_use(**of_rank)
        assert used["exposed"] + used["hidden"] > 0.95 * 1e3 * size / 2e7
        assert used["exposed"] > 0.7 * 1e3 * size / 2e7


# ---- which of two programs is faster ----


def test_the_faster_of_two_programs_is_told_and_a_program_is_as_fast_as_itself():
    def compare():
        with process_group():
            steps = {"slow": lambda: time.sleep(0.03), "fast": lambda: time.sleep(0.01)}
            times = lesson16.take_turns(steps | {"again": steps["slow"]}, 7)
            return [lesson16.times_as_fast(times, name, "slow") for name in times]

    for same, fast, again in launch(compare):
        assert same == (1, 1, 1)
        assert fast[0] <= fast[1] <= fast[2] and 1.5 < fast[1] < 3.5
        assert 0.7 < again[1] < 1.4


def test_without_a_difference_at_most_one_comparison_in_twenty_finds_one():
    draw = random.Random(0)
    for rounds in (6, 8, 9, 21, 50):
        found = 0
        for _ in range(2000):
            times = {
                name: [draw.lognormvariate(0, 0.2) for _ in range(rounds)]
                for name in ("before", "after")
            }
            low, _, high = lesson16.times_as_fast(times, "after", "before")
            found += not low <= 1 <= high
        assert found / 2000 < 0.06, rounds
        assert found  # it has teeth
    with pytest.raises(ValueError, match="take six or more"):
        lesson16.times_as_fast({"a": [1.0] * 5, "b": [2.0] * 5}, "a", "b")


def test_steps_take_turns_in_both_orders():
    def compare():
        with process_group():
            called = []
            steps = {name: partial(called.append, name) for name in "ab"}
            lesson16.take_turns(steps, 3, warm_up=1)
            return "".join(called)

    assert launch(compare) == ["abbaabba"] * 2


def test_a_round_counts_as_long_as_its_slowest_rank_and_warm_up_does_not_count():
    def compare():
        with process_group() as (rank, _):
            calls = []

            def step():
                calls.append(1)
                time.sleep(0.05 * rank)

            times = lesson16.take_turns({"step": step}, 4, warm_up=2)["step"]
            return times, len(calls)

    for times, calls in launch(compare):
        assert calls == 6 and len(times) == 4 and min(times) >= 0.05


# ---- a model that predicts ----

PROFILE = StepProfile(0.1, 0.06, [(0.02, 100), (0.04, 300), (0.06, 200)])


@pytest.mark.parametrize(
    ("cap", "expected"),
    [
        (1, [(0.02, 100), (0.04, 300), (0.06, 200)]),
        (100, [(0.02, 100), (0.04, 300), (0.06, 200)]),
        (101, [(0.04, 400), (0.06, 200)]),
        (400, [(0.04, 400), (0.06, 200)]),
        (401, [(0.06, 600)]),
        (10**9, [(0.06, 600)]),
    ],
)
def test_buckets_are_filled_in_order_and_sent_when_their_last_gradient_is_ready(
    cap, expected
):
    assert lesson16.buckets(PROFILE.gradients, cap) == expected


@pytest.mark.parametrize(
    ("make", "bucket_sizes"),  # the last three as in the notebook
    [
        (lambda: MLP(128, 10), (0.1, 0.3, 100)),
        (lambda: MLP(384, 20), (0.5, 2, 25)),
        (lambda: ConvNet(dropout=False), (0.005, 2, 25)),
        (lambda: MLP(32, 60), (0.02, 0.1, 25)),
    ],
)
def test_buckets_are_those_that_ddp_makes_and_each_size_makes_others(
    make, bucket_sizes
):
    def sizes_of_messages(bucket_mb):
        with process_group():
            torch.manual_seed(0)
            network, inputs, sent = make(), torch.randn(2, 1, 28, 28), []
            model = DistributedDataParallel(network, bucket_cap_mb=bucket_mb)

            def hook(state, bucket):
                sent.append(bucket.buffer().nbytes)
                done = torch.futures.Future()
                done.set_result(bucket.buffer())
                return done

            model.register_comm_hook(None, hook)
            for _ in range(3):
                sent.clear()
                model(inputs).sum().backward()
            plain = make()
            profile = profile_step(
                lambda: plain(inputs).sum(),
                list(plain.parameters()),
                plain.zero_grad,
                1,
            )
            cap = bucket_mb * 2**20
            return sent, [size for _, size in lesson16.buckets(profile.gradients, cap)]

    found = []
    for bucket_mb in bucket_sizes:
        [(sent, predicted)] = launch(sizes_of_messages, bucket_mb, nproc=1)
        assert sent == predicted
        found.append(sent)
    assert len(found[0]) > len(found[1]) > len(found[2]) == 1


def test_exposed_communication_is_what_backward_does_not_hide():
    link = {"ranks": 2, "alpha": 0.0}
    whole = 0.06 + 600 * 1e-4
    assert exposed_seconds(PROFILE, 10**9, **link, beta=1e-4) == pytest.approx(
        whole - PROFILE.backward
    )
    # two buckets: the network is busy with the first one until 0.04 + 0.04
    assert exposed_seconds(PROFILE, 101, **link, beta=1e-4) == pytest.approx(0.04)
    # a fast network: only the last bucket is left
    assert exposed_seconds(PROFILE, 1, **link, beta=1e-6) == pytest.approx(200e-6)
    assert (
        exposed_seconds(PROFILE, 1, 1, 1.0, 1.0) == 0
    )  # one rank has nobody to send to
    late = PROFILE._replace(backward=1.0)
    assert exposed_seconds(late, 1, 2, 0.0, 1e-4) == 0


def test_transfers_wait_for_their_bucket_and_for_the_network():
    spans = lesson16.transfers(PROFILE, 101, 2, 0.0, 1e-4)
    assert len(spans) == len(lesson16.buckets(PROFILE.gradients, 101))
    for (begin, end), (ready, size) in zip(
        spans, lesson16.buckets(PROFILE.gradients, 101)
    ):
        assert begin >= ready
        taken = traffic.ring_seconds(size, 2, 0.0, 1e-4)
        assert end - begin == pytest.approx(taken)
    assert spans[1][0] == spans[0][1]  # the second bucket was ready before
    late = spans[-1][1] - PROFILE.backward
    assert exposed_seconds(PROFILE, 101, 2, 0.0, 1e-4) == pytest.approx(late)


def test_latency_counts_once_per_bucket_and_hop():
    few, many = (exposed_seconds(PROFILE, cap, 4, 0.01, 0.0) for cap in (10**9, 1))
    assert few == pytest.approx(2 * 3 * 0.01)
    assert many == pytest.approx(0.02 + 3 * 2 * 3 * 0.01 - 0.06)
    assert traffic.ring_seconds(600, 4, 0.01, 0.0) == pytest.approx(0.06)


def test_a_profile_has_all_gradients_in_the_order_of_backward():
    network = MLP(64, 5)
    inputs, updates = torch.randn(4, 784), []
    profile = profile_step(
        lambda: network(inputs).sum(),
        list(network.parameters()),
        lambda: updates.append(network.zero_grad()),
        rounds=5,
    )
    times = [when for when, _ in profile.gradients]
    sizes = [size for _, size in profile.gradients]
    assert len(updates) == 5
    assert sorted(sizes) == sorted(p.nbytes for p in network.parameters())
    assert sum(sizes[-2:]) == 4 * (784 * 64 + 64)  # the first layer comes last
    assert times == sorted(times)
    assert 0 < times[0] and times[-1] <= profile.backward < profile.compute
    hooks = [p._post_accumulate_grad_hooks for p in network.parameters()]
    assert not any(hooks)


def test_a_profile_tells_the_update_from_forward_and_backward():
    network, inputs = Sleepy([(0.2, 4_000)]), torch.zeros(1, requires_grad=True)

    def forward():
        time.sleep(0.02)
        return network(inputs).sum()

    parameters = list(network.parameters())
    profile = profile_step(forward, parameters, lambda: time.sleep(0.05), 3)
    assert profile.update >= 0.05 and profile.backward >= 0.2
    assert profile.compute - profile.update - profile.backward >= 0.02  # forward


def test_a_profile_made_by_hand_needs_no_update():
    assert PROFILE.update == 0.0


def predict_and_measure(network, bucket_mb, rounds=5):
    """Seconds of a step that mostly communicates: predicted, measured."""
    with process_group() as (_, world_size):
        plain, inputs = MLP(256, 6), torch.randn(16, 784)
        parameters = list(plain.parameters())
        profile = profile_step(lambda: plain(inputs).sum(), parameters, plain.zero_grad)
        model = DistributedDataParallel(MLP(256, 6), bucket_cap_mb=bucket_mb)
        step = lambda: model(inputs).sum().backward()
        times = lesson16.take_turns({"step": step}, rounds)["step"]
        link = world_size, network[0], 1 / network[1]
        exposed = exposed_seconds(profile, bucket_mb * 2**20, *link)
        return profile.compute + exposed, sorted(times)[rounds // 2]


@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("bucket_mb", [0.25, 25])
def test_where_the_network_is_the_bottleneck_a_step_takes_what_is_predicted(
    ranks, bucket_mb
):
    """It cannot be shorter; a busy machine may make it longer."""
    network = (0.02, 1.5e7)
    for predicted, measured in launch(
        predict_and_measure, network, bucket_mb, nproc=ranks, network=network
    ):
        assert 0.8 < measured / predicted < 1.8


def test_buckets_that_travel_during_backward_make_a_step_shorter_as_predicted():
    """A model that sleeps, so computing needs no core and its times are known."""
    alpha, bandwidth = 5e-3, 8e6
    layers = [(0.04 * place, 200_000) for place in range(1, 9)]  # of backward

    def predict_and_measure():
        with process_group() as (_, world_size):
            plain, start = Sleepy(layers), torch.zeros(1, requires_grad=True)
            parameters = list(plain.parameters())
            forward, update = lambda: plain(start).sum(), plain.zero_grad
            profile = profile_step(forward, parameters, update, 3)
            model = DistributedDataParallel(Sleepy(layers), bucket_cap_mb=0.3)
            step = lambda: model(start).sum().backward()
            measured = min(lesson16.take_turns({"step": step}, 3)["step"])
            on = profile, 0.3 * 2**20, world_size, alpha, 1 / bandwidth
            sent = sum(end - begin for begin, end in lesson16.transfers(*on))
            exposed = exposed_seconds(*on)
            return profile.compute + exposed, profile.compute + sent, measured

    for predicted, without_overlap, measured in launch(
        predict_and_measure, network=(alpha, bandwidth)
    ):
        assert predicted < 0.75 * without_overlap
        assert predicted < 1.05 * measured and measured < 0.9 * without_overlap


def test_the_two_laws_say_what_their_authors_said():
    assert amdahl(1, 0.3) == gustafson(1, 0.3) == 1
    assert amdahl(10**9, 0.05) == pytest.approx(20)
    assert amdahl(8, 0) == gustafson(8, 0) == 8
    # Gustafson's own example: 1024 processors, s of 0.4 %
    assert gustafson(1024, 0.004) == pytest.approx(1020, abs=1)


def test_the_noise_scale_is_found_where_it_is_known():
    """Gradients of 30 numbers: a mean of squared length 2, and noise of variance 0.5
    in each number for a batch of one sample; so the scale is 30 * 0.5 / 2.
    """
    torch.manual_seed(0)
    mean = torch.randn(30, dtype=torch.float64)
    mean *= 2**0.5 / mean.norm()
    samples = mean + 0.5**0.5 * torch.randn(400_000, 30, dtype=torch.float64)
    norms = {
        batch: samples.view(-1, batch, 30).mean(1).square().sum(1).mean().item()
        for batch in (4, 40)
    }
    found = noise_scale(norms[4], norms[40], 4, 40)
    assert found == pytest.approx(30 * 0.5 / 2, rel=0.05)


# ---- the program ----

FLAGS = "--data digits --train-samples 320 --batch-size 32 --epochs 1 --no-dropout"


def run(out, *more, lesson=lesson16):
    with redirect_stdout(StringIO()):
        return lesson.main([*FLAGS.split(), "--out", str(out), *more])


def parameters(out):
    state = torch.load(out / "model.pt", weights_only=True)
    return torch.cat([value.flatten() for value in state.values()])


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    """The parameters of lesson 4's program on two ranks."""
    out = tmp_path_factory.mktemp("plain")
    launch(run, out, lesson=lesson04)
    return parameters(out)


SAME = [
    [],
    ["--channels-last"],
    ["--fused"],
    ["--static-graph"],
    ["--bucket-mb", "0.5"],
]
SAME += [["--workers", "1"], ["--trace", "3"]]


@pytest.mark.parametrize("flags", SAME, ids=" ".join)
def test_a_switch_changes_no_result_but_for_rounding(flags, plain, tmp_path):
    results = launch(run, tmp_path, *flags)
    assert results[0]["params_sha256"] == results[1]["params_sha256"]
    assert results[0]["lesson"] == "16"
    assert (parameters(tmp_path) - plain).norm() < 2e-3 * plain.norm()


@pytest.mark.parametrize(
    "flags",
    [["--precision", "bf16"], ["--compress", "bf16"], ["--compress", "powersgd"]],
)
def test_fewer_bits_still_train(flags, plain, tmp_path):
    results = launch(run, tmp_path, *flags, "--epochs", "3")
    assert results[0]["test_accuracy"] > 0.6
    first = [json.loads(line)["loss"] for line in open(tmp_path / "metrics.jsonl")]
    assert first[-1] < first[0]
    assert (parameters(tmp_path) - plain).norm() > 1e-4 * plain.norm()


def test_a_traced_run_writes_a_trace_for_each_rank_and_says_where_the_time_went(
    tmp_path,
):
    launch(run, tmp_path, "--trace", "2")
    log = (tmp_path / "train.log").read_text()
    for rank in range(2):
        used = time_use(**read_trace(tmp_path / f"trace-rank{rank}.json"))
        told = ", ".join(f"{what} {ms:.1f} ms" for what, ms in used.items())
        assert f"the traced step of rank {rank}: {told}" in log
        assert used["computing"] > 0 and used["exposed"] + used["hidden"] > 0


def trace_on_a_full_disk(folder):
    import resource

    resource.setrlimit(resource.RLIMIT_FSIZE, (1024, 1024))
    record_trace(lambda: torch.ones(3).sum(), folder / "trace.json")


def test_a_trace_that_does_not_fit_on_the_disk_is_named_and_not_left(tmp_path):
    with pytest.raises(
        RankError, match="UsageError: cannot write a whole trace to .*trace.json"
    ):
        launch(trace_on_a_full_disk, tmp_path, nproc=1)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("flags", "text"),
    [
        ("--trace 0", "'0' is not a whole number from 1"),
        ("--workers -1", "'-1' is not a whole number from 0"),
        ("--bucket-mb 0", "--bucket-mb 0.0 is not a size"),
        ("--bucket-mb nan", "'nan' is not a number from 0 to 1e\\+06"),
        ("--bucket-mb 2 --compress powersgd", "powersgd needs one bucket"),
        ("--bucket-mb 0.5 --compile", "--compile needs buckets of 1 MiB"),
    ],
)
def test_an_impossible_switch_is_refused_before_any_rank_starts(flags, text):
    with pytest.raises(UsageError, match=text):
        lesson16.arguments(flags.split())


def test_a_step_that_the_run_does_not_reach_cannot_be_traced(tmp_path):
    with pytest.raises(
        RankError, match="--trace 6 is not reached: the run has 5 steps"
    ):
        launch(run, tmp_path, "--trace", "6")


@pytest.mark.skipif(not THOROUGH, reason="compiles for a minute: make thorough")
def test_a_compiled_run_computes_the_same_and_saves_the_same_names(plain, tmp_path):
    cache = {"TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "cache")}
    launch(run, tmp_path, "--compile", timeout=600, env=cache)
    assert (parameters(tmp_path) - plain).norm() < 2e-3 * plain.norm()
    names = torch.load(tmp_path / "model.pt", weights_only=True)
    assert list(names) == list(ConvNet().state_dict())


# ---- what the notebook says of torch ----


def graphs_of(order, bucket_mb=None):
    """How many graphs are compiled in three steps of training."""
    graphs = []

    def backend(graph, inputs):
        graphs.append(graph)
        return graph.forward

    with process_group():
        network = MLP(64) if "Sequential" in order else ConvNet()
        if order.startswith("DDP(compile"):
            network.compile(backend=backend)
            model = DistributedDataParallel(network, bucket_cap_mb=bucket_mb)
        else:
            model = DistributedDataParallel(network, bucket_cap_mb=bucket_mb)
            model.compile(backend=backend)
        for _ in range(3):
            F.nll_loss(model(torch.randn(4, 1, 28, 28)), torch.arange(4)).backward()
        return len(graphs)


def test_compiling_ddp_around_a_sequential_compiles_nothing(capfd):
    counts = {
        order: launch(graphs_of, order, timeout=600)
        for order in ("compile(DDP(Sequential))", "DDP(compile(Sequential))", "other")
    }
    whole = int(torch.__version__ >= "2.15")  # before, nothing here either
    assert counts == {
        "compile(DDP(Sequential))": [0, 0],
        "DDP(compile(Sequential))": [whole, whole],
        "other": [2, 2],  # cut where DDP's buckets end
    }


def test_a_module_that_is_compiled_in_place_keeps_its_names():
    network = nn.Linear(2, 2)
    assert list(torch.compile(network, backend="eager").state_dict())[0].startswith(
        "_orig_mod."
    )
    network.compile(backend="eager")
    assert list(network.state_dict()) == ["weight", "bias"]
