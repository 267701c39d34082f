"""Documentation -> prose: takes the markup, the navigation and the code out of HTML, plain text, Info, POD and dictionaries, and what repeats out of a
corpus. What gap.py stands on. ASCII rules only: the result must not depend on the Unicode tables of a Python version."""

import hashlib
import html
import re

from corpus import split_dictionary

MIN_WORDS = 8                    # a paragraph of fewer is a caption, a menu entry or a table cell
MIN_DOCUMENT = 400               # bytes; less of a page is what was left of an index or of an API table
MIN_ENTRY = 80                   # bytes of a dictionary's entry: less is a cross-reference
MIN_REPEAT = 40                  # letters from which on a paragraph may stand in the corpus once only

# The most frequent function words: some 40 % of English prose, a few per cent of code, tables, lists of names and other languages.
FUNCTION_WORDS = frozenset("""the of and to a in is that it for as with be are on by this or an not from at which if can have will but was you has when
    all no its they may one their there been more other any than should must only used does do would such use we also each these into he his so were
    what who had them her she how where then some because both between could""".split())
WORD = re.compile(r"[A-Za-z]+(?:'[a-z]+)?")
CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f]")


def function_share(words):
    return sum(map(FUNCTION_WORDS.__contains__, map(str.lower, words))) / len(words) if words else 0.0


def is_prose(paragraph):
    """Sentences, by their words: enough of them, of the frequent ones a share that lists and code do not reach, and few signs."""
    words = WORD.findall(paragraph)
    if len(words) < MIN_WORDS or function_share(words) < 0.15:
        return False
    solid = paragraph.replace(" ", "")
    return sum(map(len, words)) >= 0.7 * len(solid) and "...." not in paragraph and ". . ." not in paragraph   # leaders: a table of contents


def keep_prose(marked):
    """Takes [(is a heading, paragraph)]. Keeps paragraphs of prose, and a heading where one follows it."""
    kept, heading = [], None
    for is_heading, paragraph in marked:
        if is_heading:
            heading = paragraph
        elif is_prose(paragraph):
            if heading:
                kept.append(heading)
            kept.append(paragraph)
            heading = None
    return kept


def squeeze(text):
    return " ".join(CONTROL.sub(" ", text).split())


# ----------------------------------------------------------------------------------------------------------------------
# HTML, and XML of documentation (Mallard pages, DocBook)

COMMENT = re.compile(r"<!--.*?(?:-->|\Z)|<(script|style)\b.*?</\1\s*>|<!\[CDATA\[|\]\]>|<[!?][^>]*>", re.S | re.I)
TAG = re.compile(r"<(/?)([A-Za-z][\w:.-]*)([^<>]*)>")
DROPPED = frozenset("script style pre head nav header footer noscript svg math aside form select button textarea title-info screen programlisting synopsis "
                    "info revision cmdsynopsis code-block".split())
BLOCKS = frozenset("p div li dt dd td th tr table ul ol dl blockquote section article body html caption figure center hr main h1 h2 h3 h4 h5 h6 title "
                   "para simpara listitem entry item page note steps list terms varlistentry term note warning tip important".split())
HEADINGS = frozenset("h1 h2 h3 h4 h5 h6 title".split())
CLASSED = frozenset("div ul ol table section span a dl".split())
# Whole words of a class or id: wy-nav-content is no navigation.
NAVIGATION = re.compile(r"""(?:class|id)\s*=\s*["']?[^"'>]*(?<![\w-])(?:navheader|navfooter|navigation|nav|navbar|sphinxsidebar|related|toc|toctree-wrapper|tocset|sidebar|
    breadcrumbs?|wy-breadcrumbs|wy-menu|menu|footer|header|highlight(?:-\w+)?|headerlink|contents\s+topic|indextable|genindextable|navset(?:top|bottom)|
    sourceCode|literal-block|programlisting|screen|synopsis|example|lisp|smalllisp|smallexample|SCodeFlow|memproto|fragment)(?![\w-])""", re.X | re.I)


def html_paragraphs(text):
    marked, parts = [], []
    skipped, depth, is_heading, at = None, 0, False, 0

    def flush():
        paragraph = squeeze(html.unescape("".join(parts)))
        if paragraph:
            marked.append((is_heading, paragraph))
        parts.clear()

    text = COMMENT.sub("", text)
    for tag in TAG.finditer(text):
        if not skipped:
            parts.append(text[at:tag.start()])
        at = tag.end()
        closing, name, attributes = tag[1], tag[2].lower(), tag[3]
        if skipped:
            if name == skipped and not attributes.endswith("/"):
                depth += -1 if closing else 1
                if not depth:
                    skipped = None
            continue
        dropped = name in DROPPED or (attributes and name in CLASSED and NAVIGATION.search(attributes))
        if dropped:
            if name not in ("span", "a"):                # these stand within a paragraph
                flush()
            if not closing and not attributes.endswith("/"):
                skipped, depth = name, 1
        elif name in BLOCKS:
            flush()
            is_heading = name in HEADINGS and not closing
        elif name == "br":
            parts.append(" ")
    if not skipped:
        parts.append(text[at:])
    flush()
    return keep_prose(marked)


# ----------------------------------------------------------------------------------------------------------------------
# Plain text

FOOTER = re.compile(r"\n[^\n]*\[Page [^\]\n]*\][^\n]*\s*\Z")
HEADER = re.compile(r"\A\s*(?:RFC|Internet|INTERNET)[^\n]*\n")
HEADING = re.compile(r"(?:[0-9A-Z]+(?:\.[0-9]+)*\.?\s+)?[A-Z][A-Za-z][^.;:=|<>{}]{0,70}$")
FENCE = re.compile(r"^(```).*?^\1[^\n]*$", re.S | re.M)


def join_pages(text):
    """Takes the footers and headers of an RFC's pages out. A sentence that the break cut goes on: no full stop before it, a small letter after."""
    first, *rest = text.split("\x0c")
    parts = [FOOTER.sub("\n", first).rstrip()]
    for page in rest:
        page = FOOTER.sub("\n", HEADER.sub("", page))
        cut = parts[-1][-1:] not in ".:?!" and re.match(r"\s*[a-z]", page)
        parts += ["\n" if cut else "\n\n", page.lstrip("\n").rstrip()]
    return "".join(parts)


def text_paragraphs(text):
    text = FENCE.sub("", join_pages(text.replace("\r\n", "\n")))
    marked = []
    for block in re.split(r"\n[ \t]*\n", text):
        if re.search(r"[+|][-=]{3,}|[-=]{3,}[+|>]|\|.*\|", block):     # a drawing or a table
            continue
        paragraph = squeeze(re.sub(r"(?m)^[ \t]*[-=~^*#]{3,}[ \t]*$", "", block))
        if paragraph:
            marked.append((len(paragraph) <= 80 and HEADING.match(paragraph) is not None, paragraph))
    return keep_prose(marked)


def info_paragraphs(text):
    """GNU Info: nodes begin with a line of pointers; menus and the tag table go."""
    nodes = []
    for node in text.split("\x1f"):
        if node.lstrip("\n").startswith(("Tag Table:", "Indirect:", "End Tag Table", "Local Variables")):
            continue
        node = re.sub(r"\A\s*File: [^\n]*\n", "", node)
        node = re.sub(r"(?m)^\* .*?(?:::|:[^\n]*\.)[^\n]*(?:\n[ ]{10,}[^\n]*)*$|^\* Menu:.*$", "", node)
        node = re.sub(r"\*[Nn]ote\s+([^:]+)::", r"\1", node)
        nodes.append(re.sub(r"(?m)^[*=.-]{3,}$", "\n", node))          # the line under a title, so that the title stands alone
    return text_paragraphs("\n\n".join(nodes))


def pod_paragraphs(text):
    """Perl's POD: commands at the start of a line, code in indented paragraphs, X<...> within the text."""
    blocks = []
    for block in text.replace("\r\n", "\n").split("\n\n"):
        if block.startswith(("=head", "=item")):
            block = block.partition(" ")[2]
        elif block[:1] in ("=", " ", "\t"):
            continue
        for _ in range(3):                               # they nest
            block = re.sub(r"\b[A-Z](?:<<+ (.*?) >>+|<([^<>]*)>)", lambda m: m[1] or m[2] or "", block)
        blocks.append(block)
    return text_paragraphs("\n\n".join(blocks))


# ----------------------------------------------------------------------------------------------------------------------
# Dictionaries, code

SOURCE_MARK = re.compile(r"\s*\[(?:1913 Webster|PJC|WordNet 1\.5|Webster 1913 Suppl\.|[A-Z][A-Za-z .]{1,20}\s*\+?PJC|RP|MW10|AS|Century Dict\.(?: 1906)?)\]")
UNSPACED_ENTRY = re.compile(r"\n(?=[^ \n][^\n]*\n {4}(?:n|v|adj|adv) +[0-9]*: )")    # WordNet has no blank line between entries
SENSE = re.compile(r"\n(?=\s+(?:(?:n|v|adj|adv)\s+)?[0-9]+: )")


def dictionary_documents(text):
    """dictd: an entry is a document and each of WordNet's senses a paragraph, for every synonym repeats them."""
    text = UNSPACED_ENTRY.sub("\n\n", text)
    for entry in split_dictionary("dictionary", [text.encode("utf-8")]):
        entry = entry.decode("utf-8")
        if entry.startswith(("00-database", "00database")):
            continue
        entry = SOURCE_MARK.sub("", entry).replace("{", "").replace("}", "")
        head, _, body = entry.partition("\n")
        if len(head) >= 50:                              # not a headword but the first line of the text
            head, body = "", entry
        paragraphs = [squeeze(p) for p in SENSE.split("\n" + body)]
        yield [p for p in (squeeze(head), *paragraphs) if p]


def code_documents(text):
    """Source as it is. A chunk between blank lines is its paragraph; white space is kept."""
    if not CONTROL.search(text.replace("\x0c", "")):
        yield [p.strip("\n") for p in re.split(r"\n(?:[ \t]*\n)+", text.replace("\x0c", "")) if p.strip()]


CLEANERS = {
    "html": lambda text: [html_paragraphs(text)],
    "text": lambda text: [text_paragraphs(text)],
    "info": lambda text: [info_paragraphs(text)],
    "pod": lambda text: [pod_paragraphs(text)],
    "dict": lambda text: list(dictionary_documents(text)),
    "code": lambda text: list(code_documents(text)),
}


# ----------------------------------------------------------------------------------------------------------------------
# What repeats

class Deduplicator:
    """Joins paragraphs into documents, each paragraph once in the whole corpus: the first stays. Paragraphs are the same if their letters are, so that
    a date or a number makes no difference. A document of which too little is left goes."""

    def __init__(self, least_letters=MIN_REPEAT):
        self.seen, self.least_letters = set(), least_letters
        self.documents = self.short = self.foreign = self.repeated = self.repeated_bytes = 0

    def key(self, paragraph):
        letters = re.sub(r"[^a-z]+", "", re.sub(r"^(?:(?:n|v|adj|adv) )?[0-9]*: ", "", paragraph).lower())
        return hashlib.blake2b(letters.encode("ascii"), digest_size=8).digest() if len(letters) >= self.least_letters else None

    def document(self, paragraphs, least, english=True):
        """-> the document's bytes, or None"""
        kept, heading = [], False
        for paragraph in paragraphs:
            key = self.key(paragraph)
            if key in self.seen:
                if english and heading:                  # of what has just gone
                    kept.pop()
                heading = False
                self.repeated += 1
                self.repeated_bytes += len(paragraph)
                continue
            if key:
                self.seen.add(key)
            kept.append(paragraph)
            heading = key is None and len(WORD.findall(paragraph)) < MIN_WORDS
        text = "\n\n".join(kept)
        if len(text) < least:
            self.short += 1
            return None
        if english and function_share(WORD.findall(text)) < 0.25:
            self.foreign += 1
            return None
        self.documents += 1
        return (text + "\n").encode("utf-8")
