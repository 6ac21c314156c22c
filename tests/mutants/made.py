"""Wrong answers that a program makes: our own, with one small change.

A statement is dropped, + becomes -, a whole number is one more or one less, a comparison
lets its limit in or out, a `.wait()` is forgotten. One that passes is a hole in a check,
or does what ours does: then EQUIVALENT says why.
"""

import ast
import copy

SWAPPED = {
    ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.FloorDiv, ast.FloorDiv: ast.Mult,
    ast.Div: ast.Mult, ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq, ast.NotEq: ast.Eq, ast.And: ast.Or, ast.Or: ast.And,
}  # fmt: skip
# {question: {change: why it does what ours does}}
EQUIVALENT = {
    "02 broadcast": {"5: have < n: another comparison": "in one more round, nobody has anyone to send to"},
    "03 overlapped": {
        "21: self.backwards[parameter] += 1: another operator": "multiples of `every` are multiples below 0, too"
    },
    "03 bucketed": {
        "13: 0: one less": "the first parameter opens the first bucket, as with 0",
        "15: 0: one more": "gradients have four bytes per number: no bucket has one left",
    },
    "03 traffic": {"8: 0: one less": "the first parameter opens the first bucket, as with 0"},
    "04 evaluate": {
        "13: 250: one more": "a batch of an evaluation may have any size",
        "13: 250: one less": "a batch of an evaluation may have any size",
        "evaluate returns NaN": "it returns whole numbers, which this change does not reach",
    },
    "04 find_the_bug_1": {
        "7: for epoch in range(epochs):: without `model.train()`": "a new network is in training mode",
        "train_on_ranks returns NaN": "it returns a network, which this change does not reach",
    },
    "04 find_the_bug_2": {
        "10: 0: one less": "all samples have equally many features",
        "10: 0: one more": "all samples have equally many features",
        "14: for epoch in range(epochs):: without `sampler.set_epoch(epoch)`": "it learns the classes in one order, too",
        "16: for inputs, labels in loader:: without `optimizer.zero_grad()`": "it learns the classes with momentum, too",
    },
    "04 find_the_bug_3": {
        "1: def train_and_test(make_model, train_set, test_set, epochs, : without `model.eval()`":
            "no layer of the network has modes",
        "12: for epoch in range(epochs):: without `model.train()`": "a new network is in training mode",
    },
    "04 sharded_sampler": {
        "28: self.seed + self.epoch: another operator": "any function of both chooses a shuffle",
        "35: total - len(left): another operator": "what is too much is cut off below",
        "9: 0: one less": "the signature is given, and one seed is as good as another",
        "9: 0: one more": "the signature is given, and one seed is as good as another",
    },
    "05 normalize": {"15: 0: one less": "rounding makes a variance negative, but by far less than 1"},
    "06 weighing_hook": {
        "14: 0: one less": "the value of the future is a list of one tensor",
        "weighing_hook returns NaN": "it returns a future, whose numbers this change does not reach",
    },
    "07 train": {"train returns NaN": "it returns a network, which this change does not reach"},
    "08 script": {
        "39: False: the opposite": "DDP may look for unused parameters: it only takes longer",
        "42: True: the opposite": "a progress bar changes nothing",
    },
    "08 uneven": {"collate returns NaN": "it returns a dict of whole numbers, which this change does not reach"},
    "09 save_whole": {
        "13: with temporary.open('wb') as file:: without `file.flush()`": "torch.save leaves nothing in the file's buffer",
        "22: 0: one less": "there is one problem: it is the last one, too",
        "23: 0: one more": "an error all the same, of all ranks",
        "23: 0: one less": "there is one problem: it is the last one, too",
    },
    "10 bits_per_byte": {
        "12: 1: one less": "a window without targets adds nothing",
        "16: 0: one less": "there is one row of logits",
    },
    "10 pretrain": {
        "7: 0: one more": "any shuffle does, if it is the same on all ranks",
        "7: 0: one less": "any shuffle does, if it is the same on all ranks",
        "8: len(tokens) - 1: another operator": "the shuffle rarely takes the window whose last target is missing",
        "8: 1: one more": "the text may end one token earlier",
        "8: 1: one less": "the shuffle rarely takes the window whose last target is missing",
        "10: 8: one more": "a batch may have any size",
        "10: 8: one less": "a batch may have any size",
        "13: for step, batch in enumerate(batches):: without `for group in optimizer.param_groups:`":
            "AdamW's own rate of 0.001 does as well",
        "15: for group in optimizer.param_groups:: without `group['lr'] = 0.002 * min(10 * (done + 0.01), 1 - done)`":
            "AdamW's own rate of 0.001 does as well",
        "16: 10 * (done + 0.01): another operator": "no warm-up is needed",
        "16: 1 - done: another operator": "no decay is needed",
        "16: 10: one more": "a warm-up may have any length",
        "16: 10: one less": "a warm-up may have any length",
        "16: done + 0.01: another operator": "one small step uphill does no harm",
        "16: 1: one more": "no decay is needed",
        "17: network.context + 1: another operator": "rows may be shorter",
        "17: 1: one less": "rows may be shorter",
    },
    "11 lora_layer": {
        "12: 5: one more": "A begins with other random numbers, and may",
        "12: 5: one less": "A begins with other random numbers, and may",
    },
    "11 teach": {
        "13: 0: one more": "A begins with other random numbers, and may",
        "13: 0: one less": "A begins with other random numbers, and may",
        "22: 16: one more": "a batch may have any size",
        "22: 16: one less": "a batch may have any size",
        "31: for value in trained:: without `value.grad /= dist.get_world_size()`": "Adam does not mind the scale",
        "33: value.grad /= dist.get_world_size(): another operator": "Adam does not mind the scale",
    },
    "11 fine_tune": {
        "20: with torch.no_grad():: without `for layer in layers:`": "nothing is merged, which does as well",
    },
    "13 checkpoint_bytes": {
        "10: 0: one more": "a byte is less than a file's header, which does not matter",
        "10: 0: one less": "a byte is less than a file's header, which does not matter",
    },
    "14 survive_preemption": {
        "1: def train(network, samples, batches, path):: without `dist.barrier()`": (
            "rank 0 returns when the file is there, and the others have nothing more to do"
        ),
        "20: for batch in batches[len(losses):]:: without `return losses`": "it saves at the end, too, which does no harm",
        "13: True: the opposite": "the file is the run's own, and torch loads the same from it",
    },
    "14 meeting_place": {
        "1: def meeting_place(hosts, ports):: without `return None`": "a function that ends returns None anyway"
    },
    "14 job_file": {"job_file returns NaN": "it returns a text, which this change does not reach"},
    "16 compare": {
        "7: 1: one more": "one round shows nothing, whatever error is allowed",
        "7: 1: one less": "nor do no rounds",
        "8: 2 / 2 ** rounds > error: another comparison": "no power of 2 is a part of 5 %",
        "10: chance > error: another comparison": "no power of 2 is a part of 5 %",
        "12: faster > slower: another comparison": "with as many on each side, nothing is shown",
    },
    "17 vocabulary_parallel_loss": {
        "11: 0: one less": "the gathered logits are one column",
    },
    "17 dropout_states": {
        "5: seed * 64 + data_rank: another operator": "64 numbers below a multiple of 64 are as good as 64 above it",
        "5: 64: one more": "more room for each seed",
        "5: 9: one more": "more room for each data rank",
    },
    "17 tensor_parallel_block": {
        "1: def all_reduced(x, group):: without `x = x.clone()`": "nobody needs what is added up in place",
        "20: @staticmethod: without `ctx.group = group`": "the backward of Leave needs no group",
        "30: 1: one less": "the layer's first weight is replaced",
        "30: 0: one more": "the layer's first weight is replaced",
        "30: 0: one less": "the layer's first weight is replaced",
    },
    "17 clip_gradients": {"10: norm + 1e-06: another operator": "a millionth more or less is within what is allowed"},
    "18 schedule": {
        "6: 0: one more": "a step may begin in any slot",
        "6: 0: one less": "a step may begin in any slot",
        "7: 0: one more": "a step may begin in any slot",
        "7: 0: one less": "a step may begin in any slot",
        "16: free[rank] > slot: another comparison": "all ranks begin a slot later, which changes no list",
        "19: 2: one more": "the lists are the same with a longer backward",
        "19: 2: one less": "the lists are the same with a shorter backward",
        "26: 1: one more": "the lists are as short with a longer forward",
        "26: 1: one less": "the lists are as short where a forward takes no time",
        "31: slot + length: another operator": "the lists are as short where nothing takes time",
        "32: 1: one more": "the lists are as short in steps of two slots",
    },
    "18 balance": {
        "4: 0: one more": "only differences of these sums are used",
        "4: 0: one less": "only differences of these sums are used",
        "11: 0: one more": "each stage takes one or more",
        "11: 0: one less": "each stage takes more than nothing",
        "13: 0: one more": "what does not fit has no cut",
        "13: 0: one less": "what does not fit has no cut",
        "14: 1: one less": "no layers have no last stage",
    },
    "18 tied_gradients": {"27: 0: one less": "the last copy has the gradient of the first one"},
    "19 merge": {
        "5: 0: one more": "any number does in the place of a largest of -inf",
        "5: 0: one less": "any number does in the place of a largest of -inf",
        "7: 0: one more": "the weight of these outputs is 0",
        "7: 0: one less": "the weight of these outputs is 0",
        "10: 1: one more": "the output is 0 / 2 there, and the logsumexp is replaced",
    },
    "19 layout": {
        "6: place + 1: another operator": "all pieces have as many tokens: their order is the same",
        "6: 1: one more": "all pieces have as many tokens: their order is the same",
        "6: 1: one less": "all pieces have as many tokens: their order is the same",
        "8: 0: one more": "all ranks begin with the same number",
        "8: 0: one less": "all ranks begin with the same number",
        "9: True: the opposite": "from the least to the most, ranks stay within the work of a piece, too",
    },
    "19 own_batch": {"5: 0: one less": "lengths have one dimension"},
    "19 train_shared": {
        "16: 0: one more": "all parts have the same shape",
        "16: 0: one less": "all parts have the same shape",
        "38: 0: one less": "these dimensions have the size 1",
    },
    "13 place": {
        "3: 1: one less": "no layers have the sum 0, which is too small a limit",
        "3: 1: one more": "of the second 1: a slice ends where the list does",
    },
    "13 train": {
        "19: False: the opposite": "DeepSpeed sees that the process group exists",
        "7: 0: one more": "all batches have the same size",
        "7: 0: one less": "all batches have the same size",
        "12: 10: one less": "a bucket of any size: only how it is sent changes",
        "12: 6: one less": "a bucket of any size: only how it is sent changes",
    },
    "15 agreement": {
        "44: @staticmethod: without `return None`": "a function returns None at its end",
        "41: 7: one less": "48 bits of a hash are as good as 56",
        "56: 0: one less": "one rank is odd: it is the last one, too",
    },
}  # fmt: skip

NAN = """

def {name}(*args, ours={name}, **options):
    def nan(value):
        if isinstance(value, dict):
            return {{key: nan(item) for key, item in value.items()}}
        if isinstance(value, list | tuple):
            return type(value)(map(nan, value))
        if hasattr(value, "is_floating_point"):
            return value * float("nan") if value.is_floating_point() else value
        return float("nan") if type(value) in (int, float) else value

    return nan(ours(*args, **options))
"""


def with_nan(source, names):
    """The cell, and then functions of these names that return NaN for each number."""
    functions = [node for node in ast.parse(source).body if is_function(node)]
    returning = {node.name for node in functions if returns_something(node)}
    for name in sorted(returning & set(names)):
        yield f"{name} returns NaN", source + NAN.format(name=name)


def is_function(node):
    return isinstance(node, ast.FunctionDef)


def returns_something(function):
    nodes = ast.walk(function)
    return any(isinstance(node, ast.Return) and node.value for node in nodes)


def changes(source):
    """(what was changed, the changed source) of each small change to a cell."""
    tree = ast.parse(source)
    for place, node in enumerate(ast.walk(tree)):
        for what, change in changes_of(node):
            changed = copy.deepcopy(tree)
            again = list(ast.walk(changed))[place]
            before = ast.unparse(again).split("\n")[0]
            change(again)
            text = ast.unparse(ast.fix_missing_locations(changed))
            if text != ast.unparse(tree):
                yield f"{getattr(node, 'lineno', 0)}: {before[:60]}: {what}", text


def changes_of(node):
    """(what is changed, a function that changes a node like this one)."""
    for field in ("body", "orelse", "finalbody"):
        block = getattr(node, field, None)
        if isinstance(block, list) and not isinstance(node, ast.Module):
            for number, statement in enumerate(block):
                if not isinstance(statement, ast.Pass) and not is_docstring(statement):
                    words = ast.unparse(statement).split("\n")[0][:60]
                    yield f"without `{words}`", dropping(field, number)
    if isinstance(node, ast.BinOp | ast.AugAssign) and type(node.op) in SWAPPED:
        yield "another operator", swapping("op")
    if isinstance(node, ast.BoolOp):
        yield "and, or", swapping("op")
    if isinstance(node, ast.Compare) and type(node.ops[0]) in SWAPPED:
        yield "another comparison", swapping("ops")
    if isinstance(node, ast.Constant) and type(node.value) is int:
        yield "one more", lambda node: setattr(node, "value", node.value + 1)
        yield "one less", lambda node: setattr(node, "value", node.value - 1)
    if isinstance(node, ast.Constant) and type(node.value) is bool:
        yield "the opposite", lambda node: setattr(node, "value", not node.value)
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
        yield "without not", lambda node: setattr(node, "op", ast.UAdd())


def is_docstring(statement):
    return isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)


def dropping(field, number):
    """A change that puts `pass` in the place of a statement."""

    def change(node):
        getattr(node, field)[number] = ast.Pass()

    return change


def swapping(field):
    """A change that takes the other operator."""

    def change(node):
        if field == "ops":
            node.ops[0] = SWAPPED[type(node.ops[0])]()
        else:
            setattr(node, field, SWAPPED[type(getattr(node, field))]())

    return change
