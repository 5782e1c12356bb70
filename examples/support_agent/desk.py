"""The support desk of a shop, an app on LangGraph: a model answers customers with three tools. It does not use Fulmen.

It reads customers' messages, one a line, and writes the answers as JSON lines; its prompt is in a file:

echo 'hello where is my order K17' | python desk.py prompt.md
"""

import asyncio
import json
import os
import sys
from pathlib import Path

from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from langgraph.errors import GraphRecursionError
from langgraph.graph import START, MessagesState, StateGraph
from langgraph.prebuilt import ToolNode, tools_condition
from shop import ORDERS, RETURN_DAYS

PROMPT = (Path(__file__).parent / "prompt.md").read_text()
MODEL = os.environ.get("DESK_MODEL", "support-desk")
MAX_STEPS = 12
MAX_ANSWER_TOKENS = 100
CUSTOMERS_AT_ONCE = 4


@tool
def look_up_order(order: str) -> str:
    """Says what was ordered, what it cost, and where it is."""
    found = ORDERS.get(order)
    if found is None:
        return "no such order"
    where = "on its way" if found["days"] is None else f"delivered {found['days']} days ago"
    return f"{found['item']} for {found['euros']} euros {where}"


@tool
def refund_policy(item: str) -> str:
    """Says within how many days after its delivery an item is taken back."""
    return f"{RETURN_DAYS[item]} days" if item in RETURN_DAYS else "no such item"


@tool
def open_refund(order: str, euros: int) -> str:
    """Pays an order back."""
    return f"paid back {euros} euros for order {order}"


TOOLS = [look_up_order, refund_policy, open_refund]
model = ChatOpenAI(model=MODEL, max_tokens=MAX_ANSWER_TOKENS).bind_tools(TOOLS)


async def ask(state: MessagesState):
    return {"messages": [await model.ainvoke(state["messages"])]}


desk = (
    StateGraph(MessagesState)
    .add_node("model", ask)
    .add_node("tools", ToolNode(TOOLS))
    .add_edge(START, "model")
    .add_conditional_edges("model", tools_condition)
    .add_edge("tools", "model")
    .compile()
)


async def answer(message: str, prompt: str) -> dict:
    """Answers a customer: the text, and the refunds that were opened meanwhile."""
    asked = {"messages": [("system", prompt), ("user", message)]}
    try:
        said = (await desk.ainvoke(asked, {"recursion_limit": MAX_STEPS}))["messages"]
    except GraphRecursionError:
        return {"message": message, "text": "A colleague will write to you.", "refunds": []}
    calls = [call for each in said for call in getattr(each, "tool_calls", ())]
    refunds = [call["args"] for call in calls if call["name"] == "open_refund"]
    return {"message": message, "text": said[-1].text, "refunds": refunds}


async def main() -> None:
    prompt = Path(sys.argv[1]).read_text()
    free = asyncio.Semaphore(CUSTOMERS_AT_ONCE)

    async def serve(line: str) -> dict:
        async with free:
            return await answer(line.strip(), prompt)

    for each in await asyncio.gather(*map(serve, sys.stdin)):
        print(json.dumps(each))


if __name__ == "__main__":
    asyncio.run(main())
