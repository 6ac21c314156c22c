"""Question 5: an analyser that tells waiting for another rank from sending."""

from ddp_course.checks.claims import Between, Claim, hold
from ddp_course.judge.answer import trying
from ddp_course.judge.question import question

KINDS = ("computing", "sending", "waiting", "idle")
STEP, LENGTH = "the step", 120  # microseconds


def event(name, cat, begin, end, tid=7, **args):
    return {"ph": "X", "name": name, "cat": cat, "ts": begin, "dur": end - begin, "tid": tid, "args": args}  # fmt: skip


GEMM, NCCL = "sm90_xmma_gemm_f32", "ncclDevKernel_AllReduce_Sum_f32_RING_LL"
GATHER = "ncclKernel_AllGather_RING_LL_Sum_int8_t"  # as nccl before 2.19 names it
PACK = "pack_for_nccl_AllReduce"  # a kernel that computes
ADAM = "multi_tensor_apply_adam_step"


def a_step(begin, length=LENGTH):
    return event(STEP, "user_annotation", begin, begin + length, tid=1)


def no_range(name, begin, end, **args):
    """An event that looks like a kernel, but has no stream and another ph."""
    return {"ph": "i", "name": name, "cat": "kernel", "ts": begin, "dur": end - begin, "args": args}  # fmt: skip


# ---- traces whose answer can be seen ----

SIMPLE = {
    "one rank that computes, sends and rests": [
        [a_step(0, 100), event(GEMM, "kernel", 0, 40), event(NCCL, "kernel", 30, 70, 20, seq=0)],
    ],
    "two computing streams at once": [
        [a_step(10, 100), event(GEMM, "kernel", 20, 60), event(GEMM, "kernel", 40, 80, 8)],
    ],
    "a range inside another one": [
        [a_step(0, 100), event(GEMM, "kernel", 10, 90), event(GEMM, "kernel", 20, 50)],
    ],
    "operators of the CPU, which launch kernels and do not compute": [
        [a_step(0, 100), event("aten::addmm", "cpu_op", 0, 90, 1), event(GEMM, "kernel", 50, 80),
         event("nccl:all_reduce", "user_annotation", 10, 20, 1)],
    ],
    "a kernel that gathers, and one that computes, with nccl within its name": [
        [a_step(0, 100), event(GATHER, "kernel", 0, 40, 7, seq=0), event(PACK, "kernel", 50, 80, 20, grid=[8, 1, 1])],
    ],
    "events that are none of kernels: their ph is not X": [
        [a_step(0, 100), event(GEMM, "kernel", 0, 20), no_range(GEMM, 10, 60), no_range(NCCL, 50, 90, seq=0)],
    ],
    "times with decimals": [
        [a_step(0.5, 100), event(GEMM, "kernel", 0.785, 40), event(NCCL, "kernel", 30, 70.345, 20, seq=0)],
    ],
    "kernels that begin before the step, and end after it": [
        [a_step(100, 100), event(GEMM, "kernel", 50, 120), event(NCCL, "kernel", 180, 250, 20, seq=0)],
    ],
    "a rank that waits for the other": [
        [a_step(0, 100), event(GEMM, "kernel", 0, 20), event(NCCL, "kernel", 20, 90, 20, seq=3)],
        [a_step(0, 100), event(GEMM, "kernel", 0, 70), event(NCCL, "kernel", 70, 90, 20, seq=3)],
    ],
    "two collectives at once, of which one has all ranks": [
        [a_step(0, 100), event(NCCL, "kernel", 10, 80, 20, seq=0), event(NCCL, "kernel", 10, 50, 21, seq=1)],
        [a_step(0, 100), event(NCCL, "kernel", 70, 80, 20, seq=0), event(NCCL, "kernel", 20, 50, 21, seq=1)],
    ],
    "collectives in another order on the other rank": [
        [a_step(0, 100), event(NCCL, "kernel", 0, 30, 20, seq=0), event(NCCL, "kernel", 40, 90, 21, seq=1)],
        [a_step(0, 100), event(NCCL, "kernel", 60, 90, 21, seq=1), event(NCCL, "kernel", 20, 30, 20, seq=0)],
    ],
    "steps that do not begin at the same time": [
        [a_step(0, 100), event(NCCL, "kernel", 10, 60, 20, seq=0)],
        [a_step(30, 100), event(NCCL, "kernel", 40, 60, 20, seq=0)],
    ],
    "collectives that one rank begins before its step, and the other after it": [
        [a_step(0, 50), event(NCCL, "kernel", 10, 45, 20, seq=1), event(NCCL, "kernel", 60, 90, 20, seq=0)],
        [a_step(20, 80), event(NCCL, "kernel", 15, 45, 20, seq=1), event(NCCL, "kernel", 50, 90, 20, seq=0)],
    ],
    "a collective that one rank ends before the other": [
        [a_step(0, 100), event(NCCL, "kernel", 10, 60, 20, seq=0)],
        [a_step(0, 100), event(NCCL, "kernel", 30, 50, 20, seq=0)],
    ],
}  # fmt: skip


def random_traces(draw):
    """Traces of some ranks, in no order, with quarters of microseconds."""
    ranks, traces = draw.randint(2, 4), []
    collectives = draw.randint(0, 5)
    ends = [draw.randrange(20, LENGTH + 40) for _ in range(collectives)]
    for _ in range(ranks):
        start = draw.randrange(15)
        events = [a_step(start), {"ph": "M", "name": "process_name", "args": {}}]
        for _ in range(draw.randrange(10)):
            begin = draw.randrange(-20, LENGTH + 20)
            kind = draw.choice(["kernel"] * 4 + ["cpu_op"])
            length = draw.choice([3, 9, 25])
            name, tid = draw.choice([GEMM, PACK, ADAM]), draw.choice([7, 8, 20])
            events.append(event(name, kind, begin, begin + length, tid, grid=[8, 1, 1]))
        for seq, end in enumerate(ends):
            begin = end - draw.randrange(1, 60)
            name, tid = draw.choice([NCCL, GATHER]), draw.choice([7, 20, 21])
            events.append(event(name, "kernel", begin, end + draw.randrange(5), tid, seq=seq))
        draw.shuffle(events)
        traces.append([in_quarters(event) for event in events])
    return traces


def in_quarters(event):
    """The event with its times in quarters of microseconds, which floats have exactly."""
    return event | {name: event[name] / 4 for name in ("ts", "dur") if name in event}


# ---- what is right: between two moments at which something begins or ends ----


def spans(events, wanted):
    return [(e["ts"], e["ts"] + e["dur"], e["args"].get("seq")) for e in events if e["ph"] == "X" and wanted(e)]


def is_transfer(e):
    return e["cat"] == "kernel" and e["name"].startswith("nccl")


def is_computing(e):
    return e["cat"] == "kernel" and not e["name"].startswith("nccl")


def truth(traces):
    """For each rank {kind: microseconds}."""
    complete = {}  # by collective, when the last rank has begun it
    for events in traces:
        for begin, _, seq in spans(events, is_transfer):
            complete[seq] = max(begin, complete.get(seq, begin))
    found = []
    for events in traces:
        computing, transfers = spans(events, is_computing), spans(events, is_transfer)
        [(first, last, _)] = spans(events, lambda e: e["name"] == STEP)
        counts = dict.fromkeys(KINDS, 0)
        edges = [edge for begin, end, _ in computing + transfers for edge in (begin, end)]
        edges += complete.values()
        edges = [first, *sorted(edge for edge in edges if first < edge < last), last]
        for now, next_edge in zip(edges, edges[1:]):
            running = [seq for begin, end, seq in transfers if begin <= now < end]
            if any(begin <= now < end for begin, end, _ in computing):
                kind = "computing"
            elif any(complete[seq] <= now for seq in running):
                kind = "sending"
            else:
                kind = "waiting" if running else "idle"
            counts[kind] += next_edge - now
        found.append(counts)
    return found


def analysed(analyse, cases):
    """What the answer says of each case, by rank; or a text."""
    found = []
    for name, traces in cases:
        with trying(name):
            returned = analyse(traces)
        try:
            found.append([{kind: float(rank[kind]) for kind in KINDS} for rank in returned])
        except (TypeError, ValueError, KeyError):
            found.append(repr(returned)[:200])
    return found


@question(
    "Draw the two ranks of a case on paper, one line per stream. At which moments does a rank communicate and not compute, "
    "and which of these moments are before the last rank has begun that collective?",
    "Extend lesson16.time_use: a third kind of span besides communication and computing, the communication that has begun "
    "on all ranks. First go through all ranks once, and note for each seq when the last rank began; then cut each rank's "
    "spans there.",
    "With complete[seq] = the latest begin of all ranks: a transfer is in two parts, (begin, complete[seq]) and "
    "(complete[seq], end). Give time_use the second parts alone: exposed is sending. Give it all transfers: exposed is "
    "sending and waiting, and computing and idle are right.",
)
def check_analyse(answer, draw):
    """All numbers are compared with what each rank does between two events."""
    cases = list(SIMPLE.items())
    cases += [(f"random traces, number {i}", random_traces(draw)) for i in range(60)]
    [found] = answer.on_ranks(analysed, cases, timeout=10)
    for (name, traces), got in zip(cases, found):
        hold(form(name, traces, got))
        for rank, right in enumerate(truth(traces)):
            hold(states(name, got[rank], right), f"{rank} of {len(traces)}")


# ---- what is claimed ----


def form(name, traces, got):
    yield Claim(name, len(got) if isinstance(got, list) else got, len(traces), "return one dict per rank, with these four "
                "keys", told=f"a list of {len(traces)} dicts with {', '.join(KINDS)}", shown=got)  # fmt: skip


def states(name, got, right):
    yield Claim(name, [got[kind] for kind in KINDS], [Between(right[kind] - 1e-6, right[kind] + 1e-6) for kind in KINDS],
                cause_of(name, got, right), told=in_words(right), shown=in_words(got))  # fmt: skip


def in_words(counts):
    return ", ".join(f"{kind} {counts[kind]:g} µs" for kind in KINDS)


CAUSES = {
    "two computing streams at once": "time in which two streams compute is one time: take the union of the spans",
    "a range inside another one": "time in which two ranges compute is one time: take the union of the spans",
    "operators of the CPU, which launch kernels and do not compute": "only events with cat 'kernel' are what the GPU does",
    "a kernel that gathers, and one that computes, with nccl within its name": "a kernel whose name begins with nccl "
    "communicates, on any stream and with any collective, and all other kernels compute",
    "events that are none of kernels: their ph is not X": "only events with ph 'X' count, whatever their cat is",
    "times with decimals": "times are no whole numbers: add up lengths of spans, and do not count microseconds",
    "kernels that begin before the step, and end after it": "cut what is outside of the step",
    "two collectives at once, of which one has all ranks": "the rank sends as soon as one of its running collectives has "
    "begun on all ranks, even if another one waits",
    "collectives in another order on the other rank": "find the same collective on the other ranks by its seq, not by "
    "its place",
    "steps that do not begin at the same time": "all ranks have one clock, and each rank has its own step",
    "collectives that one rank begins before its step, and the other after it": "a collective has begun on a rank when its "
    "kernel has, whether that is within the rank's step or not",
    "a collective that one rank ends before the other": "a collective that has begun on all ranks sends as long as this "
    "rank's kernel runs, even if another rank's has ended",
}  # fmt: skip


def cause_of(name, got, right):
    total, wanted = (sum(of[kind] for kind in KINDS) for of in (got, right))
    exposed = right["sending"] + right["waiting"]
    if name in CAUSES:
        return CAUSES[name]
    if abs(got["sending"] - exposed) < 1e-6 and right["waiting"]:
        return "a collective that has not begun on all ranks does not send: that part is waiting"
    if abs(got["waiting"] - exposed) < 1e-6 and right["sending"]:
        return "as soon as the last rank has begun a collective, it is sending"
    talks = got["sending"] + got["waiting"]
    if abs(got["computing"] - right["computing"]) < 1e-6 and talks > exposed:
        return "communication during computing is hidden: it counts as computing only"
    if abs(total - wanted) > 1e-6:
        return f"the four must add up to the step, {wanted:g} µs, and yours are {total:g} µs"
    return (
        "at each moment: does the rank compute? If not, has one of its running collectives begun on all ranks? If not, "
        "does one run?"
    )
