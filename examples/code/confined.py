"""Evaluates a model's expressions, each in its own confined process.

`trial.py` starts this program. Each line of standard input is a request, `{"code": text, "arguments": [lists]}`. The next line of
standard output is its answer: `{"results": [values]}` or `{"error": name}`.

Three barriers confine an expression:

- Only an expression of lists and whole numbers is compiled: without attributes, texts, functions of its own, powers or shifts.
- It knows `xs`, its own variables and the functions of KNOWN.
- Its process has no environment, can open no file, socket or program, and has bounded CPU time, memory and output. It never
  sees the wanted results.

The third barrier alone would not stop an expression from removing a file by its name. Run untrusted agents in a
sandbox.
"""

import ast
import builtins
import json
import os
import resource
import select
import signal
import sys
import time

CPU_S, WALL_S, MEMORY_BYTES, OUTPUT_BYTES = 2, 10.0, 512 * 2**20, 64 * 1024
KNOWN = {name: getattr(builtins, name) for name in ("abs", "len", "list", "max", "min", "set", "sorted", "sum")}
TOLD = (SyntaxError, NameError, TypeError, ValueError, MemoryError)
ERRORS = (*(each.__name__ for each in TOLD), "RuntimeError", "TimeoutError")
"""Names of errors that a model sees; any other error is a RuntimeError."""
NODES = (
    ast.Expression, ast.Name, ast.Load, ast.Store, ast.Constant, ast.List, ast.Subscript, ast.Slice,
    ast.ListComp, ast.GeneratorExp, ast.comprehension, ast.IfExp, ast.Call, ast.keyword,
    ast.BinOp, ast.Add, ast.Sub, ast.Mult, ast.FloorDiv, ast.Mod, ast.UnaryOp, ast.USub, ast.Not, ast.BoolOp, ast.And, ast.Or,
    ast.Compare, ast.Eq, ast.NotEq, ast.Lt, ast.LtE, ast.Gt, ast.GtE, ast.In, ast.NotIn,
)  # fmt: skip
REPLY = 3
"""The only open file of a child."""
MOST_OPEN = 64
"""More than this program ever opens."""


def refused(tree: ast.AST) -> bool:
    """True if an expression contains anything but lists, whole numbers, and calls of known functions."""
    for node in ast.walk(tree):
        if not isinstance(node, NODES):
            return True
        if isinstance(node, ast.Constant) and type(node.value) is not int:
            return True
        if isinstance(node, ast.Name) and node.id.startswith("_"):
            return True
        if isinstance(node, ast.Call) and not (isinstance(node.func, ast.Name) and node.func.id in KNOWN):
            return True
    return False


def computed(code: str, arguments: list) -> dict:
    """Returns the results of an expression of `xs`, or the name of its error."""
    tree = ast.parse(code, mode="eval")
    if refused(tree):
        return {"error": "SyntaxError"}
    program = compile(tree, "expression", "eval")
    return {"results": [eval(program, {"__builtins__": {}, **KNOWN, "xs": list(xs)}) for xs in arguments]}


def answered(line: str) -> bytes:
    """Answers a request; an error that is not TOLD ends the process without an answer."""
    try:
        answer = json.dumps(computed(**json.loads(line))).encode()
        if len(answer) > OUTPUT_BYTES:
            raise MemoryError
    except TOLD as error:
        name = next(each.__name__ for each in TOLD if isinstance(error, each))
        return json.dumps({"error": name}).encode()
    return answer


def confine(reply: int) -> None:
    """Closes all files except the one to write to, and prevents opening others."""
    os.dup2(reply, REPLY)
    os.closerange(0, REPLY)
    os.closerange(REPLY + 1, MOST_OPEN)
    for limit, most in (
        (resource.RLIMIT_CPU, CPU_S),
        (resource.RLIMIT_AS, MEMORY_BYTES),
        (resource.RLIMIT_FSIZE, 0),
        (resource.RLIMIT_CORE, 0),
        (resource.RLIMIT_NPROC, 0),
        (resource.RLIMIT_NOFILE, 0),
    ):
        try:
            resource.setrlimit(limit, (most, most))
        except (OSError, ValueError):
            # macOS cannot limit memory; on Linux every barrier is required.
            if sys.platform == "linux":
                raise


def received(source: int, until: float) -> bytes:
    """Reads what a child writes, until it ends, is late, or writes too much."""
    found = b""
    while len(found) <= OUTPUT_BYTES and select.select([source], [], [], max(0.0, until - time.monotonic()))[0]:
        piece = os.read(source, OUTPUT_BYTES)
        if not piece:
            break
        found += piece
    return found


def in_a_child(line: str) -> bytes:
    """Answers a request in its own process, which has ended when this returns."""
    ours, its = os.pipe()
    child = os.fork()
    if not child:
        try:
            confine(its)
            os.write(REPLY, answered(line))
        finally:
            os._exit(0)
    os.close(its)
    found = received(ours, time.monotonic() + WALL_S)
    os.close(ours)
    os.kill(child, signal.SIGKILL)
    _, status = os.waitpid(child, 0)
    if found:
        return found
    # The kernel kills processes that have used up their CPU time.
    error = "TimeoutError" if os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL else "RuntimeError"
    return json.dumps({"error": error}).encode()


def main() -> None:
    """Answers requests until there are no more."""
    for line in sys.stdin:
        sys.stdout.write(in_a_child(line).decode(errors="replace") + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
