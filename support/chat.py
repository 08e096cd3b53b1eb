"""How a chat model expects a question: two fixed forms. A model's tokens tell which one is its own."""

import tiktoken

# By a token that occurs in it: the form of a first question, up to where the answer begins.
QUESTION_FORMS = {
    # Llama 3: a header for each message. Source: the model card, "Special Tokens used with Llama 3".
    "<|start_header_id|>": "<|start_header_id|>user<|end_header_id|>\n\n{}<|eot_id|>"
    "<|start_header_id|>assistant<|end_header_id|>\n\n",
    # ChatML, with the first message that SmolLM2's own template adds.
    "<|im_start|>": "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by "
    "Hugging Face<|im_end|>\n<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n",
}


def as_question(text: str, tokenizer: tiktoken.Encoding) -> str:
    """Return a question in the form that a model expects. Raises ValueError if it has none of QUESTION_FORMS."""
    for token, form in QUESTION_FORMS.items():
        if token in tokenizer.special_tokens_set:
            return form.format(text)
    raise ValueError(
        f"--chat needs a model whose tokens include {' or '.join(QUESTION_FORMS)}: this one answers no questions"
    )
