"""Answers arithmetic questions with the help of a calculator tool: at least two model calls for each task.

An ordinary program on the vendor's SDK; run by hand it answers one task from standard input:

echo '{"input": {"question": "19+34"}}' | python agent.py
"""

import ast
import asyncio
import json
import operator
import sys

from openai import AsyncOpenAI

MODEL = "calculator"
MAX_TURNS = 4
MAX_ANSWER_TOKENS = 48
MAX_EXPRESSION_LENGTH = 100

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "calculator",
            "description": "Evaluates an arithmetic expression.",
            "parameters": {
                "type": "object",
                "properties": {"expression": {"type": "string"}},
                "required": ["expression"],
            },
        },
    }
]

BINARY = {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.truediv}
UNARY = {ast.UAdd: operator.pos, ast.USub: operator.neg}

client = AsyncOpenAI()


def calculate(expression: str) -> str:
    """Returns the value of an expression of numbers, + - * / and parentheses, or `error`."""
    try:
        if len(expression) > MAX_EXPRESSION_LENGTH:
            return "error"
        value = _value(ast.parse(expression, mode="eval").body)
        return str(int(value)) if value == int(value) else f"{value:.6g}"
    except (SyntaxError, ValueError, TypeError, KeyError, ZeroDivisionError, OverflowError, RecursionError):
        return "error"


def _value(node: ast.expr) -> float:
    match node:
        case ast.Constant(value=int() | float() as number):
            return number
        case ast.BinOp(left=left, op=op, right=right):
            return BINARY[type(op)](_value(left), _value(right))
        case ast.UnaryOp(op=op, operand=operand):
            return UNARY[type(op)](_value(operand))
        case _:
            raise ValueError("not arithmetic")


def use_tool(arguments: str) -> str:
    """Runs one call of the calculator; what the model gets wrong is told to it, not raised."""
    try:
        return calculate(str(json.loads(arguments)["expression"]))
    except (ValueError, TypeError, KeyError):
        return "error"


async def solve(task: dict) -> str:
    """Returns the model's answer to the task's question, as text; empty if it never stops calling the tool."""
    messages: list = [{"role": "user", "content": task["input"]["question"]}]
    for _ in range(MAX_TURNS):
        completion = await client.chat.completions.create(
            model=MODEL, messages=messages, tools=TOOLS, max_tokens=MAX_ANSWER_TOKENS
        )
        answer = completion.choices[0].message
        if not answer.tool_calls:
            return answer.content or ""
        messages.append(answer.model_dump(exclude_none=True))
        messages += [
            {"role": "tool", "tool_call_id": call.id, "content": use_tool(call.function.arguments)}
            for call in answer.tool_calls
        ]
    return ""


if __name__ == "__main__":
    print(asyncio.run(solve(json.load(sys.stdin))))
