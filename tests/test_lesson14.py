"""Lesson 14: any number of ranks, fewer bytes, and machines that come and go."""

import json
import shlex
from contextlib import redirect_stdout
from io import StringIO

import pytest
import torch
from conftest import THOROUGH, see_the_scale
from test_machines import needs_namespaces

from ddp_course import lesson14
from ddp_course.files import temporary_name
from ddp_course.ranks.environment import process_group
from ddp_course.ranks.launch import RankError, launch
from ddp_course.ranks.machines.machines import Machines

FLAGS = (
    "--data digits --train-samples 200 --global-batch 48 --no-dropout --save-every 2"
)


def run(out, *more):
    """The program in each rank; its result."""
    see_the_scale()
    with redirect_stdout(StringIO()):
        return lesson14.main([*FLAGS.split(), "--out", str(out), *more])


def parameters(out):
    return torch.load(out / "model.pt", weights_only=True)


def farthest(one, other):
    """The largest difference between two runs' parameters."""
    one, other = parameters(one), parameters(other)
    return max((one[name] - other[name]).abs().max().item() for name in one)


def dealt(start=0):
    with process_group():
        batches = lesson14.DealtBatches(50, 16, epochs=2, seed=3)
        batches.start = start
        return list(batches)


def test_any_number_of_ranks_deals_the_same_global_batches():
    whole = [sorted(batch) for batch in launch(dealt, nproc=1)[0]]
    assert [len(batch) for batch in whole] == [16] * 6
    assert not set(whole[0]) & set(whole[1]) and whole[0] != whole[3]
    for nproc in (2, 3):
        parts = launch(dealt, nproc=nproc)
        assert [sorted(sum(batch, [])) for batch in zip(*parts)] == whole
        sizes = [len(part[0]) for part in parts]
        assert max(sizes) - min(sizes) <= 1
    assert launch(dealt, 4, nproc=1)[0] == launch(dealt, nproc=1)[0][4:]


@pytest.mark.parametrize("nproc", [2, 3])
def test_n_ranks_train_as_one_does_also_with_several_micro_batches(nproc, tmp_path):
    one, many = tmp_path / "one", tmp_path / "many"
    [alone] = launch(run, one, "--epochs", "1", "--batch-size", "10", nproc=1)
    results = launch(run, many, "--epochs", "1", nproc=nproc)
    assert results[0]["test_accuracy"] == alone["test_accuracy"]
    assert results[0]["train_loss"] == pytest.approx(alone["train_loss"], abs=2e-4)
    assert farthest(one, many) < 1e-4


def test_a_run_goes_on_with_another_number_of_ranks(tmp_path):
    whole, changed = tmp_path / "whole", tmp_path / "changed"
    launch(run, whole, "--epochs", "3", nproc=1)
    launch(run, changed, "--epochs", "1", nproc=3)
    launch(run, changed, "--epochs", "2", "--resume", nproc=1)
    [result, _] = launch(run, changed, "--epochs", "3", "--resume", nproc=2)
    assert result["world_size"] == 2 and farthest(whole, changed) < 1e-3
    log = (changed / "train.log").read_text()
    assert "resuming after update 4" in log and "resuming after update 8" in log
    rows = (changed / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(row)["step"] for row in rows] == list(range(12))


@pytest.mark.parametrize(
    "flags, said",
    [
        (["--compress", "bf16"], "made with compress none, not bf16"),
        (["--batch-size", "8"], r"made with batch-size \d+, not 8"),
    ],
)
def test_what_changes_the_numbers_must_be_the_same_at_a_resume(flags, said, tmp_path):
    launch(run, tmp_path, nproc=1)
    with pytest.raises(RankError, match=said):
        launch(run, tmp_path, "--epochs", "2", "--resume", *flags, nproc=1)


def test_what_a_killed_run_has_left_unfinished_is_removed_by_the_next(tmp_path):
    """And nothing else that begins with a dot."""
    nobody = 2**30  # no system has so many processes
    left = [temporary_name(name, process=nobody) for name in ("model.pt", "job")]
    for name in (*left, ".mine", ".a.7"):
        (tmp_path / name).touch()
    launch(run, tmp_path, nproc=1)
    left = {path.name for path in tmp_path.iterdir() if path.name.startswith(".")}
    assert left == {".mine", ".a.7"}


def test_without_resume_a_run_begins_anew(tmp_path):
    for _ in range(2):
        launch(run, tmp_path, "--epochs", "1", nproc=1)
    assert "resuming" not in (tmp_path / "train.log").read_text()


def test_a_restart_resumes_by_itself_and_a_finished_run_ends_as_it_did(tmp_path):
    [before] = launch(run, tmp_path, "--epochs", "1", nproc=1)
    again = {"TORCHELASTIC_RESTART_COUNT": "1"}
    [after] = launch(run, tmp_path, "--epochs", "1", nproc=1, env=again)
    assert after["params_sha256"] == before["params_sha256"]
    assert "resuming after update 4" in (tmp_path / "train.log").read_text()


@pytest.mark.parametrize(
    ("more", "text"),
    [
        (["--seed", "7"], "was made with seed 0, not 7"),
        (["--global-batch", "40"], "was made with global-batch 48, not 40"),
        (["--train-samples", "100"], "was made with train-samples 200, not 100"),
    ],
)
def test_a_checkpoint_of_another_run_is_refused(more, text, tmp_path):
    launch(run, tmp_path, "--epochs", "1", nproc=1)
    with pytest.raises(RankError, match=text):
        launch(run, tmp_path, "--epochs", "2", "--resume", *more, nproc=2)


@pytest.mark.parametrize("spoil", ["cut", "text", "other", "nan", "empty"])
def test_a_damaged_checkpoint_is_named_on_all_ranks(spoil, tmp_path):
    launch(run, tmp_path, "--epochs", "1", nproc=1)
    path = tmp_path / "checkpoint.pt"
    content = torch.load(path, weights_only=True)
    if spoil == "nan":
        content["states"]["model"]["fc2.bias"][0] = torch.nan
        torch.save(content, path)
    elif spoil == "other":
        torch.save({"a": 1}, path)
    else:
        whole = path.read_bytes()
        spoilt = {"cut": whole[:1000], "text": b"not a file of torch", "empty": b""}
        path.write_bytes(spoilt[spoil])
    with pytest.raises(RankError) as raised:
        launch(run, tmp_path, "--epochs", "2", "--resume", nproc=2)
    assert "checkpoint.pt cannot be used because" in raised.value.message
    assert "UsageError" in raised.value.message
    assert "meanwhile rank" in str(raised.value)


@pytest.mark.parametrize("size", ["1", "201"])
def test_an_impossible_global_batch_is_refused(size, tmp_path):
    with pytest.raises(RankError, match=f"--global-batch {size} is impossible: from 2"):
        launch(run, tmp_path, "--global-batch", size, nproc=2)


@needs_namespaces
def test_compressed_gradients_take_fewer_bytes_and_still_train(tmp_path):
    sent, accuracy = {}, {}
    for how in ("none", "bf16", "powersgd"):
        with Machines(2, quiet=True) as machines:
            out = tmp_path / how
            more = [out, "--epochs", "4", "--compress", how]
            [result, _] = machines.launch(run, *more, nproc=1)
            sent[how], accuracy[how] = machines.sent(0), result["test_accuracy"]
    assert 0.4 < sent["bf16"] / sent["none"] < 0.65
    assert sent["powersgd"] < 0.4 * sent["none"]
    assert min(accuracy.values()) > 0.6 and accuracy["bf16"] > accuracy["none"] - 0.05


ELASTIC = (
    "torchrun --nnodes 1:3 --nproc-per-node 1 --max-restarts 5 --rdzv-backend c10d "
    "--rdzv-endpoint node0:29400 --rdzv-id run --rdzv-conf last_call_timeout=3 "
    "-m ddp_course.lesson14 --data digits --no-dropout --train-samples 576 "
    "--save-every 4 --timeout 5 --epochs 60 --out"
)


@needs_namespaces
@pytest.mark.skipif(not THOROUGH, reason="takes a minute: make thorough")
def test_a_run_that_loses_a_machine_and_gains_two_ends_as_an_undisturbed_one(tmp_path):
    env = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
    line = [*shlex.split(ELASTIC), str(tmp_path / "elastic")]
    with Machines(3, quiet=True) as machines:
        first = machines.follow(0, line, env)
        machines.follow(1, line, env)
        first.wait_for("update 4 of", 120)
        machines.power_off(1)
        first.wait_for("resuming after update", 120)
        machines.power_on(1)
        joined = [machines.follow(node, line, env) for node in (1, 2)]
        assert [agent.wait().code for agent in (first, *joined)] == [0, 0, 0]
    log = (tmp_path / "elastic" / "train.log").read_text()
    sizes = [f"{ranks}, 128 samples" for ranks in ("2 ranks", "1 rank", "3 ranks")]
    places = [log.index(size) for size in sizes]
    assert places == sorted(places) and "goodput" in log
    result = json.loads((tmp_path / "elastic" / "result.json").read_text())
    more = ["--train-samples", "576", "--global-batch", "128", "--epochs", "60"]
    [alone] = launch(run, tmp_path / "alone", *more, nproc=1)
    assert result["train_loss"] == pytest.approx(alone["train_loss"], abs=0.01)
    assert abs(result["test_accuracy"] - alone["test_accuracy"]) < 0.02
