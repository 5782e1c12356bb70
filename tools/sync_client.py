"""Makes the blocking Python API, `fulmen.client.sync`, of the asynchronous one, `fulmen.client.aio`.

Each public class gets a face: the same methods, signatures and docstrings, without `await`, whose bodies run the
asynchronous method and wait. `--check` changes nothing, and exits with 1 if a file is not what would be made.
"""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "sdk/python/src/fulmen/client"
AIO, SYNC = PACKAGE / "aio", PACKAGE / "sync"
NO_FACES = frozenset({"__init__.py", "base.py"})
HEAD = (
    '"""{doc} Made by tools/sync_client.py of `fulmen.client.aio.{stem}`."""\n\nfrom __future__ import annotations\n\n'
)
ASYNC_NAME = re.compile(r"\bAsync(?!Iterator\b|Generator\b)([A-Z]\w*)")
DUNDERS = {"__aenter__": "__enter__", "__aexit__": "__exit__", "__aiter__": "__iter__"}


def blocking(text: str) -> str:
    """Returns code or a docstring of the asynchronous API as that of the blocking one."""
    text = text.replace("AsyncIterator[", "Iterator[")
    text = re.sub(r"\bawait ", "", text)
    text = re.sub(r"\basync (for|with)\b", r"\1", text)
    return ASYNC_NAME.sub(r"\1", text)


def faces(path: Path) -> str:
    """Returns the module of faces for a module of the asynchronous API."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    classes = [node for node in tree.body if isinstance(node, ast.ClassDef) and node.name.startswith("Async")]
    body = "\n\n".join(_face(node) for node in classes)
    imports = [
        "from fulmen.client.face import Face, faced",
        f"from fulmen.client.aio.{path.stem} import {', '.join(node.name for node in classes)}",
        "from collections.abc import Iterator",
        *_imports(tree),
    ]
    names = ", ".join(f'"{blocking(node.name)}"' for node in classes)
    doc = blocking((ast.get_docstring(tree) or "").split("\n")[0]).replace(
        "asynchronous programs", "scripts and notebooks"
    )
    text = (
        HEAD.format(doc=doc, stem=path.stem) + "\n".join(_used(imports, body)) + f"\n\n__all__ = [{names}]\n\n\n" + body
    )
    for arguments in (["check", "--select", "I,F401", "--fix", "--quiet"], ["format", "--quiet"]):
        name = ["--stdin-filename", str(SYNC / path.name), "-"]
        command = [str(Path(sys.executable).with_name("ruff")), *arguments, *name]
        text = subprocess.run(command, input=text, check=True, capture_output=True, text=True, cwd=ROOT).stdout
    return text


def _imports(tree: ast.Module) -> list[str]:
    """Returns the module's imports, each name by itself; asynchronous classes become their faces."""
    found = []
    for node in tree.body:
        if isinstance(node, ast.Import):
            found += [f"import {alias.name}" for alias in node.names]
        if isinstance(node, ast.ImportFrom) and node.module != "__future__":
            for alias in node.names:
                module = node.module or ""
                if alias.name.startswith("Async") and alias.name != "AsyncIterator":
                    module = module.replace(".aio.", ".sync.")
                found.append(f"from {module} import {blocking(alias.name)}")
    return [line for line in found if "AsyncIterator" not in line]


def _used(imports: list[str], body: str) -> list[str]:
    """Returns the imports of which the code uses a name."""
    kept = []
    for line in imports:
        names = line.partition("import ")[2].split(", ")
        if any(re.search(rf"\b{re.escape(name)}\b", body) for name in names):
            kept.append(line)
    return kept


def _face(node: ast.ClassDef) -> str:
    name = blocking(node.name)
    lines = [f"class {name}(Face):", _doc(node, 4), f"    _wraps = {node.name}", f"    _aio: {node.name}", ""]
    methods = [each for each in node.body if isinstance(each, ast.FunctionDef | ast.AsyncFunctionDef)]
    own_start = node.name == "AsyncClient"
    for method in methods:
        if method.name == "__init__" and own_start:
            lines += [
                _signature(method),
                _doc(method, 8),
                f"        super().__init__({node.name}({_passed(method)}))",
                "",
            ]
        elif method.name != "__init__" and (
            not method.name.startswith("_") or method.name.startswith(("__", "_repr_"))
        ):
            lines += [*_method(method), ""]
    lines += [
        "    @property",
        f"    def aio(self) -> {node.name}:",
        '        """The same, asynchronous, over the same connection."""',
        "        return self._aio",
        "",
    ]
    return "\n".join(lines)


def _method(method: ast.FunctionDef | ast.AsyncFunctionDef) -> list[str]:
    lines = [f"    @{ast.unparse(each)}" for each in method.decorator_list]
    lines += [_signature(method), _doc(method, 8)]
    is_property = any(ast.unparse(each) == "property" for each in method.decorator_list)
    if method.name == "__aenter__":
        return [*lines, "        return self"]
    if method.name == "__aexit__":
        return [*lines, "        self.close()"]
    call = f"self._aio.{method.name}" + ("" if is_property else f"({_passed(method)})")
    if isinstance(method, ast.AsyncFunctionDef) and any(isinstance(each, ast.Yield) for each in ast.walk(method)):
        return [*lines, f"        return self._iterate({call})"]
    if isinstance(method, ast.AsyncFunctionDef):
        if method.returns is not None and ast.unparse(method.returns) == "None":
            return [*lines, f"        self._call({call})"]
        # A run that returns itself stays the same object.
        return [*lines, f"        {'self._call(' + call + ')'}", "        return self"] if _returns_itself(method) else [
            *lines, f"        return self._call({call})"
        ]  # fmt: skip
    if method.name == "__repr__":
        return [*lines, f'        return {call}.removeprefix("Async")']
    if method.returns is not None and "Async" not in ast.unparse(method.returns):
        return [*lines, f"        return {call}"]
    return [*lines, f"        return faced({call})"]


def _returns_itself(method: ast.AsyncFunctionDef) -> bool:
    last = method.body[-1]
    return isinstance(last, ast.Return) and isinstance(last.value, ast.Name) and last.value.id == "self"


def _signature(method: ast.FunctionDef | ast.AsyncFunctionDef) -> str:
    arguments, returns = blocking(ast.unparse(method.args)), blocking(ast.unparse(method.returns or ast.Constant(None)))
    name = DUNDERS.get(method.name, method.name)
    return f"    def {name}({arguments}) -> {returns}:"


def _passed(method: ast.FunctionDef | ast.AsyncFunctionDef) -> str:
    arguments = method.args
    passed = [each.arg for each in arguments.args[1:]]
    passed += [f"{each.arg}={each.arg}" for each in arguments.kwonlyargs]
    return ", ".join(passed + ([f"**{arguments.kwarg.arg}"] if arguments.kwarg is not None else []))


def _doc(node: ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef, indent: int) -> str:
    text = blocking(ast.get_docstring(node) or "")
    text = text.replace("used from any event loop", "for scripts and notebooks")
    margin = " " * indent
    lines = "\n".join(f"{margin}{line}" if line else "" for line in text.split("\n"))
    return f'{margin}"""{lines.strip()}' + ("\n" + margin if "\n" in text else "") + '"""'


def main() -> int:
    """Writes or checks the files; returns the exit status."""
    is_check = "--check" in sys.argv[1:]
    stale = []
    for path in sorted(AIO.glob("*.py")):
        if path.name in NO_FACES:
            continue
        target = SYNC / path.name
        text = faces(path)
        if not target.exists() or target.read_text(encoding="utf-8") != text:
            stale.append(target.relative_to(ROOT))
            if not is_check:
                target.write_text(text, encoding="utf-8")
    if is_check and stale:
        sys.stderr.write(f"not as tools/sync_client.py makes them: {', '.join(map(str, stale))}\n")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
