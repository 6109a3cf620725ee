"""What a token of a prompt or an answer is: one byte for each token of a segment.

It must not know torch, a tokenizer or a chat template.
"""

from __future__ import annotations

from enum import IntEnum


class TokenKind(IntEnum):
    """The kind of a token, by the part of the conversation that it stands in."""

    OTHER = 0
    """Nothing is known: text that no message accounts for, raw prompts."""
    SYSTEM = 1
    """A system message, tool schemas included."""
    QUESTION = 2
    """What the user said."""
    ANSWER = 3
    """What the model said to the user."""
    THOUGHT = 4
    """What the model said to itself: a reasoning block."""
    TOOL_CALL = 5
    """What the model said to a tool."""
    TOOL_RESULT = 6
    """What a tool said."""
    DELIMITER = 7
    """Structure of the chat template: control tokens, role names, line ends between turns."""
    MARKED = 8
    """Text that the user asked to keep (`protect_text`)."""
