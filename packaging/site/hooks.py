"""Reads the book, which is written for GitHub and needs no tool, as MkDocs expects it."""

import re
from pathlib import Path
from typing import Any

REPORTS = """
The site contains reports of two runs, as `softhca report` writes them: [a lost packet](playground/lost-packet.html) and
[an incast with pauses](playground/incast.html). The [playground](playground/index.html) is one page, too.

## Lesson 1"""
REPOSITORY = "https://github.com/softhca/softhca/blob/main/"
LINK = re.compile(r"^( *)-? ?\[(.+)\]\((\S+)\)$")


def navigation(summary: str) -> list[Any]:
    """The contents: parts are headings, chapters and their sections are lists."""
    parts: list[Any] = []
    chapters = parts
    for line in summary.splitlines()[1:]:
        if line.startswith("# "):
            chapters = []
            parts.append({line[2:]: chapters})
        elif found := LINK.match(line):
            indent, title, path = found.groups()
            if not indent:
                chapters.append({title: path})
                continue
            # A chapter with sections is the first of a list.
            [(chapter, content)] = chapters[-1].items()
            if isinstance(content, str):
                chapters[-1] = {chapter: [content]}
            chapters[-1][chapter].append({title: path})
    return [*parts, {"Source": "https://github.com/softhca/softhca"}]


def on_config(config: Any) -> Any:
    config["nav"] = navigation((Path(config["docs_dir"]) / "SUMMARY.md").read_text())
    return config


def on_files(files: Any, config: Any) -> Any:
    # The first page is that of the site.
    files.get_file_from_path("introduction.md").dest_uri = "index.html"
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    # The marks of tests after the language of a block.
    markdown = re.sub(r"(?m)^( *```\w+) .*$", r"\1", markdown)
    if page.file.src_uri == "playground.md":
        markdown = markdown.replace("\n## Lesson 1", REPORTS, 1)
    # Files outside the book.
    folder = Path(page.file.src_uri).parent

    def outside(found: re.Match[str]) -> str:
        path = Path("docs", folder, found[1])
        parts: list[str] = []
        for part in path.parts:
            parts = parts[:-1] if part == ".." else [*parts, part]
        inside = parts[0] == "docs" and (files.get_file_from_path("/".join(parts[1:])) is not None or "playground" in parts)
        return found[0] if inside else f"]({REPOSITORY}{'/'.join(parts)}{found[2] or ''})"

    return re.sub(r"\]\((?![a-z]+:)([^)#\s]+)(#[^)]*)?\)", outside, markdown)
