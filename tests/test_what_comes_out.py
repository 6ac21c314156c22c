"""What lesson 10 leaves: a model that transformers loads, and text that it writes."""

import json
import math

import pytest
import torch
from safetensors.torch import load_file

from ddp_course import UsageError
from ddp_course.checkpoints.export import bytes_as_tokenizer, export
from ddp_course.cli.sample import sample
from ddp_course.data.text import Windows
from ddp_course.data.tokenizers import BPE, Bytes
from ddp_course.models import recipe
from ddp_course.models.gpt import GPT, Cache
from ddp_course.models.modern import ModernGPT
from ddp_course.ranks.environment import process_group
from ddp_course.ranks.launch import launch

TEXT = "déf f(x):\n\treturn x  # ½ 漢字\n\n    y\x01".encode()


@pytest.fixture(params=[GPT, ModernGPT])
def network(request):
    """A GPT whose vectors are not zero or one, as they are before the training."""
    torch.manual_seed(0)
    shape = {"context": 16, "layers": 2, "heads": 4, "width": 16, "dropout": 0.1}
    network = request.param(**shape).double().eval()
    for parameter in network.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    return network


def test_a_cached_generation_writes_the_same_and_reads_each_token_once(network):
    read = []
    network.token_embedding.register_forward_hook(
        lambda layer, inputs, output: read.append(inputs[0].shape[1])
    )
    assert network.generate([1, 2, 3], 13) == network.generate(
        [1, 2, 3], 13, cached=False
    )
    assert read == [3] + 12 * [1] + [*range(3, 16)]


def test_the_cache_ends_where_the_window_begins_to_move(network):
    assert network.generate([1], 40) == network.generate([1], 40, cached=False)


def test_a_token_that_is_read_with_a_cache_sees_all_before_it(network):
    tokens, cache = torch.randint(256, (2, 9)), Cache()
    with torch.no_grad():
        whole = network(tokens)
        first = network(tokens[:, :4], cache=cache)
        later = [network(tokens[:, place, None], cache=cache) for place in range(4, 9)]
    torch.testing.assert_close(torch.cat([first, *later], dim=1), whole)
    assert cache.read == 9


def test_transformers_computes_the_same_logits_from_the_exported_model(
    network, tmp_path
):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    export(network, Bytes(), tmp_path)
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path)
    tokens = AutoTokenizer.from_pretrained(tmp_path)(TEXT.decode())["input_ids"]
    assert tokens == list(TEXT)
    tokens = torch.tensor([tokens[:16]])
    with torch.no_grad():
        torch.testing.assert_close(theirs(tokens).logits, network(tokens))
    dropouts = {k: v for k, v in theirs.config.to_dict().items() if "drop" in k}
    dropouts.pop("summary_first_dropout", None)
    assert set(dropouts.values()) == {0.1}
    assert theirs.config.eos_token_id is None
    size = sum(
        value.numel() for value in load_file(tmp_path / "model.safetensors").values()
    )
    assert size == sum(value.numel() for value in network.parameters())


def test_a_sample_goes_on_where_the_context_ends_and_can_be_repeated(network, tmp_path):
    export(network.float(), Bytes(), tmp_path)
    texts = [sample(tmp_path, "def ", 50, seed, 0.8, 40) for seed in (0, 0, 1)]
    assert texts[0] == texts[1] != texts[2] and texts[0].startswith("def ")
    greedy = sample(tmp_path, "ab", 9, 0, 0.8, 1)
    assert greedy == Bytes().decode(network.generate(list(b"ab"), 9, top_k=1))


def test_a_chat_model_is_asked_by_its_template_and_shows_its_answer_only(
    network, tmp_path
):
    from transformers import AutoTokenizer

    export(network, Bytes(), tmp_path)
    with pytest.raises(UsageError, match="no chat template"):
        sample(tmp_path, "ab", 9, 0, 0.8, 1, chat=True)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    tokenizer.chat_template = (
        "{{ messages[0].content }}{% if not add_generation_prompt %}c{% endif %}d"
    )
    tokenizer.eos_token = "e"
    tokenizer.save_pretrained(tmp_path)
    continued = Bytes().decode(network.generate(list(b"abd"), 9, top_k=1)[3:])
    answer = sample(tmp_path, "ab", 9, 0, 0.8, 1, chat=True)
    assert answer == continued.partition("e")[0]


@pytest.mark.parametrize("torn", [None, "config.json", "model.safetensors"])
def test_a_folder_without_a_whole_model_gives_one_line(network, tmp_path, torn):
    if torn:
        export(network, Bytes(), tmp_path)
        (tmp_path / torn).write_bytes((tmp_path / torn).read_bytes()[:40])
    with pytest.raises(UsageError, match="holds no model") as error:
        sample(tmp_path, "def ", 5, 0, 0.8, 40)
    assert "\n" not in str(error.value)


def test_each_byte_is_one_token_and_comes_back():
    tokenizer = bytes_as_tokenizer()
    assert tokenizer.get_vocab_size() == 256
    tokens = tokenizer.encode(TEXT.decode()).ids
    assert tokens == list(TEXT) and tokenizer.decode(tokens) == TEXT.decode()


def test_the_folder_has_the_runs_own_tokenizer(network, tmp_path):
    BPE.train(["def f(x): return x"], 256, tmp_path / "own.json")
    bpe = BPE(tmp_path / "own.json")
    export(network, bpe, tmp_path / "model")
    assert json.loads(
        (tmp_path / "model" / "tokenizer.json").read_text()
    ) == json.loads((tmp_path / "own.json").read_text())


# ---- evaluating ----


def test_the_error_of_an_evaluation_is_that_of_the_mean_for_any_number_of_ranks():
    def evaluated():
        with process_group():
            torch.manual_seed(0)
            model, tokens = GPT(context=8, layers=1, heads=1, width=8), torch.arange(90)
            windows = Windows((tokens * tokens % 91).numpy(), 8)
            cpu = torch.device("cpu")
            losses = [
                recipe.loss_of(model, *window, torch.float32, cpu).item()
                for window in torch.utils.data.DataLoader(windows)
            ]
            return recipe.evaluate(model, windows, torch.float32, cpu), losses

    for found, losses in launch(evaluated, nproc=3) + launch(evaluated, nproc=1):
        losses = torch.tensor(losses, dtype=torch.float64)
        expected = losses.mean().item(), (losses.std() / len(losses) ** 0.5).item()
        assert len(losses) == 11 and found == pytest.approx(expected, rel=1e-6)


def test_bits_per_byte_do_not_depend_on_how_much_text_a_token_holds(tmp_path):
    content = b"aaaabbbb" * 40
    BPE.train([content.decode()], 258, tmp_path / "own.json")
    bpe = BPE(tmp_path / "own.json")
    for tokenizer in (Bytes(), bpe):
        tokens = tokenizer.encode(content)
        windows = Windows(tokens, len(tokens) - 1)
        [(_, targets)] = windows
        size = len(content) - tokenizer.size(tokens[:1])
        assert tokenizer.size(targets.tolist()) == size
        nats = 100 / len(targets)  # 100 nats for the whole text
        bits = recipe.bits_per_byte(nats, windows, tokenizer)
        assert bits == pytest.approx(100 / math.log(2) / size)
