"""The traps of testing with random weights, closed one by one for each family."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from tests.support import oracle, templates
from tests.support.force import Ambiguous, chain, force
from tests.support.tiny import END_ID, FAMILIES, REFUSED, tiny_model
from tests.support.tok import VOCAB_SIZE, byte_tokenizer, metaspace_tokenizer

N_PROMPT, N_NEW = 40, 16


def prompt() -> list[int]:
    """Ids without a pattern: a run of neighbours would hide a shift by one."""
    return [(17 * i * i + 5 * i + 3) % 400 for i in range(N_PROMPT)]


@pytest.fixture(params=FAMILIES)
def family(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def test_one_early_token_decides_the_answer(family: str) -> None:
    model = tiny_model(family)
    answer = oracle.greedy(model, prompt(), N_NEW, ignore_eos=True)
    for early in (0, 1, 5):
        changed = prompt()
        changed[early] = 401
        assert oracle.greedy(model, changed, N_NEW, ignore_eos=True) != answer, early


def test_a_gap_in_the_positions_decides_the_answer(family: str) -> None:
    model = tiny_model(family)
    half = N_PROMPT // 2
    gap = [*range(half), *range(half + 1, N_PROMPT + 1)]
    straight = oracle.logits(model, prompt()).argmax(-1)
    shifted = oracle.logits(model, prompt(), positions=gap).argmax(-1)
    assert torch.equal(straight[:half], shifted[:half])
    assert int((straight != shifted)[half:].sum()) >= 2


def test_no_near_ties_on_the_way(family: str) -> None:
    model = tiny_model(family)
    answer = oracle.greedy(model, prompt(), N_NEW, ignore_eos=True)
    assert len(answer) == N_NEW
    assert oracle.least_margin(model, prompt(), answer) > 1e-3
    assert len(set(answer)) > N_NEW // 2, "the model repeats itself"


def test_default_initialisation_would_hide_a_wrong_prefix() -> None:
    """The trap itself: with the usual spread the changed token does not show."""
    model = tiny_model("llama")
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(0, 0.02, generator=torch.Generator().manual_seed(0))
    changed = prompt()
    changed[5] = 401
    same = oracle.greedy(model, prompt(), 4, ignore_eos=True)
    assert oracle.greedy(model, changed, 4, ignore_eos=True) == same


def test_tiny_models_leave_the_global_random_state_alone() -> None:
    before = torch.get_rng_state()
    first, second = tiny_model("qwen2", seed=3), tiny_model("qwen2", seed=3)
    assert torch.equal(torch.get_rng_state(), before)
    assert all(map(torch.equal, first.parameters(), second.parameters()))
    assert not torch.equal(first.lm_head.weight, tiny_model("qwen2", seed=4).lm_head.weight)


def test_the_default_model_keeps_512_bytes_of_kv_per_token() -> None:
    config = tiny_model().config
    assert config.num_hidden_layers * 2 * config.num_key_value_heads * config.head_dim * 4 == 512


def test_sinks_and_biases_are_off_neutral() -> None:
    sinks = tiny_model("gpt_oss").model.layers[0].self_attn.sinks
    assert sinks.std() > 0.3
    assert tiny_model("qwen2").model.layers[0].self_attn.q_proj.bias.std() > 0.1


@pytest.mark.parametrize("name", REFUSED)
def test_refused_models_can_be_built(name: str) -> None:
    model = REFUSED[name]()
    assert model.config.model_type == name
    assert not model.training


@pytest.mark.parametrize("make", [byte_tokenizer, metaspace_tokenizer])
def test_tokenizers_round_trip_and_fit_the_models(make: Callable[..., Any]) -> None:
    tokenizer = make()
    assert len(tokenizer) == VOCAB_SIZE == tiny_model().config.vocab_size
    assert tokenizer.eos_token_id == END_ID
    text = "Plan the trip.\n\nHanzi 你好 🙂, then fly."
    ids = tokenizer.encode(text, add_special_tokens=False)
    assert tokenizer.decode(ids) == text
    assert len(tokenizer.encode("🙂", add_special_tokens=False)) >= 4


def test_a_word_has_a_split_the_tokenizer_would_not_choose() -> None:
    tokenizer = byte_tokenizer()
    chosen = tokenizer.encode("Hanzi", add_special_tokens=False)
    other = tokenizer.convert_tokens_to_ids(["Ha", "n", "zi"])
    assert tokenizer.decode(other) == "Hanzi"
    assert chosen == tokenizer.convert_tokens_to_ids(["Han", "zi"])


@pytest.mark.parametrize("is_special", [False, True])
def test_tags_show_unless_they_are_special(is_special: bool) -> None:
    tokenizer = byte_tokenizer(special_tags=is_special)
    ids = tokenizer.encode("<think>a</think>b<|im_end|>", add_special_tokens=False)
    shown = tokenizer.decode(ids, skip_special_tokens=True)
    assert shown == ("ab" if is_special else "<think>a</think>b")


def rendered(template: str, *contents: str, ask: bool = True) -> str:
    roles = ("user", "assistant") * len(contents)
    messages = [{"role": r, "content": c} for r, c in zip(roles, contents, strict=False)]
    return str(
        byte_tokenizer(template).apply_chat_template(
            messages, tokenize=False, add_generation_prompt=ask
        )
    )


def test_the_plain_template_is_prefix_stable() -> None:
    first = rendered(templates.PLAIN, "hi")
    assert rendered(templates.PLAIN, "hi", "yes ", "more").startswith(first + "yes <|im_end|>\n")


@pytest.mark.parametrize("template", ["THINK", "TRIM", "DATE"])
def test_other_templates_are_not(template: str) -> None:
    text = getattr(templates, template)
    reply = " yes "
    assert not rendered(text, "hi", reply, "more").startswith(rendered(text, "hi") + reply)


def test_force_scripts_generate_and_keeps_the_other_logits() -> None:
    model, ids, script = tiny_model(), prompt(), [7, 300, 7, END_ID]
    free = oracle.logits(model, ids)[-1]
    with force(model, script):
        assert oracle.greedy(model, ids, 8) == script[:-1]
        forced = oracle.logits(model, ids)[-1]
    assert int(forced.argmax()) == script[0]
    forced[script[0]] = free[script[0]]
    assert torch.equal(forced, free)
    assert oracle.greedy(model, ids, 8) != script[:-1]


def test_force_tells_streams_of_one_packed_batch_apart_by_position() -> None:
    """As the engine feeds them: one line, explicit positions, an index of rows to keep."""
    model = tiny_model()
    scripts = {10: [7, 8, 9], 14: [20, 21, 22]}
    rows = [(9, 399), (10, 7), (11, 8), (13, 399), (14, 20), (14, 5)]
    with force(model, scripts), torch.no_grad():
        logits = model(
            input_ids=torch.tensor([[0] + [token_id for _, token_id in rows]]),
            position_ids=torch.tensor([[0] + [position for position, _ in rows]]),
            use_cache=False,
            logits_to_keep=torch.arange(1, len(rows) + 1),
        ).logits[0]
    assert logits[:5].argmax(-1).tolist() == [7, 8, 9, 20, 21]
    best = logits.topk(2, dim=-1).values
    assert float(best[5, 0] - best[5, 1]) < 20, "an unscripted row was forced"


def test_force_refuses_scripts_it_cannot_tell_apart() -> None:
    model = tiny_model()
    with force(model, {3: [7, 7, 5], 4: [7, 6]}), pytest.raises(Ambiguous):
        oracle.greedy(model, [1, 2, 3], 4)


def test_a_chain_forces_by_the_last_token() -> None:
    model = tiny_model()
    with force(model, chain({3: 40, 40: 41, 41: END_ID})):
        assert oracle.greedy(model, [1, 2, 3], 8) == [40, 41]
        assert oracle.greedy(model, [9, 9, 9, 3], 8) == [40, 41]


def test_the_hook_goes_when_the_block_fails() -> None:
    model = tiny_model()

    def fail() -> None:
        with force(model, [1]):
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    assert not model._forward_hooks


def test_the_oracle_is_the_argmax_of_fresh_forwards() -> None:
    model, ids = tiny_model(), prompt()
    expected = list(ids)
    for _ in range(5):
        expected.append(int(oracle.logits(model, expected)[-1].argmax()))
    assert oracle.greedy(model, ids, 5, ignore_eos=True) == expected[len(ids) :]


def test_the_oracle_ends_at_the_end_of_turn_unless_told_otherwise() -> None:
    model = tiny_model()
    with force(model, chain({3: 40, 40: END_ID, END_ID: 50, 50: 51})):
        assert oracle.greedy(model, [1, 2, 3], 4) == [40]
        assert oracle.greedy(model, [1, 2, 3], 4, ignore_eos=True) == [40, END_ID, 50, 51]


def test_storage_bytes_counts_the_storage_behind_a_view_once() -> None:
    big = torch.zeros(1000, dtype=torch.float32)
    assert oracle.storage_bytes([big[:1], {"again": big[5:6]}]) == 4000
    assert oracle.storage_bytes(big[:1].clone()) == 4
