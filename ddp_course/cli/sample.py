"""Let a trained model continue a text."""

from ddp_course import UsageError


def sample(folder, prompt, length, seed, temperature, top_k, chat=False):
    """The prompt and what the model in a folder makes of it, or its answer: a str.

    folder: one that transformers can load, such as `model` of lesson 10 or `merged` of
    lesson 11. length: tokens at most; the model may end the text earlier. Where its
    context is full, the older half is forgotten. chat: the prompt is a question, which
    is asked as the model's chat template says. Raises UsageError for another folder.
    """
    model, tokenizer = load(folder)
    import torch

    ends = model.generation_config.eos_token_id  # several, one, or none
    ends = ends if isinstance(ends, list) else [ends] if ends is not None else []
    if chat:
        prompt, ends = asked(prompt, tokenizer)
    options = {"return_tensors": "pt", "add_special_tokens": not chat}
    tokens = tokenizer(prompt, **options)["input_ids"]
    given = tokens.shape[1] if chat else 0  # an answer is shown without its question
    if not tokens.numel():
        raise UsageError("the prompt is empty: a sample needs something to begin with")
    torch.manual_seed(seed)
    how = {"do_sample": top_k > 1, "pad_token_id": 0, "eos_token_id": ends or None}
    if top_k > 1:
        how |= {"temperature": temperature, "top_k": top_k}
    context = model.config.max_position_embeddings
    end = tokens.shape[1] + length
    while tokens.shape[1] < end:
        full = tokens.shape[1] >= context
        seen = tokens[:, -(context // 2) :] if full else tokens
        room = min(end - tokens.shape[1], context - seen.shape[1])
        mask = torch.ones_like(seen)
        longer = model.generate(seen, attention_mask=mask, max_new_tokens=room, **how)
        new = longer[:, seen.shape[1] :]
        tokens = torch.cat([tokens, new], dim=1)
        if new.shape[1] < room or new[0, -1].item() in ends:
            break
    return tokenizer.decode(tokens[0, given:], skip_special_tokens=True)


def asked(question, tokenizer):
    """A question as the chat template writes it, and the tokens that end an answer."""
    from ddp_course.data.questions import as_text, conversation, end_tokens

    if tokenizer.chat_template is None:
        raise UsageError("the model has no chat template: leave out --chat")
    return as_text(conversation(question), tokenizer, asks=True), end_tokens(tokenizer)


def load(folder):
    """The model and the tokenizer in a folder. Raises UsageError if there are none."""
    if not (folder / "config.json").is_file():
        where = "lesson 10 writes one into the folder model of its --out"
        raise UsageError(f"{folder} holds no model, for it has no config.json: {where}")
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        model = AutoModelForCausalLM.from_pretrained(folder, local_files_only=True)
        tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    except Exception as error:  # each kind of file raises another one
        why = " ".join(str(error).split())[:200]
        raise UsageError(f"{folder} holds no model that loads: {why}") from None
    return model.eval(), tokenizer
