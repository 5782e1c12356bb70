"""What can be checked of the Triton kernels without a GPU; `tests/gpu` runs them."""

from __future__ import annotations

import ast
from pathlib import Path

from fulmen_exchange.kernels import reference

SOURCE = Path(reference.__file__).with_name("triton_kernels.py")


def test_no_kernel_assigns_to_its_parameters() -> None:
    # A parameter is a pointer: a value assigned to its name is then stored through.
    functions = [node for node in ast.parse(SOURCE.read_text()).body if isinstance(node, ast.FunctionDef)]
    kernels = [function for function in functions if any("jit" in ast.unparse(d) for d in function.decorator_list)]
    assert kernels
    for kernel in kernels:
        parameters = {argument.arg for argument in kernel.args.args}
        assigned = {
            node.id for node in ast.walk(kernel) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)
        }
        assert not parameters & assigned, kernel.name
