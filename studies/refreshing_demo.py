"""The refresh study in seconds: the bare run of overfill.py."""

from __future__ import annotations

import argparse
import math
import time

import tiktoken
import torch

from gpt_kv_cache import GPT, generate
from load_gpt2_weights import load_tokenizer
from overfill import Pair, Policy, generate_refreshed, read_along, tokens_of
from studies.refreshing_texts import pocket_prompts
from support.cli import PROMPT
from support.statistics import kl
from support.tables import table


@torch.no_grad()
def demo(teacher: GPT, student: GPT, tokenizer: tiktoken.Encoding, policies: dict[str, Policy],
         args: argparse.Namespace) -> None:  # fmt: skip
    """Print what the teacher, the student and pairs of both write greedily after a prompt, how long it takes, and how
    far their predictions are from the teacher's on texts that it has sampled.

    The prompt is that of the options, or the beginning of a document of the corpus: then of six documents the teacher
    samples a text. Raises ValueError if the prompt and the new tokens exceed the context.
    """
    policies = {"OverFill": Policy(), **policies}
    prompts = [tokenizer.encode(args.prompt or PROMPT, allowed_special="all")] * 6
    if not args.prompt and tokens_of(tokenizer) == tokens_of(load_tokenizer("pocket")):
        prompts = pocket_prompts(tokenizer, "test", 6, 192)
    n, room = args.max_new_tokens or 128, min(teacher.config.n_ctx, student.config.n_ctx)
    if len(prompts[0]) + n > room:
        raise ValueError(f"{len(prompts[0])} tokens of the prompt and {n} more exceed the context of {room}")
    ids = torch.tensor(prompts, device=args.device)
    width, models = ids.size(1), {"teacher": teacher, "student alone": student}
    generator = torch.Generator(ids.device).manual_seed(args.seed)
    new = torch.cat(list(generate(teacher, ids, n, temperature=1.0, generator=generator)), 1)  # (B, n)
    logits = {name: model(torch.cat([ids, new], 1))[:, width:] for name, model in models.items()}  # (B, n, V)
    for name, policy in policies.items():
        logits[name] = torch.stack(list(read_along(Pair(teacher, student, ids), new, policy)), 1)
    texts, seconds, reads = {}, dict.fromkeys(logits, math.inf), {"student alone": "0", "teacher": f"{width} + {n - 1}"}
    for name in 2 * [*logits]:  # in turn, and the faster turn counts
        begun, pair = time.perf_counter(), Pair(teacher, student, ids[:1])
        tokens = generate(models[name], pair.ids, n) if name in models else generate_refreshed(pair, n, policies[name])
        texts[name] = [int(token) for token in tokens]
        seconds[name] = min(seconds[name], time.perf_counter() - begun)
        reads.setdefault(name, f"{width} + {int(pair.teacher_tokens)}")
    same = {name: next((i for i in range(n) if text[i] != texts["teacher"][i]), n) for name, text in texts.items()}
    rows = [[name, f"{1e3 * seconds[name]:.0f}", f"{n / seconds[name]:.0f}", reads[name],
             f"{float(kl(logits['teacher'], logits[name]).mean()):.3f}", f"{same[name]} of {n}"]
            for name in logits]  # fmt: skip
    print(f"A prompt of {width} tokens, which ends with: {tokenizer.decode(ids[0, -20:].tolist())!r}\n")
    print(table(["", "ms", "tokens/s", "teacher reads", "KL to teacher", "same tokens"], rows))
    print(f"""
ms, tokens/s:   {n} tokens after the prompt, always the likeliest; prefill included; the faster of two turns
teacher reads:  tokens of the prompt + tokens of the text
KL to teacher:  of the next token, in nats, mean over {len(ids)} texts of {n} tokens that the teacher has sampled
same tokens:    as in the teacher's text, up to the first difference; each text goes on from there:
""")
    for name, text in texts.items():
        at = same[name] % n
        print(f"  {name:{max(map(len, texts))}}  {'... ' * (at > 0)}{tokenizer.decode(text[at : at + 20])!r}")
    print("""
Exact: the first token is the teacher's, and right after a refresh of the whole text so is the student's cache.
Approximate: every further token, because the student predicts it.

The full study, in half an hour (--quick: in a minute): python3 overfill.py study""")
