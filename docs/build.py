"""Build the site: ``docs/build.py`` puts its pages together in build/pages and lets Zensical make build/site of them.

The pages are those of docs/, with start.md as the start, the README, the other Markdown files that they link to, and a
page of the API for each public module, which mkdocstrings fills with the docstrings.
"""

import ast
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

PROJECT = Path(__file__).resolve().parents[1]
DOCS = PROJECT / "docs"
STAGE = PROJECT / "build" / "pages"

# Where files outside of docs/ are in the site, and the two whose names there are others.
ELSEWHERE = {
    PROJECT / "README.md": "readme.md",
    DOCS / "start.md": "index.md",
    DOCS / "index.md": "pages.md",
    PROJECT / "CHANGELOG.md": "changelog.md",
    PROJECT / "tests" / "gpu" / "README.md": "guides/first_hour.md",
}
PUBLIC = {  # modules with a page of the API, by the name to import them by, and where they are
    "distopt": "distopt",
    "distopt.optim": "distopt.optim",
    "distopt.optim.schedules": "distopt.optim.schedules",
    "distopt.compress": "distopt.compress",
    "distopt.comm": "distopt.comm",
    "distopt.data": "distopt.data",
    "distopt.torch": "distopt.torch",
    "distopt.jax": "distopt.jax",
    "distopt.trainer": "distopt.trainer",
    "distopt.lab": "distopt.lab",
    "distopt.cost": "distopt.lab.cost",
    "distopt.experiment": "distopt.lab.experiment",
    "distopt.monitor": "distopt.lab.experiment.callbacks",
    "distopt.fit": "distopt.lab.fit",
    "distopt.lab.observe": "distopt.lab.observe",
    "distopt.lab.tape": "distopt.lab.tape",
}
INHERITING = (
    "distopt",
    "distopt.torch",
    "distopt.jax",
    "distopt.trainer",
)  # their classes have methods of bases that are not public
FENCED = re.compile(r"(^```.*?^```$)", re.S | re.M)


def place(file: Path) -> Path:
    """Where a file of the repository is among the pages of the site; ValueError if it is not there."""
    if file in ELSEWHERE:
        return STAGE / ELSEWHERE[file]
    if not file.is_relative_to(DOCS):
        raise ValueError(f"a link must lead to a page of the site, got {file}; add it to ELSEWHERE in docs/build.py")
    return STAGE / file.relative_to(DOCS)


def moved(file: Path) -> str:
    """The text of a page, with links from its place in the site."""

    def link(match: re.Match[str]) -> str:
        path, mark, anchor = match[1].partition("#")
        if not path:
            return match[0]
        target = place((file.parent / path).resolve())
        return f"]({os.path.relpath(target, place(file).parent)}{mark}{anchor})"

    parts = FENCED.split(file.read_text())
    parts[::2] = [re.sub(r"\]\(([^)\s]+)\)", link, text) for text in parts[::2]]
    return "".join(parts)


def exports(module: str) -> dict[str, str]:
    """The public names of a module, and what each is: a name of the module itself, or of one that it imports from."""
    base = PROJECT.joinpath(*module.split("."))
    text = (base / "__init__.py" if base.is_dir() else base.with_suffix(".py")).read_text()
    imported, names = {}, []
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.ImportFrom):
            imported |= {alias.asname or alias.name: f"{node.module}.{alias.name}" for alias in node.names}
        elif isinstance(node, ast.Assign) and getattr(node.targets[0], "id", "") == "__all__":
            names = ast.literal_eval(node.value)
    return {name: imported.get(name, f"{module}.{name}") for name in names}


def api(page: str) -> str:
    """The page of a public module: what has no other page in full, and links to what has one."""
    pages = {module: name for name, module in PUBLIC.items()}
    here, there = [], []
    for name, home in exports(PUBLIC[page]).items():
        module = home.rpartition(".")[0]
        if home in pages:
            there.append(f"[`{name}`]({pages[home]}.md)")
        elif pages.get(module, page) != page:
            there.append(f"[`{name}`]({pages[module]}.md#{pages[module]}.{name})")
        else:
            here.append(f"::: {page}.{name}\n    options: {{inherited_members: {str(page in INHERITING).lower()}}}\n")
    elsewhere = [f"On pages of their own: {', '.join(there)}.\n"] if there else []
    only_text = "    options:\n      members: false\n      show_root_heading: false\n      show_root_toc_entry: false\n"
    return "\n".join([f"# {page}\n", f"::: {page}\n{only_text}", *elsewhere, *here])


def stage() -> None:
    """Put the pages together, anew."""
    shutil.rmtree(STAGE, ignore_errors=True)
    written = {STAGE / "api" / f"{page}.md": api(page) for page in PUBLIC}
    written |= {place(file): moved(file) for file in (*DOCS.rglob("*.md"), *ELSEWHERE)}
    for page, text in written.items():
        page.parent.mkdir(parents=True, exist_ok=True)
        page.write_text(text)
    for asset in (file for kind in ("png", "svg", "css") for file in DOCS.rglob(f"*.{kind}")):
        shutil.copy(asset, place(asset))


def main() -> int:
    """Build the site; a warning is an error, of Zensical and of Griffe, which reads the docstrings."""
    stage()
    command = [sys.executable, "-m", "zensical", "build", "--strict", "--clean", "-f", str(PROJECT / "mkdocs.yml")]
    run = subprocess.run(command, cwd=PROJECT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
    print(run.stdout, end="")
    return run.returncode or int("griffe: " in run.stdout)


if __name__ == "__main__":
    sys.exit(main())
