r"""Small chat templates, each with one habit that real templates have.

Jinja text only; it must not know a tokenizer or a model. Line ends are written inside of
expressions (`{{ '\n' }}`), since templates are rendered with `trim_blocks`.
"""

from __future__ import annotations

_TURN = r"{{- '<|im_start|>' + m.role + '\n' + (m.content or '') + '<|im_end|>\n' }}"
_ASK = r"{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{%- endif %}"


def _each_message(turn: str) -> str:
    return "{%- for m in messages %}" + turn + "{%- endfor %}" + _ASK


PLAIN = _each_message(_TURN)
"""Prefix-stable: a longer history's render starts with the render of a shorter one."""

TRIM = _each_message(_TURN.replace("(m.content or '')", "(m.content or '') | trim"))
"""Strips each message, so that a reply's render may differ from what was generated."""

NOSYS = _each_message(
    "{%- if m.role == 'system' %}{{- raise_exception('System role not supported') }}{%- endif %}"
    + _TURN
)
"""Refuses a system message, as Gemma's templates do."""

ALT = (
    "{%- for m in messages if m.role != 'system' %}"
    "{%- if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{- raise_exception('Conversation roles must alternate user/assistant/user/...') }}"
    "{%- endif %}{%- endfor %}" + PLAIN
)
"""Refuses two messages of one role in a row; a system message may lead."""

DATE = r"{{- 'Now: ' + strftime_now('%H:%M:%S.%f') + '\n' }}" + PLAIN
"""Starts with the time of day: two renders share a few tokens at most."""

_LAST_USER = (
    "{%- set ns = namespace(last=0) %}"
    "{%- for m in messages %}{%- if m.role == 'user' %}{%- set ns.last = loop.index %}"
    "{%- endif %}{%- endfor %}"
)

_CALLS = (
    "{%- for call in m.tool_calls or [] %}{%- set call = call.function or call %}"
    r"""{{- '\n<tool_call>\n{"name": "' + call.name + '", "arguments": ' }}"""
    "%ARGUMENTS%"
    r"{{- '}\n</tool_call>' }}"
    "{%- endfor %}"
)
_AS_JSON = "{{- call.arguments | tojson }}"
_AS_STRING = "{{- '' + call.arguments }}"
_AS_MAPPING = (
    "{{- '{' }}{%- for name, value in call.arguments.items() %}"
    """{{- ('' if loop.first else ', ') + '"' + name + '": ' + (value | tojson) }}"""
    "{%- endfor %}{{- '}' }}"
)

THINK = (
    _LAST_USER + "{%- for m in messages %}"
    "{%- set body = m.content or '' %}{%- set thought = m.reasoning_content or '' %}"
    "{%- if m.role == 'assistant' and '</think>' in body %}"
    "{%- set thought = (body.split('</think>') | first).split('<think>') | last | trim %}"
    r"{%- set body = (body.split('</think>') | last).lstrip('\n') %}{%- endif %}"
    r"{{- '<|im_start|>' + m.role + '\n' }}"
    "{%- if m.role == 'assistant' and loop.index > ns.last %}"
    r"{{- '<think>\n' + thought + '\n</think>\n\n' }}{%- endif %}"
    "{{- body }}" + _CALLS.replace("%ARGUMENTS%", _AS_JSON) + r"{{- '<|im_end|>\n' }}{%- endfor %}"
    r"{%- if add_generation_prompt %}"
    r"{{- '<|im_start|>assistant\n<think>\n\n</think>\n\n' }}{%- endif %}"
)
"""Asks with an empty think block; keeps reasoning only after the last user turn."""


def _tools(arguments: str) -> str:
    listed = (
        r"{%- if tools %}{{- '<|im_start|>system\n# Tools\n' }}"
        r"{%- for tool in tools %}{{- (tool | tojson) + '\n' }}{%- endfor %}"
        r"{{- '<|im_end|>\n' }}{%- endif %}"
    )
    result = (
        "{%- if m.role == 'tool' %}"
        r"{{- '<|im_start|>user\n<tool_response>\n' + m.content }}"
        r"{{- '\n</tool_response><|im_end|>\n' }}"
    )
    spoken = (
        r"{%- else %}{{- '<|im_start|>' + m.role + '\n' + (m.content or '') }}"
        + _CALLS.replace("%ARGUMENTS%", arguments)
        + r"{{- '<|im_end|>\n' }}{%- endif %}"
    )
    return listed + _each_message(result + spoken)


TOOLS_JSON = _tools(_AS_JSON)
"""Lists the tools; prints a call's arguments with `tojson`: wants a mapping."""

TOOLS_MAP = _tools(_AS_MAPPING)
"""As `TOOLS_JSON`, but walks the arguments' items: fails on a string."""

TOOLS_STR = _tools(_AS_STRING)
"""As `TOOLS_JSON`, but joins the arguments to text: fails on a mapping."""

TOOLS = TOOLS_JSON
"""The tool template of the tests that do not care which."""
