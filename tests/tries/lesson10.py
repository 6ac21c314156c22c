from tries import new, run

GERMAN = """\
other = "Wo man singet, da lass dich nieder, böse Menschen haben keine Lieder.\\n"
average = len(other.encode()) / len(bpe.encode(other.encode()))
of_python = len(line.encode()) / len(bpe.encode(line.encode()))
print(average, of_python)
assert average < of_python
"""
REPEATS = """\
def learn_to_repeat():
    torch.manual_seed(0)
    own = gpt.GPT(context=32, layers=1, heads=2, width=64)
    optimizer = torch.optim.AdamW(own.parameters(), lr=3e-3)
    for step in range(100):
        places = range(16 * step, 16 * step + 16)
        [(inputs, _)] = Windows(train_tokens, 32).__getitems__(places)
        loss = recipe.loss_of(own, inputs, inputs, torch.float32, cpu)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return loss.item()


print(learn_to_repeat())
assert learn_to_repeat() < 0.1
"""
OUT = 'flags += ["--out", str(whole)]'
BAD_LINE = """\
with gzip.open(corpus / "2.jsonl.gz", "at") as file:
    file.write('{"body": "no text"}\\n')
command = [sys.executable, "-m", "ddp_course.data.text", *options, "--out"]
command.append(f"{folder.name}/other")
done = subprocess.run(command, capture_output=True, text=True)
print(done.returncode, done.stderr)
"""
WITH_FLAG = """\
command.append("--skip-bad-lines")
done = subprocess.run(command, capture_output=True, text=True)
print(done.returncode, done.stderr)
"""
TRIES = {
    "21e63cbb": [new(GERMAN)],
    "cc876657": [
        run(
            "c5f6abfa",
            ("tokens, targets, torch.float32", "tokens, tokens, torch.float32"),
        ),
        new("assert loss.item() < math.log(256) - 0.5"),
        new(REPEATS),
    ],
    "870f0790": [
        run("fda94938", (OUT, OUT + '\nflags += ["--prompt", "class "]')),
        new("clipped = result['validation_loss']"),
        run("fda94938", (OUT, OUT + '\nflags += ["--max-norm", "1000"]')),
        new("assert result['validation_loss'] != clipped"),
    ],
    "7cab8989": [
        new(
            BAD_LINE,
            says=r"(?m)^text.py: .*2\.jsonl\.gz, line.*--key.*--skip-bad-lines",
        ),
        new(WITH_FLAG, says="0 (?s:.*)left out: .*2.jsonl.gz"),
    ],
    "2a757a5c": [
        run(
            "f1501200",
            ('run(*noisy, "--resume",', 'run(*noisy, "--resume", "--dropout", "0.2",'),
            fails="was made with dropout 0.1, not 0.2",
        )
    ],
    "d5cbecd6": [
        run(
            "c74c5a6f",
            ("torch.manual_seed(rank)", "torch.manual_seed(0)"),
            ("    assert (both[0] == both[1]) == of_all_ranks\n", ""),
        ),
        new("assert both[0] == both[1]"),
    ],
}
