"""Prepare pages for the site: links to files of the repository, and the two pages that stand in its root.

On a code host a page may link to a source file, such as `../kvbench/cache/layer.py`. The site holds no sources, so
there such a link becomes the file's path as code. A link to a file that does not exist is a warning, which fails the
build.
"""

import logging
import re
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
LINK = re.compile(r"\[([^\]]+)\]\(\.\./([^)#\s]+)(?:#[^)]*)?\)")
INCLUDED = {"contributing.md": "CONTRIBUTING.md", "changelog.md": "CHANGELOG.md"}

log = logging.getLogger("mkdocs.hooks.site")


def on_page_markdown(markdown: str, page, **_) -> str:
    """Return the page's Markdown as the site shows it."""
    name = page.file.src_uri
    if name in INCLUDED:
        text = (ROOT / INCLUDED[name]).read_text()
        markdown = re.sub(r"\]\((?!https?://|#)", "](../", text).replace("](../docs/", "](")
        for page_name, file in INCLUDED.items():
            markdown = markdown.replace(f"](../{file})", f"]({page_name})")
    return LINK.sub(lambda link: replace_link(link, name), markdown)


def replace_link(link: re.Match, page: str) -> str:
    """Return the text that takes the place of a link out of docs/: the path as code, in front of it other words."""
    words, path = link[1], link[2]
    if not (ROOT / path).exists():
        log.warning("%s links to %s, which does not exist", page, path)
    plain = words.strip("`")
    return f"`{path}`" if plain in path else f"{words} (`{path}`)"
