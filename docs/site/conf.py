"""The site of `make docs`: Sphinx with MyST reads docs/, whose API page docs/site/reference.py writes.

The READMEs are the site's first pages, in front of what docs/index.md and docs/index.zh.md say. A link that leads out
of docs/ becomes the path it leads to: the site may lie where the repository does not.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

from sphinx.application import Sphinx
from sphinx.errors import ExtensionError

sys.path.insert(0, str(Path(__file__).parent))
import docstrings

import zero3d

ROOT = Path(__file__).parents[2]
FIRST_PAGES = {"index": "README.md", "index.zh": "README.zh.md"}
SITE_OF = {name: f"{page}.md" for page, name in FIRST_PAGES.items()}
LINK = re.compile(r"\[([^\[\]]*)\]\(([^()\s]+)\)")
PERCENT = re.compile(r"(?<=\d) %(?=.*\|$)", re.M)  # in a table: it stays with its number

project, author, version = "zero3d", "zero3d developers", zero3d.__version__
release = version
extensions = ["myst_parser", "sphinx_copybutton"]
exclude_patterns = ["site"]
myst_heading_anchors = 3
highlight_language = "none"
suppress_warnings = ["misc.highlighting_failure"]  # Pygments reads what a command prints as one
smartquotes = False
html_theme = "furo"
html_title = f"zero3d {version}"
html_static_path = ["static"]
html_css_files = ["site.css"]
html_copy_source = False
html_show_copyright = False


def link(found: re.Match[str], folder: Path) -> str:
    """A link as the site has it: to a page, or the text and the path of what is no page."""
    text, target = found[1], found[2]
    if target.startswith(("http", "#")):
        return found[0]
    path, _, anchor = target.partition("#")
    there = (folder / path).resolve().relative_to(ROOT).as_posix()
    if (ROOT / f"{there}.md").is_file():  # a folder with a page of its own
        there += ".md"
    page = SITE_OF.get(there) or (there.removeprefix("docs/") if there.startswith("docs/") else "")
    if page.endswith(".md"):
        up = "../" * len(folder.relative_to(ROOT / "docs").parts) if folder != ROOT else ""
        title = "" if text in (there, path) else text  # MyST takes the page's own
        return f"[{title}]({up}{page}{'#' + anchor if anchor else ''})"
    return f"`{there}`" if text.strip("`") in (there, there.split("/")[-1]) else f"{text} (`{there}`)"


def read(app: Sphinx, name: str, source: list[str]) -> None:
    """A page's text with the README in front of a first page, and with links as the site has them."""
    folder = (ROOT / "docs" / name).parent
    pages = [(folder, source[0])]
    if name in FIRST_PAGES:
        pages.insert(0, (ROOT, (ROOT / FIRST_PAGES[name]).read_text()))
    text = "\n".join(LINK.sub(lambda found, of=of: link(found, of), text) for of, text in pages)
    source[0] = PERCENT.sub("\N{NO-BREAK SPACE}%", text)


def check(app: Sphinx) -> None:
    """Raises ExtensionError for public names without a docstring."""
    if missing := docstrings.undocumented():
        raise ExtensionError(f"public names without a docstring: {', '.join(missing)}")


def name_language(app: Sphinx, page: str, template: str, context: dict[str, object], doctree: object) -> None:
    """What a page says its language is."""
    if page.endswith(".zh"):
        context["language"] = "zh-Hans"


def setup(app: Sphinx) -> None:
    """Connect the above."""
    app.connect("builder-inited", check)
    app.connect("source-read", read)
    app.connect("html-page-context", name_language)
