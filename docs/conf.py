"""Sphinx's settings of the site (`make docs`): the Markdown pages of the repository, in the order of the README's table."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from docutils import nodes
from latex2mathml.converter import convert
from sphinx.application import Sphinx
from sphinx.writers.html5 import HTML5Translator

ROOT = Path(__file__).parents[1]
ROW = re.compile(r"^\| ([^|]+?) \| (\[.*)\|$", re.MULTILINE)  # of the README's table of pages
PAGE = re.compile(r"\]\(([\w./-]+)\.md\)")

project, author, copyright = "verl", "", ""
root_doc = "README"
source_suffix = {".md": "markdown"}
include_patterns = [
    "*.md",
    "docs/*.md",
    "docs/config/*.md",
    "docs/history/*.md",
    "examples/*.md",
    "examples/clusters/*.md",
]
exclude_patterns = [".*", "work"]
extensions = ["myst_parser", "sphinxcontrib.mermaid"]
html_math_renderer = "mathml"  # of browsers, without a script from the network
myst_heading_anchors = 6
myst_fence_as_directive = ["math", "mermaid"]
html_theme, html_title = "furo", "verl"
html_show_copyright = html_show_sphinx = html_copy_source = False
html_theme_options = {"navigation_with_keys": True}


def navigation(readme: str) -> str:
    """A hidden table of contents for each row of the README's table of pages, under the name of its task."""
    parts = []
    for task, cell in ROW.findall(readme):
        pages = "\n".join(PAGE.findall(cell))
        parts.append(f"```{{toctree}}\n:hidden:\n:caption: {task}\n\n{pages}\n```")
    return "\n\n".join(parts)


def add_navigation(app: Sphinx, name: str, source: list[str]) -> None:
    if name == root_doc:
        source[0] += f"\n\n{navigation(source[0])}\n"


def widen(app: Sphinx, name: str, template: str, context: dict[str, Any], doctree: object) -> None:
    """Let lines of 120 characters of code fit, and formulas have no scroll bar."""
    style = "<style>.main > .content { width: 58em; max-width: 100% } div.math-wrapper { overflow-y: hidden }</style>"
    context["metatags"] = context.get("metatags", "") + style


def write_index(app: Sphinx, error: Exception | None) -> None:
    """The address of the site leads to the README."""
    page = f'<meta http-equiv="refresh" content="0; url={root_doc}.html">\n'
    (Path(app.outdir) / "index.html").write_text(page, encoding="utf-8")


def visit_formula(translator: HTML5Translator, node: nodes.math | nodes.math_block) -> None:
    display = "block" if isinstance(node, nodes.math_block) else "inline"
    translator.body.append(convert(node.astext(), display=display))
    raise nodes.SkipNode


def setup(app: Sphinx) -> None:
    app.add_html_math_renderer("mathml", (visit_formula, None), (visit_formula, None))
    app.connect("source-read", add_navigation)
    app.connect("html-page-context", widen)
    app.connect("build-finished", write_index)
