"""How Sphinx makes the site; it runs on the folder that `generate.py` writes, not on this one."""

from tito_audit.version import VERSION

project = "tito-audit"
author = "the authors of tito-audit"
version = release = VERSION
copyright = "the authors of tito-audit, Apache-2.0"

extensions = ["myst_parser"]
myst_enable_extensions = ["colon_fence", "deflist", "fieldlist"]
myst_heading_anchors = 4
# Docstrings speak of <think> and <tool_call>: text, not HTML.
myst_disable_syntax = ["html_block", "html_inline"]
myst_links_external_new_tab = True

# Flags are written with two hyphens.
smartquotes = False
toc_object_entries_show_parents = "hide"
python_use_unqualified_type_names = True
python_maximum_signature_line_length = 80
# Every name of this package has to be found; those of others are on other sites.
nitpick_ignore_regex = [("py:.*", r"(?!tito_audit).*")]

html_theme = "furo"
html_title = f"tito-audit {VERSION}"
html_static_path = ["_static"]
# Pages that were, each with the way to where it stands now.
html_extra_path = ["_moved"]
html_css_files = ["site.css"]
html_show_sphinx = False
html_copy_source = False
html_theme_options = {
    "light_css_variables": {"color-brand-primary": "#1f5fa8", "color-brand-content": "#1f5fa8"},
    "dark_css_variables": {"color-brand-primary": "#8ab8ee", "color-brand-content": "#8ab8ee"},
}
pygments_style = "friendly"
pygments_dark_style = "github-dark"
