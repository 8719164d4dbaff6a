"""docs/troubleshooting.md has a line for every text that an exception of `ep` can have."""

import ast
import re
from dataclasses import dataclass
from pathlib import Path

import ep

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "troubleshooting.md"
KINDS = {
    name
    for name, kind in vars(ep).items()
    if isinstance(kind, type) and issubclass(kind, ep.EpError)
}
GAP = "…"
LEAST_KEY = 12
"""Characters of a constant part that tells a text from others; else all of it does."""


@dataclass(frozen=True)
class Message:
    """A text that some line can raise; what is only known then is a gap."""

    kind: str
    text: str
    where: str

    @property
    def key(self):
        return key_of(self.text)

    @property
    def line(self):
        start = "…=… is not allowed: " if self.kind == "ConfigError" else ""
        return f"| `{start}{self.text}` | CAUSE | REMEDY |"


def key_of(text):
    longest = max(text.split(GAP), key=len).strip()
    return longest if len(longest) >= LEAST_KEY else text


def text_of(node):
    """Give the text of an expression, its variable parts as gaps."""
    match node:
        case ast.Constant(value=str(words)):
            return words
        case ast.JoinedStr(values=parts):
            return "".join(map(text_of, parts))
        case ast.BinOp(op=ast.Add(), left=left, right=right):
            return text_of(left) + text_of(right)
    return GAP


def messages_of(path):
    for node in ast.walk(ast.parse(path.read_text())):
        if not isinstance(node, ast.Call):
            continue
        named = {part.id for part in ast.walk(node.func) if isinstance(part, ast.Name)}
        kinds = sorted(named & KINDS)
        if kinds == ["EpTimeout"]:
            # It makes its text of fields, in one place.
            continue
        if ast.unparse(node.func) == "super().__init__" and "waited_s" in ast.unparse(node):
            kinds = ["EpTimeout"]
        if not kinds or not node.args:
            continue
        text = text_of(node.args[-1] if kinds == ["ConfigError"] else node.args[0])
        text = re.sub(f"{GAP}+", GAP, " ".join(text.split()))
        if text != GAP:
            yield Message(kinds[0], text, f"{path.relative_to(ROOT)}:{node.lineno}")


def all_messages():
    return [
        message for path in sorted((ROOT / "src").rglob("*.py")) for message in messages_of(path)
    ]


def c_messages():
    """Texts of the exported library, by what its sources call when something fails."""
    for path in sorted((ROOT / "src/ep/export/c").glob("*.c")):
        calls = re.findall(
            r"\b(?:fail\(\s*EP_\w+|snprintf\(trouble, sizeof trouble),\s*((?:\"[^\"]*\"\s*)+)",
            path.read_text(),
        )
        for words in calls:
            text = "".join(re.findall(r'"([^"]*)"', words))
            text = re.sub(r"%#?[.0-9]*(?:ll|z)?[a-z]", GAP, text)
            if text != GAP:
                yield text


def sections():
    """Texts of the page by kind of exception, of the first column of each table."""
    found: dict[str, list[str]] = {}
    rows: list[str] = []
    for line in PAGE.read_text().splitlines():
        if line.startswith("## "):
            rows = found.setdefault(line.removeprefix("## ").strip("`"), [])
        elif line.startswith("| `"):
            rows.append(line.split("` |")[0].removeprefix("| `").replace(r"\|", "|"))
    return found


def test_every_text_is_explained():
    page = sections()
    missing = {
        (
            message.kind,
            message.key,
        ): f"{message.where}: add under '## `{message.kind}`':\n{message.line}"
        for message in all_messages()
        if not any(message.key in text for text in page.get(message.kind, ()))
    }
    assert not missing, f"docs/{PAGE.name} lacks lines\n" + "\n".join(missing.values())


def test_every_line_explains_a_text():
    messages = all_messages()
    stale = [
        f"under '## `{kind}`' remove: {text}"
        for kind, texts in sections().items()
        if kind in KINDS
        for text in texts
        if not any(message.kind == kind and message.key in text for message in messages)
    ]
    assert not stale, f"docs/{PAGE.name} has lines for texts that are gone\n" + "\n".join(stale)


def test_the_exported_library_is_explained():
    texts, page = list(c_messages()), sections()["What the exported library says"]
    assert len(set(texts)) > 25
    missing = [text for text in texts if not any(key_of(text) in line for line in page)]
    assert not missing
    stale = [line for line in page if not any(key_of(text) in line for text in texts)]
    assert not stale


def test_every_line_has_a_cause_and_a_remedy():
    for line in PAGE.read_text().splitlines():
        if line.startswith("| `"):
            _, _, cause, remedy, _ = re.split(r"(?<!\\)\|", line)[:5]
            assert min(len(cause.split()), len(remedy.split())) >= 2, line
            assert "CAUSE" not in line, line


def test_many_texts_are_found():
    messages = all_messages()
    assert {message.kind for message in messages} == KINDS
    assert len(messages) > 80
