"""The judge of stories: the corpus's own hold together, and each kind of fault is found."""

import pytest

from formats.tokenizers import read_tokenizer
from gpt_kv_cache import GPT, GPTConfig
from pocket import coherence, corpus
from pocket.tokenizer import TOKENIZER, VOCABULARY

STORY = """\
Halek lived in Tolben, the town on the Tamble. One misty day in May, he and his sister Belessa packed for a long walk. \
Zanoth had lent Belessa a clay saucer, and Belessa kept it close. Kelessa lived in the house with the blue door, \
behind the market. The donkey pulled a cart with nine sacks of flour on it. Halek had a yellow cap, and nobody was to \
find it. He put it under the third stair.
Halek slipped and fell into the water. Belessa pulled him out with a branch, and they sat in the sun until his clothes \
were dry.
They knocked at the blue door, and Kelessa opened it. Zanoth was pleased to have the clay saucer back. All nine sacks \
of flour were sold before dark. At home Halek found the yellow cap under the third stair, where he had put it. It had \
been a long day, but a good one."""
FAULTS = [
    ("owner", "Zanoth was pleased", "Varbert was pleased"),
    ("door", "They knocked at the blue", "They knocked at the green"),
    ("count", "All nine sacks of flour", "All nine jars of honey"),
    ("hide", "cap under the third stair, where", "cap behind the beehives, where"),
    ("he or she", "until his clothes", "until her clothes"),
    ("stranger", "Belessa pulled him", "Velrin pulled him"),
    ("two roles", "Kelessa", "Halek"),
    ("from nowhere", " Kelessa lived in the house with the blue door, behind the market.", ""),
    (
        "left open",
        "They knocked at the blue door, and Kelessa opened it. Zanoth was pleased to have the clay saucer "
        "back. ",
        "",
    ),
    ("unread", "It had been a long day", "It had been a long, long day"),
]


@pytest.mark.parametrize("split", corpus.SPLITS)
def test_the_corpus_itself_holds_together(split: str) -> None:
    for i in range(20):
        prose, (_, threads) = corpus.tell_story(corpus.Pen(split, f"read/{i}"), mute=i % 2 == 0)
        paid = len(threads) - (i % 2 == 0)
        assert coherence.judge(prose) == coherence.Verdict([], paid, paid), prose
        stated = [
            reading for reading in coherence.find_statements(prose) if reading.kind == "state"
        ]
        assert {reading.thread for reading in stated} == {*threads}


@pytest.mark.parametrize(("kind", "old", "new"), FAULTS)
def test_a_fault_is_found(kind: str, old: str, new: str) -> None:
    assert coherence.judge(STORY) == coherence.Verdict([], 4, 4) and old in STORY
    assert coherence.judge(STORY.replace(old, new)).faults == [kind]


def test_a_model_goes_on_from_openings_each_by_itself() -> None:
    model = GPT(GPTConfig(vocab_size=VOCABULARY, n_ctx=512, n_layer=1, n_head=1, n_embd=8)).eval()
    tokenizer, prompts = read_tokenizer(TOKENIZER), coherence.story_openings("valid", 3)
    assert len({*prompts}) == 3
    assert {coherence.find_statements(prompt)[0].kind for prompt in prompts} == {"opening"}
    stories = coherence.finish_stories(model, tokenizer, prompts)
    assert all(story.startswith(prompt) for story, prompt in zip(stories, prompts, strict=True))
    assert stories[2:] == coherence.finish_stories(model, tokenizer, prompts[2:])
    shares = coherence.measure([*stories, STORY])
    assert shares == {"coherent_share": 0.25, "paid_share": 1.0, "paid_per_story": 1.0}
