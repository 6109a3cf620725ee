"""Every error this package raises, in one tree; it must know no other module.

    SideQuestError
    ├── ConfigError (ValueError)          a setting is out of range, unknown or contradicts another
    ├── RequestError (ValueError)         one call cannot be served; the engine serves on
    │   ├── ContextLengthError            the prompt does not fit the model's context
    │   ├── TemplateError                 the chat template is absent or refuses these messages
    │   ├── MessageError                  a message has no text form (an image, an empty list)
    │   └── GrammarError                  a schema, regex or choice that no text can be held to
    ├── ModelError                        a model cannot be had or cannot be used
    │   ├── UnknownModelError (ValueError)      the name means nothing here
    │   ├── UnsupportedModelError (ValueError)  the architecture cannot be served exactly
    │   └── ModelFilesError (OSError)           files absent, damaged, unreachable, no room
    ├── CacheError                        the segment tree cannot do what was asked
    │   ├── ArchiveError                  an archived copy is lost, damaged or another model's
    │   │   └── SavedThreadError          a thread's file is absent, damaged or another model's
    │   ├── BudgetExceeded                what must stay resident is more than the budget
    │   └── CacheCorrupted                its books do not balance: a defect of ours
    ├── RequestCancelledError             the request was cancelled while someone waited for it
    └── EngineClosedError (RuntimeError)  the engine was closed while, or before, it was asked

A message says what was asked, what was found, and what to do.
"""

from __future__ import annotations


class SideQuestError(Exception):
    """Base of every error this package raises on purpose."""


class ConfigError(SideQuestError, ValueError):
    """A setting is out of range, unknown, or contradicts another one."""


class RequestError(SideQuestError, ValueError):
    """One call cannot be served as asked. Nothing was cached; the engine serves on."""


class ContextLengthError(RequestError):
    """The prompt is longer than the model's context window.

    Attributes:
        n_prompt_tokens: Tokens of the prompt.
        context_length: Tokens the model can hold.
    """

    def __init__(self, n_prompt_tokens: int, context_length: int) -> None:
        self.n_prompt_tokens = n_prompt_tokens
        self.context_length = context_length
        super().__init__(
            f"the prompt has {n_prompt_tokens} tokens, but the model's context holds "
            f"{context_length} and one must be left for the answer; shorten the messages "
            "(langchain_core.messages.trim_messages) or use a model with a longer context"
        )

    def __reduce__(self) -> tuple[type[ContextLengthError], tuple[int, int]]:
        # Exceptions are rebuilt from `args`, the message, which is not what `__init__` takes.
        return type(self), (self.n_prompt_tokens, self.context_length)


class TemplateError(RequestError):
    """The tokenizer has no chat template, or its template refuses these messages."""


class MessageError(RequestError):
    """A message has no text form that this model could read."""


class GrammarError(RequestError):
    """A grammar (a JSON schema, a regex, a choice) that cannot be expressed, or broke down."""


class ModelError(SideQuestError):
    """A model cannot be had, or cannot be used."""


class UnknownModelError(ModelError, ValueError):
    """The name is no catalogue entry, no local directory, no file and no Hub id."""


class UnsupportedModelError(ModelError, ValueError):
    """The architecture cannot be served exactly over a segment tree."""


class ModelFilesError(ModelError, OSError):
    """A model's files are absent, damaged or unreachable, or there is no room for them."""


class CacheError(SideQuestError):
    """The segment tree cannot do what was asked."""


class ArchiveError(CacheError):
    """A copy in the archive is lost, damaged or made by another model. Nothing was restored."""


class SavedThreadError(ArchiveError):
    """The file of a saved thread is absent, damaged or made by another model.

    Nothing of it was loaded, and the cache is what it was: the thread's next call computes its
    prompt anew.

    Attributes:
        field: What differs from the model that runs now (`"weights"`, `"dtype"`, `"tokenizer"`,
            `"template"`, ...); `None` where the file is the matter.
    """

    field: str | None = None


class BudgetExceeded(CacheError):
    """What must stay resident takes more than the budget, and nothing more may be given up."""


class CacheCorrupted(CacheError):
    """The books of the segment tree do not balance: a defect of this package."""


class EngineClosedError(SideQuestError, RuntimeError):
    """The engine was closed while, or before, the request was served."""


class RequestCancelledError(SideQuestError):
    """The request was cancelled, by its ticket, while someone still waited for its answer."""
