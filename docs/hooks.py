"""Makes a site of the repository's pages as they are: mkdocs.yml names this file as a hook.

Links in the pages are those of a checkout, relative to each file. Pages outside docs/ become pages
of the site, and every other file that a page links to is copied. A link to a folder becomes text.
"""

import os.path
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parents[1]
PAGES = {  # path in the repository -> in the site
    "README.md": "index.md", "CHANGELOG.md": "changelog.md", "CONTRIBUTING.md": "contributing.md",
    "SECURITY.md": "security.md", "experiments/LOG.md": "log.md", "kernels/README.md": "kernels.md"}
HOMES = {uri: path for path, uri in PAGES.items()}
# docs/check.py reads when to run a block from its title; a reader wants what it takes.
TITLE = re.compile(r'^(```\w+ title=")(?:full|by hand): ', re.M)
LINK = re.compile(r"(?<!`)(!?)\[([^\[\]]*(?:\[[^\[\]]*\][^\[\]]*)*)\]\(([^()\s#:]+)(#[^()\s]*)?\)")


def on_files(files: Files, config: Any) -> Files:
    """Adds the pages of PAGES, and the files that any page links to."""
    for path, uri in PAGES.items():
        files.append(File.generated(config, uri, abs_src_path=str(ROOT / path)))
    pages = [file for file in files if file.is_documentation_page()]
    linked = {target for page in pages for target in links(page)}
    for target in sorted(linked):
        if (ROOT / target).is_file() and site_uri(target) not in files.src_uris:
            files.append(File.generated(config, site_uri(target), abs_src_path=str(ROOT / target)))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Returns the page with links and titles of blocks as the site has them."""
    uri = page.file.src_uri

    def rewrite(match: re.Match[str]) -> str:
        image, text, link, anchor = match.groups()
        target = resolve(uri, link)
        if (ROOT / target).is_dir():
            return text
        there = os.path.relpath(site_uri(target), os.path.dirname(uri) or ".")
        return f"{image}[{text}]({there}{anchor or ''})"

    return TITLE.sub(r"\1", LINK.sub(rewrite, markdown))


def links(file: File) -> set[str]:
    """Returns the paths in the repository of what a page links to."""
    return {resolve(file.src_uri, link) for _, _, link, _ in LINK.findall(file.content_string)}


def resolve(uri: str, link: str) -> str:
    """Returns the path in the repository of a link of the page at `uri`."""
    return os.path.normpath(os.path.join(os.path.dirname(HOMES.get(uri, f"docs/{uri}")), link))


def site_uri(path: str) -> str:
    """Returns where the site has a file of the repository."""
    return PAGES.get(path) or (path.removeprefix("docs/") if path.startswith("docs/")
                               else f"repository/{path}")
