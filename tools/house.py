"""Prints measures of the code's structure: sizes, crumbs, long signatures, suppressions. They are not limits.

python tools/house.py                       # the table, of this checkout
python tools/house.py --list crumbs         # the places behind one measure
python tools/house.py --root ../other       # another checkout, to compare
"""

from __future__ import annotations

import argparse
import ast
import json
import re
import subprocess
import sys
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

PRODUCT = ("sdk/", "cli/", "libs/", "services/")
GENERATED = re.compile(r"_pb2(_grpc)?\.pyi?$")
CRUMB_LINES = 100
MANY_PARAMETERS = 7
MANY_FILES = 20
SUPPRESSION = re.compile(r"#\s*(type: ignore|noqa|pyright: ignore)")
Function = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True)
class Module:
    """One Python file.

    Args:
        path: Path relative to the root.
        text: The source.
    """

    path: str
    text: str

    @property
    def name(self) -> str:
        """The dotted name under which the module is imported."""
        parts = Path(self.path).with_suffix("").parts
        if "src" in parts:
            parts = parts[parts.index("src") + 1 :]
        return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)

    @property
    def lines(self) -> int:
        """The number of lines."""
        return self.text.count("\n")

    @cached_property
    def nodes(self) -> list[ast.AST]:
        """Every node of the syntax tree."""
        return list(ast.walk(ast.parse(self.text)))

    @cached_property
    def classes(self) -> list[ast.ClassDef]:
        """Every class, nested ones included."""
        return [node for node in self.nodes if isinstance(node, ast.ClassDef)]

    @cached_property
    def functions(self) -> list[Function]:
        """Every function and method."""
        return [node for node in self.nodes if isinstance(node, Function)]

    def at(self, node: ast.stmt | ast.ExceptHandler, what: str) -> str:
        """Formats a place in this module."""
        return f"{self.path}:{node.lineno}: {what}"


@dataclass
class Measure:
    """One row of the table.

    Args:
        title: Its name in the table.
        value: The number.
        places: Locations behind the number; may be empty.
    """

    title: str
    value: float
    places: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class House:
    """A checkout, read once.

    Args:
        root: The root of the checkout.
        files: The files that git tracks, relative to the root.
        product: The Python modules that are shipped.
        tests: The Python modules under `tests/`.
    """

    root: Path
    files: list[str]
    product: list[Module]
    tests: list[Module]

    @classmethod
    def read(cls, root: Path) -> House:
        """Reads every tracked Python file under `root`."""
        listed = subprocess.run(["git", "-C", root, "ls-files"], check=True, capture_output=True, text=True)
        files = [name for name in listed.stdout.splitlines() if (root / name).is_file()]
        modules = [
            Module(name, (root / name).read_text(encoding="utf-8"))
            for name in files
            if name.endswith(".py") and not GENERATED.search(name)
        ]
        return cls(
            root=root,
            files=files,
            product=[module for module in modules if module.path.startswith(PRODUCT)],
            tests=[module for module in modules if module.path.startswith("tests/")],
        )

    @cached_property
    def importers(self) -> dict[str, set[str]]:
        """The product modules that import a module, by its name."""
        known = {module.name for module in self.product}
        found: defaultdict[str, set[str]] = defaultdict(set)
        for module in self.product:
            for name in imported(module):
                if name in known and name != module.name:
                    found[name].add(module.name)
        return found

    def crumbs(self) -> Measure:
        """Short modules that a single other module imports."""
        places = [
            f"{module.path}: {module.lines} lines, imported by {next(iter(self.importers[module.name]))}"
            for module in self.product
            if module.lines <= CRUMB_LINES
            and len(self.importers[module.name]) == 1
            and "__" not in Path(module.path).name
        ]
        return Measure(f"modules of <= {CRUMB_LINES} lines with one importer", len(places), places)

    def callables(self) -> Measure:
        """Parameters of constructors that are callables."""
        aliases = {
            (module.name, node.targets[0].id)
            for module in self.product
            for node in module.nodes
            if isinstance(node, ast.Assign)
            and isinstance(node.targets[0], ast.Name)
            and ast.unparse(node.value).startswith("Callable[")
        }
        places = []
        for module in self.product:
            known = {"Callable"} | {name for owner, name in aliases if owner == module.name}
            for node in module.nodes:
                if isinstance(node, ast.ImportFrom):
                    known |= {alias.name for alias in node.names if (node.module, alias.name) in aliases}
            places += [
                module.at(method, f"{owner.name}({argument.arg})")
                for owner, method in constructors(module)
                for argument in parameters(method)
                if argument.annotation is not None and names(argument.annotation) & known
            ]
        return Measure("constructor parameters that are callables", len(places), places)

    def single_protocols(self) -> Measure:
        """Protocols that at most one class implements, explicitly or by its members; test doubles count."""
        classes = [(module, node) for module in self.product + self.tests for node in module.classes]
        concrete = [(members(node), bases(node)) for _, node in classes if "Protocol" not in bases(node)]
        places = []
        for module, node in classes:
            if "Protocol" not in bases(node) or module not in self.product:
                continue
            wanted = members(node)
            count = sum(node.name in parents or (bool(wanted) and wanted <= own) for own, parents in concrete)
            if count <= 1:
                places.append(module.at(node, f"{node.name}: {count} implementations"))
        return Measure("protocols with fewer than two implementations", len(places), places)

    def long_signatures(self) -> Measure:
        """Functions with many parameters, `self` not counted."""
        places = [
            module.at(node, f"{node.name}: {count} parameters")
            for module in self.product
            for node in module.functions
            if (count := len(parameters(node))) > MANY_PARAMETERS
        ]
        return Measure(f"functions of > {MANY_PARAMETERS} parameters", len(places), places)

    def pass_throughs(self) -> Measure:
        """Functions that only pass their own parameters to another function."""
        places = [
            module.at(node, node.name) for module in self.product for node in module.functions if is_pass_through(node)
        ]
        total = sum(len(module.functions) for module in self.product)
        return Measure("pass-throughs, % of functions", round(100 * len(places) / total, 1), places)

    def broad_excepts(self) -> Measure:
        """Handlers that catch every exception."""
        places = [
            module.at(node, "broad except")
            for module in self.product
            for node in module.nodes
            if isinstance(node, ast.ExceptHandler)
            and (node.type is None or names(node.type) & {"Exception", "BaseException"})
        ]
        return Measure("broad excepts", len(places), places)

    def suppressions(self) -> Measure:
        """Comments that silence a checker."""
        places = [
            f"{module.path}:{number}: {line.strip()}"
            for module in self.product
            for number, line in enumerate(module.text.splitlines(), 1)
            if SUPPRESSION.search(line)
        ]
        kilo_lines = sum(module.lines for module in self.product) / 1000
        return Measure("suppressions per 1,000 lines", round(len(places) / kilo_lines, 2), places)

    def crowded_folders(self) -> Measure:
        """Product folders with many modules."""
        counts = Counter(str(Path(module.path).parent) for module in self.product)
        places = [f"{folder}: {count} files" for folder, count in sorted(counts.items()) if count > MANY_FILES]
        return Measure(f"product folders of > {MANY_FILES} files", len(places), places)

    def measures(self) -> dict[str, Measure]:
        """Every measure, by the word that `--list` takes."""
        lines = sum(module.lines for module in self.product)
        queries = [name for name in self.files if name.endswith(".sql") and name.startswith(PRODUCT)]
        glossary = re.findall(r"(?m)^\| \*\*.*", self.text("GLOSSARY.md"))
        return {
            "lines": Measure("product lines (Python)", lines),
            "files": Measure("product files (Python)", len(self.product)),
            "mean": Measure("mean lines per product file", round(lines / len(self.product))),
            "sql": Measure("SQL lines", sum(self.text(name).count("\n") for name in queries)),
            "tests": Measure("test lines (Python)", sum(module.lines for module in self.tests)),
            "folders": self.crowded_folders(),
            "crumbs": self.crumbs(),
            "callables": self.callables(),
            "protocols": self.single_protocols(),
            "signatures": self.long_signatures(),
            "pass-throughs": self.pass_throughs(),
            "excepts": self.broad_excepts(),
            "suppressions": self.suppressions(),
            "glossary": Measure("glossary terms", len(glossary), glossary),
            "readme": Measure("README words", len(self.text("README.md").split())),
        }

    def text(self, name: str) -> str:
        """Returns the text of a file, empty if it does not exist."""
        path = self.root / name
        return path.read_text(encoding="utf-8") if path.exists() else ""


def imported(module: Module) -> Iterator[str]:
    """Yields the names of all modules that a module may import; of `from a import b`, both `a` and `a.b`."""
    for node in module.nodes:
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def constructors(module: Module) -> Iterator[tuple[ast.ClassDef, Function]]:
    """Yields each class that has an `__init__`, with it."""
    for owner in module.classes:
        yield from (
            (owner, node) for node in owner.body if isinstance(node, ast.FunctionDef) and node.name == "__init__"
        )


def parameters(function: Function) -> list[ast.arg]:
    """Returns the named parameters of a function without `self` and `cls`."""
    arguments = [*function.args.posonlyargs, *function.args.args, *function.args.kwonlyargs]
    return [argument for argument in arguments if argument.arg not in ("self", "cls")]


def names(expression: ast.expr) -> set[str]:
    """Returns every name in an expression, quoted annotations included."""
    if isinstance(expression, ast.Constant) and isinstance(expression.value, str):
        expression = ast.parse(expression.value, mode="eval").body
    return {node.id for node in ast.walk(expression) if isinstance(node, ast.Name)}


def bases(owner: ast.ClassDef) -> set[str]:
    """Returns the names of the bases of a class, without their modules and parameters."""
    return {re.split(r"[\[(]", ast.unparse(base))[0].rsplit(".", 1)[-1] for base in owner.bases}


def members(owner: ast.ClassDef) -> set[str]:
    """Returns the names of the methods, the fields and the attributes set on `self` of a class."""
    fields = {ast.unparse(node.target) for node in owner.body if isinstance(node, ast.AnnAssign)}
    fields |= {ast.unparse(target) for node in owner.body if isinstance(node, ast.Assign) for target in node.targets}
    attributes = {
        node.attr
        for node in ast.walk(owner)
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and ast.unparse(node.value) == "self"
    }
    return fields | attributes | {node.name for node in owner.body if isinstance(node, Function)}


def is_pass_through(function: Function) -> bool:
    """True if the body is one call with the parameters unchanged and in order."""
    body = [node for node in function.body if not (isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant))]
    own = [argument.arg for argument in parameters(function)]
    if len(body) != 1 or not own or not isinstance(body[0], ast.Return | ast.Expr) or body[0].value is None:
        return False
    call = body[0].value.value if isinstance(body[0].value, ast.Await) else body[0].value
    if not isinstance(call, ast.Call):
        return False
    given = [*call.args, *(keyword.value for keyword in call.keywords)]
    return [value.id if isinstance(value, ast.Name) else None for value in given] == own


def main() -> int:
    """Prints the table, or the places behind one measure."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--root", type=Path, default=Path(__file__).parent.parent, help="the checkout to read")
    parser.add_argument("--list", metavar="MEASURE", help="print the places behind one measure")
    parser.add_argument("--json", action="store_true", help="print the values as JSON")
    arguments = parser.parse_args()
    measures = House.read(arguments.root).measures()
    if arguments.list:
        if arguments.list not in measures:
            parser.error(f"unknown measure {arguments.list!r}; known: {', '.join(measures)}")
        print("\n".join(measures[arguments.list].places))
    elif arguments.json:
        print(json.dumps({key: measure.value for key, measure in measures.items()}, indent=2))
    else:
        for key, measure in measures.items():
            print(f"{key:14} {measure.value:>10,}  {measure.title}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
