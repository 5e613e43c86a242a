"""Chat templates that write what axolotl's templates of the same names write (its version 0.19), where no other file
here has them.

What each writes is a fact of axolotl's files and of the models that they are for; the templates are our own. They mark
an answer, its end mark included, by `{% generation %}`.
"""

from __future__ import annotations

from planner.job.axolotl_prompts import (
    COMMAND_A,
    COMMAND_A_DEVELOPER,
    EXAONE_4_TOOLS,
    FALCON_H1_TOOLS,
    LLAMA_4_SYSTEM,
    LLAMA_4_USER,
    METHARME,
    MISTRAL_V7,
    PHI_4,
)

_SYSTEM_FIRST = (
    "{% if messages and messages[0]['role'] == 'system' %}{% set system = messages[0]['content'] %}"
    "{% set rest = messages[1:] %}{% else %}{% set rest = messages %}{% endif %}"
)
"""Sets `system`, which stays undefined where the first message is not the system's, and `rest`, the messages behind
it."""
_ASKED = "{% if add_generation_prompt %}"
_ALTERNATE = (
    "{% if (m['role'] == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('turns of user and assistant must alternate, behind one of the system') }}{% endif %}"
)


def _quoted(text: str) -> str:
    """The text as a Jinja string literal."""
    return "'" + text.replace("\\", "\\\\").replace("'", "\\'") + "'"


def _learned(written: str) -> str:
    """The text of an answer, its end mark included, marked as learned."""
    return f"{{% generation %}}{written}{{% endgeneration %}}"


def _turns(*cases: tuple[str, str], over: str = "messages", before: str = "", behind: str = "") -> str:
    """A loop over the list `over` that writes, for each message `m`, the text of the first condition that holds."""
    first, *others = (f"if {condition} %}}{written}" for condition, written in cases)
    chosen = "".join(f"{{% el{case}" for case in others)
    return f"{{% for m in {over} %}}{before}{{% {first}{chosen}{{% endif %}}{behind}{{% endfor %}}"


def _role(name: str) -> str:
    return f"m['role'] == '{name}'"


_SAID, _SAID_TRIMMED = "{{ m['content'] }}", "{{ m['content'].strip() }}"
_USER, _ASSISTANT, _SYSTEM = _role("user"), _role("assistant"), _role("system")

_ALPACA = (
    "{{ bos_token }}"
    + _turns(
        (f"{_SYSTEM} and loop.first", _SAID),
        (_USER, "{{ '### Instruction:\n' }}" + _SAID),
        (_ASSISTANT, "{{ '### Response:\n' }}" + _learned(_SAID + "{{ eos_token }}")),
        behind="{% if not loop.last %}{{ '\n\n' }}{% endif %}",
    )
    + _ASKED
    + "{{ '\n\n### Response:\n' }}{% endif %}"
)
_PHI_3 = "{{ bos_token }}" + _turns(
    (_SYSTEM, "{{ '<|system|>\n' }}" + _SAID + "{{ '<|end|>\n' }}"),
    (_USER, "{{ '<|user|>\n' }}" + _SAID + "{{ '<|end|>\n<|assistant|>\n' }}"),
    (_ASSISTANT, _learned(_SAID + "<|end|>") + "{{ '\n' }}"),
)
_PHI_35 = (
    _turns(
        (f"{_SYSTEM} and m['content']", "{{ '<|system|>\n' }}" + _SAID + "{{ '<|end|>\n' }}"),
        (_USER, "{{ '<|user|>\n' }}" + _SAID + "{{ '<|end|>\n' }}"),
        (_ASSISTANT, "{{ '<|assistant|>\n' }}" + _learned(_SAID + "<|end|>") + "{{ '\n' }}"),
    )
    + _ASKED
    + "{{ '<|assistant|>\n' }}{% endif %}"
)
_PHI_4 = (
    _SYSTEM_FIRST
    + "<|im_start|>system<|im_sep|>{{ system if system is defined else "
    + _quoted(PHI_4)
    + " }}<|im_end|>"
    + _turns(
        (_USER, f"<|im_start|>user<|im_sep|>{_SAID}<|im_end|>"),
        (_ASSISTANT, "<|im_start|>assistant<|im_sep|>" + _learned(_SAID + "<|im_end|>")),
        over="rest",
    )
    + _ASKED
    + "<|im_start|>assistant<|im_sep|>{% endif %}"
)
_DEEPSEEK_V2 = (
    "{{ bos_token }}"
    + _turns(
        (_USER, "<｜User｜>" + _SAID),
        (_ASSISTANT, "<｜Assistant｜>" + _learned(_SAID + "{{ eos_token }}")),
        (_SYSTEM, _SAID + "{{ '\n\n' }}"),
    )
    + _ASKED
    + "<｜Assistant｜>{% endif %}"
)
_EXAONE = (
    _turns(
        (_USER, "[|user|]" + _SAID + "{{ '\n' }}"),
        (_ASSISTANT, "[|assistant|]" + _learned(_SAID + "[|endofturn|]") + "{{ '\n' }}"),
        ("true", "[|{{ m['role'] }}|]" + _SAID + "{{ '[|endofturn|]\n' }}"),
        before=f"{{% if loop.first and not {_SYSTEM} %}}{{{{ '[|system|][|endofturn|]\n' }}}}{{% endif %}}",
    )
    + _ASKED
    + "[|assistant|]{% endif %}"
)
_METHARME = (
    _SYSTEM_FIRST
    + "{{ bos_token }}<|system|>{{ system if system is defined else "
    + _quoted(METHARME)
    + " }}"
    + _turns(
        (_USER, "<|user|>" + _SAID_TRIMMED),
        (
            _ASSISTANT,
            "<|model|>{% if loop.last and not add_generation_prompt %}"
            + _learned(_SAID_TRIMMED + "{{ eos_token }}")
            + "{% else %}"
            + _learned(_SAID_TRIMMED)
            + "{% endif %}",
        ),
        over="rest",
    )
    + _ASKED
    + "<|model|>{% elif not rest or rest[-1]['role'] != 'assistant' %}{{ eos_token }}{% endif %}"
)
_FALCON_H1 = (
    "{{ bos_token }}{% set first = messages[0]['content'] if messages[0]['role'] == 'system' else '' %}"
    "{% if tools %}{{ '<|im_start|>system\n' }}{% if messages[0]['role'] == 'system' %}{{ first + '\n\n' }}{% endif %}"
    "{{ "
    + _quoted(FALCON_H1_TOOLS[0])
    + " }}{% for tool in tools %}[{{ tool | tojson }}]{% endfor %}{{ "
    + _quoted(FALCON_H1_TOOLS[1])
    + " }}"
    "{% elif messages[0]['role'] == 'system' %}{{ '<|im_start|>system\n' + first + '<|im_end|>\n' }}{% endif %}"
    + _turns(
        (_ASSISTANT, "{{ '<|im_start|>assistant\n' }}" + _learned(_SAID + "<|im_end|>") + "{{ '\n' }}"),
        (f"not {_SYSTEM}", "{{ '<|im_start|>' + m['role'] + '\n' }}" + _SAID + "{{ '<|im_end|>\n' }}"),
    )
    + _ASKED
    + "{{ '<|im_start|>assistant\n' }}{% endif %}"
)
_NEMOTRON_H = (
    _SYSTEM_FIRST
    + "{% if system is defined %}{{ '<|im_start|>system\n' + system + '<|im_end|>\n' }}{% endif %}"
    + _turns(
        (_USER, "{{ '<|im_start|>user\n' }}" + _SAID + "{{ '<|im_end|>\n' }}"),
        (_ASSISTANT, "{{ '<|im_start|>assistant\n' }}" + _learned(_SAID + "<|im_end|>") + "{{ '\n' }}"),
        ("true", "{{ raise_exception('no turn has the role ' + m['role']) }}"),
        over="rest",
    )
    + _ASKED
    + "{{ '<|im_start|>assistant\n' }}{% endif %}"
)

_MISTRAL_V1 = (
    _SYSTEM_FIRST
    + "{{ bos_token }}"
    + _turns(
        (
            _USER,
            "{{ ' [INST] ' }}{% if loop.first and system is defined %}{{ system + '\n\n' }}{% endif %}"
            + _SAID
            + "{{ ' [/INST]' }}",
        ),
        (_ASSISTANT, "{{ ' ' }}" + _learned(_SAID + "{{ eos_token }}")),
        ("true", "{{ raise_exception('no turn has the role ' + m['role']) }}"),
        over="rest",
        before=_ALTERNATE,
    )
)
_ID = (
    "{% if not ID or ID | length != 9 %}"
    "{{ raise_exception('the ids of tool calls have 9 letters and digits') }}{% endif %}"
)


def _mistral(space: str, said: str) -> str:
    """Mistral's versions 2 and 3. `space`: the text behind some marks; `said`: the expression for an answer."""
    calls = "m.tool_calls is defined and m.tool_calls is not none"
    return (
        _SYSTEM_FIRST + "{% set count = namespace(turns=0) %}{% for m in rest %}"
        "{% if not (m.role in ('tool', 'tool_results') or ("
        + calls
        + ")) %}"
        + _ALTERNATE.replace("loop.index0", "count.turns")
        + "{% set count.turns = count.turns + 1 %}{% endif %}{% endfor %}"
        "{% set asked = rest | selectattr('role', 'equalto', 'user') | list %}{{ bos_token }}"
        + _turns(
            (
                _USER,
                "{% if tools is defined and tools is not none and m == asked[-1] %}"
                f"{{{{ '[AVAILABLE_TOOLS]{space}[' }}}}"
                '{% for tool in tools %}{{ \'{"type": "function", "function": {\' }}'
                "{% for key, value in tool.function.items() if key != 'return' %}{{ '\"' + key + '\": ' }}"
                "{% if value is string %}{{ '\"' + value + '\"' }}{% else %}{{ value | tojson }}{% endif %}"
                "{{ ', ' if not loop.last }}{% endfor %}{{ '}}' + (']' if loop.last else ', ') }}{% endfor %}"
                "[/AVAILABLE_TOOLS]{% endif %}"
                f"{{{{ '[INST]{space}' }}}}{{% if loop.last and system is defined %}}{{{{ system + '\n\n' }}}}"
                "{% endif %}" + _SAID + "[/INST]",
            ),
            (
                calls,
                f"{{{{ '[TOOL_CALLS]{space}' }}}}"
                + _learned(
                    "[{% for call in m.tool_calls %}"
                    + _ID.replace("ID", "call.id")
                    + "{{ (call.function | tojson)[:-1] + ', \"id\": \"' + call.id + '\"}' }}"
                    "{% if loop.last %}]{{ eos_token }}{% else %}{{ ', ' }}{% endif %}{% endfor %}"
                ),
            ),
            (_ASSISTANT, f"{{{{ '{space}' }}}}" + _learned(said + "{{ eos_token }}")),
            (
                "m['role'] in ('tool', 'tool_results')",
                _ID.replace("ID", "m.tool_call_id")
                + f"{{{{ '[TOOL_RESULTS]{space}{{\"content\": ' + m.content | string }}}}"
                "{{ ', \"call_id\": \"' + m.tool_call_id + '\"}[/TOOL_RESULTS]' }}",
            ),
            ("true", "{{ raise_exception('no turn has the role ' + m['role']) }}"),
            over="rest",
        )
    )


_MISTRAL_V7 = (
    _SYSTEM_FIRST + "{{ bos_token }}[SYSTEM_PROMPT]{% if system is defined %}{{ system }}{% else %}"
    "{{ "
    + _quoted(MISTRAL_V7[0])
    + " + strftime_now('%Y-%m-%d') + "
    + _quoted(MISTRAL_V7[1])
    + " }}{% endif %}[/SYSTEM_PROMPT]"
    + _turns(
        (_USER, f"[INST]{_SAID}[/INST]"),
        (_SYSTEM, f"[SYSTEM_PROMPT]{_SAID}[/SYSTEM_PROMPT]"),
        (_ASSISTANT, _learned(_SAID + "{{ eos_token }}")),
        ("true", "{{ raise_exception('no turn has the role ' + m['role']) }}"),
        over="rest",
    )
)

_LLAMA_4_CALLS = "'tool_calls' in m"
_LLAMA_4_ROLE = "{{{{ '<|header_start|>{}<|header_end|>\n\n' }}}}".format
_LLAMA_4_TOOLS = "{% for tool in tools %}{{ tool | tojson(indent=4) + '\n\n' }}{% endfor %}"
_LLAMA_4 = (
    _SYSTEM_FIRST + "{{ bos_token }}{% if custom_tools is defined %}{% set tools = custom_tools %}{% endif %}"
    "{% set offered = tools is defined and tools is not none %}"
    "{% set with_user = tools_in_user_message is not defined or tools_in_user_message %}"
    "{% if system is defined %}"
    + _LLAMA_4_ROLE("system")
    + "{% if offered %}{{ 'Environment: ipython\n' }}{% endif %}{% if offered and not with_user %}"
    "{{ " + _quoted(LLAMA_4_SYSTEM) + " }}" + _LLAMA_4_TOOLS + "{% endif %}{{ system | trim }}<|eot|>{% endif %}"
    "{% if offered and with_user %}{% if not rest %}{{ raise_exception('tools need a first turn') }}{% endif %}"
    + _LLAMA_4_ROLE("user")
    + "{{ "
    + _quoted(LLAMA_4_USER)
    + " }}"
    + _LLAMA_4_TOOLS
    + "{{ rest[0]['content'] | trim }}<|eot|>{% set rest = rest[1:] %}{% endif %}"
    + _turns(
        (
            f"{_LLAMA_4_CALLS} and m.tool_calls | length > 0",
            _LLAMA_4_ROLE("assistant")
            + _learned(
                f"<|python_start|>{_SAID}<|python_end|>{{% for call in m.tool_calls %}}"
                '{{ \'{"name": "\' + call.function.name + \'", "parameters": \' }}'
                "{{ call.function.arguments | tojson + '}' }}{% endfor %}<|eot|>"
            ),
        ),
        ("m['role'] in ('tool', 'ipython')", _LLAMA_4_ROLE("ipython") + "{{ m['content'] | tojson }}<|eot|>"),
        (f"{_ASSISTANT} and not {_LLAMA_4_CALLS}", _LLAMA_4_ROLE("assistant") + _learned(_SAID + "<|eot|>")),
        (f"not {_LLAMA_4_CALLS}", _LLAMA_4_ROLE("' + m['role'] + '") + _SAID + "<|eot|>"),
        over="rest",
    )
    + _ASKED
    + _LLAMA_4_ROLE("assistant")
    + "{% endif %}"
)

_EXAONE_4S_TOOLS = (
    "{% set offered %}{% if tools is defined and tools %}{{ " + _quoted(EXAONE_4_TOOLS[0]) + " }}"
    "{% for tool in tools %}{{ '<tool>' + tool | tojson(ensure_ascii=False) + '</tool>\n' }}{% endfor %}"
    "{{ " + _quoted(EXAONE_4_TOOLS[1]) + " }}{% endif %}{% endset %}"
)
_EXAONE_4 = (
    _EXAONE_4S_TOOLS + f"{{% if offered and not {_SYSTEM.replace('m[', 'messages[0][')} %}}"
    "{{ '[|system|]\n' + offered + '[|endofturn|]\n' }}{% endif %}"
    + _turns(
        (
            _ASSISTANT,
            "{{ '[|assistant|]\n' }}{% if m.content %}{% if '</think>' in m.content %}"
            "{% set thought = m.content.split('</think>')[0].strip() %}"
            "{% if thought.startswith('<think>') %}{% set thought = thought[7:].strip() %}{% endif %}{% endif %}"
            "{% if m.reasoning_content %}{% set thought = m.reasoning_content %}{% endif %}"
            "{% set said = m.content.split('</think>')[-1].strip() if '</think>' in m.content else m.content %}"
            "{% if skip_think is defined and not skip_think and loop.last and thought is defined %}"
            + _learned("{{ '<think>\n' + thought + '\n</think>\n\n' + said }}[|endofturn|]")
            + "{% else %}{{ '<think>\n\n</think>\n\n' }}"
            + _learned("{{ said }}[|endofturn|]")
            + "{% endif %}"
            "{% else %}" + _learned("[|endofturn|]") + "{% endif %}{{ '\n' }}",
        ),
        (
            _role("tool"),
            "{% if loop.first or messages[loop.index0 - 1].role != 'tool' %}{{ '[|tool|]\n' }}{% endif %}"
            "{{ '<tool_result>{\"result\": ' + m.content | tojson(ensure_ascii=False) + '}</tool_result>' }}"
            "{% if loop.last or messages[loop.index0 + 1].role != 'tool' %}[|endofturn|]{% endif %}{{ '\n' }}",
        ),
        (
            f"{_USER} or {_SYSTEM}",
            "{{ '[|' + m['role'] + '|]\n' }}"
            + _SAID
            + f"{{% if loop.first and {_SYSTEM} and offered %}}{{{{ '\n\n' + offered }}}}{{% endif %}}"
            "{{ '[|endofturn|]\n' }}",
        ),
        ("true", "{{ raise_exception('no turn has the role ' + m['role']) }}"),
    )
    + _ASKED
    + "{{ '[|assistant|]\n<think>\n' }}{% if enable_thinking is not defined or enable_thinking is not true %}"
    "{{ '\n</think>\n\n' }}{% endif %}{% endif %}"
)
"""Tool calls are not written, as in axolotl's template."""
_JAMBA = (
    "{% if documents or knobs %}{{ raise_exception('documents and knobs are not there yet') }}{% endif %}"
    + _SYSTEM_FIRST
    + "<|startoftext|><|bom|><|system|>{{ ' ' }}{{ system if system is defined else '' }}"
    "{% if tools %}{% if system %}{{ '\n\n' }}{% endif %}{{ '<tool_definitions>\n# Tools\n\n## Functions' }}"
    "{% for tool in tools %}{% if tool.type is defined and tool.type is not none %}{% if tool.type != 'function' %}"
    "{{ raise_exception('tools are functions') }}{% endif %}{% set tool = tool.function %}{% endif %}"
    "{{ '\n\n' + tool | tojson(indent=2) }}{% endfor %}{{ '\n</tool_definitions>' }}{% endif %}<|eom|>"
    + _turns(
        (
            _ASSISTANT,
            _learned(
                "{{ m.content or '' }}{% if m.tool_calls %}{{ '<tool_calls>[\n' }}{% for call in m.tool_calls %}"
                "{% set call = call.function if call.function is defined else call %}"
                "{% set given = call.arguments if call.arguments is string else call.arguments | tojson %}"
                "{{ '    {\"name\": \"' + call.name + '\", \"arguments\": ' + given + '}' }}{{ ',' if not loop.last }}"
                "{{ '\n' }}{% endfor %}]</tool_calls>{% endif %}{% if m.citations %}<citations>"
                "{{ m.citations | map(attribute='document_id') | list | string }}</citations>{% endif %}<|eom|>"
            ),
        ),
        ("true", "{{ m.content or '' }}<|eom|>"),
        over="rest",
        before="<|bom|>{{ '<|' + m.role + '|> ' }}{% if m.name is defined and m.name is not none %}({{ m.name }})"
        "{% endif %}",
    )
    + _ASKED
    + "<|bom|><|assistant|>{% endif %}"
)

_COMMAND_A_ANSWERS = "<|START_OF_TURN_TOKEN|><|CHATBOT_TOKEN|>"
_COMMAND_A = (
    "{% if documents or safety_mode | upper == 'STRICT' %}"
    "{{ raise_exception('documents and safety_mode STRICT are not there yet') }}{% endif %}"
    + _SYSTEM_FIRST
    + "{{ bos_token }}<|START_OF_TURN_TOKEN|><|SYSTEM_TOKEN|>{{ "
    + _quoted(COMMAND_A)
    + " }}"
    "{% if system %}{{ " + _quoted(COMMAND_A_DEVELOPER) + " + system }}{% else %}{% set rest = messages %}{% endif %}"
    "<|END_OF_TURN_TOKEN|>"
    + _turns(
        (_SYSTEM, f"<|START_OF_TURN_TOKEN|><|SYSTEM_TOKEN|>{_SAID}<|END_OF_TURN_TOKEN|>"),
        (_USER, f"<|START_OF_TURN_TOKEN|><|USER_TOKEN|>{_SAID}<|END_OF_TURN_TOKEN|>"),
        (
            _ASSISTANT,
            _COMMAND_A_ANSWERS + "<|START_RESPONSE|>" + _learned(_SAID + "<|END_RESPONSE|><|END_OF_TURN_TOKEN|>"),
        ),
        over="rest",
    )
    + _COMMAND_A_ANSWERS
    + _ASKED
    + "<|START_RESPONSE|>{% endif %}"
)
"""Tools, calls and their results are not written, as in axolotl's template. As there, an answer begins behind the last
turn, too."""

TEMPLATES = {
    "alpaca": _ALPACA,
    "command_a": _COMMAND_A,
    "deepseek_v2": _DEEPSEEK_V2,
    "exaone": _EXAONE,
    "exaone4": _EXAONE_4,
    "falcon_h1": _FALCON_H1,
    "jamba": _JAMBA,
    "llama4": _LLAMA_4,
    "metharme": _METHARME,
    "mistral_v1": _MISTRAL_V1,
    "mistral_v2v3": _mistral(" ", "{{ m['content'] | trim }}"),
    "mistral_v3_tekken": _mistral("", _SAID),
    "mistral_v7_tekken": _MISTRAL_V7,
    "nemotron_h": _NEMOTRON_H,
    "phi_3": _PHI_3,
    "phi_35": _PHI_35,
    "phi_4": _PHI_4,
}
"""Name -> template."""
