"""What a training step does when, as torch's profiler sees it."""

import os


def record(step):
    """Run `step()`, one training step, under torch's profiler; return what ran when.

    Returns {"forward", "backward", "all_reduce", "optimizer": [(begin, length), ...]}
    in milliseconds from the start. all_reduce runs in threads of its own, so its times
    may lie within those of backward: that is the overlap.
    """
    from torch.profiler import ProfilerActivity, profile

    os.environ.setdefault(
        "KINETO_LOG_LEVEL", "99"
    )  # else the profiler's library reports each start and stop
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        step()
    spans = sorted(
        (event.time_range.start / 1e3, event.time_range.end / 1e3, event.name)
        for event in profiler.events()
    )
    begin = next(
        start
        for start, _, name in spans
        if name.startswith(("aten::", "DistributedDataParallel.forward"))
    )

    def of(*prefixes):
        return [
            (start - begin, end - start)
            for start, end, name in spans
            if name.startswith(prefixes)
        ]

    backward = of("autograd::engine::evaluate_function")
    return {
        "forward": [(0.0, backward[0][0])],
        "backward": backward,
        "all_reduce": of("gloo:", "nccl:"),
        "optimizer": of("Optimizer.step"),
    }
