"""Tokenizers made here from a word list: byte-level, and Metaspace as SentencePiece has it.

Nothing is trained or fetched: the merges follow from the words, in order. It must not know
a model.
"""

from __future__ import annotations

from collections.abc import Iterable

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from tests.support.templates import PLAIN

VOCAB_SIZE = 416
"""Every tokenizer here, and every tiny model, has exactly this many ids."""

BOS, START, END = "<|bos|>", "<|im_start|>", "<|im_end|>"
CONTROL = (BOS, START, END)
TAGS = ("<think>", "</think>", "<tool_call>", "</tool_call>")

# A word makes each of its heads a token ("pl", "pla", "plan"), so most words also have
# splits that the tokenizer itself would never choose: "Han"+"zi" against "H"+"anzi".
_WORDS = (
    " the", " plan", " city", " day", " fly", " to", " from", " in", " and", " of", " a",
    "user", "assistant", "system", "tool", "Han", "anzi", "zi", "Paris", " Paris", " Rome",
    " Oslo", " Lisbon", " trip", " days", " then", " score", " yes", " no", "Observation",
    "arguments", "name", "\n\n", ".\n\n", ".\n", "城市", "你好", "。\n", "The", "Plan", "END",
    " answer", " think", " branch", " prune", " back", "ing", "er", "ion", "Now", "value",
)  # fmt: skip

_SPLIT = r"\p{L}+| ?\p{L}+|\p{N}|[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+"


def byte_tokenizer(
    template: str | None = PLAIN, *, special_tags: bool = False
) -> PreTrainedTokenizerFast:
    """A byte-level BPE: any text round-trips, an emoji is several tokens.

    Args:
        template: Its chat template; `None` is a base model's tokenizer.
        special_tags: Whether think and tool tags are special tokens, hidden when decoding;
            else they are single tokens that show, as in Qwen's.
    """
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    to_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    words = [to_bytes.pre_tokenize_str(word)[0][0] for word in _WORDS]
    n_added = len(CONTROL) + len(TAGS)
    backend = Tokenizer(_bpe(alphabet, words, VOCAB_SIZE - n_added))
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(Regex(_SPLIT), "isolated"), to_bytes]
    )
    backend.decoder = decoders.ByteLevel()
    return _wrapped(backend, template, special_tags=special_tags)


def metaspace_tokenizer(
    template: str | None = PLAIN, *, special_tags: bool = False
) -> PreTrainedTokenizerFast:
    """A BPE with `▁` for a space and byte fallback; decoding strips the first space.

    Args:
        template: Its chat template; `None` is a base model's tokenizer.
        special_tags: As for `byte_tokenizer`.
    """
    fallback = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256))]
    letters = [chr(code) for code in range(33, 127)]
    words = ["▁" + word.lstrip() for word in _WORDS if not word.startswith((".", "\n", "。"))]
    n_added = len(CONTROL) + len(TAGS)
    alphabet = [*fallback, *letters, "▁", "城", "市", "你", "好"]
    backend = Tokenizer(_bpe(alphabet, words, VOCAB_SIZE - n_added, byte_fallback=True))
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    backend.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    return _wrapped(backend, template, special_tags=special_tags)


def _bpe(
    alphabet: Iterable[str], words: Iterable[str], n_tokens: int, *, byte_fallback: bool = False
) -> models.BPE:
    """Merges each word from left to right until `n_tokens` are there.

    Raises:
        ValueError: The words run out before.
    """
    vocab = {token: token_id for token_id, token in enumerate(alphabet)}
    merges: list[tuple[str, str]] = []
    for word in words:
        for end in range(1, len(word)):
            head, letter, longer = word[:end], word[end], word[: end + 1]
            if longer not in vocab and len(vocab) < n_tokens:
                vocab[longer] = len(vocab)
                merges.append((head, letter))
    if len(vocab) < n_tokens:
        msg = f"the words make {len(vocab)} tokens, {n_tokens} are wanted; add words"
        raise ValueError(msg)
    unk = "<unk>" if byte_fallback else None
    return models.BPE(vocab=vocab, merges=merges, byte_fallback=byte_fallback, unk_token=unk)


def _wrapped(
    backend: Tokenizer, template: str | None, *, special_tags: bool
) -> PreTrainedTokenizerFast:
    backend.add_special_tokens([AddedToken(token, special=True) for token in CONTROL])
    tags = [AddedToken(tag, special=special_tags, normalized=False) for tag in TAGS]
    backend.add_special_tokens(tags) if special_tags else backend.add_tokens(tags)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend,
        bos_token=BOS,
        eos_token=END,
        pad_token=END,
        extra_special_tokens=[START, *(TAGS if special_tags else ())],
        clean_up_tokenization_spaces=False,
        chat_template=template,
    )
    if len(tokenizer) != VOCAB_SIZE:
        msg = f"the tokenizer has {len(tokenizer)} ids, expected {VOCAB_SIZE}"
        raise ValueError(msg)
    return tokenizer
