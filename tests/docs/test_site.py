"""The site that docs/build.py makes: every page and public name has its place, and every link leads there."""

import importlib
import importlib.util
import inspect
import re
import sys
from html.parser import HTMLParser

import pytest
from pages import PAGES, PROJECT

import distopt
from launch import finish


def load(path):
    """A Python file of docs/, which is no package."""
    spec = importlib.util.spec_from_file_location(f"docs_{path.stem}", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


build = load(PROJECT / "docs" / "build.py")
NAV = re.findall(r"[\w./]+\.md", (PROJECT / "mkdocs.yml").read_text().partition("\nnav:")[2])
SITE = PROJECT / "build" / "site"
missing = [name for name in ("zensical", "mkdocstrings_handlers") if importlib.util.find_spec(name) is None]


def test_every_page_is_in_the_navigation_once():
    pages = {build.place(page) for page in (*PAGES, *build.ELSEWHERE)}
    pages |= {build.STAGE / "api" / f"{name}.md" for name in build.PUBLIC}
    assert sorted(NAV) == sorted(str(page.relative_to(build.STAGE)) for page in pages)


def with_torch():
    of_torch = "distopt.torch", "distopt.jax"
    return [pytest.param(n, marks=pytest.mark.torch) if n in of_torch else n for n in build.PUBLIC]


def skip_without_jax(page):
    if page == "distopt.jax":
        pytest.importorskip("jax", reason="jax is missing: pip install jax")


@pytest.mark.parametrize("page", with_torch())
def test_every_public_name_has_its_place_in_the_reference(page):
    skip_without_jax(page)
    public, home = importlib.import_module(page), importlib.import_module(build.PUBLIC[page])
    assert all(getattr(public, name) is getattr(home, name) for name in home.__all__)
    text = build.api(page)
    for name in public.__all__:
        linked = re.search(rf"\[`{name}`\]\(([\w.]+)\.md(?:#([\w.]+))?\)", text)
        owner = linked[1] if linked else page
        assert owner in build.PUBLIC
        if not linked or linked[2]:
            assert f"::: {owner}.{name}\n" in build.api(owner), f"{page}.{name} is on no page of the reference"


@pytest.mark.parametrize("page", with_torch())
def test_whatever_a_page_of_the_reference_shows_has_a_docstring(page):
    skip_without_jax(page)
    module = importlib.import_module(build.PUBLIC[page])
    shown = {page: module}
    for name in build.exports(build.PUBLIC[page]):
        thing = getattr(module, name)
        if inspect.isclass(thing) or inspect.isroutine(thing):
            shown[name] = thing
        if inspect.isclass(thing):
            methods = inspect.getmembers(thing, lambda part: inspect.isroutine(part) or isinstance(part, property))
            shown |= {f"{name}.{method}": part for method, part in methods if not method.startswith("_")}
    without = [name for name, thing in shown.items() if not inspect.getdoc(thing)]
    assert not without, f"{page}: no docstring of {', '.join(without)}"


def test_every_public_module_of_distopt_has_a_page():
    modules = [name for name in distopt.__all__ if isinstance(getattr(distopt, name), type(distopt))]
    assert {f"distopt.{name}" for name in modules} <= set(build.PUBLIC)


class Page(HTMLParser):
    """What a page of HTML refers to, and the anchors that it has."""

    def __init__(self, file):
        super().__init__()
        self.links, self.anchors = [], set()
        self.feed(file.read_text())

    def handle_starttag(self, tag, attributes):
        for name, value in attributes:
            if name in ("href", "src", "action", "srcset") and value is not None:
                self.links.append(value)
            elif name in ("id", "name") and tag != "meta":
                self.anchors.add(value)


@pytest.fixture(scope="module")
def site():
    """The pages of the site, built anew, by file."""
    code, output = finish([sys.executable, PROJECT / "docs" / "build.py"], 300)
    assert code == 0, output
    return {file: Page(file) for file in SITE.rglob("*.html")}


@pytest.mark.thorough
@pytest.mark.skipif(bool(missing), reason=f"{' and '.join(missing)} missing: pip install 'distopt[docs]'")
class TestBuilt:
    def test_every_page_of_the_navigation_is_built(self, site):
        assert {SITE / page.replace(".md", ".html") for page in NAV} | {SITE / "404.html"} == set(site)

    def test_links_and_anchors_lead_somewhere(self, site):
        for file, page in site.items():
            for link in page.links:
                path, _, anchor = link.partition("#")
                folder = SITE if path.startswith("/") else file.parent
                target = (folder / path.lstrip("/")).resolve() if path else file
                target = target / "index.html" if target.is_dir() else target
                assert target.is_file(), f"{file.relative_to(SITE)} links to {link}"
                if anchor and target in site:
                    assert anchor in site[target].anchors, f"{file.relative_to(SITE)} links to {link}"

    def test_nothing_is_loaded_from_another_host(self, site):
        for file, page in site.items():
            assert not [link for link in page.links if "://" in link or link.startswith("//")], file
            others = set(re.findall(r"\w+://[\w./-]+", file.read_text())) - {"http://www.w3.org/2000/svg"}
            assert not others, f"{file.relative_to(SITE)} names {others}"

    def test_every_public_name_has_an_anchor(self, site):
        for name in build.PUBLIC:
            for shown in re.findall(r"^::: (.+)$", build.api(name), re.M)[1:]:
                assert shown in site[SITE / "api" / f"{name}.html"].anchors

    def test_sections_of_docstrings_are_read(self, site):
        """As lists and blocks of code, not as text."""
        text = (SITE / "api" / "distopt.compress.html").read_text()
        for title in ("Parameters", "Raises", "Returns", "Examples"):
            assert f"{title}:" in text
        assert not re.search(r"<p>(Args|Raises|Returns|Example):", text)
        assert "<blockquote>\n<blockquote>" not in text
