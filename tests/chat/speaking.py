r"""Chat templates that print calls of tools as four families do, and replies for them.

Jinja text only, in our own words; `{{ '\n' }}` since templates are rendered with `trim_blocks`.
"""

from __future__ import annotations

from typing import Any

from tests.support import templates

_HEAD = (
    r"{%- if tools %}{{- '<|im_start|>system\nTools: ' + (tools | tojson) + '<|im_end|>\n' }}"
    r"{%- endif %}{%- for m in messages %}"
)
_TAIL = r"{%- endfor %}{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{%- endif %}"
_OTHERS = (
    r"{%- else %}{{- '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{%- endif %}"
)
_CALLING = r"{%- if m.role == 'assistant' and m.tool_calls %}"


def _calling(printed: str) -> str:
    said = r"{{- '<|im_start|>assistant\n' + (m.content or '') }}"
    return _HEAD + _CALLING + said + printed + r"{{- '<|im_end|>\n' }}" + _OTHERS + _TAIL


_JSON_CALL = (
    """{{- '{"name": "' + c.function.name + '", "KEY": ' + (c.function.arguments | tojson) }}"""
)

HERMES = _calling(
    r"{%- if m.content %}{{- '\n' }}{%- endif %}{%- for c in m.tool_calls %}"
    r"{{- '' if loop.first else '\n' }}{{- '<tool_call>\n' }}"
    + _JSON_CALL.replace("KEY", "arguments")
    + r"{{- '}\n</tool_call>' }}{%- endfor %}"
)
MISTRAL = _calling(
    "{{- '[TOOL_CALLS] [' }}{%- for c in m.tool_calls %}"
    "{%- if c.id | length != 9 %}{{- raise_exception('ids of 9 letters') }}{%- endif %}"
    + _JSON_CALL.replace("KEY", "arguments")
    + """{{- '}' if loop.last else '}, ' }}{%- endfor %}{{- ']' }}"""
)
LLAMA = _calling(
    "{%- if m.tool_calls | length != 1 %}{{- raise_exception('one call') }}{%- endif %}"
    "{%- set c = m.tool_calls[0] %}" + _JSON_CALL.replace("KEY", "parameters") + "{{- '}' }}"
)
PYTHON = _calling(
    "{{- '[' }}{%- for c in m.tool_calls %}{{- c.function.name + '(' }}"
    "{%- for key, value in c.function.arguments.items() %}"
    """{{- key + '=' }}{%- if value is string %}{{- '"' + value + '"' }}{%- else %}"""
    "{{- value }}{%- endif %}{{- '' if loop.last else ', ' }}{%- endfor %}"
    "{{- ')' if loop.last else '), ' }}{%- endfor %}{{- ']' }}"
)
FAMILIES = {"hermes": HERMES, "mistral": MISTRAL, "llama": LLAMA, "python": PYTHON}

THINKING = templates.THINK.replace(r"assistant\n<think>\n\n</think>\n\n' }}", r"assistant\n' }}")
"""As `templates.THINK`, but its model thinks when it answers."""
OPENED = templates.THINK.replace(r"<think>\n\n</think>\n\n' }}", r"<think>\n' }}")
"""As `THINKING`, but the prompt opens the thought."""


def look_up(city: str) -> str:
    """Look up a city.

    Args:
        city: Its name.
    """
    return f"{city}: rain"


def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b


TOOLS: list[Any] = [add, look_up]
REPLIES = {
    "hermes": '<tool_call>\n{"name": "look_up", "arguments": {"city": "城市 é"}}\n</tool_call>',
    "mistral": '[TOOL_CALLS] [{"name": "look_up", "arguments": {"city": "城市 é"}}]',
    "llama": '{"name": "look_up", "parameters": {"city": "城市 é"}}',
    "python": '[look_up(city="城市 é")]',
}
CALL = {"name": "look_up", "args": {"city": "城市 é"}}
