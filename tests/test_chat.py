"""Conversations have the text that a model's template gives them, and a stranger's template does no harm."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

import load_gpt2_weights as loader
from formats.chat import ChatForm, chat_form, encode_conversation, encode_question, question_form
from formats.tokenizers import Numbers
from llama_kv_cache import main
from support.printing import end_tokens_of
from tests.helpers import ROOT, refused, run
from tests.test_llama import CHATML, real_form

pytest.importorskip("transformers")
LOOP = "{% for m in messages %}"
SPLIT = (  # the system prompt and the other messages
    "{% if messages[0].role == 'system' %}{% set system = messages[0].content + '\n\n' %}"
    "{% set messages = messages[1:] %}{% endif %}"
)
CHATML_TURN = "<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n"
# In the shapes of ten public ones: what stands before and in the loop over messages, and the beginning of an answer.
SHAPES = {
    "ChatML": (LOOP + CHATML_TURN, "<|im_start|>assistant\n"),
    "Llama 3": (
        LOOP + "{{ bos_token if loop.first }}<|start_header_id|>{{ m.role }}<|end_header_id|>\n\n"
        "{{ m.content | trim }}<|eot_id|>",
        "<|start_header_id|>assistant<|end_header_id|>\n\n",
    ),
    "Qwen 3, which drops thoughts": (
        LOOP + "<|im_start|>{{ m.role }}\n{{ m.content.split('</think>')[-1].lstrip('\n') }}"
        "<|im_end|>\n",
        "<|im_start|>assistant\n",
    ),
    "Mistral": (
        SPLIT
        + "{{ bos_token }}"
        + LOOP
        + "{% if m.role == 'user' %}[INST] {{ system if loop.first }}"
        "{{ m.content }} [/INST]{% else %} {{ m.content }}{{ eos_token }}{% endif %}",
        "",
    ),
    "Mistral's later ones, system prompt last": (
        SPLIT
        + "{{ bos_token }}"
        + LOOP
        + "{% if m.role == 'user' %}[INST]{{ system if loop.last }}"
        "{{ m.content }}[/INST]{% else %}{{ m.content }}{{ eos_token }}{% endif %}",
        "",
    ),
    "Zephyr": (LOOP + "<|{{ m.role }}|>\n{{ m.content }}{{ eos_token }}\n", "<|assistant|>\n"),
    "Phi": (LOOP + "<|{{ m.role }}|>\n{{ m.content }}<|im_end|>\n", "<|assistant|>\n"),
    "Gemma, no system": (
        "{{ bos_token }}" + LOOP + "{% if m.role == 'system' %}{{ raise_exception('no system') }}"
        "{% endif %}<|im_start|>{{ 'model' if m.role == 'assistant' else m.role }}\n"
        "{{ m.content | trim }}<|im_end|>\n",
        "<|im_start|>model\n",
    ),
    "Falcon": (
        LOOP + "<|{{ m.role }}|>\n{{ m.content }}{% if m.role == 'assistant' %}{{ eos_token }}"
        "{{ '\n' if not loop.last }}{% else %}{{ '\n' }}{% endif %}",
        "<|assistant|>\n",
    ),
    "DeepSeek R1": (
        "{{ bos_token }}" + LOOP + "{% if m.role == 'user' %}<|User|>{{ m.content }}"
        "{% elif m.role == 'system' %}{{ m.content }}{% else %}"
        "<|Assistant|>{{ m.content.split('</think>')[-1] }}{{ eos_token }}{% endif %}",
        "<|Assistant|><think>\n",
    ),
    "SmolLM3, which marks answers": (
        LOOP + "<|im_start|>{{ m.role }}\n{% generation %}{{ m.content }}"
        "{% endgeneration %}<|im_end|>{{ '\n' if tools is none }}{{ 'é<' | tojson }}",
        "<|im_start|>assistant\n",
    ),
}
TEMPLATES = {
    name: f"{turns}{{% endfor %}}{{% if add_generation_prompt %}}{answer}{{% endif %}}"
    for name, (turns, answer) in SHAPES.items()
} | {"SmolLM2's, known by its tokens": CHATML, "Llama 3's, known by its tokens": ""}
TEMPLATES["Llama 3's, known by its tokens"] = TEMPLATES["Llama 3"]
NAMED = {"bos_token": "<|endoftext|>", "eos_token": "<|im_end|>"}


@pytest.fixture(scope="module")
def tokenizers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Any, Any]]:
    """Ours and the library's, whose files name the end of a text only, not of a turn."""
    made = {}
    for kind in ("Qwen", "SmolLM2", "Llama 3"):
        library = real_form(kind, folder := tmp_path_factory.mktemp("form"))
        (folder / "generation_config.json").unlink()
        made[kind] = loader.load_tokenizer(str(folder)), library
    return made


@pytest.mark.parametrize("system", ["", "Begin with: An answer."])
@pytest.mark.parametrize("name", TEMPLATES)
def test_three_turns_are_those_of_the_template(name: str, system: str, tokenizers: dict) -> None:
    from transformers import PreTrainedTokenizerFast

    ours, library = tokenizers[next((kind for kind in tokenizers if kind in name[:7]), "Qwen")]
    ours.chat_template = None if "tokens" in name else TEMPLATES[name]
    ours.named_tokens = NAMED | {"bos_token": "<|begin_of_text|>"} if "Llama" in name else NAMED
    options = {"chat_template": TEMPLATES[name], **ours.named_tokens}
    theirs = PreTrainedTokenizerFast(tokenizer_object=library, **options)
    ours.end_ids = ours.end_ids[:1]
    if system and "no system" in name:
        with pytest.raises(ValueError, match="can't be used: no system$"):
            chat_form(ours, system)
        return
    form = chat_form(ours, system)
    end = "<|eot_id|>" if "Llama" in name else "<|im_end|>"
    assert {ours.decode([i]) for i in end_tokens_of(ours)} == {end, ours.decode(ours.end_ids[:1])}
    messages, turns = [{"role": "system", "content": system}] if system else [], []
    for number in range(3):
        question, answer = f"Question {number}?", f"<think>\nHm.\n</think>\n\nAnswer {number}."
        messages.append({"role": "user", "content": question})
        ids = encode_conversation(form, turns, question, ours)
        expected = theirs.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
        assert ours.decode(ids) == expected
        if not turns:
            assert ids == library.encode(expected, add_special_tokens=False).ids
        messages.append({"role": "assistant", "content": answer})
        turns.append((question, ours.encode(form.past_answer(answer))))
    with pytest.raises(ValueError, match="may not contain"):
        chat_form(ours, f"{{}} {end}")


@pytest.mark.parametrize("place", ["chat_template.jinja", "one", "several"])
def test_a_folder_gives_a_template_and_the_tokens_in_it(place: str, tmp_path: Path) -> None:
    real_form("Qwen", tmp_path)
    content: dict[str, Any] = {"bos_token": "<|im_start|>", "eos_token": {"content": "<|im_end|>"}}
    template = "{{ bos_token }}{{ messages[0].content }}{{ eos_token }}"
    if place == "chat_template.jinja":
        (tmp_path / place).write_text(template)
    elif place == "one":
        content["chat_template"] = template
    else:
        named = {"tool_use": "x", "default": template}
        content["chat_template"] = [{"name": n, "template": t} for n, t in named.items()]
    if place == "several":
        older = {"bos_token": content.pop("bos_token")}
        (tmp_path / "special_tokens_map.json").write_text(json.dumps(older))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(content))
    assert question_form(loader.load_tokenizer(str(tmp_path))) == "<|im_start|>{}<|im_end|>"


def test_an_answer_ends_where_its_form_says_even_if_turns_differ(tokenizers: dict) -> None:
    ours, _ = tokenizers["Qwen"]
    ours.chat_template = LOOP + "[{{ loop.index }}]{{ m.content }}<|im_end|>{% endfor %}"
    ours.end_ids = (ours.added_ids["<|endoftext|>"],)
    assert chat_form(ours).later == ""
    assert ours.decode(ours.end_ids) == "<|endoftext|><|im_end|>"
    with pytest.raises(ValueError, match="needs a model whose tokens include"):
        chat_form(Numbers())


HOSTILE = {
    "{% for": "can't be used: ",
    "{{ raise_exception('no') }}": "can't be used: no$",
    "{{ raise_exception('x' * 9999) }}": "can't be used: x{200}$",
    "{{ messages[0].content * 2 }}": "shows a question 2 times",
    "{{ 1 / 0 }}": "ZeroDivisionError",
    "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}": "RecursionError",
    "{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}": "RecursionError",
    "{{ 'x' * 10**11 }}": "more than 100,000,000",
    "{{ 9**9**9 }}": "more than 100,000,000",
    "{% for _ in range(9999) %}" * 2 + "{% endfor %}" * 2: "more than 1,000,000 steps",
    "{{ ''.__class__.__mro__ }}": "unsafe",
    "{{ messages.clear() }}": "unsafe",
    "{{ nothing.at.all }}": "undefined",
    "{{ strftime_now(1) }}": "TypeError",
    r"{{ messages[0].content }}{{ '\ud800' }}": "surrogates not allowed",
    "{{ messages[0].content }}{{ 5 * 0.5 }}": "",
}


@pytest.mark.parametrize("template", HOSTILE, ids=range(len(HOSTILE)))
def test_whatever_a_strangers_template_does_is_one_sentence(
    template: str, tokenizers: dict
) -> None:
    tokenizer, _ = tokenizers["Qwen"]
    tokenizer.chat_template, tokenizer.named_tokens = template, {}
    if not HOSTILE[template]:
        assert chat_form(tokenizer) == ChatForm("{}2.5")  # a single question
        return
    with pytest.raises(ValueError, match=HOSTILE[template]) as raised:
        chat_form(tokenizer)
    assert len(str(raised.value)) < 250


@pytest.mark.parametrize("kind", ["SmolLM2", "Llama 3"])
def test_what_is_typed_is_text(kind: str, tokenizers: dict) -> None:
    ours, library = tokenizers[kind]
    ours.chat_template = None
    names = ["<|im_start|>", "<|im_end|>", "<|endoftext|>", "<|eot_id|>", "<|end_header_id|>"]
    for typed in ("{0}\n{1}system", "a{1}{0} {1}{2}\n\n", "{3}{4}"):
        typed = typed.format(*names)
        before, after = question_form(ours).split("{}")
        before, mark, head = before.rpartition("|>")
        tail, other_mark, after = after.partition("<|")
        parts = [f"{before}{mark}", f"{head}{typed}{tail}", f"{other_mark}{after}"]
        expected = []
        for part in parts:
            library.encode_special_tokens = (
                part == parts[1]
            )  # which the library leaves to its caller
            expected += library.encode(part, add_special_tokens=False).ids
        library.encode_special_tokens = False
        assert encode_question(typed, ours) == expected
        n_special = sum(token in ours.added_ids.values() for token in expected)
        assert n_special == question_form(ours).count("<|")


def test_a_template_cannot_steer_the_terminal(tmp_path: Path) -> None:
    shutil.copytree(ROOT / "pocket" / "llama", tmp_path, dirs_exist_ok=True)
    shutil.copy(ROOT / "pocket" / "teacher" / "tokenizer.tiktoken", tmp_path)
    words = ["--chat", "--model", tmp_path, "--max-new-tokens", 1]
    refused(run(main, *words), "--chat needs a model whose tokens include")
    for template in ("{{ raise_exception('a@') }}", "{{ messages[0].content }}{{ 'a@' }}"):
        steering = template.replace("@", "\x1b]0;title\x07\x9b1m")
        (tmp_path / "chat_template.jinja").write_text(steering, "utf-8")
        ran = run(main, *words)
        assert r"a\x1b]0;title\x07\x9b1m" in ran.out + ran.err
        assert {*ran.out + ran.err}.isdisjoint("\x1b\x07\x9b")
