"""Models whose weights a quantiser of transformers has packed are served as they are.

The same model's own `generate` says what is right: packing is lossy, serving is not.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file
from transformers import BitsAndBytesConfig, PreTrainedModel

from sidequest_langchain.engine.engine import Engine
from sidequest_langchain.engine.registry import engine_over
from sidequest_langchain.errors import ConfigError, UnsupportedModelError
from sidequest_langchain.models.loading import load
from tests.engine.driving import ask, audit, ids, run, run_together, stored
from tests.support import oracle
from tests.support.tiny import tiny_model
from tests.support.tok import byte_tokenizer

TRUNK = ids(30)
PROMPTS = [[*TRUNK, *ids(n, seed)] for n, seed in ((1, 1), (5, 2), (17, 3), (9, 4))]
N_TOKENS = 12
SLACK = 0.05
"""Share of the largest logit that rounded activations may cost a token."""


def nf4() -> Any:
    """Four bits a weight; the products are in the model's dtype, one token like another."""
    return BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4")


def int8() -> Any:
    """Eight bits a weight and an activation, which is why the products are coarse.

    At the default threshold the columns that stay in half precision are chosen by looking at
    all tokens of a pass, so that its batch-mates change a token's logits in plain transformers
    too; at 0 none are.
    """
    return BitsAndBytesConfig(load_in_8bit=True, llm_int8_threshold=0.0)


def torchao_int8() -> Any:
    """Eight bits a weight; the products are in the model's dtype."""
    from torchao.quantization import Int8WeightOnlyConfig

    return transformers.TorchAoConfig(Int8WeightOnlyConfig())


PACKERS: dict[str, tuple[Callable[[], Any], str]] = {
    "bitsandbytes nf4": (nf4, "float32"),
    "bitsandbytes int8": (int8, "bfloat16"),
}
"""How weights are packed, and the dtype of everything else."""
if find_spec("torchao") is not None:  # not among our requirements: its import is loud
    PACKERS["torchao int8"] = (torchao_int8, "float32")


def packed(folder: Path, packer: str, dtype: str | None = None) -> PreTrainedModel:
    """The dense model of a directory, its linear layers packed as they are loaded."""
    config, usual = PACKERS[packer]
    return transformers.AutoModelForCausalLM.from_pretrained(
        folder, quantization_config=config(), dtype=getattr(torch, dtype or usual)
    )


@pytest.fixture(scope="module")
def dense_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("dense") / "tiny-llama"
    tiny_model("llama", intermediate_size=128).save_pretrained(folder)  # in blocks of 64
    byte_tokenizer().save_pretrained(folder)
    return folder


@pytest.fixture(scope="module", params=PACKERS)
def packer(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(scope="module")
def packed_folder(
    packer: str, dense_folder: Path, tmp_path_factory: pytest.TempPathFactory
) -> Path:
    """A checkpoint as it lies on the Hub: packed weights, and a config.json that says so.

    Saved before its first pass, in which bitsandbytes re-orders 4-bit weights for the CPU.
    """
    folder = tmp_path_factory.mktemp("packed") / "tiny-llama"
    packed(dense_folder, packer).save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)
    assert '"quantization_config"' in (folder / "config.json").read_text(encoding="utf-8")
    return folder


@pytest.fixture(scope="module")
def model(packer: str, packed_folder: Path) -> PreTrainedModel:
    return load(str(packed_folder), device="cpu", dtype=PACKERS[packer][1]).model


@pytest.fixture(scope="module")
def served(model: PreTrainedModel) -> Iterator[Engine]:
    engine = engine_over(model, byte_tokenizer())
    yield engine
    engine.close()


@pytest.fixture
def engine(served: Engine) -> Engine:
    served.kv.clear()
    return served


def check(model: PreTrainedModel, prompt: list[int], token_ids: Sequence[int]) -> None:
    """The answer is that of `generate`, token for token, where only weights are rounded.

    With rounded activations the last bit of a sum can move a value to the next of 255 levels:
    there every token must be the best by the model's own logits, up to what it rounds.
    """
    assert len(token_ids) == N_TOKENS
    if model.dtype is torch.float32:
        assert list(token_ids) == oracle.greedy(model, prompt, N_TOKENS)
        assert oracle.least_margin(model, prompt, token_ids) > 1e-3
        return
    logits = oracle.logits(model, [*prompt, *token_ids])[len(prompt) - 1 : -1]
    chosen = logits.gather(1, torch.tensor(token_ids).unsqueeze(1)).squeeze(1)
    assert (logits.amax(1) - chosen <= SLACK * logits.abs().amax(1)).all()


class TestServed:
    def test_the_model_is_packed(self, model):
        weight = model.model.layers[0].self_attn.q_proj.weight
        assert type(weight) is not torch.nn.Parameter
        assert model.is_quantized

    @pytest.mark.parametrize("n_prompt", range(len(PROMPTS)))
    def test_one_stream(self, engine, model, n_prompt):
        request = ask(PROMPTS[n_prompt], N_TOKENS)

        result = run(engine, request)

        check(model, PROMPTS[n_prompt], result.token_ids)
        audit(engine, [stored(request, result)])

    def test_siblings_in_a_batch(self, engine, model):
        run(engine, ask(TRUNK, 1))
        requests = [ask(prompt, N_TOKENS) for prompt in PROMPTS]

        results = run_together(engine, requests)

        assert [r.n_reused_tokens for r in results] == [len(TRUNK)] * len(PROMPTS)
        for prompt, result in zip(PROMPTS, results, strict=True):
            check(model, prompt, result.token_ids)

    def test_a_released_prefix_comes_back(self, engine, model):
        for _ in range(2):
            request = ask(PROMPTS[2], N_TOKENS, call="again")
            check(model, PROMPTS[2], run(engine, request).token_ids)
            assert engine.kv.release("again").freed_bytes > 0
            assert engine.kv.usage().n_bytes == 0

    def test_the_cache_is_of_the_dtype_of_the_products(self, engine, packer):
        run(engine, ask(TRUNK, 1))

        (segment,) = engine.kv.segments()

        size = getattr(torch, PACKERS[packer][1]).itemsize
        assert segment.n_bytes == len(TRUNK) * 2 * 2 * 2 * 16 * size


class TestLoaded:
    def test_packed_weights_are_those_of_the_file(self, packer, packed_folder):
        loaded = load(str(packed_folder), device="cpu", dtype=PACKERS[packer][1])

        assert loaded.quantised is None
        found = loaded.model.state_dict()
        n_packed = 0
        for name, saved in load_file(packed_folder / "model.safetensors").items():
            if name in found and saved.dtype in (torch.uint8, torch.int8):
                n_packed += name.endswith("proj.weight")
                assert torch.equal(found[name], saved), name
        assert n_packed == 14 or packer.startswith("torchao")  # which keeps tensors of its own

    @pytest.mark.parametrize("quantization", ["auto", "int8"])
    def test_our_int8_leaves_them_alone(self, packed_folder, quantization):
        plain = load(str(packed_folder), device="cpu")

        loaded = load(str(packed_folder), device="cpu", quantization=quantization)

        assert loaded.quantised is None
        for one, other in zip(plain.model.modules(), loaded.model.modules(), strict=True):
            assert type(one) is type(other)
        logits = [oracle.logits(m.model, PROMPTS[1]) for m in (plain, loaded)]
        assert torch.equal(*logits)

    def test_our_int8_in_another_dtype_says_where_to_go(self, packed_folder):
        with pytest.raises(ConfigError, match=r"for float32 models on a CPU.*bitsandbytes"):
            load(str(packed_folder), device="cpu", dtype="bfloat16", quantization="int8")


def test_a_model_whose_tokens_depend_on_their_batch_mates_is_refused(dense_folder):
    """LLM.int8() at its default threshold, in fp32: nothing served in a batch would be exact."""
    coarse = transformers.AutoModelForCausalLM.from_pretrained(
        dense_folder,
        quantization_config=BitsAndBytesConfig(load_in_8bit=True),
        dtype=torch.float32,
    )
    prompt = PROMPTS[2]
    alone, among = oracle.logits(coarse, TRUNK), oracle.logits(coarse, prompt)[: len(TRUNK)]
    assert (alone - among).abs().max() > 0.02, "plain transformers says something else already"

    with pytest.raises(UnsupportedModelError, match="load-time check"):
        engine_over(coarse, byte_tokenizer())
