"""Prepare pages for the site and check what was built.

Links to files of the repository are replaced, and the two pages that stand in its root are put in. The foot of each
page names kvbench's version.

On a code host a page may link to a source file, such as `../kvbench/cache/layer.py`. The site holds no sources, so
there such a link becomes the file's path as code. A link to a file that does not exist is a warning, which fails the
build. Once CITATION.cff states the repository's address (`repository-code`), the head of each page links to it.

Once the site is built, every link in its HTML must lead to a file of the site and to an anchor in it. No page may load
a script, style or picture from another host, because the site opens from disk and without a network.
"""

import logging
import re
import tomllib
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

import yaml

ROOT = Path(__file__).resolve().parent.parent
LINK = re.compile(r"\[([^\]]+)\]\(\.\./([^)#\s]+)(?:#[^)]*)?\)")
INCLUDED = {"contributing.md": "CONTRIBUTING.md", "changelog.md": "CHANGELOG.md"}

log = logging.getLogger("mkdocs.hooks.site")


def on_config(config):
    """Let the foot of each page name the version, and its head the repository if CITATION.cff states its address."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    config.copyright = f"kvbench {project['version']}"
    config.repo_url = yaml.safe_load((ROOT / "CITATION.cff").read_text()).get("repository-code")
    config.repo_name = "kvbench"
    return config


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


class Page(HTMLParser):
    """The anchors of a page, its links, and the addresses of what it loads."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.anchors, self.links, self.loaded = set[str](), set[str](), set[str]()
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = dict(attrs)
        self.anchors |= {value for name in ("id", "name") if (value := given.get(name))}
        if address := given.get("href" if tag in ("a", "link") else "src"):
            (self.links if tag == "a" else self.loaded).add(address)


def on_post_build(config) -> None:
    """Warn of links and files that lead nowhere, and of what a page loads from another host."""
    for line in find_faults(Path(config.site_dir)):
        log.warning(line)


def find_faults(site: Path) -> list[str]:
    """Return a line for each link that leads nowhere, and for each file that a page loads from another host.

    Args:
        site: The folder of the built site.
    """
    pages = {path: Page(path.read_text(encoding="utf-8")) for path in sorted(site.rglob("*.html"))}
    faults = []
    for path, page in pages.items():
        name = path.relative_to(site)
        if name.name == "404.html":  # its addresses begin at the root of a server
            continue
        for address in sorted(page.links | page.loaded):
            parts = urlsplit(address)
            if parts.scheme or parts.netloc:
                faults += [f"{name} loads {address} from another host"] if address in page.loaded else []
                continue
            target = (path.parent / unquote(parts.path)).resolve() if parts.path else path
            if not target.exists():
                faults.append(f"{name} leads to {address}, which does not exist")
            elif parts.fragment and target in pages and unquote(parts.fragment) not in pages[target].anchors:
                faults.append(f"{name} leads to {address}, and there is no such anchor")
    return faults
