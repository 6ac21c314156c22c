"""Links in the course's texts, which lead to files, made to lead to pages of the site."""

import os
import re
from pathlib import Path

LINK = re.compile(r"(?<!!)\[(?P<text>[^\[\]]+)\]\((?P<target>[^()\s]+)\)")
CODE = re.compile(r"(?s)(```.*?```|`[^`\n]+`)")
ELSEWHERE = ("http://", "https://", "mailto:", "#")


def relinked(text, course, origin, page):
    """Markdown whose links lead where they lead in the repository.

    origin: the folder that the text is from. page: the page that it goes to, a path in
    the site's sources. A link to a file that is not on the site leads to the repository,
    if that has an address, or becomes plain text, as do links to lessons and exercises
    that are not written yet. Any other link that leads nowhere stays: Sphinx reports it.
    """

    def replace(link):
        target, _, anchor = link["target"].partition("#")
        if link["target"].startswith(ELSEWHERE):
            return link[0]
        path = Path(os.path.normpath(origin / target))
        if not path.is_relative_to(course.root):
            return link[0]
        address = address_of(path, course, page)
        if address is None:
            return link[0]
        return (
            f"[{link['text']}]({address}{anchor and '#' + anchor})"
            if address
            else link["text"]
        )

    parts = re.split(CODE, text)
    return "".join(
        part if CODE.fullmatch(part) else LINK.sub(replace, part) for part in parts
    )


def address_of(path, course, page):
    """Where a link to a file leads: "" if nowhere, None if the file should exist."""
    shown = course.page_of(path)
    if shown:
        return Path(os.path.relpath(shown, page.parent)).as_posix()
    if path.exists():
        return course.in_the_repository(path)
    later = re.fullmatch(r"(\d\d)_\w+\.ipynb", path.name)
    if later and later[1] not in course.notebooks(path.parent.name):
        return ""
    return None
