"""Real instruct models: branching conversations are exact, token for token.

The oracle is plain `generate` on the full prompt, with a fresh cache of its own: quicker than
none, and nothing is reused between two prompts.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import pytest
import torch
from transformers import PreTrainedModel

from sidequest_langchain.engine.engine import Engine
from sidequest_langchain.engine.request import GenerationRequest, GenerationResult
from tests.engine.driving import ask, audit, run, run_together, stored

pytestmark = [pytest.mark.real, pytest.mark.slow]

SYSTEM = "You plan trips. Answer in one short sentence."
CONVERSATIONS = {
    "trip": (
        ["Name a city to begin a trip through Europe.", "Where to next?"],
        ["By train?", "Is it far?", "What does it cost, and what else is there to see on the way?"],
    ),
    "code": (
        ["Write a Python function that adds two numbers.", "Add type hints."],
        ["Now subtract.", "Write a test.", "Explain the code in a few words."],
    ),
    "facts": (
        ["你好! What is the capital of Norway?", "And of Portugal? 🙂"],
        ["How do I fly there?", "Why?", "List three sights."],
    ),
}
N_NEW = {"smollm2": 8, "qwen": 6}


@dataclass
class Talk:
    """One conversation with one model, over ids, beside all paths that must be resident."""

    engine: Engine
    model: PreTrainedModel
    n_new: int
    scope: str
    paths: list[tuple[int, ...]] = field(default_factory=list)

    def say(self, text: str, role: str = "user") -> list[int]:
        """A turn of the template, with the opening of the answer behind it."""
        encode = self.engine.tokenizer.encode
        opening = encode("<|im_start|>assistant\n") if role == "user" else []
        return [*encode(f"<|im_start|>{role}\n{text}<|im_end|>\n"), *opening]

    def ask(self, prompt: Sequence[int]) -> GenerationRequest:
        return ask(prompt, self.n_new, scope=self.scope)

    def check(self, request: GenerationRequest, result: GenerationResult) -> list[int]:
        """The answer is right; returns the prompt that goes on from it."""
        assert list(result.token_ids) == plain(self.model, request.prompt_ids, self.n_new)
        self.paths.append(stored(request, result))
        return [*request.prompt_ids, *result.kept_ids, *self.end()]

    def end(self) -> list[int]:
        return self.engine.tokenizer.encode("<|im_end|>\n")


def plain(model: PreTrainedModel, prompt: Sequence[int], n: int) -> list[int]:
    ids = torch.tensor([list(prompt)])
    out = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=n,
        do_sample=False,
        temperature=None,
        top_p=None,
        top_k=None,
        repetition_penalty=1.0,
        pad_token_id=0,
    )
    answer: list[int] = out[0, len(prompt) :].tolist()
    eos = model.generation_config.eos_token_id
    ends = set(eos) if isinstance(eos, list) else {eos}
    return answer[:-1] if answer[-1] in ends else answer


@pytest.fixture(scope="module", params=["smollm2", "qwen"])
def served(request: pytest.FixtureRequest) -> Iterator[tuple[Engine, PreTrainedModel, int]]:
    fixture = {"smollm2": "real_smollm", "qwen": "real_qwen"}[request.param]
    loaded = request.getfixturevalue(fixture)
    engine = Engine(loaded.model, loaded.tokenizer)
    yield engine, loaded.model, N_NEW[request.param]
    engine.close()


@pytest.mark.parametrize("name", CONVERSATIONS)
def test_a_branching_conversation(served: tuple[Engine, PreTrainedModel, int], name: str) -> None:
    """Two turns, three branches at once, one of them gone on with, the others pruned."""
    engine, model, n_new = served
    engine.kv.clear()
    turns, questions = CONVERSATIONS[name]
    talk = Talk(engine, model, n_new, scope=name)
    prompt = talk.say(SYSTEM, "system")
    for text in turns:
        request = talk.ask([*prompt, *talk.say(text)])
        prompt = talk.check(request, run(engine, request))
    requests = [talk.ask([*prompt, *talk.say(text)]) for text in questions]
    results = run_together(engine, requests)
    n_trunk = len(talk.paths[-1])
    for request, result in zip(requests, results, strict=True):
        assert result.n_reused_tokens >= n_trunk
        last = talk.check(request, result)
    audit(engine, talk.paths)
    for request in requests[:2]:
        predicted = engine.kv.predict_release(request.label.call_id)
        assert engine.kv.release(request.label.call_id).freed_bytes == predicted.freed_bytes > 0
        talk.paths.remove(stored(request, results[requests.index(request)]))
    audit(engine, talk.paths)
    request = talk.ask([*last, *talk.say("Go on.")])
    talk.check(request, run(engine, request))
    again = run(engine, talk.ask(requests[0].prompt_ids))
    assert again.token_ids == results[0].token_ids
    assert 0 < again.n_reused_tokens < len(requests[0].prompt_ids)


def test_a_real_vocabulary_holds_more_than_the_tokenizer(
    served: tuple[Engine, PreTrainedModel, int],
) -> None:
    """The ids between the tokenizer's end and the embedding's are none that it ever gives."""
    engine, model, _ = served
    assert engine.tokenizer.vocab_size <= engine.vocab_size
    assert engine.context_length == model.config.max_position_embeddings
    [end] = engine.tokenizer.encode("<|im_end|>")
    assert end in engine.eos_ids
