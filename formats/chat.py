"""Questions in the form that a chat model expects: that of its own template, or one of two fixed forms; a model's
tokens tell which one it uses."""

import argparse
import re
from collections.abc import Sequence
from datetime import datetime
from typing import NamedTuple, NoReturn

import tiktoken
from jinja2 import TemplateError
from jinja2.sandbox import ImmutableSandboxedEnvironment

from support.prefix import common_prefix_length


class ChatForm(NamedTuple):
    """The form of a conversation: what begins it, a question up to where its answer begins, with {} in the place of the
    text, and what ends an answer."""

    header: str
    question: str
    end: str


class FixedForm(NamedTuple):
    """A form whose header holds a system prompt: the header, with {} in its place, the system prompt that a model adds by
    itself ("" if none), and the other parts of a ChatForm."""

    header: str
    default_system: str
    question: str
    end: str


# By a token that occurs in the form.
FIXED_FORMS = {
    # Llama 3: a header for each message. Source: the model card, "Special Tokens used with Llama 3".
    "<|start_header_id|>": FixedForm(
        "<|start_header_id|>system<|end_header_id|>\n\n{}<|eot_id|>",
        "",
        "<|start_header_id|>user<|end_header_id|>\n\n{}<|eot_id|>"
        "<|start_header_id|>assistant<|end_header_id|>\n\n",
        "<|eot_id|>",
    ),
    # ChatML, with the first message that SmolLM2's own template adds.
    "<|im_start|>": FixedForm(
        "<|im_start|>system\n{}<|im_end|>\n",
        "You are a helpful AI assistant named SmolLM, trained by Hugging Face",
        "<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n",
        "<|im_end|>\n",
    ),
}
ANSWER = "An answer."
INSTRUCTION = "Read this text and answer the question after it with a few words."


def has_chat_form(tokenizer: tiktoken.Encoding) -> bool:
    """Return whether a model was trained on conversations, as its template or its name says. (A base model may have the
    tokens of a form, too.)"""
    has_template = bool(getattr(tokenizer, "chat_template", None))
    return has_template or getattr(tokenizer, "is_instruct", False)


def chat_form(tokenizer: tiktoken.Encoding, system: str = "") -> ChatForm:
    """Return the form of a conversation that a model expects, with a system prompt if one is given. Raises ValueError if
    the model has neither a template that says it, nor the tokens of FIXED_FORMS, or if the system prompt holds the name
    of a control token."""
    for name in ("{}", *sorted(tokenizer.special_tokens_set)):
        if name in system:
            raise ValueError(
                f"the system prompt may not contain {name}, which stands for something else"
            )
    if getattr(tokenizer, "chat_template", None):
        return template_form(tokenizer.chat_template, system)
    for token, form in FIXED_FORMS.items():
        if token in tokenizer.special_tokens_set:
            system = system or form.default_system
            header = form.header.replace("{}", system) if system else ""
            return ChatForm(header, form.question, form.end)
    raise ValueError(
        f"--chat needs a model whose tokens include {' or '.join(FIXED_FORMS)}: this one answers no questions"
    )


def question_form(tokenizer: tiktoken.Encoding, system: str = "") -> str:
    """Return the form of a first question that a model expects, with {} in the place of the text. Raises ValueError as
    chat_form() does."""
    form = chat_form(tokenizer, system)
    return form.header + form.question


def template_form(template: str, system: str = "") -> ChatForm:
    """Return the form of a conversation that a template gives, without the token that begins every text. Raises
    ValueError if the template is broken, or doesn't show the question once."""
    before = [{"role": "system", "content": system}] if system else []
    question = {"role": "user", "content": "{}"}
    first = rendered_messages(template, [*before, question])
    if first.count("{}") != 1:
        raise ValueError(f"the model's chat template shows a question {first.count('{}')} times")
    answered = [
        {"role": "user", "content": "A question."},
        {"role": "assistant", "content": ANSWER},
    ]
    later = rendered_messages(template, [*before, *answered, question]).rpartition(ANSWER)[2]
    shared = first[len(first) - common_prefix_length(first[::-1], later[::-1]) :]
    if "{}" not in shared:  # no later question: it looks different from the first
        return ChatForm("", first, "")
    return ChatForm(first.removesuffix(shared), shared, later.removesuffix(shared))


def rendered_messages(template: str, messages: Sequence[dict[str, str]]) -> str:
    """Return the text that a template makes of messages, up to where the next answer begins.

    Source: apply_chat_template() of transformers, for the functions that a template may call."""
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
    )

    def raise_exception(message: str) -> NoReturn:
        raise TemplateError(message)

    environment.globals["raise_exception"] = raise_exception
    environment.globals["strftime_now"] = datetime.now().strftime
    try:
        return environment.from_string(template).render(
            messages=messages, add_generation_prompt=True, bos_token="", eos_token=""
        )
    except (TemplateError, TypeError) as error:
        raise ValueError(f"the model's chat template can't be used: {error}") from error


def encode_in_form(form: str, text: str, tokenizer: tiktoken.Encoding) -> list[int]:
    """Return the tokens of a form with a text in the place of {}. Control tokens come only from the form: their names in
    the text are plain text."""
    ids, names = [], sorted(tokenizer.special_tokens_set, key=len, reverse=True)
    pieces = re.split(f"({'|'.join(map(re.escape, names))})", form) if names else [form]
    for piece in pieces:
        special = tokenizer.special_tokens_set.intersection([piece])
        ids += tokenizer.encode(
            piece.replace("{}", text), allowed_special=special, disallowed_special=()
        )
    return ids


def beginning_tokens(tokenizer: tiktoken.Encoding) -> list[int]:
    """Return the tokens that begin every text, if there are any."""
    return tokenizer.encode("", allowed_special="all")


def encode_question(text: str, tokenizer: tiktoken.Encoding, system: str = "") -> list[int]:
    """Return the tokens of a question in the form that a model expects. Raises ValueError as
    chat_form() does."""
    form = question_form(tokenizer, system)
    return beginning_tokens(tokenizer) + encode_in_form(form, text, tokenizer)


def encode_prompt(prompt: str, tokenizer: tiktoken.Encoding) -> list[int]:
    """Return the tokens of a prompt, in the form that a chat model expects."""
    if has_chat_form(tokenizer):
        return encode_question(prompt, tokenizer)
    return tokenizer.encode(prompt, disallowed_special=())


def encode_fact_question(text: str, question: str, tokenizer: tiktoken.Encoding) -> list[int]:
    """Return the tokens of a question about a text, up to where its answer begins: in the form that
    a chat model expects, otherwise as lines."""
    prompt = f"{INSTRUCTION}\n\n{text}\n\nQuestion: {question}"
    return encode_prompt(prompt if has_chat_form(tokenizer) else f"{prompt}\nAnswer:", tokenizer)


def encode_given_prompt(args: argparse.Namespace, tokenizer: tiktoken.Encoding) -> list[int]:
    """Return the tokens of --prompt. With --chat or --system, args.prompt is first put into the form
    that the model expects; raises ValueError if it has none."""
    if not (args.chat or args.system):
        return tokenizer.encode(args.prompt, allowed_special="all")
    ids = encode_question(args.prompt, tokenizer, args.system)
    args.prompt = question_form(tokenizer, args.system).replace("{}", args.prompt)
    return ids
