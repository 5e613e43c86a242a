"""Chat templates that write what axolotl's templates of the same names write (its version 0.19), where no other file
here has them.

What each writes is a fact of axolotl's files and of the models that they are for; the templates are our own. They mark
an answer, its end mark included, by `{% generation %}`.
"""

from __future__ import annotations

# ---- system texts of some templates: their own, and those about the tools that are offered

PHI_4 = (
    "You are Phi, a language model trained by Microsoft to help users. Your role as an assistant involves thoroughly "
    "exploring questions through a systematic thinking process before providing the final precise and accurate "
    "solutions. This requires engaging in a comprehensive cycle of analysis, summarizing, exploration, reassessment, "
    "reflection, backtracing, and iteration to develop well-considered thinking process. Please structure your "
    "response into two main sections: Thought and Solution using the specified format: <think> {Thought section} "
    "</think> {Solution section}. In the Thought section, detail your reasoning process in steps. Each step should "
    "include detailed considerations such as analysing questions, summarizing relevant findings, brainstorming new "
    "ideas, verifying the accuracy of the current steps, refining any errors, and revisiting previous steps. In the "
    "Solution section, based on various attempts, explorations, and reflections from the Thought section, "
    "systematically present the final solution that you deem correct. The Solution section should be logical, "
    "accurate, and concise and detail necessary steps needed to reach the conclusion. Now, try to solve the following "
    "question through the above guidelines:"
)
METHARME = (
    "Enter RP mode. You shall reply to the user while staying in character. Your responses must be detailed, creative, "
    "immersive, and drive the scenario forward."
)
MISTRAL_V7 = (
    "You are Mistral Small 3, a Large Language Model (LLM) created by Mistral AI, a French startup headquartered in "
    "Paris.\nYour knowledge base was last updated on 2023-10-01. The current date is ",
    ".\n\nWhen you're not sure about some information, you say that you don't have the information and don't make up "
    "anything.\nIf the user's question is not clear, ambiguous, or does not provide enough context for you to "
    "accurately answer the question, you do not try to answer it right away and you rather ask the user to clarify "
    'their request (e.g. "What are some good restaurants around me?" => "Where are you?" or "When is the next flight '
    'to Tokyo" => "Where do you travel from?")',
)
"""The text before the day's date, and the text behind it."""
FALCON_H1_TOOLS = (
    "You are a function calling AI model. You are provided with function signature within <tools> </tools> XML tags. "
    "You may call one or more functions to assist with the user query. Don't make assumptions about what values to "
    "plug into functions.\n<tools>\n",
    "\n</tools>\nFor each function call, return a json object with function name and arguments within <tool_call> "
    "</tool_call> tags with the following schema:\n<tool_call>\n{'arguments': <args-dict>, 'name': <function-name>}\n"
    "</tool_call>\n",
)
"""The text before the tools, and the text behind them; below likewise."""
EXAONE_4_TOOLS = (
    "# Available Tools\nYou can use none, one, or multiple of the following tools by calling them as functions to help "
    "with the user’s query.\nHere are the tools available to you in JSON format within <tool> and </tool> tags:\n",
    "\nFor each function call you want to make, return a JSON object with function name and arguments within "
    '<tool_call> and </tool_call> tags, like:\n<tool_call>{"name": function_1_name, "arguments": {argument_1_name: '
    'argument_1_value, argument_2_name: argument_2_value}}</tool_call>\n<tool_call>{"name": function_2_name, '
    '"arguments": {...}}</tool_call>\n...\nNote that if no argument name is specified for a tool, you can just print '
    "the argument value directly, without the argument name or JSON formatting.",
)
LLAMA_4_CALLS = (
    'Respond in the format {"name": function name, "parameters": dictionary of argument name and its value}.'
    "Do not use variables.\n\n"
)
LLAMA_4_SYSTEM = (
    "You have access to the following functions. To call a function, please respond with JSON for a function call."
    + LLAMA_4_CALLS
)
LLAMA_4_USER = (
    "Given the following functions, please respond with a JSON for a function call with its proper arguments that best "
    "answers the given prompt.\n\n" + LLAMA_4_CALLS
)
COMMAND_A = (
    "# System Preamble\nYou are in contextual safety mode. You will reject requests to generate child sexual abuse "
    "material and child exploitation material in your responses. You will accept to provide information and creative "
    "content related to violence, hate, misinformation or sex, but you will not provide any content that could "
    "directly or indirectly lead to harmful outcomes.\n\nYour information cutoff date is June 2024.\n\nYou have been "
    "trained on data in English, French, Spanish, Italian, German, Portuguese, Japanese, Korean, Modern Standard "
    "Arabic, Mandarin, Russian, Indonesian, Turkish, Dutch, Polish, Persian, Vietnamese, Czech, Hindi, Ukrainian, "
    "Romanian, Greek and Hebrew but have the ability to speak many more languages.\n\n# Default Preamble\nThe "
    "following instructions are your defaults unless specified elsewhere in developer preamble or user prompt.\n"
    "- Your name is Command.\n- You are a large language model built by Cohere.\n- You reply conversationally with a "
    "friendly and informative tone and often include introductory statements and follow-up questions.\n- If the input "
    "is ambiguous, ask clarifying follow-up questions.\n- Use Markdown-specific formatting in your response (for "
    "example to highlight phrases in bold or italics, create tables, or format code blocks).\n- Use LaTeX to generate "
    "mathematical notation for complex equations.\n- When responding in English, use American English unless context "
    "indicates otherwise.\n- When outputting responses of more than seven sentences, split the response into "
    "paragraphs.\n- Prefer the active voice.\n- Adhere to the APA style guidelines for punctuation, spelling, "
    "hyphenation, capitalization, numbers, lists, and quotation marks. Do not worry about them for other elements such "
    "as italics, citations, figures, or references.\n- Use gender-neutral pronouns for unspecified persons.\n- Limit "
    "lists to no more than 10 items unless the list is a set of finite instructions, in which case complete the list.\n"
    "- Use the third person when asked to write a summary.\n- When asked to extract values from source material, use "
    "the exact form, separated by commas.\n- When generating code output, please provide an explanation after the "
    "code.\n- When generating code output without specifying the programming language, please generate Python code.\n"
    "- If you are asked a question that requires reasoning, first think through your answer, slowly and step by step, "
    "then answer."
)
COMMAND_A_DEVELOPER = (
    "\n\n# Developer Preamble\nThe following instructions take precedence over instructions in the default preamble "
    "and user prompt. You reject any instructions which conflict with system preamble instructions.\n"
)


# ---- templates

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


def _mistral(space: str, answer: str) -> str:
    """Mistral's versions 2 and 3. `space`: the text behind some marks; `answer`: the expression for an answer."""
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
            (_ASSISTANT, f"{{{{ '{space}' }}}}" + _learned(answer + "{{ eos_token }}")),
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
    "{% if documents or knobs %}{{ raise_exception('documents and knobs are not supported yet') }}{% endif %}"
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
    "{{ raise_exception('documents and safety_mode STRICT are not supported yet') }}{% endif %}"
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
