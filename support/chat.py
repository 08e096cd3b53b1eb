"""Questions in the form that a chat model expects: that of its own template, or one of two fixed forms; a model's
tokens tell which one it uses."""

import re
from datetime import datetime
from typing import NoReturn

import tiktoken
from jinja2 import TemplateError
from jinja2.sandbox import ImmutableSandboxedEnvironment

# The form of a first question, up to where the answer begins, by a token that occurs in it.
QUESTION_FORMS = {
    # Llama 3: a header for each message. Source: the model card, "Special Tokens used with Llama 3".
    "<|start_header_id|>": "<|start_header_id|>user<|end_header_id|>\n\n{}<|eot_id|>"
    "<|start_header_id|>assistant<|end_header_id|>\n\n",
    # ChatML, with the first message that SmolLM2's own template adds.
    "<|im_start|>": "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by "
    "Hugging Face<|im_end|>\n<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n",
}


def question_form(tokenizer: tiktoken.Encoding) -> str:
    """Return the form of a question that a model expects, with {} in the place of the text. Raises
    ValueError if the model has neither a template that says it, nor the tokens of QUESTION_FORMS."""
    if getattr(tokenizer, "chat_template", None):
        return rendered_question(tokenizer.chat_template)
    for token, form in QUESTION_FORMS.items():
        if token in tokenizer.special_tokens_set:
            return form
    raise ValueError(
        f"--chat needs a model whose tokens include {' or '.join(QUESTION_FORMS)}: this one answers no questions"
    )


def has_question_form(tokenizer: tiktoken.Encoding) -> bool:
    """Return whether a model has a form for questions, so that question_form() may be called."""
    has_template = bool(getattr(tokenizer, "chat_template", None))
    return has_template or not tokenizer.special_tokens_set.isdisjoint(QUESTION_FORMS)


def rendered_question(template: str) -> str:
    """Return the form of a question that a template gives, without the token that begins every text. Raises ValueError
    if the template is broken, or doesn't show the question once.

    Source: apply_chat_template() of transformers, for the functions that a template may call."""
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
    )

    def raise_exception(message: str) -> NoReturn:
        raise TemplateError(message)

    environment.globals["raise_exception"] = raise_exception
    environment.globals["strftime_now"] = datetime.now().strftime
    messages = [{"role": "user", "content": "{}"}]
    try:
        form = environment.from_string(template).render(
            messages=messages, add_generation_prompt=True, bos_token="", eos_token=""
        )
    except (TemplateError, TypeError) as error:
        raise ValueError(f"the model's chat template can't be used: {error}") from error
    if form.count("{}") != 1:
        raise ValueError(f"the model's chat template shows a question {form.count('{}')} times")
    return form


def encode_question(text: str, tokenizer: tiktoken.Encoding) -> list[int]:
    """Return the tokens of a question in the form that a model expects. Control tokens come only
    from the form: their names in the question are plain text. Raises ValueError as question_form()
    does."""
    ids = tokenizer.encode("", allowed_special="all")  # tokens that begin a text, if any
    names = sorted(tokenizer.special_tokens_set, key=len, reverse=True)
    for piece in re.split(f"({'|'.join(map(re.escape, names))})", question_form(tokenizer)):
        special = tokenizer.special_tokens_set.intersection([piece])
        ids += tokenizer.encode(
            piece.replace("{}", text), allowed_special=special, disallowed_special=()
        )
    return ids
