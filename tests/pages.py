"""What tests of HTML share: a strict reader of tables."""

from html.parser import HTMLParser

VOID = ("br", "img", "meta", "hr")


class Page(HTMLParser):
    """Rows of all tables of a piece of HTML, as lists of texts; fails on tags that do not match."""

    def __init__(self, text):
        super().__init__()
        self.open, self.rows, self.cells = [], [], None
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag, attrs):
        if tag not in VOID:
            self.open.append(tag)
        if tag == "tr":
            self.rows.append([])
        if tag in ("td", "th"):
            self.rows[-1].append("")

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if self.open and self.open[-1] in ("td", "th"):
            self.rows[-1][-1] += data
