"""A hook of mkdocs (mkdocs.yml): the site holds docs/ alone, so a link to another file becomes its text."""

from __future__ import annotations

import re
from typing import Any

LINK = re.compile(r"!?\[([^\]]+)\]\(((?:\.\./)+)([^)#]+)(?:#[^)]*)?\)")


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """The page's text; `page.file.src_uri` is its path below docs/."""
    depth = page.file.src_uri.count("/")

    def plain(link: re.Match[str]) -> str:
        leaves_docs = link[2].count("../") > depth
        return link[1] if leaves_docs else link[0]

    return LINK.sub(plain, markdown)
