"""The site's hooks find links that lead nowhere, and the site needs no other host."""

import importlib.util
from types import SimpleNamespace

import pytest
import yaml

from tests.support.repository import ROOT


@pytest.fixture(scope="module")
def hooks():
    spec = importlib.util.spec_from_file_location("site_hooks", ROOT / "docs" / "site_hooks.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def write_site(folder, body):
    (folder / "sub").mkdir()
    (folder / "sub" / "other.html").write_text('<h2 id="there">x</h2><a href="../index.html#top">up</a>')
    (folder / "a.js").write_text("")
    (folder / "index.html").write_text(f'<h1 id="top">x</h1>{body}')


@pytest.mark.parametrize(
    ("body", "fault"),
    [
        ('<a href="sub/other.html#there">x</a><a href="#top">x</a><script src="a.js"></script>', None),
        ('<a href="https://example.org">x</a>', None),
        ('<a href="gone.html">x</a>', "index.html leads to gone.html, which does not exist"),
        ('<a href="sub/other.html#gone">x</a>', "index.html leads to sub/other.html#gone, and there is no such anchor"),
        ('<a href="#gone">x</a>', "index.html leads to #gone, and there is no such anchor"),
        ('<img src="gone.png">', "index.html leads to gone.png, which does not exist"),
        ('<script src="https://a.org/b.js"></script>', "index.html loads https://a.org/b.js from another host"),
        ('<link rel="stylesheet" href="//a.org/b.css">', "index.html loads //a.org/b.css from another host"),
    ],
)
def test_a_link_that_leads_nowhere_is_a_fault(hooks, tmp_path, body, fault):
    write_site(tmp_path, body)
    assert hooks.find_faults(tmp_path) == ([fault] if fault else [])


def test_the_head_of_a_page_links_to_the_repository_once_its_address_is_known(hooks, tmp_path, monkeypatch):
    monkeypatch.setattr(hooks, "ROOT", tmp_path)
    (tmp_path / "pyproject.toml").write_text('[project]\nversion = "1.2"\n')
    for line, address in (
        ("", None),
        ("repository-code: https://example.org/kvbench\n", "https://example.org/kvbench"),
    ):
        (tmp_path / "CITATION.cff").write_text(f"version: 1.2\n{line}")
        config = hooks.on_config(SimpleNamespace())
        assert (config.copyright, config.repo_url) == ("kvbench 1.2", address)


def test_search_from_disk_takes_its_script_from_the_site():
    text = (ROOT / "mkdocs.yml").read_text()
    plugins = text.partition("\nplugins:\n")[2].partition("\nmarkdown_extensions:")[0]
    assert "  - offline" in plugins
    [script] = yaml.safe_load(text)["extra"]["polyfills"]
    assert "iframe-worker" in script and (ROOT / "docs" / script).is_file()  # by this name the plugin knows it
