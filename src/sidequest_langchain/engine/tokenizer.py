"""The tokenizer of one model, safe to use from many threads: text to ids, ids to text, templates.

It owns a copy of the user's tokenizer and never changes it after construction. It must not know
LangChain's messages or the engine.
"""

from __future__ import annotations

import copy
import re
import threading
from collections.abc import Sequence
from typing import Any

from transformers import PreTrainedTokenizerBase

from sidequest_langchain.engine.placing import ends_by_bytes, ends_by_offsets
from sidequest_langchain.engine.spelling import (
    Spelling,
    leaves_open,
    spelling_of,
    token_bytes,
)
from sidequest_langchain.errors import TemplateError

Template = str | dict[str, str]
_PROBE = "Probe 1: two  words,\n城市 <x>."


class ChatTokenizer:
    """Encodes, decodes and renders for one model.

    A Rust-backed tokenizer is used through its backend, without a lock: encoding does not
    change it, since truncation and padding, which callers may set on theirs, are switched off
    in our copy once. Any other tokenizer is used under a lock.
    """

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase, *, chat_template: Template | None = None
    ) -> None:
        """Copy `tokenizer`.

        Args:
            tokenizer: The user's; not changed, and free to be used elsewhere at the same time.
            chat_template: Replaces the tokenizer's own: one, or several by name (`"default"`,
                and `"tool_use"`, which is used when tools are given).
        """
        self._tokenizer = copy.deepcopy(tokenizer)
        self._lock = threading.Lock()
        self._template: Template | None = chat_template or tokenizer.chat_template
        self._backend = _usable_backend(self._tokenizer)
        self._spelling = spelling_of(self._backend)
        self.vocab_size = len(self._tokenizer)
        added = self._tokenizer.added_tokens_decoder
        self._added = {token_id: token.content for token_id, token in added.items()}
        special_ids = {token_id for token_id, token in added.items() if token.special}
        if self._backend is None:
            special_ids |= set(self._tokenizer.all_special_ids)
        self._special_ids = frozenset(special_ids)
        self.special_tokens: frozenset[str] = frozenset(self._tokenizer.all_special_tokens) | {
            token.content for token in added.values() if token.special
        }
        self._newline_ids = self._encode_alone("\n", control_tokens=True)
        joined = self._encode_alone("\nab", control_tokens=True)
        apart = self._newline_ids + self._encode_alone("ab", control_tokens=True)
        self._marks_text_start = joined != apart
        self._borders = self._find_borders()

    @property
    def name(self) -> str:
        """Where the tokenizer came from, for messages to the user."""
        return str(getattr(self._tokenizer, "name_or_path", "") or type(self._tokenizer).__name__)

    @property
    def has_template(self) -> bool:
        """Whether there is a chat template."""
        return bool(self._template)

    @property
    def control_text(self) -> frozenset[str]:
        """Tokens that structure a chat: the special ones, and added ones the template names."""
        named = {text for text in self._added.values() if text in self.template_text}
        return self.special_tokens | {text for text in named if len(text.strip()) > 1}

    @property
    def template_text(self) -> str:
        """The text of the chat template, of all of them if there are several; `''` of none."""
        template = self._template or ""
        return template if isinstance(template, str) else "\0".join(template.values())

    def with_template(self, chat_template: Template) -> ChatTokenizer:
        """The same tokenizer with another chat template; nothing heavy is copied."""
        other = copy.copy(self)
        other._template = chat_template
        return other

    def encode(
        self, text: str, *, control_tokens: bool = True, follows_text: bool = False
    ) -> list[int]:
        """Token ids of `text`; no special tokens are added.

        Args:
            text: What to encode.
            control_tokens: Whether text that spells a control token becomes that token;
                `False` encodes it as plain text.
            follows_text: Whether `text` goes on from other text: then it gets none of the marks
                (a prefixed space) that some tokenizers put at the start of a text.
        """
        if not text:
            return []
        if follows_text and self._marks_text_start:
            ids = self._encode_alone("\n" + text, control_tokens=control_tokens)
            n_newline = len(self._newline_ids)
            if ids[:n_newline] == self._newline_ids:
                return ids[n_newline:]
        return self._encode_alone(text, control_tokens=control_tokens)

    def ends_of(self, text: str, ids: Sequence[int], *, follows_text: bool = False) -> list[int]:
        """Where each of `ids`, which `encode` made of `text`, ends in it, in characters.

        By the tokenizer's own word, if it has one for these ids; else by the tokens' bytes.
        """
        prefixes = ("", "\n") if follows_text and self._marks_text_start else ("",)
        ends = ends_by_offsets(self._backend, _well_formed(text), ids, prefixes)
        return self.spelled_ends(text, ids) if ends is None else ends

    def spelled_ends(self, text: str, ids: Sequence[int]) -> list[int]:
        """As `ends_of`, by the tokens' bytes alone: for ids that a model chose."""
        return ends_by_bytes(text, map(self.token_bytes, ids))

    def sections(self, text: str) -> list[str]:
        """`text` in parts whose ids, put together, are those of the whole.

        The cuts are at special tokens, where the tokenizer cuts before anything else. A part can
        be remembered: a longer conversation holds the parts of the shorter one. One part only
        where the tokenizer gives no such promise.
        """
        if self._borders is None:
            return [text]
        return [part for part in self._borders.split(text) if part]

    def decode(self, ids: Sequence[int], *, skip_special: bool = True) -> str:
        """Text of `ids`, never "cleaned up": what was generated is what is returned."""
        if self._backend is not None:
            return str(self._backend.decode(list(ids), skip_special_tokens=skip_special))
        with self._lock:
            text = self._tokenizer.decode(
                list(ids), skip_special_tokens=skip_special, clean_up_tokenization_spaces=False
            )
        return str(text)

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes one token stands for; empty for an id outside of the vocabulary."""
        return token_bytes(self._token(token_id), self._spelling)

    def is_special(self, token_id: int) -> bool:
        """Whether decoding skips this token."""
        return token_id in self._special_ids

    def leaves_open(self, ids: Sequence[int]) -> bool:
        """Whether a next token could change the text of `ids`, which begin at a character.

        Args:
            ids: At least one; none of them special.
        """
        tokens = [self._token(token_id) for token_id in ids]
        return leaves_open(tokens, self._spelling, lambda: self.decode(ids))

    def render(
        self,
        messages: list[dict[str, Any]],
        *,
        tools: list[dict[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
    ) -> str:
        """The chat template's text for `messages`.

        Args:
            messages: Template messages: `role`, `content`, and what the template knows beyond.
            tools: JSON schemas of tools; chooses the `"tool_use"` template if there is one.
            add_generation_prompt: Whether to open the assistant's turn at the end.
            continue_final_message: Whether to leave the last message open instead.

        Raises:
            TemplateError: There is no template, or it fails on these messages.
        """
        template = self._template_for(bool(tools))
        try:
            text = self._tokenizer.apply_chat_template(
                messages,
                tools=[*tools] if tools else None,
                chat_template=template,
                add_generation_prompt=add_generation_prompt and not continue_final_message,
                continue_final_message=continue_final_message,
                tokenize=False,
            )
        except Exception as error:  # a template is a program: it may raise anything
            roles = [message.get("role") for message in messages]
            msg = (
                f"the chat template of {self.name} cannot render messages with the roles "
                f"{roles}: {error}; change the messages, or pass chat_template=..."
            )
            raise TemplateError(msg) from error
        return str(text)

    def _find_borders(self) -> re.Pattern[str] | None:
        added = self._tokenizer.added_tokens_decoder.values()
        special = sorted((t.content for t in added if t.special), key=len, reverse=True)
        is_simple = self._backend is not None and self._spelling is Spelling.BYTES
        is_simple = is_simple and not self._marks_text_start and bool(special)
        for token in added:
            has_habits = token.lstrip or token.rstrip or token.single_word or token.normalized
            is_longer = any(s in token.content and s != token.content for s in special)
            is_simple = is_simple and not (is_longer or (token.special and has_habits))
        return re.compile(f"({'|'.join(map(re.escape, special))})") if is_simple else None

    def _template_for(self, has_tools: bool) -> str:  # noqa: FBT001
        if not self._template:
            msg = (
                f"the tokenizer of {self.name} has no chat template (a base model?); pass "
                "chat_template=... with the format the model was trained on, or use an "
                "instruct model"
            )
            raise TemplateError(msg)
        if isinstance(self._template, str):
            return self._template
        names = ("tool_use", "default") if has_tools else ("default",)
        for name in names:
            if name in self._template:
                return self._template[name]
        msg = (
            f"the chat templates of {self.name} are named {sorted(self._template)}, and none is "
            "'default'; pass chat_template=... with one of them"
        )
        raise TemplateError(msg)

    def _token(self, token_id: int) -> str:
        if self._backend is not None:
            return self._backend.id_to_token(token_id) or ""
        with self._lock:
            return str(self._tokenizer.convert_ids_to_tokens(token_id) or "")

    def _encode_alone(self, text: str, *, control_tokens: bool) -> list[int]:
        text = _well_formed(text)
        if control_tokens:
            return self._encode_marked(text)
        ids = self._encode_plain(text)
        if len(text) > 1 and any(self._is_structure(token_id) for token_id in ids):
            # The model's own vocabulary spells the control token too: keep it from forming.
            head = self._encode_alone(text[:1], control_tokens=False)
            return head + self._encode_alone(text[1:], control_tokens=False)
        return ids

    def _is_structure(self, token_id: int) -> bool:
        return token_id in self._special_ids or len(self._added.get(token_id, "").strip()) > 1

    def _encode_marked(self, text: str) -> list[int]:
        if self._backend is not None:
            return list(self._backend.encode(text, add_special_tokens=False).ids)
        with self._lock:
            return list(self._tokenizer.encode(text, add_special_tokens=False))

    def _encode_plain(self, text: str) -> list[int]:
        backend = self._backend
        if backend is None:
            with self._lock:
                return list(
                    self._tokenizer.encode(
                        text, add_special_tokens=False, split_special_tokens=True
                    )
                )
        # The backend's own pipeline, without its search for added tokens.
        if backend.normalizer is not None:
            text = backend.normalizer.normalize_str(text)
        words = [text]
        if backend.pre_tokenizer is not None:
            words = [word for word, _ in backend.pre_tokenizer.pre_tokenize_str(text)]
        return [token.id for word in words for token in backend.model.tokenize(word)]


def _usable_backend(tokenizer: PreTrainedTokenizerBase) -> Any:
    """The Rust backend of our copy, if it encodes just as the tokenizer around it does."""
    backend: Any = getattr(tokenizer, "_tokenizer", None)
    if not hasattr(backend, "no_truncation"):
        return None
    backend.no_truncation()
    backend.no_padding()
    wrapped = tokenizer.encode(_PROBE, add_special_tokens=False)
    bare = backend.encode(_PROBE, add_special_tokens=False).ids
    return backend if list(wrapped) == list(bare) else None


def _well_formed(text: str) -> str:
    """`text` as Unicode can say it: half of a surrogate pair (cut JSON) becomes U+FFFD."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")
    return text
