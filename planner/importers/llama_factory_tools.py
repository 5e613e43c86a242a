"""Writes tool definitions and tool calls as text, in LLaMA-Factory's formats (`tool_format`). Does not import torch."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from datetime import datetime
from typing import Any

from planner.data.json_values import json_in

Call = tuple[str, Any]
"""A tool call: the function's name, and its arguments as parsed from JSON."""

_DEFAULT = (
    "You have access to the following tools:\n{tools}Use the following format if using a tool:\n```\n"
    "Action: tool name (one of [{names}])\n"
    "Action Input: the input to the tool, in a JSON format representing the kwargs "
    '(e.g. ```{{"input": "hello world", "num_beams": 5}}```)\n```\n'
)
_SIGNATURES = (
    "# Tools\n\nYou may call one or more functions to assist with the user query.\n\n"
    "You are provided with function signatures within <tools></tools> XML tags:\n<tools>{tools}\n</tools>\n\n"
)
_AS_JSON = (
    "For each function call, return a json object with function name and arguments within "
    "<tool_call></tool_call> XML tags:\n<tool_call>\n"
    '{"name": <function-name>, "arguments": <args-json-object>}\n</tool_call>'
)
_AS_KEYS = (
    "For each function call, output the function name and arguments within the following XML format:\n"
    "<tool_call>{function-name}\n<arg_key>{arg-key-1}</arg_key>\n<arg_value>{arg-value-1}</arg_value>\n"
    "<arg_key>{arg-key-2}</arg_key>\n<arg_value>{arg-value-2}</arg_value>\n...\n</tool_call>\n"
)
_GLM4 = (
    "你是一个名为 ChatGLM 的人工智能助手。你是基于智谱 AI 公司训练的语言模型 GLM-4 模型开发的，"
    "你的任务是针对用户的问题和要求提供适当的答复和支持。\n\n# 可用工具"
)
_LLAMA3 = (
    "Cutting Knowledge Date: December 2023\nToday Date: {date}\n\n"
    "You have access to the following functions. To call a function, please respond with JSON for a function call. "
    'Respond in the format {{"name": function name, "parameters": dictionary of argument name and its value}}. '
    "Do not use variables.\n\n{tools}"
)
_MINIMAX1 = (
    "You are provided with these tools:\n<tools>\n{tools}</tools>\n\n"
    "If you need to call tools, please respond with <tool_calls></tool_calls> XML tags, and provide tool-name and "
    "json-object of arguments, following the format below:\n<tool_calls>\n"
    '{{"name": <tool-name-1>, "arguments": <args-json-object-1>}}\n...\n</tool_calls>'
)
_MINIMAX2 = (
    "\n\n# Tools\n\nYou may call one or more tools to assist with the user query.\n"
    "Here are the tools available in JSONSchema format:\n\n<tools>\n{tools}</tools>\n\n"
    "When making tool calls, use XML format to invoke tools and pass parameters:\n\n"
    '<minimax:tool_call>\n<invoke name="tool-name-1">\n<parameter name="param-key-1">param-value-1</parameter>\n'
    '<parameter name="param-key-2">param-value-2</parameter>\n...\n</invoke>\n</minimax:tool_call>'
)
_QWEN35 = (
    "\n\n# Tools\n\nYou have access to the following functions:\n\n<tools>{tools}\n</tools>\n\n"
    "If you choose to call a function ONLY reply in the following format with NO suffix:\n\n"
    "<tool_call>\n<function=example_function_name>\n<parameter=example_parameter_1>\nvalue_1\n</parameter>\n"
    "<parameter=example_parameter_2>\nThis is the value for the second parameter\nthat can span\nmultiple lines\n"
    "</parameter>\n</function>\n</tool_call>\n\n<IMPORTANT>\nReminder:\n"
    "- Function calls MUST follow the specified format: an inner <function=...></function> block must be nested within "
    "<tool_call></tool_call> XML tags\n- Required parameters MUST be specified\n"
    "- You may provide optional reasoning for your function call in natural language BEFORE the function call, but NOT "
    "after\n- If there is no function call available, answer the question like normal with your current knowledge and "
    "do not tell the user about function calls\n</IMPORTANT>"
)
_SEED = (
    "system\nYou are Doubao, a helpful AI assistant. You may call one or more functions to assist with the user query."
    "Tool List:\nYou are authorized to use the following tools (described in JSON Schema format). Before performing "
    "any task, you must decide how to call them based on the descriptions and parameters of these tools.\n{tools}\n"
    "工具调用请遵循如下格式:\n<seed:tool_call>\n<function=example_function_name>\n<parameter=example_parameter_1>value_1"
    "</parameter>\n<parameter=example_parameter_2>This is the value for the second parameter\nthat can span\nmultiple "
    "lines</parameter>\n</function>\n</seed:tool_call>\n"
)


def _json(value: object, indent: int | None = None) -> str:
    return json.dumps(value, ensure_ascii=False, indent=indent)


def _bare(tool: Any) -> Any:
    return tool["function"] if tool.get("type") == "function" else tool


def _wrapped(tool: Any) -> Any:
    return tool if tool.get("type") == "function" else {"type": "function", "function": tool}


def _default_tools(tools: Sequence[Any]) -> str:
    text = ""
    for tool in map(_bare, tools):
        arguments = ""
        for name, schema in tool["parameters"]["properties"].items():
            required = ", required" if name in tool["parameters"].get("required", []) else ""
            values = f", should be one of [{', '.join(schema['enum'])}]" if schema.get("enum") else ""
            items = f", where each item should be {schema['items'].get('type', '')}" if schema.get("items") else ""
            about = f"{schema.get('description', '')}{values}{items}"
            arguments += f"  - {name} ({schema.get('type', '')}{required}): {about}\n"
        about = tool.get("description", "")
        text += f"> Tool Name: {tool['name']}\nTool Description: {about}\nTool Args:\n{arguments}\n"
    return _DEFAULT.format(tools=text, names=", ".join(_bare(tool)["name"] for tool in tools))


def _signatures(tools: Sequence[Any]) -> str:
    return _SIGNATURES.format(tools="".join("\n" + _json(_wrapped(tool)) for tool in tools))


def _glm4_tools(tools: Sequence[Any]) -> str:
    each = "\n\n## {}\n\n{}\n在调用上述函数时，请使用 Json 格式表示调用的参数。"
    return _GLM4 + "".join(each.format(tool["name"], _json(tool, 4)) for tool in map(_bare, tools))


def _gemma4_tools(tools: Sequence[Any]) -> str:
    quoted = '<|"|>{}<|"|>'.format

    def kind(schema: Any) -> list[str]:
        return [f"type:{quoted(str(schema['type']).upper())}"] if schema.get("type") else []

    def about(schema: Any) -> list[str]:
        return [f"description:{quoted(schema['description'])}"] if schema.get("description") else []

    def declared(tool: Any) -> str:
        pieces = [f"description:{quoted(tool.get('description', ''))}"]
        if its := tool.get("parameters"):
            properties = (its.get("properties") or {}).items()
            named = [f"{name}:{{{','.join(about(schema) + kind(schema))}}}" for name, schema in properties]
            inside = [f"properties:{{{','.join(named)}}}"] if named else []
            inside += [f"required:[{','.join(map(quoted, its['required']))}]"] if its.get("required") else []
            pieces.append(f"parameters:{{{','.join(inside + kind(its))}}}")
        if its := tool.get("response"):
            is_object = str(its.get("type", "")).upper() == "OBJECT"
            pieces.append(f"response:{{{','.join(about(its) + (kind(its) if is_object else []))}}}")
        return f"declaration:{tool['name']}{{{','.join(pieces)}}}"

    return "\n".join(declared(_bare(tool)) for tool in tools)


def _gemma4_value(value: Any, *, quotes_keys: bool = False) -> str:
    if isinstance(value, str):
        return f'<|"|>{value}<|"|>'
    if isinstance(value, bool) or value is None:
        return json.dumps(value)
    if isinstance(value, dict):
        return "{" + ",".join(f"{key}:{_gemma4_value(value[key])}" for key in sorted(value)) + "}"
    return f"[{','.join(map(_gemma4_value, value))}]" if isinstance(value, list) else str(value)


def _gemma4_call(name: str, arguments: Any) -> str:
    if isinstance(arguments, dict):
        inside = _gemma4_value(arguments)[1:-1]
    else:
        inside = arguments if isinstance(arguments, str) else _gemma4_value(arguments)
    return f"<|tool_call>call:{name}{{{inside}}}<tool_call|>"


def _each(form: str, value: str, end: str) -> Callable[[Sequence[Call]], str]:
    """Return a function that writes tool calls with one element per argument: `form` begins a call, `value` writes an
    argument, `end` ends a call."""

    def written(calls: Sequence[Call]) -> str:
        texts = []
        for name, arguments in calls:
            values = {key: its if isinstance(its, str) else _json(its) for key, its in arguments.items()}
            texts.append(form % name + "".join(value % item for item in values.items()) + end)
        return "\n".join(texts)

    return written


def _one_glm4_call(calls: Sequence[Call]) -> str:
    if len(calls) > 1:
        raise ValueError("a turn calls several tools, and GLM-4 calls one at a time")
    return f"{calls[0][0]}\n{_json(calls[0][1])}"


def _objects(calls: Sequence[Call], arguments: str = "arguments") -> list[dict[str, Any]]:
    return [{"name": name, arguments: values} for name, values in calls]


def _llama3_calls(calls: Sequence[Call]) -> str:
    objects = _objects(calls, "parameters")
    return _json(objects[0] if len(objects) == 1 else objects)


def _lfm2_calls(calls: Sequence[Call]) -> str:
    texts = []
    for name, arguments in calls:
        pairs = [f'{key}="{its}"' if isinstance(its, str) else f"{key}={_json(its)}" for key, its in arguments.items()]
        texts.append(f"{name}({', '.join(pairs)})")
    return f"<|tool_call_start|>[{', '.join(texts)}]<|tool_call_end|>"


def _default_calls(calls: Sequence[Call]) -> str:
    return "\n".join(f"Action: {name}\nAction Input: {_json(arguments)}" for name, arguments in calls)


def _qwen_calls(calls: Sequence[Call]) -> str:
    return "\n".join(f"<tool_call>\n{_json(call)}\n</tool_call>" for call in _objects(calls))


_FORMS: dict[str, tuple[Callable[[Sequence[Any]], str], Callable[[Sequence[Call]], str]]] = {
    "default": (_default_tools, _default_calls),
    "gemma4": (_gemma4_tools, lambda calls: "".join(_gemma4_call(*call) for call in calls)),
    "glm4": (_glm4_tools, _one_glm4_call),
    "glm4_moe": (
        lambda tools: "\n\n" + _signatures(tools) + _AS_KEYS,
        _each("\n<tool_call>%s", "\n<arg_key>%s</arg_key>\n<arg_value>%s</arg_value>", ""),
    ),
    "lfm2": (
        lambda tools: f"List of tools: <|tool_list_start|>{_json([_bare(tool) for tool in tools])}<|tool_list_end|>",
        _lfm2_calls,
    ),
    "ling": (lambda tools: _signatures(tools) + _AS_JSON + "\ndetailed thinking off", _qwen_calls),
    "llama3": (
        lambda tools: _LLAMA3.format(
            date=datetime.now().strftime("%d %b %Y"), tools="".join(_json(_wrapped(tool), 4) + "\n\n" for tool in tools)
        ),
        _llama3_calls,
    ),
    "minimax1": (
        lambda tools: _MINIMAX1.format(tools="".join(_json(_bare(tool)) + "\n" for tool in tools)),
        lambda calls: "<tool_calls>\n" + "\n".join(map(_json, _objects(calls))) + "\n</tool_calls>",
    ),
    "minimax2": (
        lambda tools: _MINIMAX2.format(tools="".join(f"<tool>{_json(_bare(tool))}</tool>\n" for tool in tools)),
        _each('<invoke name="%s">', '\n<parameter name="%s">%s</parameter>', "\n</invoke>"),
    ),
    "mistral": (
        lambda tools: f"[AVAILABLE_TOOLS] {_json([_wrapped(tool) for tool in tools])}[/AVAILABLE_TOOLS]",
        lambda calls: _json(_objects(calls)),
    ),
    "qwen": (lambda tools: "\n\n" + _signatures(tools) + _AS_JSON, _qwen_calls),
    "qwen3_5": (
        lambda tools: _QWEN35.format(tools="".join("\n" + _json(_bare(tool)) for tool in tools)),
        _each("<tool_call>\n<function=%s>", "\n<parameter=%s>\n%s\n</parameter>", "\n</function>\n</tool_call>"),
    ),
    "seed_oss": (
        lambda tools: _SEED.format(tools=_json(tools)),
        _each("\n<seed:tool_call>\n<function=%s", "\n<parameter=%s>%s</parameter>", "\n</function>\n</seed:tool_call>"),
    ),
}
_AS_GIVEN = "phi4_mini"


def tools_text(form: str, tools: str) -> str:
    """Return the text that tells a model which tools it may call, in LLaMA-Factory's format `form` (`tool_format`).
    `tools`: JSON text of a list of tool definitions. Raises ValueError for other text."""
    if form == _AS_GIVEN:
        return f"<|tool|>{tools}<|/tool|>"
    try:
        listed = json_in(tools)
        return _FORMS[form][0](listed) if listed else ""
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        raise ValueError(f"LLaMA-Factory cannot write these tools ({type(error).__name__}): {tools[:200]}") from error


def calls_text(form: str, calls: str) -> str:
    """Return the text of tool calls in LLaMA-Factory's format `form` (`tool_format`). `calls`: JSON text of one call or
    a list of calls, which are objects with name and arguments. Raises ValueError for other text."""
    try:
        parsed = json_in(calls)
        pairs = [(call["name"], call["arguments"]) for call in (parsed if isinstance(parsed, list) else [parsed])]
        return _FORMS["default" if form == _AS_GIVEN else form][1](pairs)
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        raise ValueError(f"LLaMA-Factory cannot write these calls ({type(error).__name__}): {calls[:200]}") from error
