"""Question 1: an update that sends too many messages."""

import time

import torch
import torch.distributed as dist
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from ddp_course.checks.checked_watch import CheckedWatch
from ddp_course.checks.differences import near, parted
from ddp_course.checks.ex16.gain import in_turn, judge_gain
from ddp_course.checks.ex16.slow import update as slow_update
from ddp_course.checks.training import Chain, a_batch, state
from ddp_course.checks.work import Work
from ddp_course.judge.answer import trying
from ddp_course.judge.question import question
from ddp_course.judge.verdict import Wrong
from ddp_course.ranks.environment import process_group

WIDTH, LAYERS, UPDATES = 10, 6, 2
GRADIENT = WIDTH * WIDTH * 8  # bytes of a layer's
MOST = 2  # collectives: one for the gradients, one for the losses
LATENCY = 2e-3  # seconds that each collective takes longer when updates are timed
LEAST_GAIN = 1.5  # where a right answer gains 4 to 9


def make_model(seed):
    """Some layers of which one is frozen, in 64 bits."""
    model = Chain(WIDTH, LAYERS, seed)
    next(model.parameters()).requires_grad_(False)
    return model


def micro_batches(count, size, seed):
    inputs = [a_batch(size, WIDTH, seed + 10 * place) for place in range(count)]
    labels = [(x.sum(1) * 10).long().abs() % WIDTH for x in inputs]
    return list(zip(inputs, labels))


def make_optimizer(model, n):
    """SGD on two ranks. AdamW on three: there, the mean of updated parameters is not the
    update by the mean gradient, and a gradient of zeros moves parameters.
    """
    if n == 2:
        return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    return torch.optim.AdamW(model.parameters(), lr=0.1, weight_decay=0.1)


def observed(update, count, size, seed):
    """Two updates of this rank: the parameters and losses, and what the second did."""
    with process_group() as (rank, n):
        model = make_model(seed)
        optimizer, parameters, losses = make_optimizer(model, n), [], []
        for number in range(UPDATES):
            mine = micro_batches(count, size, seed + 1000 * (rank + 1) + 100 * number)
            fetched, samples = [], []

            def note(layer, inputs, fetched=fetched, samples=samples):
                fetched.append(work.fetched)
                samples.append(len(inputs[0]))

            hook = model[0].register_forward_pre_hook(note)
            with CheckedWatch() as watch, Work() as work, trying(f"update {number + 1}"):
                losses.append(as_list(update(model, mine, optimizer)))
            hook.remove()
            parameters.append(flat(model))
        dist.barrier()
        sent = [sent_in_a_ring(entry, n) for entry in watch.log]
        return {
            "parameters": parameters, "losses": losses, "sent": sent,
            "names": [entry["name"] for entry in watch.log],
            "fetched": max(fetched, default=0), "samples": max(samples, default=0),
        }  # fmt: skip


def sent_in_a_ring(entry, n):
    """The bytes that a rank sends for this collective: see lesson 2."""
    rounds = 2 if entry["name"].startswith("allreduce") else 1
    return rounds * (n - 1) * entry["whole"] // n


class Slower(TorchDispatchMode):
    """Lets each collective in a `with` block take LATENCY longer, as on a network."""

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if "c10d" in function.namespace:
            time.sleep(LATENCY)
        return function(*args, **(kwargs or {}))


def timed(update, count, size, seed):
    """The seconds of updates by the answer, and by the slow program, in turn."""
    with process_group() as (rank, n):
        mine = micro_batches(count, size, seed + rank)

        def step_with(function):
            model = make_model(seed)
            optimizer = make_optimizer(model, n)

            def step():
                with Slower(), trying("an update that is timed"):
                    function(model, mine, optimizer)

            return step

        return in_turn(step_with(slow_update), step_with(update))


def as_list(losses):
    try:
        return [float(loss) for loss in losses]
    except (TypeError, ValueError):
        return repr(losses)


def flat(model):
    return torch.cat([value.flatten() for value in state(model).values()])


def alone(n, count, size, seed, scale=1.0):
    """One process with the micro-batches of all ranks: its parameters after each update,
    and losses. scale: of the gradients, a mistake that is made.
    """
    model = make_model(seed)
    optimizer, parameters, losses = make_optimizer(model, n), [], []
    for number in range(UPDATES):
        optimizer.zero_grad()
        of_ranks = [micro_batches(count, size, seed + 1000 * (rank + 1) + 100 * number) for rank in range(n)]
        means = []
        for parts in zip(*of_ranks):
            each = [F.cross_entropy(model(x), y) for x, y in parts]
            mean = sum(each) / n
            (mean * scale / count).backward()
            means.append(mean.item())
        losses.append(means)
        optimizer.step()
        parameters.append(flat(model))
    return parameters, losses


@question(
    "Write down what an update sends: how many all-reduces, and when? Count them with watch.count_collectives, or look "
    "at the trace. Which of them are needed?",
    "Gradients add up over the micro-batches in .grad by themselves, without any message. So loss.backward() for each "
    "micro-batch, and one average at the end of the update. And many small tensors can travel as one: torch.cat.",
    "After the loop: flat = torch.cat([p.grad.flatten() for p in trained]); dist.all_reduce(flat); divide by world_size "
    "* len(micro_batches), and copy the pieces back with flat.split([...]). Keep each loss.detach() in a list, stack "
    "them, all_reduce the stack once, and call .tolist() at the very end.",
)
def check_update(answer, draw):
    """Parameters and losses are those of one process; collectives are counted; updates
    are timed.
    """
    for n in (2, 3):
        case = draw.randint(3, 5), draw.randint(3, 6), draw.randrange(10**5)
        of_ranks = answer.on_ranks(observed, *case, nproc=n, timeout=12)
        for rank, seen in enumerate(of_ranks):
            judge_update(seen, n, *case, f"{rank} of {n}")
    times, *_ = answer.on_ranks(timed, 4, 4, draw.randrange(10**5), nproc=2, timeout=20)
    checked = f"an update, with {1e3 * LATENCY:g} ms more per collective"
    cause = (
        "the counts are right, so what takes the time is nothing that they see, such as collectives that are called "
        "in another way, or a loop in Python"
    )
    return judge_gain(times, LEAST_GAIN, checked, cause)


def judge_update(seen, n, count, size, seed, where):
    parameters, losses = alone(n, count, size, seed)
    checked = f"{UPDATES} updates of {count} micro-batches on {n} ranks"
    for number, (true, own) in enumerate(zip(parameters, seen["parameters"]), 1):
        if not near(own, true, 1e-9):
            expected, got = parted(true, own)
            cause = cause_of_parameters(own, true, number, n, count, size, seed)
            raise Wrong(f"{checked}: the parameters after update {number}", rank=where, expected=expected,
                        got=got, cause=cause)  # fmt: skip
    for of_update, expected in zip(seen["losses"], losses):
        if isinstance(of_update, str) or len(of_update) != count:
            raise Wrong(f"{checked}: the losses", rank=where, expected=f"{count} numbers",
                        got=of_update, cause="return a list with the mean loss of each micro-batch")  # fmt: skip
        got, true = torch.tensor(of_update).double(), torch.tensor(expected).double()
        if not near(got, true, 1e-6):
            cause = "each loss is the mean over the ranks: sum it over them, and divide"
            raise Wrong(f"{checked}: the losses", rank=where, expected=true, got=got, cause=cause)  # fmt: skip
    judge_work(seen, checked, n, count, size, where)


def judge_work(seen, checked, n, count, size, where):
    sent = seen["sent"]
    if len(sent) > MOST:
        raise Wrong(f"{checked}: how many collectives an update calls", rank=where,
                    expected=f"at most {MOST}", got=len(sent), cause=cause_of_messages(seen, n, count))  # fmt: skip
    # as much as an all-gather of gradients and losses; an all-reduce sends less than that
    most = (n - 1) * ((LAYERS - 1) * GRADIENT + 8 * count)
    if sum(sent) > 1.1 * most:
        raise Wrong(f"{checked}: the bytes that a rank sends", rank=where,
                    expected=f"at most {most:,}: each gradient once", got=f"{sum(sent):,}",
                    cause="one collective is enough, but it must not hold the gradients of each micro-batch, or of "
                    "frozen parameters")  # fmt: skip
    if seen["samples"] > size:
        raise Wrong(f"{checked}: the samples in a call of the model", rank=where,
                    expected=f"at most {size}: one micro-batch", got=seen["samples"],
                    cause="joined micro-batches need as much memory as one large batch, and BatchNorm would compute other "
                    "numbers: call the model once per micro-batch")  # fmt: skip
    if seen["fetched"]:
        raise Wrong(f"{checked}: numbers fetched before the last forward", rank=where,
                    expected="0", got=seen["fetched"],
                    cause="item() waits until a GPU has computed everything so far, and then it has nothing to do: fetch "
                    "the losses at the end of the update")  # fmt: skip


def cause_of_messages(seen, n, count):
    """The likely cause, from what the collectives of an update send."""
    if "broadcast" in seen["names"]:
        return "a broadcast is not needed, as all ranks have the same parameters. DDP broadcasts them each time it " \
            "wraps a model: leave the model as it is, and call dist.all_reduce yourself"  # fmt: skip
    if len(seen["sent"]) - seen["names"].count("barrier") <= MOST:
        return "a barrier is a collective, too, and an all-reduce waits for all ranks anyway"
    sizes, trained = seen["sent"], LAYERS - 1
    one = 2 * (n - 1) * GRADIENT // n
    alone, joined = sizes.count(one), sum(size > 2 * one for size in sizes)
    if alone >= count * trained:
        return "each gradient travels alone, for each micro-batch: add up first, and send once per update"
    if alone >= trained:
        return "the gradients are added up first, but each of them travels alone: put them into one tensor"
    if joined > 1 and len(sizes) >= 2 * count:
        return "gradients and loss travel once per micro-batch: both can wait until the end of the update"
    if joined > 1:
        return "the gradients travel once per micro-batch: add them up, and send them at the end of the update"
    return "the loss travels once per micro-batch: the losses can wait until the end of the update, too"


def cause_of_parameters(got, true, number, n, count, size, seed):
    """Why the parameters after this update are wrong; those before it were right."""
    if number > 1:
        return "the gradients of the update before are still there: zero_grad()"
    frozen = WIDTH * WIDTH  # numbers of the first layer
    if not near(got[:frozen], true[:frozen], 1e-9):
        return "a frozen parameter has changed: AdamW moves each parameter that has a gradient, even if that is zero, so " \
            "leave the .grad of frozen parameters None"  # fmt: skip
    mistakes = {
        n: "that is the sum over the ranks: divide by their number",
        count: "that is the sum over the micro-batches: divide by their number",
        n * count: "that is a sum: divide by the number of ranks and of micro-batches",
        n / 2: "divided by 2: divide by the number of ranks, whatever it is",
        1 / count: "divided by the number of micro-batches twice",
        1 / n: "divided by the number of ranks twice",
    }  # fmt: skip
    for scale, cause in mistakes.items():
        if near(got, alone(n, count, size, seed, scale)[0][0], 1e-9):
            return cause
    return "the update must take the mean gradient over all micro-batches of all ranks, as the slow program does"
