"""Conversations: rows of a CSV or JSONL file, a text, tokens with labels."""

import ast
import csv
import io
import json
import os
import warnings

import datasets
from jinja2 import TemplateError
from transformers import AutoTokenizer

from ddp_course import UsageError
from ddp_course.data.text import files_of, fingerprint_of, made_once
from ddp_course.files import open_file

MOST_HELD_OUT = 128  # questions, and a tenth of them at the most
MOST_ON_A_CPU = 1024  # questions to train on, unless told
LONGEST = 72  # characters of a question, or of an answer
IGNORED = -100  # a label that does not count, for torch and transformers
COLUMNS = {  # and what others call them; the first that a file has is taken
    "user": "user question instruction query input prompt".split(),
    "answer": "answer assistant output response completion prompt".split(),
}
END, PAD = "<|end|>", "<|pad|>"
# as Jinja: "user: ...", a new line, "assistant: ..." and the token that ends a text
CHAT = (
    "{{ bos_token }}{% for message in messages %}"
    "{{ message['role'] + ': ' + message['content'] }}"
    "{{ eos_token if message['role'] == 'assistant' else '\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}assistant:{% endif %}"
)

# ---- a file of questions ----


def questions_file():
    """A CSV file with the columns `user`, what a function does, and `answer`, its first
    line, as a string.

    Both are from the standard library: the first line of the docstring, and what comes
    after `def`. Made once per machine.
    """
    sources = [path.read_bytes() for path in files_of("python")[::2]]

    def make(folder):
        with (folder / "questions.csv").open("w", newline="", encoding="utf-8") as file:
            rows = csv.writer(file, lineterminator="\n")
            rows.writerow(COLUMNS)
            rows.writerows(dict(functions_in(sources)).items())  # no question twice

    folder = made_once("questions", fingerprint_of(__file__, sources), make)
    return str(folder / "questions.csv")


def functions_in(sources):
    """Yield the first line of each function's docstring, and the function's own.

    sources: bytes.
    """
    for source in sources:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of strings in old sources
            tree = ast.parse(source)
        for node in ast.walk(tree):
            is_function = isinstance(node, ast.FunctionDef)
            docstring = ast.get_docstring(node) if is_function else None
            if docstring:
                what = docstring.splitlines()[0].strip()
                line = f"def {node.name}({ast.unparse(node.args)}):"
                short = max(len(what), len(line)) <= LONGEST
                if short and what.isascii() and " " in what:
                    yield what, line


def read_questions(path):
    """The conversations in a file: a list of lists of {"role": ..., "content": ...}.

    path: a CSV file with two columns, see COLUMNS, or a JSONL file, whose rows have
    either these or `messages`, with as many turns as there were. Raises UsageError.
    """
    try:
        with open_file(path) as binary:  # which refuses a pipe: it would be waited for
            text = binary.read().decode("utf-8-sig")
        if str(path).endswith(".jsonl"):
            rows = [json.loads(line) for line in text.split("\n") if line.strip()]
        else:
            csv.field_size_limit(2**31 - 1)  # an answer may be long
            rows = list(csv.DictReader(io.StringIO(text, newline="")))
    except (OSError, ValueError, RecursionError, csv.Error) as error:
        said = (str(error).splitlines() or [type(error).__name__])[0]
        raise UsageError(f"cannot read --data {path}: {said}") from None
    if not rows:
        raise UsageError(f"cannot read --data {path}: it has no rows")
    if len(rows) < 2:
        least = "one to train on and one to hold out are the least"
        raise UsageError(f"--data {path} has {len(rows)} rows: {least}")
    columns, found = None, []
    for number, row in enumerate(rows, 1):
        if not isinstance(row, dict):
            raise UsageError(f"--data {path} has values without names in row {number}")
        if isinstance(row.get("messages"), list):
            found.append(checked(row["messages"], path, number))
            continue
        columns = columns or columns_in(row, path)
        user, answer = (text_of(row, names) for names in columns)
        if not (user and answer):
            raise UsageError(f"--data {path} has an empty cell in row {number}")
        found.append(conversation(user, answer))
    return found


def columns_in(row, path):
    """The names of a file's columns with questions, and with answers: two lists."""
    spelled = {name.strip().lower(): name for name in row if name}
    user = next((name for name in COLUMNS["user"] if name in spelled), None)
    rest = [name for name in COLUMNS["answer"] if name in spelled and name != user]
    if not user or not rest:
        problem = f"has no column {'answer' if user else 'user'}"
        there = ", ".join(filter(None, row))
        raise UsageError(f"--data {path} {problem}; its columns are {there}")
    # Alpaca's: the instruction, and in many rows an input that it is about
    with_input = [user, "input"] if user == "instruction" else [user]
    return [spelled[name] for name in with_input if name in spelled], [spelled[rest[0]]]


def text_of(row, names):
    """Some cells of a row as one text; "" if the first is empty."""
    cells = [row.get(name) for name in names]
    texts = ["" if cell is None else str(cell) for cell in cells]
    if not texts[0].strip():
        return ""
    return "\n\n".join(text for text in texts if text.strip())


def checked(messages, path, number):
    """The messages of a row, with role and content alone."""
    for message in messages:
        is_dict = isinstance(message, dict)
        values = [is_dict and message.get(key) for key in ("role", "content")]
        if not all(isinstance(value, str) for value in values):
            problem = "a message without role and content"
            raise UsageError(f"--data {path} has {problem} in row {number}")
    kept = [{key: message[key] for key in ("role", "content")} for message in messages]
    if not any(message["role"] == "assistant" for message in kept[1:]):
        raise UsageError(f"--data {path} has no answer in row {number}")
    return kept


# ---- as a model reads them ----


def load_tokenizer(name):
    """The tokenizer of a model, with a chat template and a token for padding.

    Raises UsageError where there is none, or none that will do.
    """
    try:
        tokenizer = AutoTokenizer.from_pretrained(name, trust_remote_code=False)
    except (OSError, ValueError) as error:
        places = "a folder with a model and its tokenizer, or a name on the hub"
        within = "and the hub within reach"
        said = str(error).splitlines()[0]
        problem = f"cannot load --model {name}, it must be {places}, {within}"
        raise UsageError(f"{problem}: {said}") from None
    if not (tokenizer.is_fast and tokenizer.eos_token):
        lack = "no token that ends a text" if tokenizer.is_fast else "no fast version"
        raise UsageError(f"the tokenizer of --model {name} has {lack}")
    if tokenizer.chat_template is None:
        tokenizer.chat_template = CHAT
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token  # our labels do not depend on it
    return tokenizer


def conversation(user, answer=None):
    """A question, and its answer where there is one, as chat templates want them."""
    answers = [] if answer is None else [{"role": "assistant", "content": answer}]
    return [{"role": "user", "content": user}, *answers]


def as_text(messages, tokenizer, asks=False):
    """A conversation as the model's template writes it. asks: up to an empty answer.

    Raises UsageError if the template refuses it: many want user and assistant in turns.
    """
    how = {"tokenize": False, "enable_thinking": False}  # the latter for Qwen3
    try:
        return tokenizer.apply_chat_template(
            messages, add_generation_prompt=asks, **how
        )
    except TemplateError as error:
        begins = " ".join(str(messages[0]["content"])[:60].split())
        problem = f"the model's chat template refuses a conversation: {error}"
        raise UsageError(f"{problem} (it begins with {begins!r})") from None


UNCUT = 10**9  # tokens: a limit that no conversation reaches


def encode(messages, tokenizer, longest, all_tokens=False):
    """A conversation as tokens, with labels: -100 where nothing is learnt."""
    whole = as_text(messages, tokenizer)
    learnt = [(0, len(whole))] if all_tokens else answers_in(messages, whole, tokenizer)
    tokens = tokenizer(
        whole,
        add_special_tokens=False,  # the template has written them
        truncation=True,
        max_length=longest,
        return_offsets_mapping=True,
    )
    places = zip(tokens["input_ids"], tokens.pop("offset_mapping"))
    labels = [
        token if any(begin <= start < end for begin, end in learnt) else IGNORED
        for token, (start, _) in places
    ]
    return {**tokens, "labels": labels}


def encode_and_say_whether_cut(messages, tokenizer, longest, all_tokens):
    """What `encode` returns, and as "cut" whether the conversation is longer."""
    row = encode(messages, tokenizer, UNCUT, all_tokens)
    cut = {"cut": len(row["input_ids"]) > longest}
    return {name: values[:longest] for name, values in row.items()} | cut


def answers_in(messages, whole, tokenizer):
    """Where each answer begins and ends in the whole text, with the token that ends it.

    An answer begins where the whole text first differs from the text that asks for it.
    That works with any chat template, and with any token for padding.
    """
    found = []
    for number, message in enumerate(messages):
        if number == 0 or message["role"] != "assistant":
            continue
        asked = as_text(messages[:number], tokenizer, asks=True)
        begin = len(os.path.commonprefix([asked, whole]))
        so_far = as_text(messages[: number + 1], tokenizer)
        if not whole.startswith(so_far):  # some templates cut what earlier answers said
            said = message["content"].strip()
            at = whole.find(said, begin) + len(said)
            _, there, end = so_far.rpartition(said)
            if not there or not whole[begin:at].endswith(said) or not said:
                continue
            so_far = whole[:at] + os.path.commonprefix([end, whole[at:]])
        found.append((begin, len(so_far)))
    return found


def load_questions(args, tokenizer, settings):
    """Questions and answers as tokens with labels: (to train on, held out).

    Raises UsageError where the file cannot be read, has too few rows, or --longest
    leaves nothing of an answer.
    """
    path = questions_file() if args.data == "questions" else args.data
    datasets.disable_progress_bars()
    rows = datasets.Dataset.from_dict({"messages": read_questions(path)})
    held_out = min(MOST_HELD_OUT, -(-len(rows) // 10))
    # without the seed, each rank would shuffle differently and hold out other rows
    parts = rows.train_test_split(held_out, seed=0)
    there = len(parts["train"])
    most = there if settings.device.type == "cuda" else min(MOST_ON_A_CPU, there)
    if (samples := args.train_samples or most) > there:
        few = f"--data {path} has: {there}"
        raise UsageError(f"--train-samples {samples} is more than {few}")
    parts["train"] = parts["train"].select(range(samples))
    options = {"longest": args.longest, "all_tokens": args.all_tokens}
    parts = parts.map(
        encode_and_say_whether_cut,
        input_columns=["messages"],
        fn_kwargs={"tokenizer": tokenizer, **options},
        remove_columns=["messages"],
        keep_in_memory=True,
    )
    labels = [*parts["train"]["labels"], *parts["test"]["labels"]]
    if lost := sum(set(row[1:]) <= {IGNORED} for row in labels):
        problem = f"--longest {args.longest} cuts off all of the answer"
        raise UsageError(
            f"{problem} in {lost} of {len(labels)} rows: allow more tokens"
        )
    return parts["train"], parts["test"]


def card(rows, longest):
    """What the conversations of load_questions consist of, as a line."""
    tokens = sum(map(len, rows["input_ids"]))
    learnt = sum(label != IGNORED for labels in rows["labels"] for label in labels)
    counts = (
        f"{len(rows):,} conversations, {tokens:,} tokens, {learnt:,} of them learnt"
    )
    return f"{counts}; {sum(rows['cut']):,} cut at --longest {longest}"


def end_tokens(tokenizer):
    """The tokens after which an answer is over: the one that ends a text, and the one
    with which the template ends a turn, such as Gemma's <end_of_turn>.
    """
    _, _, end = as_text(conversation("Why?", "Because."), tokenizer).rpartition(
        "Because."
    )
    turn = tokenizer(end, add_special_tokens=False)["input_ids"][:1]
    special = set(turn) & set(tokenizer.added_tokens_decoder)
    return [tokenizer.eos_token_id, *sorted(special - {tokenizer.eos_token_id})]


def answers(model, tokenizer, users, length=40):
    """What the model answers to questions: the likeliest token each time, a list.

    An answer that comes to its end within `length` tokens ends with the end token.
    """
    asked = [as_text(conversation(user), tokenizer, asks=True) for user in users]
    tokens = tokenizer(
        asked,
        add_special_tokens=False,
        padding=True,
        padding_side="left",  # the answer follows the question
        return_tensors="pt",
    ).to(model.device)
    ends = end_tokens(tokenizer)
    end = {"eos_token_id": ends, "pad_token_id": tokenizer.eos_token_id}
    model.eval()
    written = model.generate(**tokens, **end, max_new_tokens=length, do_sample=False)
    texts = tokenizer.batch_decode(written[:, tokens["input_ids"].shape[1] :])
    return [first_of(text, tokenizer.convert_ids_to_tokens(ends)) for text in texts]


def first_of(text, ends):
    """A text up to and with its first end token."""
    at, end = min(
        [(text.index(end), end) for end in ends if end in text] or [(None, "")]
    )
    return text[:at].strip() + end
