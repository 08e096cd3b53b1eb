"""Questions in the form that a chat model expects: that of its own template, or one of two fixed ones; a model's tokens
tell which one it uses."""

import argparse
import json
import re
from collections.abc import Iterable, Iterator, Sequence
from datetime import datetime
from functools import partial
from itertools import count
from typing import Any, NamedTuple, NoReturn

import tiktoken
from jinja2 import TemplateError, nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from support.printing import end_tokens_of


class ChatForm(NamedTuple):
    """The form of a conversation: the text up to the first answer, with what begins every text, and the text from the
    end of an answer up to the next one, each with {} in the place of a question.

    later: "" if the form takes a single question. after_answer: what follows an answer, up to the next question. past:
    the two texts as they are once another question follows, if that changes them. after_thoughts: None if an earlier
    answer keeps its thoughts, else what stands in their place.
    """

    first: str
    later: str = ""
    after_answer: str = ""
    past: tuple[str, str] | None = None
    after_thoughts: str | None = None

    def past_answer(self, text: str) -> str:
        """Return what stays of an answer once another question follows."""
        _, thoughts_end, rest = text.rpartition("</think>")
        if self.after_thoughts is None or not thoughts_end:
            return text
        return self.after_thoughts + rest.lstrip("\n")


# Templates of models that are known by a token which occurs in the form.
FIXED_TEMPLATES = {
    # Llama 3: a header for each message. Source: the model card, "Special Tokens used with Llama 3".
    "<|start_header_id|>": (
        "{{ bos_token }}{% for message in messages %}"
        "<|start_header_id|>{{ message.role }}<|end_header_id|>\n\n{{ message.content }}<|eot_id|>"
        "{% endfor %}{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}"
    ),
    # ChatML, with the first message that SmolLM2's own template adds.
    "<|im_start|>": (
        "{{ bos_token }}{% if messages[0].role != 'system' %}<|im_start|>system\n"
        "You are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n{% endif %}"
        "{% for message in messages %}"
        "<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n"
        "{% endfor %}{{ '<|im_start|>assistant\n' }}"
    ),
}
ANSWER = "\ue000answer\ue000"  # marks that no template contains
THOUGHT = "\ue000thought\ue000"
LARGEST_PRODUCT = 10**8  # that a template may compute
MOST_STEPS = 10**6  # of a template's loops, all of them together
INSTRUCTION = "Read this text and answer the question after it with a few words."


def has_chat_form(tokenizer: tiktoken.Encoding) -> bool:
    """Return whether a model was trained on conversations, as its template or its name says. (A base model may have the
    tokens of a form, too.)"""
    has_template = bool(getattr(tokenizer, "chat_template", None))
    return has_template or getattr(tokenizer, "is_instruct", False)


def chat_form(tokenizer: tiktoken.Encoding, system: str = "") -> ChatForm:
    """Return the form of a conversation that a model expects, with a system prompt if one is given. From now on the
    control token that ends an answer in this form ends a text. Raises ValueError if the model has neither a template
    that says it, nor a token of FIXED_TEMPLATES, or if the system prompt holds the name of a control token."""
    for name in ("{}", *sorted(tokenizer.special_tokens_set)):
        if name in system:
            raise ValueError(
                f"the system prompt may not contain {name}, which stands for something else"
            )
    if getattr(tokenizer, "chat_template", None):
        form = template_form(tokenizer.chat_template, tokenizer.named_tokens, system)
    else:
        template = fixed_template(tokenizer)
        beginning = tokenizer.decode(beginning_tokens(tokenizer))
        form = template_form(template, {"bos_token": beginning}, system)
    after_answer = form.after_answer.lstrip()
    for name in sorted(tokenizer.added_ids, key=len, reverse=True):
        if after_answer.startswith(name):
            end = tokenizer.added_ids[name]
            tokenizer.end_ids = tuple(dict.fromkeys([*end_tokens_of(tokenizer), end]))
            break
    return form


def fixed_template(tokenizer: tiktoken.Encoding) -> str:
    """Return the one of FIXED_TEMPLATES whose token a tokenizer has. Raises ValueError if it has none."""
    for token, template in FIXED_TEMPLATES.items():
        if token in tokenizer.special_tokens_set:
            return template
    raise ValueError(
        f"--chat needs a model whose tokens include {' or '.join(FIXED_TEMPLATES)}: this one answers no questions"
    )


def template_form(template: str, named_tokens: dict[str, str], system: str = "") -> ChatForm:
    """Return the form of a conversation that a template gives. named_tokens: those that it may use, such as bos_token.
    Raises ValueError if the template is broken, or doesn't show the question once."""
    before = [{"role": "system", "content": system}] if system else []
    question = {"role": "user", "content": "{}"}
    answer = {"role": "assistant", "content": ANSWER}
    thinking = {"role": "assistant", "content": f"<think>\n{THOUGHT}\n</think>\n\n{ANSWER}"}
    render = partial(rendered_messages, template, named_tokens)
    first = render([*before, question])
    if first.count("{}") != 1:
        raise ValueError(f"the model's chat template shows a question {first.count('{}')} times")

    def pieces(text: str) -> list[str]:
        """Return what stands before, between and after the questions and answers."""
        return re.split(rf"\{{\}}|{re.escape(ANSWER)}", text)

    second = pieces(render([*before, question, answer, question]))
    third = pieces(render([*before, question, answer, question, answer, question]))
    expected = [*second[:2], *third[2:3], *second[1:2], *second[2:]]
    after_answer = second[2] if len(second) > 2 else ""
    if len(second) != 4 or third != expected:  # turns look alike only if none follows
        return ChatForm(first, after_answer=after_answer)
    later = "{}".join(second[2:])
    past = ("{}".join(third[:2]), "{}".join(third[2:4]))
    thoughts = render([*before, question, thinking, question]).partition(ANSWER)[0]
    thoughts = thoughts.removeprefix(past[0])
    return ChatForm(
        first,
        later,
        after_answer,
        past=None if past == (first, later) else past,
        after_thoughts=None if THOUGHT in thoughts else thoughts,
    )


def question_form(tokenizer: tiktoken.Encoding, system: str = "") -> str:
    """Return the form of a first question that a model expects, with {} in the place of the text. Raises ValueError as
    chat_form() does."""
    return chat_form(tokenizer, system).first


class GenerationBlock(Extension):
    """{% generation %} ... {% endgeneration %}, which marks answers for training, is what stands in it."""

    tags = frozenset(("generation",))

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body, lineno=line)


class TemplateEnvironment(ImmutableSandboxedEnvironment):
    """Runs a stranger's template: it reaches nothing but the messages, and products stay small."""

    intercepted_binops = frozenset(("*", "**"))

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        sizes = [len(value) if hasattr(value, "__len__") else value for value in (left, right)]
        if abs(sizes[0] * sizes[1]) > LARGEST_PRODUCT:
            raise TemplateError(f"{operator} makes more than {LARGEST_PRODUCT:,} of something")
        return super().call_binop(context, operator, left, right)


def rendered_messages(
    template: str, named_tokens: dict[str, str], messages: Sequence[dict[str, str]]
) -> str:
    """Return the text that a template makes of messages, up to where the next answer begins.

    Source: apply_chat_template() of transformers, for what a template may use."""
    environment = TemplateEnvironment(
        trim_blocks=True,
        lstrip_blocks=True,
        extensions=["jinja2.ext.loopcontrols", GenerationBlock],
    )

    def raise_exception(message: str) -> NoReturn:
        raise TemplateError(message)

    steps = count(1)

    def counted(items: Iterable[Any]) -> Iterator[Any]:
        for item in items:
            if next(steps) > MOST_STEPS:
                raise TemplateError(f"its loops take more than {MOST_STEPS:,} steps")
            yield item

    environment.filters["counted"] = counted
    environment.globals["raise_exception"] = raise_exception
    environment.globals["strftime_now"] = datetime.now().strftime
    environment.filters["tojson"] = partial(json.dumps, ensure_ascii=False)
    variables = {"bos_token": "", "eos_token": "", "tools": None, "documents": None} | named_tokens
    try:
        tree = environment.parse(template)
        for loop in tree.find_all(nodes.For):
            loop.iter = nodes.Filter(loop.iter, "counted", [], [], None, None)
        text = environment.from_string(tree).render(
            messages=messages, add_generation_prompt=True, **variables
        )
        text.encode()  # surrogates have none
        return text
    except Exception as error:  # a template can raise whatever Python can
        reason = str(error) if isinstance(error, TemplateError) else repr(error)
        raise ValueError(f"the model's chat template can't be used: {reason:.200}") from error


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


def encode_conversation(
    form: ChatForm,
    turns: Sequence[tuple[str, list[int]]],
    question: str,
    tokenizer: tiktoken.Encoding,
) -> list[int]:
    """Return the tokens of a conversation up to where the next answer begins. turns: earlier questions, and the tokens
    of their answers."""
    ids: list[int] = []
    first, later = form.past or form[:2]
    for text, answer in turns:
        ids += encode_in_form(later if ids else first, text, tokenizer) + answer
    return ids + encode_in_form(form.later if ids else form.first, question, tokenizer)


def encode_question(text: str, tokenizer: tiktoken.Encoding, system: str = "") -> list[int]:
    """Return the tokens of a question in the form that a model expects. Raises ValueError as
    chat_form() does."""
    return encode_in_form(question_form(tokenizer, system), text, tokenizer)


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
