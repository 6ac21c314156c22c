"""What is wrong with the pages of a site: a folder of HTML, with links between files."""

import re
from html.parser import HTMLParser
from urllib.parse import unquote, urlsplit

# what a browser fetches when it shows a page, by tag
FETCHED = {
    "audio": "src",
    "embed": "src",
    "iframe": "src",
    "img": "src",
    "link": "href",
    "object": "data",
    "script": "src",
    "source": "src",
    "video": "src",
}
IN_STYLES = re.compile(r"""(?:url\(|@import)\s*["']?((?:https?:)?//[^"')\s]+)""")


class Page(HTMLParser):
    """What a page has: ids, links, images without alternative text, and what it fetches."""

    def __init__(self, path):
        super().__init__()
        self.ids, self.links, self.bare_images, self.fetched = set(), [], [], []
        text = path.read_text()
        self.feed(text)
        self.fetched += IN_STYLES.findall(text)

    def handle_starttag(self, tag, attributes):
        found = {name: value or "" for name, value in attributes}
        self.ids |= {found[name] for name in ("id", "name") if name in found}
        if tag == "a" and "href" in found:
            self.links.append(found["href"])
        if tag == "img" and not found.get("alt", "").strip():
            self.bare_images.append(found.get("src", "")[:60])
        if FETCHED.get(tag) in found:
            self.fetched.append(found[FETCHED[tag]])


def problems(folder):
    """What is wrong with a site, a line each."""
    pages = {path.resolve(): Page(path) for path in pages_in(folder)}
    found = []
    for path, page in pages.items():
        name = path.relative_to(folder.resolve()).as_posix()
        found += [f"{name}: no alternative text: {image}" for image in page.bare_images]
        for address in page.fetched:
            if is_elsewhere(address):
                found.append(f"{name}: fetches {address}")
            elif not leads_somewhere(address, path, pages):
                found.append(f"{name}: there is no {address}")
        found += [
            f"{name}: a link leads nowhere: {link}"
            for link in page.links
            if not is_elsewhere(link) and not leads_somewhere(link, path, pages)
        ]
    for path in sorted(folder.rglob("*.css")):
        for address in IN_STYLES.findall(path.read_text()):
            found.append(f"{path.relative_to(folder)}: fetches {address}")
    return found


def pages_in(folder):
    """The pages of a site. In _static, a theme keeps templates of its own."""
    found = sorted(folder.rglob("*.html"))
    return [path for path in found if path.relative_to(folder).parts[0] != "_static"]


def is_elsewhere(address):
    """Whether an address is on another host."""
    return address.startswith(("http://", "https://", "//"))


def leads_somewhere(address, path, pages):
    """Whether an address within the site, on a page, is that of a file, and of a place
    in it.
    """
    parts = urlsplit(address)
    if parts.scheme in ("data", "mailto", "javascript"):
        return True
    target = (path.parent / unquote(parts.path)).resolve() if parts.path else path
    if not target.is_file():
        return False
    anchor = unquote(parts.fragment)
    return not anchor or target not in pages or anchor in pages[target].ids
