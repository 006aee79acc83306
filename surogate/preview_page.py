"""A preview as one page of HTML that needs nothing else: no script, no font, no other file.

Whatever comes from the data is escaped, and a content security policy forbids the page to load or
run anything. A token shows its id and position when the pointer rests on it.
"""

from html import escape

from surogate.preview import Document, Piece, Preview, Row

_STYLE = """
:root { color-scheme: light dark; --page: #f5f7f9; --card: #ffffff; --line: #dde3e9;
  --ink: #1b2530; --soft: #5c6b7a; --context: #51606e; --target: #0b5a34; --target-ground: #d6f2e1;
  --special: #8a4b08; --over: #cfe0fb; }
@media (prefers-color-scheme: dark) { :root { --page: #0f141a; --card: #171e26; --line: #2a343f;
  --ink: #e3e9ef; --soft: #93a1af; --context: #a3b0bd; --target: #a5efc5; --target-ground: #123d29;
  --special: #ffb86b; --over: #2c4470; } }
* { box-sizing: border-box; }
body { margin: 0; background: var(--page); color: var(--ink);
  font: 14px/1.45 system-ui, "Segoe UI", Roboto, "DejaVu Sans", sans-serif; }
main { max-width: 1100px; margin: 0 auto; padding: 20px 20px 48px; }
h1 { font-size: 20px; margin: 0 0 12px; overflow-wrap: anywhere; }
h2 { font-size: 15px; margin: 26px 0 8px; }
.facts { display: grid; grid-template-columns: repeat(auto-fit, minmax(200px, 1fr)); gap: 8px;
  margin: 0; }
.facts div, .document, .shares { background: var(--card); border: 1px solid var(--line);
  border-radius: 8px; }
.facts div { padding: 8px 12px; }
dt, .soft { color: var(--soft); font-size: 12px; }
dd { margin: 0; font-variant-numeric: tabular-nums; overflow-wrap: anywhere; }
.shares { margin-top: 12px; padding: 6px 12px; overflow-x: auto; }
table { border-collapse: collapse; width: 100%; font-variant-numeric: tabular-nums; }
th { color: var(--soft); font-size: 12px; font-weight: 500; }
th, td { text-align: right; padding: 3px 0 3px 18px; white-space: nowrap; }
th:first-child, td:first-child { text-align: left; padding-left: 0; }
th:last-child, td:last-child { text-align: left; white-space: normal; }
.document { margin: 0 0 10px; overflow: hidden; }
.document header { display: flex; gap: 14px; padding: 6px 12px;
  border-bottom: 1px solid var(--line); color: var(--soft); font-size: 12px; }
.document header b { color: var(--ink); font-weight: 600; overflow-wrap: anywhere; flex: 1; }
pre { margin: 0; padding: 10px 12px; white-space: pre-wrap; overflow-wrap: anywhere;
  color: var(--context); font: 13px/1.6 ui-monospace, "SF Mono", Menlo, "DejaVu Sans Mono",
  monospace; }
.t { color: var(--target); background: var(--target-ground); padding: 2px 0; }
.s { color: var(--special); font-weight: 600; }
i { font-style: normal; opacity: .55; }
pre span:hover { background: var(--over); }
.key { margin: 14px 0 0; }
.key span { padding: 1px 6px; border-radius: 4px; font-family: ui-monospace, monospace; }
"""


def page(seen: Preview) -> str:
    """The whole page."""
    facts = "".join(f"<div><dt>{escape(n)}</dt><dd>{escape(v)}</dd></div>" for n, v in seen.facts)
    rows = "".join(_row(row, seen.sequence_len) for row in seen.rows)
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'">
<title>{escape(seen.title)}: training rows</title>
<style>{_STYLE}</style>
</head>
<body><main>
<h1>{escape(seen.title)}: what is trained on</h1>
<dl class="facts">{facts}</dl>
{_shares(seen)}
<p class="key soft"><span class="t">learned</span> <span>context</span>
<span class="s">&lt;special&gt;</span> rest on a token for its id and position</p>
{rows}
</main></body>
</html>
"""


def _shares(seen: Preview) -> str:
    if not seen.shares:
        return ""
    head = "".join(f"<th>{escape(name)}</th>" for name in seen.headings)
    body = "".join(
        "<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in share) + "</tr>"
        for share in seen.shares
    )
    return f'<div class="shares"><table><tr>{head}</tr>{body}</table></div>'


def _row(row: Row, sequence_len: int) -> str:
    used = sequence_len - row.padding
    documents = "".join(map(_document, row.documents))
    return (
        f'<h2>Row {row.number} <span class="soft">{len(row.documents)} documents, '
        f"{used:,} of {sequence_len:,} tokens</span></h2>{documents}"
    )


def _document(document: Document) -> str:
    return (
        f'<section class="document"><header><b>{escape(document.source)}</b>'
        f"<span>{document.tokens:,} tokens</span><span>{document.supervised:,} learned</span>"
        f"</header><pre>{''.join(map(_piece, document.pieces))}</pre></section>"
    )


def _piece(piece: Piece) -> str:
    ids = " ".join(map(str, piece.ids))
    kind = " ".join(("t",) * piece.target + ("s",) * piece.special)
    mark = f' class="{kind}"' if kind else ""
    text = escape(piece.text).replace("\n", "<i>↵</i>\n").replace("\t", "<i>⇥</i>\t")
    return f'<span{mark} title="id {ids}, position {piece.position}">{text}</span>'
