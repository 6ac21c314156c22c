"""Sphinx's configuration. The sources are in site/_build/source: see make.py."""

import sys
from pathlib import Path

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))

from course import Course  # noqa: E402

course = Course.of_the_environment()

project = "Distributed training, on any machine"
html_title = project
language = "en"
smartquotes = False  # error messages stay what they are
highlight_language = "none"

extensions = ["myst_nb", "sphinx_copybutton", "mathml", "accessible"]
exclude_patterns = ["files"]
html_math_renderer = "mathml"

nb_execution_mode = "off"  # what readers see is what the notebooks have stored
nb_merge_streams = True
nb_render_markdown_format = "myst"  # with tables
nb_code_prompt_show = "Show the imports"
nb_code_prompt_hide = "Hide the imports"
myst_enable_extensions = ["attrs_block", "colon_fence", "deflist", "dollarmath"]
myst_heading_anchors = 3

html_theme = "sphinx_book_theme"
html_theme_options = {
    "navbar_persistent": [],  # the search is in the side bar already
    "footer_content_items": [],
    "use_download_button": False,  # each page has its own, for the notebook as it is
    "use_fullscreen_button": False,
    "use_issues_button": False,
    "repository_url": course.repository,
    "use_repository_button": bool(course.repository),
    "show_navbar_depth": 1,
    "navigation_with_keys": False,
    "pygments_light_style": "a11y-high-contrast-light",
    "pygments_dark_style": "a11y-high-contrast-dark",
}
html_context = {"default_mode": "auto"}  # light or dark, as the reader's system
html_static_path = [str(HERE / "static")]
html_css_files = ["site.css"]
html_favicon = str(HERE / "static" / "icon.svg")
html_copy_source = False
html_show_sourcelink = False
html_show_sphinx = False
html_show_copyright = False

copybutton_selector = (
    "div.cell_input pre, div.highlight-bash pre, div.highlight-python pre, "
    "div.highlight-ipython pre"
)
copybutton_exclude = ".linenos"


def setup(app):
    """The search has what make.py has written beside the pages."""
    search = Path(app.srcdir) / "search.js"
    if search.exists():  # not in the small sites that tests make
        app.config.html_search_scorer = str(search)
