"""What the documentation's site has beyond the files of docs/; a hook of mkdocs.yml.

Pages of the repository's root and the reference of the contracts become pages. Links to files that are no pages lead to their source
where the variable REPOSITORY is its URL, and are plain text otherwise. Lists are indented as Python-Markdown wants them.
"""

from __future__ import annotations

import os
import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parents[1]
ROOT_PAGES = ("ARCHITECTURE.md", "CHANGELOG.md", "GLOSSARY.md", "SECURITY.md")
LINK = re.compile(r"(!?)\[([^\]]*)\]\(([^)\s#:]+)(#[^)\s]*)?\)")
FOREIGN = re.compile(
    r'<(?:script|img|iframe|source)\b[^>]*\bsrc="(?:https?:)?//[^"]*|<link\b[^>]*\brel="(?:stylesheet|preconnect|preload|icon)"[^>]*\bhref="(?:https?:)?//[^"]*'
)
ITEM = re.compile(r"( *)([-*]|\d+\.) +")
TAB = 4


def on_config(config: Any) -> Any:
    """Lists the decisions in the navigation, in their order."""
    names = sorted(path.name for path in (ROOT / "docs/decisions").glob("*.md"))
    for track in config["nav"]:
        for entries in track.values():
            for entry in entries:
                if isinstance(entry, dict) and entry.get("Decisions") == "decisions":
                    entry["Decisions"] = [f"decisions/{name}" for name in names]
    return config


def on_files(files: Files, config: Any) -> Files:
    """Adds the pages that are not in docs/."""
    for name in ROOT_PAGES:
        files.append(File.generated(config, name, content=(ROOT / name).read_text(encoding="utf-8")))
    contracts = ROOT / "build/protos.md"
    files.append(File.generated(config, "protos.md", content=contracts.read_text(encoding="utf-8")))
    return files


def on_page_markdown(markdown: str, page: Page, config: Any, files: Files) -> str:
    """Rewrites links and lists."""
    home = "" if page.file.src_uri in ROOT_PAGES else "docs/"
    return indented(
        LINK.sub(lambda link: _link(link, home + posixpath.dirname(page.file.src_uri), page, files), markdown)
    )


def on_post_page(output: str, page: Page, config: Any) -> str:
    """Refuses a page that would load something from another host."""
    if found := FOREIGN.search(output):
        raise PluginError(f"{page.file.src_uri} loads something from another host: {found[0]}")
    return output


def _link(link: re.Match[str], folder: str, page: Page, files: Files) -> str:
    picture, text, target, heading = link[1], link[2], link[3], link[4] or ""
    path = posixpath.normpath(posixpath.join(folder, target))
    known = path if path in ROOT_PAGES else path.removeprefix("docs/")
    if files.get_file_from_path(known):
        return f"{picture}[{text}]({posixpath.relpath(known, posixpath.dirname(page.file.src_uri) or '.')}{heading})"
    if not (ROOT / path).exists():
        return link[0]  # reported as a broken link
    if url := os.environ.get("REPOSITORY"):
        return f"{picture}[{text}]({url}/{'raw' if picture else 'blob'}/main/{path}{heading})"
    return text if not picture else f"*{text}*"


def indented(markdown: str) -> str:
    """Returns a page whose lists are indented by four, however wide their signs are; fences keep their text."""
    lines: list[str] = []
    offsets: list[int] = []  # where the text of each open item begins
    moved, in_fence = 0, False
    for line in markdown.split("\n"):
        text = line.lstrip(" ")
        indent, is_fence = len(line) - len(text), text.startswith("```")
        if text and not in_fence:
            while offsets and indent < offsets[-1]:
                offsets.pop()
            more = 0 if is_fence or not offsets else indent - offsets[-1]
            moved = TAB * len(offsets) + more - indent if offsets else 0
        lines.append(" " * (indent + moved) + text if text and indent + moved >= 0 else text)
        if is_fence:
            in_fence = not in_fence
        elif not in_fence and (item := ITEM.match(line)):
            offsets.append(len(item[0]))
    return "\n".join(lines)
