"""Questions and answers: rows of a CSV file, a text, tokens with labels."""

import ast
import csv
import os
import warnings

import datasets
from transformers import AutoTokenizer

from ddp_course import UsageError
from ddp_course.data.text import files_of, fingerprint_of, made_once
from ddp_course.files import open_file

MOST_HELD_OUT = 128  # questions, and a tenth of them at the most
MOST_ON_A_CPU = 1024  # questions to train on, unless told
LONGEST = 72  # characters of a question, or of an answer
IGNORED = -100  # a label that does not count, for torch and transformers
COLUMNS = ["user", "prompt"]
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
    """A CSV file with the columns `user`, what a function does, and `prompt`, its first
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


def read_questions(path, settings, cache):
    """The rows of a CSV file, as strings, with the columns `user` and `prompt`."""
    datasets.disable_progress_bars()
    # the first rank of a machine reads, and the others take what it has cached
    with settings.main_process_first(desc="reading the questions"):
        try:
            open_file(path).close()  # a pipe would be waited for
            options = {"cache_dir": str(cache), "keep_in_memory": True}
            rows = datasets.Dataset.from_csv(path, **options)
        except (OSError, ValueError, datasets.exceptions.DatasetsError) as error:
            said = str(error).splitlines()[0]
            raise UsageError(f"cannot read --data {path}: {said}") from None
    spelled = {name.strip().lower(): name for name in rows.column_names}
    if missing := set(COLUMNS) - set(spelled):
        problem = f"has no column {' and no '.join(sorted(missing))}"
        there = ", ".join(rows.column_names)
        raise UsageError(f"--data {path} {problem}; its columns are {there}")
    if len(rows) < 2:
        least = "one to train on and one to hold out are the least"
        raise UsageError(f"--data {path} has {len(rows)} rows: {least}")
    pairs = list(zip(*(rows[spelled[name]] for name in COLUMNS)))
    for number, pair in enumerate(pairs, 1):
        if None in pair:
            raise UsageError(f"--data {path} has an empty cell in row {number}")
    users, prompts = ([str(value) for value in column] for column in zip(*pairs))
    return datasets.Dataset.from_dict({"user": users, "prompt": prompts})


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


def conversation(user, prompt=None):
    """A question, and its answer where there is one, as chat templates want them."""
    answer = [] if prompt is None else [{"role": "assistant", "content": prompt}]
    return [{"role": "user", "content": user}, *answer]


def encode(user, prompt, tokenizer, longest, all_tokens=False):
    """A question and its answer as tokens, with labels: -100 where nothing is learnt.

    The answer begins where the whole text first differs from the text that asks for it.
    That works with any chat template, and with any token for padding.
    """
    turns, as_text = conversation(user, prompt), {"tokenize": False}
    whole = tokenizer.apply_chat_template(turns, **as_text)
    as_text["add_generation_prompt"] = True
    asked = tokenizer.apply_chat_template(turns[:1], **as_text)
    begin = 0 if all_tokens else len(os.path.commonprefix([asked, whole]))
    tokens = tokenizer(
        whole,
        add_special_tokens=False,  # the template has written them
        truncation=True,
        max_length=longest,
        return_offsets_mapping=True,
    )
    places = zip(tokens["input_ids"], tokens.pop("offset_mapping"))
    labels = [token if start >= begin else IGNORED for token, (start, _) in places]
    return {**tokens, "labels": labels}


def load_questions(args, tokenizer, settings):
    """Questions and answers as tokens with labels: (to train on, held out).

    Raises UsageError where the file cannot be read, has too few rows, or --longest
    leaves nothing of an answer.
    """
    path = questions_file() if args.data == "questions" else args.data
    rows = read_questions(path, settings, args.out / "cache")
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
        encode,
        input_columns=COLUMNS,
        fn_kwargs={"tokenizer": tokenizer, **options},
        remove_columns=COLUMNS,
        keep_in_memory=True,
    )
    labels = [*parts["train"]["labels"], *parts["test"]["labels"]]
    if lost := sum(set(row[1:]) <= {IGNORED} for row in labels):
        problem = f"--longest {args.longest} cuts off all of the answer"
        raise UsageError(
            f"{problem} in {lost} of {len(labels)} rows: allow more tokens"
        )
    return parts["train"], parts["test"]


def answers(model, tokenizer, users, length=40):
    """What the model answers to questions: the likeliest token each time, a list.

    An answer that comes to its end within `length` tokens ends with the end token.
    """
    asked = [
        tokenizer.apply_chat_template(
            conversation(user), tokenize=False, add_generation_prompt=True
        )
        for user in users
    ]
    tokens = tokenizer(
        asked,
        add_special_tokens=False,
        padding=True,
        padding_side="left",  # the answer follows the question
        return_tensors="pt",
    ).to(model.device)
    end = {
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.eos_token_id,
    }
    model.eval()
    written = model.generate(**tokens, **end, max_new_tokens=length, do_sample=False)
    texts = tokenizer.batch_decode(written[:, tokens["input_ids"].shape[1] :])
    return [first_of(text, tokenizer.eos_token) for text in texts]


def first_of(text, end):
    """A text up to and with its first end token."""
    before, found, _ = text.partition(end)
    return before.strip() + found
