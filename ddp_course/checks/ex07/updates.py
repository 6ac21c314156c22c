"""Question 2: updates that count each sample once, also at the end of an epoch."""

from functools import partial

from torch.nn.utils import parameters_to_vector

from ddp_course.checks.claims import hold, on_every_rank
from ddp_course.checks.ex07.networks import PRELOADED, changed, in_words
from ddp_course.checks.ex07.updates_claims import comes_back, like_one_process, shares, some_trained
from ddp_course.checks.ported import RECORD, RecordingNetwork, never_trained, trained_on
from ddp_course.checks.samples import Numbered
from ddp_course.checks.training import unwrapped
from ddp_course.judge.answer import trying
from ddp_course.judge.question import question
from ddp_course.ranks.launch import start_server


def trainings(train, cases, rate, seed):
    """Train for each case, (samples, batch_size, every, epochs); return the result, and
    which rank saw which samples.
    """
    from accelerate import Accelerator

    seen = []
    for samples, batch_size, every, epochs in cases:
        accelerator = Accelerator(cpu=True)
        # otherwise a rank might leave while another is still connecting to it
        accelerator.wait_for_everyone()
        data, network = Numbered(samples, seed), RecordingNetwork(seed)
        RECORD.clear()
        with trying(f"{samples} samples, batch_size={batch_size}, every={every}"):
            returned = train(accelerator, network, data.inputs, data.labels, batch_size, every, epochs, rate)
        network, end = unwrapped(returned), None
        if isinstance(network, RecordingNetwork):
            end = parameters_to_vector(network.parameters()).detach()
        seen.append({
            "returned": in_words(returned), "wrapped": network is not returned, "end": end, "trained": trained_on(),
            "changed": changed(data, Numbered(samples, seed)), "copied": never_trained(network),
        })  # fmt: skip
    accelerator.end_training()
    return seen


@question(
    "Two things go wrong at the end of an epoch. The last update has fewer batches than `every`, and in the last "
    "batches are samples that prepare has taken once more from the beginning. How can you recognize these samples, if "
    "each sample brings its own number along?",
    "Number 3 under `Break it` in the lesson has the frame: the batches of an update, the number of items in them on "
    "all processes, a sum divided by that number. Put torch.arange(len(samples)) into the TensorDataset. Without a "
    "shuffle, batch r of process p begins with sample (r * num_processes + p) * batch_size; where a number is smaller "
    "than its place, the sample is a repeated one. F.cross_entropy leaves out targets of -100.",
    "Per batch: first = (r * num_processes + process_index) * batch_size; own = numbers == first + torch.arange("
    "len(numbers)); targets = targets.where(own, -100). Per update: items = accelerator.reduce(the number of targets "
    "that are not -100); under accelerator.no_sync(model) for all batches but the last, accelerator.backward("
    "F.cross_entropy(model(inputs), targets, reduction='sum') / items * accelerator.num_processes); then step() and "
    "zero_grad().",
)
def check_train(answer, draw):
    """All ranks must end with the parameters of one process that counts each sample of
    an update once.
    """
    start_server(*PRELOADED)  # where none runs yet
    for n in (2, 3):
        rate, seed = draw.uniform(0.1, 0.3), draw.randrange(10**6)
        cases = cut_short(draw, n)
        seen = answer.on_ranks(trainings, cases, rate, seed, nproc=n, timeout=20)
        for place, case in enumerate(cases):
            samples, batch_size, every, epochs = case
            checked = f"train with {samples} sample{'s' * (samples > 1)}, batch_size={batch_size}, every={every}, "
            checked += f"epochs={epochs}, {n} processes"
            of_ranks = [of_rank[place] for of_rank in seen]
            on_every_rank(partial(shares, checked, case), of_ranks)
            hold(some_trained(checked, case, of_ranks))
            on_every_rank(partial(comes_back, checked), of_ranks)
            on_every_rank(partial(like_one_process, checked, case, rate, seed), of_ranks)


def cut_short(draw, n):
    """Sizes: nothing is left over; a last update of fewer batches, one of which is not
    full, and whole batches are repeated; the same with two rounds, of which the last
    reaches the second process; two full rounds; fewer samples than processes.
    """
    batch_size, every = draw.randint(3, 5), draw.randint(2, 3)
    joined = n * batch_size
    full = (2 * joined * every, batch_size, every, 1)
    in_last_round = draw.randint(1, batch_size - 1)
    short = ((every + 1) * joined + in_last_round, batch_size, every + 1, 2)
    rounds = every + 2  # in the first update; two are left for the last one
    second = ((rounds + 1) * joined + batch_size + 1, batch_size, rounds, 1)
    full_rounds = ((rounds + 2) * joined, batch_size, rounds, 1)
    return [full, short, second, full_rounds, (n - 1, batch_size, every, 2)]
