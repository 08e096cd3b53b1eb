"""Questions in the form that a chat model expects. There are two fixed forms; a model's tokens tell
which one it uses."""

import re

import tiktoken

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
    ValueError if the model has the tokens of none of QUESTION_FORMS."""
    for token, form in QUESTION_FORMS.items():
        if token in tokenizer.special_tokens_set:
            return form
    raise ValueError(
        f"--chat needs a model whose tokens include {' or '.join(QUESTION_FORMS)}: this one answers no questions"
    )


def encode_question(text: str, tokenizer: tiktoken.Encoding) -> list[int]:
    """Return the tokens of a question in the form that a model expects. Control tokens come only
    from the form: their names in the question are plain text. Raises ValueError as question_form()
    does."""
    ids = tokenizer.encode("", allowed_special="all")  # tokens that begin a text, if any
    for piece in re.split(r"(<\|\w+\|>)", question_form(tokenizer)):
        special = tokenizer.special_tokens_set.intersection([piece])
        ids += tokenizer.encode(
            piece.replace("{}", text), allowed_special=special, disallowed_special=()
        )
    return ids
