"""Stands for a vendor: an OpenAI-compatible server with three scripted models. No language model is in it.

`desk` answers customers: it follows its prompt, and sometimes errs. `critic` improves prompts, as a prompt search
asks it to. `judge` decides whether an answer is plain. The same question always has the same answer.

python vendor.py 8700
"""

import json
import re
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

SPEAK = "Name the number of the order in a full sentence."
RULE = "Before you pay anything back, ask for the refund policy of the item, and keep to it."
HASTY = "5"
"""The desk forgets the rule for orders whose number ends with this, whatever its prompt contains."""
PLAIN_WORDS = 5
BYTES_PER_TOKEN = 4


def desk(messages: list[dict]) -> str | dict:
    """Returns the answer of the desk's model, or the tool that it calls with its arguments."""
    prompt, asked = (each["content"] for each in messages[:2])
    order = re.search(r"[A-Z]\d\d", asked)[0]
    told = [each["content"] for each in messages if each["role"] == "tool"]
    if not told:
        return {"look_up_order": {"order": order}}
    found, policy = first(r"(\w+) for (\d+) euros (.*)", told), first(r"(\d+) days", told)
    if not found:
        return f"We are sorry, we have not found order {order}."
    item, euros, where = found.groups()
    if not re.search("refund|money back", asked):
        verb = "is" if where.startswith("on") else "was"
        return f"Order {order} {verb} {where}." if SPEAK in prompt else f"{where.capitalize()}."
    if first("paid back.*", told):
        return f"We have paid back {euros} euros for order {order}."
    if RULE in prompt and not order.endswith(HASTY):
        if not policy:
            return {"refund_policy": {"item": item}}
        days, limit = int(where.split()[1]), int(policy[1])
        if days > limit:
            return f"Order {order} was delivered {days} days ago and we take back a {item} within {limit} days only."
    return {"open_refund": {"order": order, "euros": int(euros)}}


def first(pattern: str, texts: list[str]) -> re.Match[str] | None:
    """Returns the match of the first text that is all of a pattern."""
    return next(filter(None, (re.fullmatch(pattern, text) for text in texts)), None)


def critic(messages: list[dict]) -> str:
    """Names a fault of a prompt, or removes the fault that was named."""
    text = messages[-1]["content"]
    prompt = text.partition("<template>\n")[2].partition("\n</template>")[0]
    if fault := text.partition("<criticism>\n")[2].partition("\n</criticism>")[0]:
        return f"<prompt>\n{prompt} {fault}\n</prompt>"
    return SPEAK if SPEAK not in prompt else RULE


def judge(messages: list[dict]) -> str:
    """Says whether an answer is plain: it is if it has five words."""
    answer = messages[-1]["content"].rpartition("Answer: ")[2]
    return "yes" if len(answer.split()) >= PLAIN_WORDS else "no"


MODELS = {"desk": desk, "critic": critic, "judge": judge}


def tokens(value: object) -> int:
    """Returns about how many tokens a part of a request or an answer has."""
    return len(json.dumps(value)) // BYTES_PER_TOKEN + 1


def completion(asked: dict) -> dict:
    """Answers a request of the chat API."""
    said = MODELS[asked["model"]](asked["messages"])
    message: dict = {"role": "assistant", "content": said}
    if isinstance(said, dict):
        [(name, arguments)] = said.items()
        call_id = f"call_{len(asked['messages'])}"
        function = {"name": name, "arguments": json.dumps(arguments)}
        message = {
            "role": "assistant",
            "content": None,
            "tool_calls": [{"id": call_id, "type": "function", "function": function}],
        }
    read, written = tokens([asked["messages"], asked.get("tools")]), tokens(said)
    return {
        "id": "vendor-1",
        "object": "chat.completion",
        "created": 1,
        "model": asked["model"],
        "choices": [
            {"index": 0, "message": message, "finish_reason": "tool_calls" if isinstance(said, dict) else "stop"}
        ],
        "usage": {"prompt_tokens": read, "completion_tokens": written, "total_tokens": read + written},
    }


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_POST(self) -> None:
        asked = json.loads(self.rfile.read(int(self.headers["content-length"])))
        body = json.dumps(completion(asked)).encode()
        self.send_response(200)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        """Says nothing of each request."""


@contextmanager
def serving(port: int = 0) -> Iterator[str]:
    """Serves in a thread meanwhile, and yields the base URL."""
    server = ThreadingHTTPServer(("127.0.0.1", port), _Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}/v1"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


if __name__ == "__main__":
    with serving(int(sys.argv[1])) as url:
        print(f"serves {', '.join(MODELS)} at {url}", flush=True)
        threading.Event().wait()
