"""An answer's cell as a rank runs it: only what the answer needs.

In a notebook, cloudpickle sends a function to the ranks with the globals that it refers
to, and nothing else. The same is done here with the cell's text: only those statements
run that define the answer, or what the answer refers to. The rest of the cell, such as
a first try, a plot or a call of the check, runs in the notebook alone.
"""

import ast
import dis
import re
import types
from contextlib import suppress

TOP_LEVEL_AWAIT = ast.PyCF_ALLOW_TOP_LEVEL_AWAIT  # as in a notebook


def run_everything(text, file, namespace):
    """Run the course's own cells, without their magics."""
    exec(compile(re.sub(r"(?m)^%.*$", "", text), file, "exec"), namespace)


def run_what_defines(name, text, file, namespace, before=(), after=()):
    """Run the statements of a cell that define a name, and all that they refer to.

    before, after: other cells, in which they may be, too.
    """
    own = parsed(text, file)
    files = dict([*others(before), *own, *others(after)])  # {statement: its file}
    namespace["get_ipython"] = NoShell
    for statement in needed_for(name, list(files)):
        exec(compiled(statement, files[statement]), namespace)


def parsed(text, file):
    """The statements of a cell, each with its file. Raises SyntaxError."""
    tree = compile(python_of(text), file, "exec", ast.PyCF_ONLY_AST | TOP_LEVEL_AWAIT)
    compile(tree, file, "exec", TOP_LEVEL_AWAIT)  # finds more than the parser
    return [(statement, file) for statement in tree.body]


def others(cells):
    """The statements of other cells. One that is not finished concerns nobody here."""
    found = []
    for cell in cells:
        with suppress(SyntaxError, ValueError):
            found += parsed(cell, "<another cell>")
    return found


class NoShell:
    """Stands for IPython's shell: each of its methods does nothing."""

    def __getattr__(self, name):
        return lambda *_, **__: None


def python_of(text):
    """A cell as plain Python, without a magic in its first line (%%time); line numbers
    do not change.
    """
    if text.lstrip().startswith("%%"):
        text = text.replace("%%", "# ", 1)
    try:
        compile(text, "<cell>", "exec", TOP_LEVEL_AWAIT, dont_inherit=True)
        return text  # in plain Python, too, a line may begin with %
    except (SyntaxError, ValueError):
        from IPython.core.inputtransformer2 import TransformerManager

        # %magic, !command and object? become calls of get_ipython()
        return TransformerManager().transform_cell(text)


def needed_for(name, statements):
    """Those statements that define a name or anything they refer to, in order."""
    bound = [bound_by(statement) for statement in statements]
    own = {
        each
        for statement, names in zip(statements, bound)
        if not isinstance(statement, ast.Import | ast.ImportFrom)
        for each in names
    }
    makes = [
        names | (changed_by(statement) & own)
        for statement, names in zip(statements, bound)
    ]
    wanted, chosen = {name}, set()
    while more := [
        place
        for place, names in enumerate(makes)
        if place not in chosen and ("*" in names or names & wanted)
    ]:
        chosen.update(more)
        wanted.update(*(read_by(statements[place]) for place in more))
    return [statements[place] for place in sorted(chosen)]


def compiled(statement, file="<cell>"):
    module = ast.Module([statement], [])
    return compile(module, file, "exec", TOP_LEVEL_AWAIT, dont_inherit=True)


def bound_by(statement):
    """The global names that a statement binds; "*" if it may be any."""
    if isinstance(statement, ast.ImportFrom) and statement.names[0].name == "*":
        return {"*"}
    return {
        step.argval
        for step in dis.get_instructions(compiled(statement))
        if step.opname in ("STORE_NAME", "STORE_GLOBAL")
    }


def changed_by(statement):
    """The names whose objects a statement changes in place: `names.append(1)`,
    `names[0] = 1`, `Model.forward = forward`.
    """
    names = set()
    if isinstance(statement, ast.FunctionDef | ast.ClassDef):
        return names
    for node in ast.walk(statement):
        if isinstance(node, ast.Attribute | ast.Subscript):
            if isinstance(node.ctx, ast.Store):
                names.add(base(node))
        elif isinstance(node, ast.Expr) and isinstance(node.value, ast.Call):
            if isinstance(node.value.func, ast.Attribute):
                names.add(base(node.value.func))
    return names


def base(node):
    """The name at the beginning of `name.attribute[index]`, None if there is none."""
    while isinstance(node, ast.Attribute | ast.Subscript):
        node = node.value
    return node.id if isinstance(node, ast.Name) else None


def read_by(statement):
    """The global names that a statement refers to, also within its functions."""
    names, codes = set(), [compiled(statement)]
    while codes:
        code = codes.pop()
        for step in dis.get_instructions(code):
            if step.opname.endswith(("_NAME", "_GLOBAL", "_FROM_DICT_OR_GLOBALS")):
                names.add(step.argval)
        codes += [part for part in code.co_consts if isinstance(part, types.CodeType)]
    return names
