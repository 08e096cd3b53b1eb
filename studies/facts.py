"""Questions about facts in the texts of data/real, answered by a model with any cache."""

import tiktoken
import torch

from compress import read_in_pieces
from demos.memories import Memory
from formats.chat import encode_fact_question
from gpt_kv_cache import generate
from support.prefix import common_prefix_length
from support.printing import end_tokens_of
from support.texts import read_questions, read_texts

ANSWER_TOKENS = 16
CHUNK_LENGTH = 16


@torch.no_grad()
def right_answers(memory: Memory, tokenizer: tiktoken.Encoding, quick: bool = False) -> list[bool]:
    """Return for each question whether the greedy answer, up to the end of its line, contains what
    it must. A text is read once, CHUNK_LENGTH tokens at a time, and its questions are read on copies
    of that cache. Texts that exceed the model's context are left out. quick: ask two questions about
    one text."""
    texts, right = read_texts(), []
    device = memory.wte.weight.device
    questions_by_text = read_questions()
    if quick:
        name, questions = questions_by_text.popitem()
        questions_by_text = {name: questions[:2]}
    for name, asked in questions_by_text.items():
        prompts = [
            encode_fact_question(texts[name], question.question, tokenizer) for question in asked
        ]
        length = max(map(len, prompts)) + ANSWER_TOKENS
        if length > memory.config.n_ctx:
            continue
        end_ids = end_tokens_of(tokenizer)  # with that of an answer, by now
        shared = min(common_prefix_length(prompts[0][:-1], prompt) for prompt in prompts)
        cache = memory.make_cache(length)
        beginning = torch.tensor([prompts[0][:shared]], device=device)
        read_in_pieces(memory.model, cache, beginning, CHUNK_LENGTH)
        for question, prompt in zip(asked, prompts, strict=True):
            ids, copy = torch.tensor([prompt], device=device), cache.clone()
            written = generate(memory.model, ids, ANSWER_TOKENS, stop_ids=end_ids, cache=copy)
            answer = tokenizer.decode(
                [int(token) for token in written if int(token) not in end_ids]
            )
            right.append(question.answer.lower() in answer.strip().partition("\n")[0].lower())
    return right
