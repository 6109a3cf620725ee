"""The settings of a chat model as pydantic fields, and the checks when one is made.

It must not know how a call is run.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Literal

from langchain_core.caches import BaseCache
from langchain_core.language_models.model_profile import ModelProfile
from pydantic import Field

from sidequest_langchain._version import __version__
from sidequest_langchain.chat.engines import EngineCell
from sidequest_langchain.chat.entry import Entries
from sidequest_langchain.chat.profile import profile_of
from sidequest_langchain.chat.settings import as_stops, near_match, settings_for, with_old_names
from sidequest_langchain.config import CacheConfig
from sidequest_langchain.errors import ConfigError, RequestError
from sidequest_langchain.models.catalogue import DEFAULT_MODEL


class ModelFields(Entries):
    """Fields of `SideQuestChatModel`. Making one loads nothing: weights load at the first call.

    Raises:
        ConfigError: A value is out of range, or a name looks like a misspelt one of ours.
    """

    model: str = DEFAULT_MODEL
    """A catalogue name, a local directory, a `.gguf` file or a Hub id. A single call can name
    another, which is loaded beside this one."""
    temperature: float = 0.0
    """0 is greedy."""
    max_tokens: int | None = 512
    """Most tokens of an answer (also `max_new_tokens`); `None`: to the end of the context."""
    top_p: float = 1.0
    top_k: int | None = None
    seed: int | None = None
    """Makes sampling repeatable; of several samples, each has a seed of its own derived from it."""
    n: int = 1
    """Samples of an answer; see `generate`. With more than one nothing is streamed."""
    stop: list[str] | str | None = None
    """Strings that end an answer, besides those of the call."""
    streaming: bool | None = None
    """`True` streams inside of `invoke`, too; `False` never streams."""
    logprobs: bool = False
    """Whether `response_metadata["logprobs"]` tells the log-probability of each token."""
    top_logprobs: int | None = None
    """How many of the best alternatives it tells for each token."""
    cache: BaseCache | CacheConfig | bool | None = Field(  # type: ignore[assignment]
        default=None, exclude=True
    )
    """Give a `CacheConfig` here for the KV cache: it becomes `cache_config`. Anything else is
    LangChain's cache of whole answers."""
    cache_config: CacheConfig = Field(default_factory=CacheConfig)
    """Settings of the KV cache."""
    dtype: str = "auto"
    device: str = "auto"
    device_map: str | dict[str, Any] | None = None
    """As in accelerate."""
    quantization: Literal["auto", "int8", "none"] = "auto"
    """`"int8"`: weights of 8 bits, on a CPU; `"none"`: as they were saved; `"auto"`: int8 on an
    x86 CPU if no `dtype` is given and a check at loading finds that the model's words stay."""
    revision: str | None = None
    """Revision of a Hub id."""
    chat_template: str | dict[str, str] | None = None
    """Replaces the model's own: one, or several by name (`default`, `tool_use`)."""
    control_tokens: Literal["text", "parse"] = "text"
    """Control tokens that a message spells out (`<|im_end|>`) are plain text to the model, or
    become structure (`"parse"`)."""
    exact: bool = False
    """Whether a managed cache leaves what its calls read as it is: nothing of it is evicted or
    packed, and nothing is reused that was. A single call can say so, too."""
    on_edit: Literal["recompute", "reuse"] = "recompute"
    """What becomes of results of tools that were cleared from a conversation: what follows them is
    computed again, exactly; or their rows leave the cache and what follows stays (`"reuse"`,
    lossy). A single call can say so, too."""
    schema_in_prompt: bool = True
    """Whether the model is told the JSON schema of `response_format`, behind the last question,
    besides being held to it. It costs the schema's tokens; small models ramble without."""
    parallel_tool_calls: bool | None = None
    """Whether one answer may call several tools; `False` takes the first call and drops the rest,
    which keeps small models from guessing ahead in an agent's loop. `None`: it may where it
    chooses, and calls one where a call is forced. A single call can say so, too."""
    engines: EngineCell = Field(default_factory=EngineCell, exclude=True, repr=False)
    """Shared by copies of this model."""

    if not TYPE_CHECKING:  # type checkers see the fields' own signature

        def __init__(self, **given: Any) -> None:
            super().__init__(**_prepared(given, set(type(self).model_fields)))
            try:
                settings_for(self._sampling_fields, None, {})
            except RequestError as error:
                raise ConfigError(str(error)) from None
            self.engines.check(self.model, self.cache_config)
            self._add_version("sidequest-langchain", __version__)

    @property
    def _sampling_fields(self) -> dict[str, Any]:
        names = ("model", "temperature", "top_p", "top_k", "seed", "max_tokens", "n", "stop")
        others = ("logprobs", "top_logprobs", "exact", "on_edit")
        told = ("schema_in_prompt", "parallel_tool_calls")
        return {name: getattr(self, name) for name in (*names, *others, *told)}

    @property
    def _identifying_params(self) -> dict[str, Any]:
        """Everything that changes an answer: it is the key of LangChain's cache of answers."""
        template = self.chat_template
        names = ("revision", "dtype", "quantization", "device", "device_map", "control_tokens")
        others = {name: getattr(self, name) for name in names}
        return {
            **self._sampling_fields,
            **others,
            # LangChain puts the stop strings of the call under "stop".
            "model_stop": list(as_stops(self.stop)),
            "chat_template": template if template is None else json.dumps(template, sort_keys=True),
            "weights": self.engines.identity,
            "output_version": self.output_version,
            "managed_cache": str(self.cache_config) if self.cache_config.is_managed else None,
        }

    def _resolve_model_profile(self) -> ModelProfile:
        return profile_of(
            self.model,
            self.engines.given,
            chat_template=self.chat_template,
            max_tokens=self.max_tokens,
        )


def _prepared(given: Mapping[str, Any], known: set[str]) -> dict[str, Any]:
    """Constructor arguments as the fields want them.

    Names we do not know are ignored, as LangChain's models do (`timeout`, `api_key`), unless
    they look like one of ours.
    """
    values = with_old_names(given, ConfigError)
    for name in values.keys() - known:
        match = near_match(name, known, cutoff=0.8)
        if match is not None:
            msg = f"a chat model got an unknown setting {name!r}; did you mean {match!r}?"
            raise ConfigError(msg)
    if isinstance(values.get("cache"), CacheConfig):
        values["cache_config"] = values.pop("cache")
    if "dtype" in values:
        values["dtype"] = str(values["dtype"]).removeprefix("torch.")
    if not isinstance(values.get("model", ""), str):
        found = type(values["model"]).__name__
        msg = (
            f"model must be a name, a directory or a file, found a {found}; for a model you "
            "loaded use SideQuestChatModel.from_model(model, tokenizer)"
        )
        raise ConfigError(msg)
    return values
