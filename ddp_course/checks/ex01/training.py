"""Question 2: one epoch with little memory: a step per batch, whose gradient comes from
pieces.
"""

import math
from collections import Counter

import torch
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from ddp_course.checks.claims import Claim, agree, hold
from ddp_course.checks.ex01.watched import Watched, WatchedSGD, left_behind, noting_state, number, told
from ddp_course.checks.work import Work
from ddp_course.judge.question import question

MOMENTUM = 0.8  # so that a step made by hand, without the optimizer, is another step

# ---- what the rank observes ----


def observe(train_one_epoch, weight, images, labels, batch_size, lr, limits):
    """Train with one limit after the other, each time from the same weights."""
    return [train_once(train_one_epoch, weight, images, labels, batch_size, lr, limit) for limit in limits]


def train_once(train_one_epoch, weight, images, labels, batch_size, lr, limit):
    model = Watched(weight).eval()  # the state after an evaluation
    loader = DataLoader(TensorDataset(images, labels), batch_size)
    optimizer = WatchedSGD(model, lr, MOMENTUM)
    fetched = []
    model.register_forward_pre_hook(lambda *_: fetched.append(work.fetched))
    with noting_state(model) as left, Work() as work:
        losses = train_one_epoch(model, loader, optimizer, limit)
    if isinstance(losses, list | tuple):
        losses = [number(loss) for loss in losses]
    return {
        "losses": number(losses), "weight": model.linear.weight.cpu(), "calls": model.calls, "modes": model.modes,
        "marks": model.marks, "recording": model.recording, "kept": model.kept, "left": left,
        "waits": fetched[-1] - fetched[0] if fetched else 0,
    }  # fmt: skip


# ---- the epoch by hand: the right one, and those with a mistake ----


def of_mean(piece, batch, pieces, batch_size, limit):
    """How much the mean loss of a piece counts: the right way, and wrong ones."""
    return piece / batch


WRONG_SHARES = {
    "the pieces count the same, although the last one is smaller: a piece of k samples of a batch of b counts k / b":
        lambda piece, batch, pieces, batch_size, limit: 1 / pieces,
    "the gradients of the pieces are added up, but each is already a mean: a piece of k samples of a batch of b counts k "
    "/ b": lambda piece, batch, pieces, batch_size, limit: 1,
    "the loss is the sum over the samples: divide it by the number of samples in the batch":
        lambda piece, batch, pieces, batch_size, limit: piece,
    "each piece is divided by the loader's batch size, but the last batch is smaller: divide by its own number of samples":
        lambda piece, batch, pieces, batch_size, limit: piece / batch_size,
    "each piece is divided by `limit`: a piece of k samples of a batch of b counts k / b":
        lambda piece, batch, pieces, batch_size, limit: piece / limit,
    "the mean loss of a piece is divided by the number of samples in the batch: it must first be multiplied by those in "
    "the piece": lambda piece, batch, pieces, batch_size, limit: 1 / batch,
}  # fmt: skip


def simulate(weight, batches, lr, limit, share=of_mean, reset=True, last_only=False):
    """One epoch of SGD by hand: the weights after it, and the loss of each batch before
    and after its step, and of each piece.
    """
    loss_of = lambda weight, images, labels: F.nll_loss(F.log_softmax(images.flatten(1) @ weight.T, dim=1), labels)
    kept, velocity = 0, 0
    losses, afterwards, of_pieces = [], [], []
    for images, labels in batches:
        weight = weight.detach().requires_grad_()
        pieces = list(zip(images.split(limit), labels.split(limit)))
        gradient, total = 0, 0
        for place, piece in enumerate(pieces):
            loss = loss_of(weight, *piece)
            sizes = len(piece[1]), len(labels), len(pieces), len(batches[0][1]), limit
            part = share(*sizes)
            of_pieces.append(loss.item())
            if place == len(pieces) - 1 or not last_only:
                gradient = gradient + part * torch.autograd.grad(loss, weight)[0]
            total += part * loss.item()
        kept = gradient + (0 if reset else kept)
        velocity = MOMENTUM * velocity + kept
        weight = weight.detach() - lr * velocity
        losses.append(total)
        afterwards.append(loss_of(weight, images, labels).item())
    return weight, losses, afterwards, of_pieces


# ---- what is claimed ----

REPEATED = "samples were given to the model more than once: each sample is in one forward pass, that of its piece"
ONE_BY_ONE = (
    "a forward keeps its activations for backward, so here those of several pieces fill the memory: call backward for each "
    "piece, before the next forward"
)
RETAINED = (
    "backward frees the activations of a piece, but not with retain_graph=True: they stay as long as its loss, so call "
    "backward without it, and keep loss.detach()"
)
WAITS = (
    "item(), float() or tolist() waits until a GPU has computed everything so far, and then it has nothing to do: keep the "
    "losses as tensors, loss.detach(), and turn them into floats after the loop"
)


def claims(epoch, seen, weight, batches, lr, limit):
    yield Claim(
        f"the mode of the model in each forward of {epoch}", all(map(all, seen["modes"])), True,
        "an evaluation leaves the model in eval mode: begin with model.train(), otherwise dropout stays off",
        told="training", shown="eval",
    )  # fmt: skip
    yield from of_the_memory(epoch, seen, limit, len(batches))
    yield from of_the_weights(f"the weights of the model after {epoch}", seen, weight, batches, lr, limit)
    yield from of_the_losses(f"what train_one_epoch returns after {epoch}", seen["losses"], weight, batches, lr, limit)
    yield from left_behind("train_one_epoch", seen["left"])


def of_the_memory(epoch, seen, limit, batches):
    """Claims that at most `limit` samples were in memory at once."""
    sizes = [len(marks) for marks in seen["marks"]]
    cause = f"cut each batch into pieces of at most {limit} samples, for instance with images.split(limit)"
    if len(sizes) > batches:
        cause = "a piece is too large: chunk(k) makes k pieces, split(k) makes pieces of k samples"
    most = max(sizes, default=0)
    yield Claim(f"the samples in one forward of {epoch}", most, range(limit + 1), cause, told=f"at most {limit}")
    recorded = iter(seen["recording"])  # a forward without autograd keeps nothing
    order = [call for call in seen["calls"] if call == "backward" or (call == "forward" and next(recorded))]
    if "backward" not in order:  # gradients without backward, or none: the weights will tell
        return
    first = ", ".join(order[: order.index("backward") + 1])
    again = most_often(seen["marks"]) > 1
    yield Claim(
        f"the order of forward and backward in {epoch}", ("forward", "forward") in zip(order, order[1:]), False,
        REPEATED if again else ONE_BY_ONE, told="forward, backward for each piece",
        shown="two forwards without a backward in between" if first == "forward, backward" else first,
    )  # fmt: skip
    where = f"pieces whose activations are still in memory at a forward of {epoch}"
    yield Claim(where, max(seen["kept"], default=0), 0, RETAINED, told="none")


def of_the_weights(what, seen, weight, batches, lr, limit):
    """Claims that the weights are those of one step per batch, taken by the given
    optimizer.
    """
    calls, steps = seen["calls"], seen["calls"].count("step")
    got, expected = seen["weight"], simulate(weight, batches, lr, limit)[0]
    end = nth(calls, "forward", 4)
    order = ", ".join(calls[:end]) + (", ..." if end < len(calls) else "")
    yield Claim(
        what, [got, steps], [expected, len(batches)],
        lambda: why_weights(seen, expected, weight, batches, lr, limit), digits=4,
        told=f"{weights(expected)}\nafter one step per batch (steps in all: {len(batches)})",
        shown=f"{weights(got)}\nafter {order or 'no call at all'} (steps in all: {steps})",
    )  # fmt: skip
    most = most_often(seen["marks"])
    yield Claim(f"how often a sample is in a forward pass: {what}", most, range(2), REPEATED, told="once",
                shown=f"{most} times")  # fmt: skip


def why_weights(seen, expected, weight, batches, lr, limit):
    """The likely mistake: from the calls, from the samples, and from what else gives
    these weights.
    """
    got, calls = seen["weight"], seen["calls"]
    count, order = Counter(calls), " ".join(calls)
    forward, step = count["forward"], count["step"]
    pieces = sum(math.ceil(len(labels) / limit) for _, labels in batches)
    forgotten = forgotten_samples(seen["marks"], batches)
    same = lambda **options: agree(got, simulate(weight, batches, lr, limit, **options)[0], 4)
    looks = [
        (forward == 0, "the model was not called with a batch: for images, labels in loader"),
        (count["backward"] == 0, "there are no gradients: loss.backward() computes them"),
        (step == 0, "the given optimizer took no step: call optimizer.step() after the pieces of each batch"),
        (forgotten, forgotten),
        (pieces > len(batches) and step == forward, "it takes a step for each piece: one step for each batch, after "
                                                    "its last piece"),
        (step < len(batches), "one step for each batch: optimizer.step() belongs inside the loop over the batches"),
        (step > len(batches), "there are more steps than batches: go through the loader once, and take one step per "
                              "batch"),
        (calls.index("step") < calls.index("backward") if step and count["backward"] else False,
         "the step comes before backward, so it does not use this batch's gradients: call backward first"),
        ("backward zero_grad step" in order or agree(got, weight, 4),
         "the gradients are reset between backward and step: nothing is left for the step"),
        (pieces > len(batches) and same(last_only=True) or "backward zero_grad forward backward step" in order,
         "the gradients are reset between the pieces of a batch, so only those of its last piece are left: reset them "
         "once per batch"),
        (same(reset=False), "the gradients of all batches so far add up: call optimizer.zero_grad() for each batch"),
    ]  # fmt: skip
    looks += [(same(share=share), cause) for cause, share in WRONG_SHARES.items()]
    nearly = got.shape == weight.shape and (got - expected).norm() < 0.03 * (expected - weight).norm()
    looks += [(nearly, "the weights are nearly right: was something computed in a less precise type than float32?")]
    other = (
        "the gradient of each step must be that of F.nll_loss over the whole batch, in the order of the loader: does "
        "each sample count the same, and does nothing but the given optimizer, as it is, change the weights?"
    )
    return next((cause for applies, cause in looks if applies), other)


def forgotten_samples(marks, batches):
    """Which samples the model has not seen, or has seen twice, in words; else None."""
    seen = times_seen(marks)
    missing = [[seen[mark] == 0 for mark in images[:, 0, 0, 0].tolist()] for images, _ in batches]
    if not any(map(any, missing)):
        return REPEATED if max(seen.values(), default=1) > 1 else None
    whole = [place for place, of_batch in enumerate(missing) if all(of_batch)]
    if len(whole) == len(batches) - 1:
        return "it stopped after one batch: is the return inside the loop?"
    if whole == [len(batches) - 1]:
        return "a batch was left out: the last, smaller one; it needs a step like all others"
    if whole:
        which = "the first one" if whole[0] == 0 else f"number {whole[0] + 1}"
        return f"a batch was left out: {which}; each batch needs a step"
    if not any(of_batch[0] for of_batch in missing):
        return "the last samples of a batch were left out: its last, smaller piece counts, too"
    return "some samples of a batch were left out: each sample is in one piece"


def times_seen(marks):
    """How often the model has seen each sample, by its mark."""
    return Counter(mark for of_forward in marks for mark in of_forward.tolist())


def most_often(marks):
    return max(times_seen(marks).values(), default=0)


def nth(calls, name, number):
    """The position of the nth occurrence of a call; the length, if there is none."""
    places = [place for place, call in enumerate(calls) if call == name]
    return places[number - 1] if len(places) >= number else len(calls)


def weights(tensor):
    return ", ".join(f"{value:.5f}" for value in tensor.flatten()[:4].tolist()) + ", ..."


def of_the_losses(what, got, weight, batches, lr, limit):
    """Claims that `got` is the list of the batches' losses."""
    _, expected, afterwards, of_pieces = simulate(weight, batches, lr, limit)
    in_words = {"told": told(expected), "shown": told(got)}
    problem = why_no_list(got)
    yield Claim(what, problem, None, problem, **in_words)
    cause = "the steps were right, so return the loss of each batch: the mean over its samples"
    if len(got) != len(expected):
        cause = "return one loss for each step: append it once per batch"
        if len(got) == len(of_pieces):
            cause = "these are the losses of the pieces: return one for each batch, the mean over its samples"
        elif len(got) == 1:
            cause = "it is one loss for the whole epoch: append one in each step"
    elif any(map(math.isnan, got)):
        cause = "a loss is nan: the mean over no samples is 0 / 0. Is one of the pieces empty?"
    mistakes = lambda: other_losses(expected, afterwards, of_pieces, batches, limit)
    yield Claim(what, got, expected, cause, mistakes, digits=3, **in_words)


def why_no_list(got):
    """What is wrong with the type of the losses, or None."""
    if got is None:
        return "it returns None: collect the losses in a list, and return the list"
    if isinstance(got, float):
        return "it is one number for the epoch: return a list with the loss of each step"
    if isinstance(got, torch.Tensor):
        return "it is a tensor: .tolist() turns it into a list of floats"
    if not isinstance(got, list):
        return "return a list of floats: the loss of each step"
    if any(isinstance(loss, torch.Tensor) for loss in got):
        return "these are still tensors: after the loop, return torch.stack(losses).tolist()"
    if not all(isinstance(loss, float) for loss in got):
        return "return only a list of floats: the loss of each step"
    return None


def other_losses(expected, afterwards, of_pieces, batches, limit):
    """Common mistakes: [(the losses that they give, the cause)]."""
    sizes = [len(labels) for _, labels in batches]
    counts = [math.ceil(size / limit) for size in sizes]
    ends = torch.tensor(counts).cumsum(0).tolist()
    pieces = [of_pieces[end - count : end] for end, count in zip(ends, counts)]
    return [
        ([loss * size for loss, size in zip(expected, sizes)],
         "each loss is multiplied by the size of its batch: return the mean over the samples of the batch"),
        ([sum(of_batch) for of_batch in pieces],
         "the mean losses of the pieces are added up: a piece of k samples of a batch of b counts k / b"),
        ([sum(of_batch) / len(of_batch) for of_batch in pieces],
         "it is the mean of the pieces' losses, in which the smaller piece counts too much: a piece of k samples of a "
         "batch of b counts k / b"),
        ([of_batch[-1] for of_batch in pieces], "it is the loss of the last piece: return that of the whole batch"),
        ([of_batch[0] for of_batch in pieces], "it is the loss of the first piece: return that of the whole batch"),
        ([of_batch[-1] * ((size - 1) % limit + 1) / size for of_batch, size in zip(pieces, sizes)],
         "it is the last piece's part of the loss: add up the parts of all pieces of the batch"),
        ([sum(expected[: step + 1]) / (step + 1) for step in range(len(expected))],
         "it is the mean of the losses so far: return the loss of each step"),
        ([sum(expected[: step + 1]) for step in range(len(expected))],
         "the losses of all batches so far add up: begin each batch with 0"),
        (afterwards, "it is the loss after the step: return the loss whose gradients were used for the step"),
    ]  # fmt: skip


@question(
    "Lesson 1 proves that the gradient of a batch is the mean of the gradients of its halves, if they have the same "
    "size. How much must each piece count if the sizes differ, so that each sample of the batch counts the same?",
    "loss.backward() adds to the gradients that are there. So reset them once per batch, call backward for each piece, "
    "and take one step after the last piece. images.split(limit) cuts a batch into pieces of at most `limit` samples. "
    "The loss of a piece counts len(piece) / len(batch).",
    "For each batch: optimizer.zero_grad(); total = 0; for each piece: loss = F.nll_loss(model(piece), its labels, "
    'reduction="sum") / len(labels); loss.backward(); total += loss.detach(). After the pieces: optimizer.step(); '
    "losses.append(total). After the loop: return torch.stack(losses).tolist()",
)
def check_train_one_epoch(answer, draw):
    """One step per batch, with the gradient of the whole batch, from pieces that fit into
    memory; training mode; the returned losses, for which no step waits.
    """
    generator = torch.Generator().manual_seed(draw.randrange(10**6))
    batch_size, steps = draw.choice([8, 11, 13, 14]), draw.randint(4, 5)
    small = draw.choice([3, 5])  # divides no batch size
    last = draw.choice([size for size in range(small + 1, batch_size) if size % small])
    samples = batch_size * (steps - 1) + last
    images = torch.randn(samples, 1, 28, 28, generator=generator)
    labels = torch.randint(10, (samples,), generator=generator)
    weight = 0.05 * torch.randn(10, 784, generator=generator)
    lr = draw.uniform(0.005, 0.015)
    limits = small, batch_size + draw.randint(1, 5), 1
    seen = answer.on_ranks(observe, weight, images, labels, batch_size, lr, limits)[0]
    batches = list(zip(images.split(batch_size), labels.split(batch_size)))
    epoch = f"an epoch of {steps - 1} batches of {batch_size} samples and one of {last}, with limit="
    for limit, of_limit in zip(limits, seen):
        hold(claims(f"{epoch}{limit}", of_limit, weight, batches, lr, limit))
    where = f"numbers fetched between the first and the last forward of {epoch}"
    # what is wrong comes before what is slow
    hold(Claim(f"{where}{limit}", of_limit["waits"], 0, WAITS) for limit, of_limit in zip(limits, seen))
