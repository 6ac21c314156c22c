"""Formulas as MathML, which browsers draw themselves: no script, no font, no request."""

from docutils.nodes import SkipNode
from latex2mathml.converter import convert


def mathml(latex, display):
    """A formula in LaTeX as MathML. display: "inline" or "block"."""
    return convert(latex, display=display).replace(r"\_", "_")


def inline(translator, node):
    translator.body.append(mathml(node.astext(), "inline"))
    raise SkipNode


def block(translator, node):
    formula = mathml(node.astext(), "block")
    translator.body.append(f'<div class="formula" tabindex="0">{formula}</div>\n')
    raise SkipNode


def setup(app):
    app.add_html_math_renderer("mathml", (inline, None), (block, None))
    return {"parallel_read_safe": True, "parallel_write_safe": True}
