"""A replica group that trains with DiLoCo. Groups may die and come back: torchft.

node0 $ torchft_lighthouse --min_replicas 1
node0 $ python clusters/torchft/diloco.py --group 0
node1 $ python clusters/torchft/diloco.py --group 1

It needs torchft: pip install -c constraints.txt -e ".[engines]". It runs only in the
laboratory, where two_groups.py starts it: torchft's servers listen on all interfaces and
ask for no password, and a group that comes back unpickles what another one sends.

A. Douillard et al., "DiLoCo: Distributed Low-Communication Training of Language Models",
2023.
"""

import json
import socket
import time
import warnings
from datetime import timedelta
from pathlib import Path

import psutil
import torch
import torch.distributed as dist
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader

from ddp_course import UsageError, lesson01, runs
from ddp_course.data.images import load_images
from ddp_course.models.convnets import ConvNet
from ddp_course.ranks.machines.namespaces import address

STORE_PORT = 29600  # of each group, on its own machine

# of torch: it is about tensors in read-only memory, which are copied from and left alone
warnings.filterwarnings("ignore", "The given buffer is not writable")


def check_laboratory():
    """Raise UsageError outside of the laboratory's machines, whose only network is that
    of the laboratory. It has no default route, so nothing leads into it or out of it.
    """
    cards = psutil.net_if_addrs()
    own = {each.address for card in cards.values() for each in card}
    routes = Path("/proc/net/route")  # Linux's; column 2 is where a route leads
    leads = [line.split()[1] for line in routes.open()] if routes.exists() else []
    number = socket.gethostname().removeprefix("node")
    inside = number.isdecimal() and address(int(number)) in own
    if not inside or set(cards) != {"lo", "eth0"} or "00000000" in leads:
        fix = "python clusters/torchft/two_groups.py starts it there"
        raise UsageError(f"torchft's servers are for the laboratory only: {fix}")


def manage(args, parts):
    """This group's store, which has to live as long as the group, and torchft's Manager.

    The Manager knows which groups there are, and gives a group that is new the state of
    the parts, {name: an object with a state_dict}, of one that is not.
    """
    from torchft import Manager, ProcessGroupGloo

    def state():
        return {name: part.state_dict() for name, part in parts.items()}

    def load(state):
        record(args, received=time.time())
        for name, part in parts.items():
            part.load_state_dict(state[name])

    host = socket.gethostname()
    store = dist.TCPStore(host, STORE_PORT, is_master=True, wait_for_workers=False)
    return store, Manager(
        pg=ProcessGroupGloo(timeout=timedelta(seconds=args.timeout)),
        state_dict=state,
        load_state_dict=load,
        min_replica_size=1,  # one group goes on alone
        use_async_quorum=False,
        init_sync=False,  # all groups begin with the same parameters: --seed
        timeout=timedelta(seconds=args.timeout),
        replica_id=f"group{args.group}",
        lighthouse_addr=args.lighthouse,
        rank=0,  # in this group, which has one rank
        world_size=1,
        store_addr=host,
        store_port=STORE_PORT,
    )


def train(args):
    from torchft.local_sgd import DiLoCo

    train_set, test_set = load_images(args.data, args.train_samples, "cpu")
    torch.manual_seed(args.seed)
    model = ConvNet(dropout=False)
    inner = torch.optim.AdamW(model.parameters(), lr=1e-3)
    outer = torch.optim.SGD(model.parameters(), lr=0.7, momentum=0.9, nesterov=True)
    store, manager = manage(args, {"model": model, "inner": inner})
    print("ready", flush=True)
    # After every `--steps` steps of inner, a round, DiLoCo averages over the groups how far
    # the parameters have moved, and outer makes one step with that. If a group has died
    # meanwhile, the round is lost: its steps are taken back.
    with DiLoCo(manager, [model], inner, outer, sync_every=args.steps):
        while manager.current_step() < rounds(args):
            done, begin = manager.current_step(), time.time()
            for images, labels in batches(train_set, done, args):
                loss = cross_entropy(model(images), labels)
                inner.zero_grad()
                loss.backward()
                computed = time.time()
                inner.step()
            committed = manager.current_step() > done
            times = {"begin": begin, "computed": computed, "end": time.time()}
            number, groups = manager.current_step(), manager.num_participants()
            record(args, round=number, groups=groups, committed=committed, **times)
            what = f"round {number}" if committed else "a round was lost"
            print(f"{what}, groups: {groups}, loss {loss:.3f}", flush=True)
    correct, seen = lesson01.evaluate(model, DataLoader(test_set, 250), "cpu")
    manager.shutdown(wait=False)
    del store
    accuracy, digest = round(correct / seen, 4), runs.params_sha256(model)
    record(args, accuracy=accuracy, params_sha256=digest)


def rounds(args):
    """The number of rounds: from a file, which may change while the groups train, and for
    which they wait.
    """
    while not (args.out / "rounds").exists():
        time.sleep(0.1)
    return int((args.out / "rounds").read_text())


def batches(train_set, done, args):
    """The batches of a round, (images, labels): others in each group and round."""
    shuffle = torch.Generator().manual_seed(args.seed + 1000 * args.group + done)
    order = torch.randperm(len(train_set), generator=shuffle)
    chosen = order.split(args.batch_size)[: args.steps]
    return DataLoader(train_set, batch_sampler=[batch.tolist() for batch in chosen])


def record(args, **what):
    """Append to this group's story, a file of JSON lines. Times are in seconds."""
    with (args.out / f"group{args.group}.jsonl").open("a") as file:
        file.write(json.dumps(what) + "\n")


def main(argv=()):
    parser = runs.parser(__file__, __doc__)
    flag = parser.add_argument
    flag("--group", type=int, default=0, help="the number of this group")
    flag("--lighthouse", default="http://node0:29510", help="(%(default)s)")
    flag("--steps", type=runs.count, default=8, help="inner steps per round (8)")
    args = parser.parse_args(argv)
    check_laboratory()
    train(args)


if __name__ == "__main__":
    runs.start(main)
