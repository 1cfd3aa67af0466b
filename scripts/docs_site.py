"""A hook of mkdocs (mkdocs.yml). The site holds docs/ and the pictures that its pages show; a link to another file
outside docs/ becomes its text."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File

LINK = re.compile(r"!?\[([^\]]+)\]\(((?:\.\./)+)([^)#]+)(?:#[^)]*)?\)")
ROOT = Path(__file__).parent.parent


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    """The page's text; `page.file.src_uri` is its path below docs/."""
    depth = page.file.src_uri.count("/")

    def inside(link: re.Match[str]) -> str:
        if link[2].count("../") <= depth:
            return link[0]
        if not link[3].endswith(".png"):
            return link[1]
        if files.get_file_from_path(link[3]) is None:
            files.append(File.generated(config, link[3], abs_src_path=str(ROOT / link[3])))
        return f"![{link[1]}]({'../' * depth}{link[3]})"

    return LINK.sub(inside, markdown)
