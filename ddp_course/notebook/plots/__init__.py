"""The course's pictures, in one style: dark ink on a white card, so that they read well
in light and dark notebooks.
"""

import matplotlib.pyplot as plt

RANK_COLORS = [
    "#3b76c2",
    "#e08a1e",
    "#3f9c5f",
    "#b8487c",
    "#7a5fc0",
    "#8a6d3b",
    "#2aa3a3",
    "#c2503b",
]
INK, FAINT = "#222222", "#d9d9d9"
STYLE = {
    "figure.facecolor": "white",
    "axes.facecolor": "white",
    "savefig.facecolor": "white",
    "figure.dpi": 80,
    "figure.constrained_layout.use": True,
    "font.size": 10.5,
    "text.color": INK,
    "axes.labelcolor": INK,
    "axes.edgecolor": "#888888",
    "axes.titlesize": 11.5,
    "axes.titlelocation": "left",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": "#e8e8e8",
    "xtick.color": "#555555",
    "ytick.color": "#555555",
    "legend.frameon": False,
    "lines.linewidth": 1.8,
    "axes.prop_cycle": plt.cycler(color=RANK_COLORS),
}


def color_of(rank):
    return RANK_COLORS[rank % len(RANK_COLORS)]


def flow(steps):
    """A program as a row of boxes with arrows between them. steps: {what the box says:
    what stands below it}.
    """
    with plt.rc_context(STYLE):
        figure, axis = plt.subplots(figsize=(1.75 * len(steps), 1.5))
        axis.axis("off")
        axis.set(xlim=(-0.55, len(steps) - 0.45), ylim=(-1.0, 0.45))
        for x, (label, note) in enumerate(steps.items()):
            axis.add_patch(
                plt.Rectangle(
                    (x - 0.36, -0.3),
                    0.72,
                    0.6,
                    facecolor="#eef3fa",
                    edgecolor=RANK_COLORS[0],
                    linewidth=1.4,
                )
            )
            axis.text(x, 0, label, ha="center", va="center", fontsize=11.5)
            axis.text(
                x, -0.42, note, ha="center", va="top", fontsize=8.5, color="#555555"
            )
            if x:
                axis.annotate(
                    "",
                    (x - 0.37, 0),
                    (x - 0.63, 0),
                    arrowprops={"arrowstyle": "-|>", "color": INK},
                )
        plt.show()


def data_parallel_step(ranks):
    """One data-parallel training step: each rank its part of the batch, then the mean
    of the gradients, for all.
    """
    with plt.rc_context(STYLE):
        figure, axis = plt.subplots(figsize=(8.5, 0.35 + 0.62 * ranks))
        axis.axis("off")
        axis.set(xlim=(-0.1, 8.6), ylim=(ranks - 0.45, -0.75))
        columns = [
            (0.6, "part {} of the batch"),
            (2.4, "forward, backward"),
            (4.2, "its own gradients"),
            (7.8, "step"),
        ]
        for rank in range(ranks):
            for left, label in columns:
                width = 1.5 if left < 7 else 0.8
                axis.add_patch(
                    plt.Rectangle(
                        (left, rank - 0.3),
                        width,
                        0.6,
                        facecolor=color_of(rank),
                        linewidth=0,
                    )
                )
                axis.text(
                    left + width / 2,
                    rank,
                    label.format(rank),
                    ha="center",
                    va="center",
                    fontsize=9,
                    color="white",
                )
            axis.text(0.45, rank, f"rank {rank}", ha="right", va="center", fontsize=9.5)
            for left, right in ((2.1, 2.4), (3.9, 4.2), (5.7, 6.0), (7.5, 7.8)):
                axis.annotate(
                    "",
                    (right, rank),
                    (left, rank),
                    arrowprops={
                        "arrowstyle": "-|>",
                        "color": INK,
                        "shrinkA": 0,
                        "shrinkB": 0,
                    },
                )
        axis.add_patch(
            plt.Rectangle(
                (6.0, -0.35),
                1.5,
                ranks - 0.3,
                facecolor="#f0f0f0",
                edgecolor=INK,
                linewidth=1.2,
            )
        )
        axis.text(
            6.75,
            (ranks - 1) / 2,
            "mean of all\ngradients",
            ha="center",
            va="center",
            fontsize=10,
        )
        axis.text(
            6.75,
            -0.55,
            "the ranks talk here, and only here",
            ha="center",
            fontsize=8.5,
            color="#555555",
        )
        plt.show()


def machines(nodes, ranks_per_node):
    """The ranks of a job on its machines, with the numbers that each has."""
    with plt.rc_context(STYLE):
        figure, axis = plt.subplots(figsize=(1.7 * nodes * ranks_per_node + 0.6, 1.9))
        axis.axis("off")
        axis.set(xlim=(-0.7, nodes * (ranks_per_node + 0.4) - 0.6), ylim=(-0.75, 1.0))
        for node in range(nodes):
            left = node * (ranks_per_node + 0.4)
            frame = plt.Rectangle(
                (left - 0.6, -0.7),
                ranks_per_node + 0.2,
                1.45,
                facecolor="#f6f6f6",
                edgecolor="#999999",
            )
            axis.add_patch(frame)
            axis.text(left - 0.52, 0.84, f"machine, node rank {node}", fontsize=10)
            for local_rank in range(ranks_per_node):
                rank = node * ranks_per_node + local_rank
                axis.add_patch(
                    plt.Rectangle(
                        (left + local_rank - 0.45, -0.55),
                        0.9,
                        1.15,
                        facecolor=color_of(rank),
                        linewidth=0,
                    )
                )
                text = f"rank {rank}\n\nlocal rank {local_rank}\nworld size {nodes * ranks_per_node}"
                axis.text(
                    left + local_rank,
                    0.02,
                    text,
                    ha="center",
                    va="center",
                    fontsize=9,
                    color="white",
                )
        plt.show()


def images(pictures, titles, columns=10, wrong=()):
    """Grey images, uint8 or float (n, 28, 28), in a grid, a title above each; the
    indices in `wrong` in red.
    """
    rows = -(-len(pictures) // columns)
    with plt.rc_context(STYLE):
        figure, axes = plt.subplots(
            rows, columns, figsize=(0.85 * columns, 1.02 * rows), squeeze=False
        )
        for axis in axes.flat:
            axis.axis("off")
        for index, (axis, picture, title) in enumerate(
            zip(axes.flat, pictures, titles)
        ):
            axis.imshow(picture, cmap="gray_r")
            axis.set_title(
                title,
                fontsize=9,
                loc="center",
                pad=2,
                color=RANK_COLORS[7] if index in wrong else INK,
            )
        plt.show()


def losses(curves, title="Training loss", every_epoch=None):
    """Loss by step. curves: {label: losses}, drawn in order; every_epoch: steps between
    the epoch marks.
    """
    with plt.rc_context(STYLE):
        figure, axis = plt.subplots(figsize=(7, 2.8))
        for index, (label, values) in enumerate(curves.items()):
            style = {
                "linestyle": ["-", "--", ":", "-."][index % 4],
                "linewidth": 1.4 if index else 2.2,
            }
            axis.plot(range(1, len(values) + 1), values, label=label, **style)
        if every_epoch:
            for step in range(every_epoch, len(values), every_epoch):
                axis.axvline(step, color=FAINT, linewidth=1, zorder=0)
        axis.set(xlabel="step", ylabel="loss (nats)", title=title, ylim=(0, None))
        if len(curves) > 1:
            axis.legend()
        plt.show()


def curve(xs, lines, xlabel, ylabel, title, marks=None):
    """Lines over the same xs, {label: values}; marks: {label: (xs, values)}, drawn as
    points that are joined.
    """
    with plt.rc_context(STYLE):
        figure, axis = plt.subplots(figsize=(7, 2.8))
        for label, values in lines.items():
            axis.plot(xs, values, label=label, linewidth=1.2 if marks else 2.2)
        for label, (places, values) in (marks or {}).items():
            axis.plot(places, values, "o-", label=label, markersize=5)
        axis.set(xlabel=xlabel, ylabel=ylabel, title=title)
        if len(lines) + len(marks or {}) > 1:
            axis.legend()
        plt.show()


def bars(values, xlabel, title, unit=""):
    """Horizontal bars with their value written at the end. values: {label: number}."""
    with plt.rc_context(STYLE):
        figure, axis = plt.subplots(figsize=(7, 0.6 + 0.38 * len(values)))
        drawn = axis.barh(
            list(values),
            list(values.values()),
            color=RANK_COLORS[: len(values)],
            height=0.65,
        )
        axis.bar_label(
            drawn,
            [
                f"{value:,.3g}{unit}" if value < 1000 else f"{value:,.0f}{unit}"
                for value in values.values()
            ],
            padding=4,
        )
        axis.invert_yaxis()
        axis.grid(axis="y", visible=False)
        axis.xaxis.set_major_formatter(
            "{x:,.0f}" if max(values.values()) >= 1000 else "{x:,.4g}"
        )
        axis.locator_params(axis="x", nbins=5)  # numbers of six digits need room
        axis.set(xlabel=xlabel, title=title, xlim=(0, 1.15 * max(values.values())))
        plt.show()


def stacked(rows, xlabel, title, unit=""):
    """Horizontal bars of parts, one after the other, and their sum at the end. rows:
    {label: {part: number}}.
    """
    parts = list(dict.fromkeys(part for row in rows.values() for part in row))
    with plt.rc_context(STYLE):
        figure, axis = plt.subplots(figsize=(7, 1.2 + 0.42 * len(rows)))
        ends = [0] * len(rows)
        for part in parts:
            lengths = [row.get(part, 0) for row in rows.values()]
            axis.barh(list(rows), lengths, left=ends, height=0.62, label=part)
            ends = [end + length for end, length in zip(ends, lengths)]
        for place, end in enumerate(ends):
            axis.text(end + 0.01 * max(ends), place, f"{end:,.3g}{unit}", va="center")
        axis.invert_yaxis()
        axis.grid(axis="y", visible=False)
        axis.set(xlabel=xlabel, title=title, xlim=(0, 1.15 * max(ends)))
        axis.legend(
            ncols=len(parts),
            loc="upper left",
            bbox_to_anchor=(0, -0.28 - 0.5 / len(rows)),
        )
        plt.show()


def in_use(timelines, title):
    """Memory during a step, from its first operation to its last. timelines: {label:
    bytes a parameter, by operation}.
    """
    with plt.rc_context(STYLE):
        figure, axis = plt.subplots(figsize=(7, 3))
        for label, values in timelines.items():
            places = [100 * place / (len(values) - 1) for place in range(len(values))]
            axis.plot(places, values, label=label, linewidth=1.4)
        axis.set(
            xlabel="operations of the step (%)",
            ylabel="bytes a parameter",
            title=title,
            ylim=(0, None),
        )
        if len(timelines) > 1:
            axis.legend(
                ncols=len(timelines), loc="upper left", bbox_to_anchor=(0, -0.22)
            )
        plt.show()


def adapter(inputs, outputs, r):
    """A weight matrix and, to scale, the two thin ones beside it."""
    with plt.rc_context(STYLE):
        figure, axis = plt.subplots(figsize=(6.5, 2.6))
        axis.axis("off")
        axis.set_aspect("equal")
        gap = 0.45 * inputs
        boxes = {
            f"W\n{outputs} × {inputs}\nfrozen": (0, outputs, inputs, FAINT),
            "B": (inputs + gap, outputs, r, RANK_COLORS[1]),
            "A": (inputs + gap + r + 0.12 * inputs, r, inputs, RANK_COLORS[1]),
        }
        for label, (x, height, width, color) in boxes.items():
            axis.add_patch(
                plt.Rectangle(
                    (x, (outputs - height) / 2),
                    width,
                    height,
                    facecolor=color,
                    edgecolor=INK,
                )
            )
            if height > r and width > r:
                axis.text(x + width / 2, outputs / 2, label, ha="center", va="center")
        axis.text(
            inputs + gap / 2,
            outputs / 2,
            "+  α/r ·",
            ha="center",
            va="center",
            fontsize=13,
        )
        b, a = boxes["B"][0], boxes["A"][0]
        axis.text(
            b + r / 2, -0.05 * outputs, f"B\n{outputs} × {r}", ha="center", va="top"
        )
        axis.text(
            a + inputs / 2,
            (outputs - r) / 2 - 0.05 * outputs,
            f"A\n{r} × {inputs}",
            ha="center",
            va="top",
        )
        axis.set(xlim=(-1, a + inputs + 1), ylim=(-0.4 * outputs, 1.02 * outputs))
        plt.show()


def four_bits(levels, weights):
    """How many weights of a layer have which value, and the levels that 4 bits leave.
    Both in units of a block's largest.
    """
    with plt.rc_context(STYLE):
        figure, axis = plt.subplots(figsize=(7, 2.4))
        axis.hist(weights, bins=120, color=FAINT)
        for level in levels:
            axis.axvline(level, color=RANK_COLORS[1], linewidth=1.4)
        axis.set(
            xlabel="weight / largest weight of its block",
            ylabel="weights",
            title="16 values for all weights",
        )
        plt.show()


def who_holds_what(panels, columns=2):
    """What each rank holds before and after a collective. panels: {name: (before,
    after)}, each a list by rank of marks.

    Marks are lesson 02's: (chunks, n * n), 1 where the chunk has a part of chunk i of
    rank r, at place n * r + i. A chunk is drawn as a box in the colours of the ranks
    that it comes from, and named: B2 is chunk 2 of rank 1.
    """
    n = len(next(iter(panels.values()))[0])
    rows = -(-len(panels) // columns)
    with plt.rc_context(STYLE):
        figure, axes = plt.subplots(
            rows,
            columns,
            figsize=(4.6 * columns, (0.42 * n + 0.55) * rows),
            squeeze=False,
        )
        for axis in axes.flat:
            axis.axis("off")
        for axis, (name, (before, after)) in zip(axes.flat, panels.items()):
            axis.set(xlim=(-2.1, 2 * n + 1.6), ylim=(n - 0.4, -0.6), title=name)
            for rank in range(n):
                axis.text(
                    -0.7, rank, f"rank {rank}", ha="right", va="center", fontsize=9.5
                )
                for column, chunk in enumerate(before[rank]):
                    _draw_chunk(axis, column, rank, chunk, n)
                for column, chunk in enumerate(after[rank]):
                    _draw_chunk(axis, n + 1.3 + column, rank, chunk, n)
            axis.annotate(
                "",
                (n + 1.0, (n - 1) / 2),
                (n + 0.25, (n - 1) / 2),
                arrowprops={"arrowstyle": "-|>", "color": INK, "lw": 1.6},
            )
        plt.show()


def ring_frames(frames, columns=3):
    """The steps of a ring all-reduce. frames: for each step, by rank, the marks
    (chunks, n * n) of what it holds.
    """
    n = len(frames[0])
    rows = -(-len(frames) // columns)
    with plt.rc_context(STYLE):
        figure, axes = plt.subplots(
            rows,
            columns,
            figsize=(3.1 * columns, (0.42 * n + 0.55) * rows),
            squeeze=False,
        )
        for axis in axes.flat:
            axis.axis("off")
        for step, (axis, holdings) in enumerate(zip(axes.flat, frames)):
            phase = (
                "start"
                if step == 0
                else f"step {step}, " + ("sum on" if step < n else "pass on")
            )
            axis.set(xlim=(-2.3, n + 0.2), ylim=(n - 0.4, -0.6), title=phase)
            for rank in range(n):
                axis.text(
                    -0.7, rank, f"rank {rank}", ha="right", va="center", fontsize=9.5
                )
                for column, chunk in enumerate(holdings[rank]):
                    new = step > 0 and not bool(
                        (chunk == frames[step - 1][rank][column]).all()
                    )
                    _draw_chunk(axis, column, rank, chunk, n, new)
        plt.show()


def _draw_chunk(axis, x, y, chunk, n, new=False):
    """One box, striped in the colours of the ranks whose chunks are summed in it;
    thick-edged where it is new.
    """
    places = chunk.nonzero().flatten().tolist()
    owners = [place // n for place in places]
    for stripe, owner in enumerate(owners):
        width = 0.9 / len(owners)
        axis.add_patch(
            plt.Rectangle(
                (x - 0.45 + stripe * width, y - 0.4),
                width,
                0.8,
                color=color_of(owner),
                linewidth=0,
            )
        )
    edge = (
        {"edgecolor": INK, "linewidth": 2.4}
        if new
        else {"edgecolor": "#777777", "linewidth": 0.8}
    )
    axis.add_patch(plt.Rectangle((x - 0.45, y - 0.4), 0.9, 0.8, fill=False, **edge))
    if len(owners) == 1:
        label = f"{chr(ord('A') + owners[0])}{places[0] % n}"
    else:
        label = f"\u03a3{places[0] % n}" if len(owners) == n else "+" if owners else ""
    axis.text(
        x,
        y,
        label,
        ha="center",
        va="center",
        fontsize=9,
        color="white",
        fontweight="bold",
    )


def cost_line(sizes, seconds, alpha, beta, fitted):
    """Measured time by message size with the line alpha + beta * bytes; filled points
    were fitted, open ones held out.
    """
    with plt.rc_context(STYLE):
        figure, axis = plt.subplots(figsize=(7, 3.2))
        curve = [
            sizes[0] * (sizes[-1] / sizes[0]) ** (step / 100) for step in range(101)
        ]
        axis.plot(
            curve,
            [(alpha + beta * size) * 1e3 for size in curve],
            color=INK,
            linewidth=1.2,
            label="\u03b1 + \u03b2 \u00b7 bytes",
        )
        for held_out, label in (
            (False, "measured, used for the fit"),
            (True, "measured, held out"),
        ):
            points = [
                (size, time * 1e3)
                for size, time in zip(sizes, seconds)
                if (size not in fitted) == held_out
            ]
            axis.plot(
                *zip(*points),
                "o",
                color=RANK_COLORS[1],
                fillstyle="none" if held_out else "full",
                label=label,
            )
        axis.set(xscale="log", yscale="log", title="What an all_reduce costs")
        axis.set(xlabel="bytes in the tensor", ylabel="time of one all_reduce (ms)")
        axis.yaxis.set_major_formatter("{x:g}")
        axis.yaxis.set_minor_formatter("")
        axis.legend()
        plt.show()


def step_timelines(recordings):
    """What one training step does when. recordings: {label: what profiling.record
    returned}, on one time axis.
    """
    colors = {
        "forward": "#9db8dc",
        "backward": RANK_COLORS[0],
        "optimizer": RANK_COLORS[2],
        "all_reduce": RANK_COLORS[1],
    }
    with plt.rc_context(STYLE):
        figure, axes = plt.subplots(
            len(recordings),
            1,
            figsize=(8.5, 0.55 + 0.85 * len(recordings)),
            sharex=True,
            squeeze=False,
        )
        for axis, (label, rows) in zip(axes.flat, recordings.items()):
            for row, spans in rows.items():
                lane = 1 if row == "all_reduce" else 0
                axis.broken_barh(
                    spans,
                    (lane - 0.36, 0.72),
                    facecolors=colors[row],
                    alpha=0.8 if lane else 1.0,
                    linewidth=0,
                    label=row,
                )
            axis.set(ylim=(1.5, -0.5), title=label)
            axis.set_yticks([0, 1], ["computes", "all_reduce"])
            axis.grid(axis="y", visible=False)
        axes[0, 0].legend(
            *axes[0, 0].get_legend_handles_labels(),
            ncols=4,
            loc="lower right",
            bbox_to_anchor=(1, 1),
            borderpad=0,
        )
        axes[-1, 0].set_xlabel("time since the step began (ms)")
        plt.show()


def pipelines(schedules):
    """Who computes which micro-batch when. schedules: {title: for each stage its
    [(kind, micro-batch, begin, seconds)]}.

    kind: 'forward' or 'backward'.
    """
    colors = {"forward": "#9db8dc", "backward": RANK_COLORS[0]}
    end = max(
        begin + length
        for stages in schedules.values()
        for spans in stages
        for *_, begin, length in spans
    )
    rows = [len(stages) for stages in schedules.values()]
    with plt.rc_context(STYLE):
        figure, axes = plt.subplots(
            len(rows), 1, figsize=(8.5, 0.9 + sum(0.5 + 0.32 * count for count in rows)), sharex=True, squeeze=False,
            gridspec_kw={"height_ratios": rows},
        )  # fmt: skip
        for axis, (title, stages) in zip(axes.flat, schedules.items()):
            for rank, spans in enumerate(stages):
                for kind, number, begin, length in spans:
                    axis.barh(
                        rank,
                        1e3 * length,
                        0.8,
                        1e3 * begin,
                        color=colors[kind],
                        edgecolor="white",
                    )
                    ink = "white" if kind == "backward" else INK
                    middle = 1e3 * (begin + length / 2)
                    axis.text(
                        middle,
                        rank,
                        number,
                        ha="center",
                        va="center",
                        color=ink,
                        fontsize=9,
                    )
            axis.set(title=title, ylim=(len(stages) - 0.5, -0.5), xlim=(0, 1e3 * end))
            axis.set_yticks(
                range(len(stages)), [f"rank {rank}" for rank in range(len(stages))]
            )
            axis.grid(axis="y", visible=False)
        boxes = [plt.Rectangle((0, 0), 1, 1, color=color) for color in colors.values()]
        axes[0, 0].legend(
            boxes,
            colors,
            ncols=2,
            loc="lower right",
            bbox_to_anchor=(1, 1),
            borderpad=0,
        )
        axes[-1, 0].set_xlabel("time since the step began (ms)")
        plt.show()


def sample_map(owners, title):
    """Which rank sees which sample. owners: by row (say, epoch), by sample, the list of
    ranks that see it (often one).
    """
    with plt.rc_context(STYLE):
        figure, axis = plt.subplots(figsize=(8.5, 0.8 + 0.34 * len(owners)))
        for y, row in enumerate(owners.values()):
            for x, ranks in enumerate(row):
                for stripe, rank in enumerate(ranks):
                    width = 0.9 / len(ranks)
                    axis.add_patch(
                        plt.Rectangle(
                            (x + stripe * width, y - 0.38),
                            width,
                            0.76,
                            color=color_of(rank),
                            linewidth=0,
                        )
                    )
                if not ranks:
                    axis.add_patch(
                        plt.Rectangle(
                            (x, y - 0.38), 0.9, 0.76, fill=False, edgecolor=FAINT
                        )
                    )
        samples = max(map(len, owners.values()))
        axis.set(
            xlim=(-0.1, samples),
            ylim=(len(owners) - 0.5, -0.5),
            xlabel="sample",
            title=title,
        )
        axis.set_xticks([sample + 0.45 for sample in range(samples)], range(samples))
        axis.set_yticks(range(len(owners)), list(owners))
        axis.grid(visible=False)
        plt.show()


def batch_statistics(seen, truth, title):
    """Mean and standard deviation of one feature, batch by batch. seen: {who: [(mean,
    deviation), ...]}; truth: the same of all data. The last of `seen` is drawn in
    ink."""
    with plt.rc_context(STYLE):
        figure, axis = plt.subplots(figsize=(8.5, 2.9))
        mean, deviation = truth
        axis.axhspan(mean - deviation, mean + deviation, color="#f0f0f0", zorder=0)
        axis.axhline(
            mean, color="#999999", linewidth=1, linestyle="--", label="all data"
        )
        for place, (who, pairs) in enumerate(seen.items()):
            color = INK if place == len(seen) - 1 else color_of(place)
            steps = [
                step + 0.18 * (place - (len(seen) - 1) / 2)
                for step in range(1, len(pairs) + 1)
            ]
            means, deviations = zip(*pairs)
            axis.errorbar(
                steps, means, deviations, fmt="o", markersize=4, color=color, label=who
            )
        axis.set(xlabel="batch", ylabel="mean ± deviation", title=title)
        axis.set_xticks(range(1, len(pairs) + 1))
        axis.grid(axis="x", visible=False)
        axis.legend(loc="upper left", bbox_to_anchor=(1, 1), borderpad=0)
        plt.show()


def accumulation(ranks, micro_batches):
    """The micro-batches of one update, and when the ranks talk: after each of them, and
    after the last one only.
    """
    with plt.rc_context(STYLE):
        height = 0.75 + 0.38 * ranks
        figure, axes = plt.subplots(2, 1, figsize=(8.5, 2 * height), sharex=True)
        for axis, synced, title in (
            (axes[0], True, "each backward averages its gradients"),
            (axes[1], False, "no_sync() for all but the last"),
        ):
            at = 0.0
            for number in range(micro_batches):
                for rank in range(ranks):
                    box = plt.Rectangle(
                        (at, rank - 0.36),
                        0.92,
                        0.72,
                        facecolor=color_of(rank),
                        linewidth=0,
                    )
                    axis.add_patch(box)
                    label = f"micro-batch {number}"
                    axis.text(
                        at + 0.46,
                        rank,
                        label,
                        ha="center",
                        va="center",
                        fontsize=8.5,
                        color="white",
                    )
                at += 1
                if synced or number == micro_batches - 1:
                    frame = plt.Rectangle(
                        (at - 0.04, -0.4),
                        0.42,
                        ranks - 0.2,
                        facecolor="#f0f0f0",
                        edgecolor=INK,
                    )
                    axis.add_patch(frame)
                    middle = (ranks - 1) / 2
                    axis.text(
                        at + 0.17,
                        middle,
                        "all-\nreduce",
                        ha="center",
                        va="center",
                        fontsize=8.5,
                    )
                    at += 0.46
            step = plt.Rectangle(
                (at, -0.4), 0.4, ranks - 0.2, facecolor=RANK_COLORS[2], linewidth=0
            )
            axis.add_patch(step)
            axis.text(
                at + 0.2,
                (ranks - 1) / 2,
                "step",
                ha="center",
                va="center",
                fontsize=8.5,
                color="white",
            )
            axis.axis("off")
            axis.set(
                xlim=(-0.75, 1.46 * micro_batches + 0.5),
                ylim=(ranks - 0.4, -0.6),
                title=title,
            )
            for rank in range(ranks):
                axis.text(
                    -0.1, rank, f"rank {rank}", ha="right", va="center", fontsize=9.5
                )
        plt.show()


def attempts(rows, save_every, title):
    """The updates that each attempt at a run made: again, those that an earlier attempt
    had made already.

    rows: a list of the numbers of the updates, from 1, for each attempt. All but the
    last were killed.
    """
    with plt.rc_context(STYLE):
        last = max(max(row, default=0) for row in rows)
        figure, axis = plt.subplots(figsize=(8.4, 0.7 + 0.5 * len(rows)))
        made = set()
        for y, row in enumerate(rows):
            for step in row:
                again = step in made
                face = FAINT if again else color_of(0)
                axis.barh(
                    y,
                    0.86,
                    0.6,
                    left=step - 0.43,
                    color=face,
                    edgecolor=color_of(0),
                    linewidth=0.8,
                )
            made |= set(row)
            if y < len(rows) - 1:
                axis.plot(
                    max(row, default=0) + 0.9,
                    y,
                    "x",
                    color=color_of(7),
                    markersize=9,
                    markeredgewidth=2.5,
                )
        for step in range(save_every, last + 1, save_every):
            axis.axvline(
                step + 0.5, color=color_of(2), linewidth=1.2, linestyle=":", zorder=0
            )
        axis.grid(False)
        axis.set(
            xlim=(0.3, last + 1.3),
            ylim=(len(rows) - 0.5, -0.5),
            xlabel="update",
            title=title,
        )
        axis.set_yticks(
            range(len(rows)), [f"attempt {y + 1}" for y in range(len(rows))]
        )
        axis.xaxis.get_major_locator().set_params(integer=True)
        handles = [
            plt.Rectangle((0, 0), 1, 1, facecolor=color_of(0)),
            plt.Rectangle((0, 0), 1, 1, facecolor=FAINT, edgecolor=color_of(0)),
            plt.Line2D(
                [], [], color=color_of(7), marker="x", linestyle="", markeredgewidth=2.5
            ),
            plt.Line2D([], [], color=color_of(2), linestyle=":"),
        ]
        axis.legend(
            handles,
            ["made", "made again", "killed", "checkpoint"],
            ncols=4,
            loc="upper center",
            bbox_to_anchor=(0.5, -0.75 / (0.7 + 0.5 * len(rows))),
        )
        plt.show()
