"""Question 1: an update that sends too many messages."""

import time

import torch
import torch.distributed as dist
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from ddp_course.checks.checked_watch import CheckedWatch
from ddp_course.checks.claims import Between, Claim, on_every_rank
from ddp_course.checks.ex16.gain import in_turn, judge_gain
from ddp_course.checks.ex16.slow import update as slow_update
from ddp_course.checks.salted import salted_hash
from ddp_course.checks.training import Chain, a_batch, state
from ddp_course.checks.work import Work
from ddp_course.judge.answer import trying
from ddp_course.judge.question import question
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
    """Some updates of this rank: for each the parameters after it, the losses, and what it
    did.
    """
    with process_group() as (rank, n), salted_hash(rank):
        another = make_model(seed + 1)  # a job may train several models
        with trying("an update of another model"):
            update(another, micro_batches(count, size, seed), make_optimizer(another, n))
        model = make_model(seed)
        for parameter in model.parameters():  # something was computed before the first update
            parameter.grad = torch.ones_like(parameter) if parameter.requires_grad else None
        optimizer, seen = make_optimizer(model, n), []
        for number in range(UPDATES):
            mine = micro_batches(count, size, seed + 1000 * (rank + 1) + 100 * number)
            fetched, samples, modes = [], [], []

            def note(layer, inputs, fetched=fetched, samples=samples, modes=modes):
                modes.append(layer.training)
                fetched.append(work.fetched)
                samples.append(len(inputs[0]))

            hook = model[0].register_forward_pre_hook(note)
            with CheckedWatch() as watch, Work() as work, trying(f"update {number + 1}"):
                losses = as_list(update(model, mine, optimizer))
            hook.remove()
            seen.append({
                "parameters": flat(model), "losses": losses,
                "sent": [sent_in_a_ring(entry, n) for entry in watch.log],
                "names": [entry["name"] for entry in watch.log],
                "fetched": max(fetched, default=0), "samples": samples,
                "training": all(modes),
            })  # fmt: skip
        dist.barrier()
        return seen


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
    are_floats = isinstance(losses, list | tuple) and all(isinstance(loss, float) for loss in losses)
    return list(losses) if are_floats else repr(losses)


def flat(model):
    return torch.cat([value.flatten() for value in state(model).values()])


def alone(n, count, size, seed, scale=1.0, left=0.0):
    """One process with the micro-batches of all ranks: its parameters after each update,
    and losses. scale: of the gradients, and what is left in them of before: mistakes.
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
        for parameter in model.parameters():
            if parameter.grad is not None:
                parameter.grad += left
        optimizer.step()
        parameters.append(flat(model))
    return parameters, losses


# ---- what is claimed ----


def claims_about(count, size, seed, n):
    """For each rank: parameters and losses are those of one process, and then that no
    update does more work than needed.
    """
    parameters, losses = alone(n, count, size, seed)
    checked = f"{UPDATES} updates of {count} micro-batches on {n} ranks"

    def mistakes():
        return [(alone(n, count, size, seed, left=1.0)[0][0], LEFT)] + [
            (alone(n, count, size, seed, scale)[0][0], cause) for scale, cause in {
            n: "that is the sum over the ranks: divide by their number",
            count: "that is the sum over the micro-batches: divide by their number",
            n * count: "that is a sum: divide by the number of ranks and of micro-batches",
            n / 2: "divided by 2: divide by the number of ranks, whatever it is",
            1 / count: "divided by the number of micro-batches twice",
            1 / n: "divided by the number of ranks twice",
        }.items()]  # fmt: skip

    def of_rank(rank, of_ranks):
        for number, (seen, true) in enumerate(zip(of_ranks[rank], parameters), 1):
            what, frozen = f"{checked}: the parameters after update {number}", WIDTH * WIDTH
            yield Claim(f"{what}, the frozen ones", seen["parameters"][:frozen], true[:frozen], FROZEN, digits=9)
            # AdamW hardly sees a factor: a mistake must give nearly the same numbers
            yield Claim(what, seen["parameters"], true, LEFT if number > 1 else MEAN_GRADIENT,
                        () if number > 1 else mistakes, digits=9, mistake_digits=9)  # fmt: skip
        for seen, true in zip(of_ranks[rank], losses):
            own = seen["losses"]
            length = len(own) if isinstance(own, list) else own
            yield Claim(f"{checked}: the losses", length, count, "return a list with the mean loss of each micro-batch, as "
                        "floats", told=f"{count} floats", shown=own)  # fmt: skip
            yield Claim(f"{checked}: the losses", torch.tensor(own).double(), torch.tensor(true).double(),
                        "each loss is the mean over the ranks: sum it over them, and divide", digits=6)  # fmt: skip
        for number, seen in enumerate(of_ranks[rank], 1):
            yield from work(f"{checked}: %s in update {number}", seen, n, count, size)

    return of_rank


FROZEN = (
    "a frozen parameter has changed: AdamW moves each parameter that has a gradient, even if that is zero, so leave the "
    ".grad of frozen parameters None"
)
LEFT = "the gradients of the update before are still there: zero_grad()"
MEAN_GRADIENT = "the update must take the mean gradient over all micro-batches of all ranks, as the slow program does"


def work(checked, seen, n, count, size):
    """Claims about what an update sends, computes and waits for."""
    yield Claim(checked % "the mode of the model", seen["training"], True, "dropout and BatchNorm would do something else: "
                "train in training mode", told="training mode", shown="evaluation mode")  # fmt: skip
    sent, samples = seen["sent"], seen["samples"]
    yield Claim(checked % "the collectives that are called", len(sent), range(MOST + 1), cause_of_messages(seen, n, count),
                told=f"at most {MOST}")  # fmt: skip
    # as much as an all-gather of gradients and losses; an all-reduce sends less than that
    most = (n - 1) * ((LAYERS - 1) * GRADIENT + 8 * count)
    yield Claim(checked % "the bytes that a rank sends", sum(sent), Between(0, 1.1 * most), "one collective is enough, but "
                "it must not hold the gradients of each micro-batch, or of frozen parameters",
                told=f"at most {most:,}: each gradient once", shown=f"{sum(sent):,}")  # fmt: skip
    yield Claim(checked % "the samples in a call of the model", max(samples, default=0), range(size + 1), "joined "
                "micro-batches need as much memory as one large batch, and BatchNorm would compute other numbers: call "
                "the model once per micro-batch", told=f"at most {size}: one micro-batch")  # fmt: skip
    yield Claim(checked % "the calls of the model", len(samples), count, "call the model once per micro-batch: each "
                "further call computes something again")  # fmt: skip
    yield Claim(checked % "the numbers fetched before the last forward", seen["fetched"], 0, "item(), and `if`, `assert` or "
                "float() of a tensor, wait until a GPU has computed everything so far, and then it has nothing to do: fetch "
                "the losses at the end of the update")  # fmt: skip


def cause_of_messages(seen, n, count):
    """The likely cause, from what the collectives of an update send."""
    names, sizes, trained = seen["names"], seen["sent"], LAYERS - 1
    if "broadcast" in names:
        return (
            "a broadcast is not needed, as all ranks have the same parameters. DDP broadcasts them each time it wraps a "
            "model: leave the model as it is, and call dist.all_reduce yourself"
        )
    if len(sizes) - names.count("barrier") <= MOST:
        return "a barrier is a collective, too, and an all-reduce waits for all ranks anyway"
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
    if len(sizes) > count:
        return "the loss travels once per micro-batch: the losses can wait until the end of the update, too"
    if names.count("allgather") > 1:
        return "a collective of objects, such as all_gather_object, calls two: send the losses as one tensor"
    return "one collective is enough for all gradients of an update, and one for all its losses"


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
        on_every_rank(claims_about(*case, n), answer.on_ranks(observed, *case, nproc=n, timeout=12))
    times, *_ = answer.on_ranks(timed, 4, 4, draw.randrange(10**5), nproc=2, timeout=20)
    checked = f"an update, with {1e3 * LATENCY:g} ms more per collective"
    cause = (
        "the counts are right, so what takes the time is nothing that they see, such as collectives that are called "
        "in another way, or a loop in Python"
    )
    return judge_gain(times, LEAST_GAIN, checked, cause)
