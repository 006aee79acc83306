"""The token that a run teaches to end an answer. A server must stop at it, and a base model's files
do not name it.
"""

from surogate.data.chat import turn_end
from surogate.data.packed import Packed
from surogate.data.vocabulary import Vocabulary
from surogate.errors import UserError

_ROWS = 1024  # whose labels are looked at together


def trained_terminator(vocabulary: Vocabulary, packed: Packed) -> int | None:
    """The id of the token that ends an answer under the chat template, if the rows teach it.

    It is the first marker (added token) that the template writes behind an answer, or the
    end-of-sequence token where the template writes nothing. None if there is no such token, if no
    label of the rows is it, and for a template that refuses a plain question with its answer.
    """
    if vocabulary.template is None:
        return None
    try:
        ending = turn_end(vocabulary.template)
    except UserError:
        return None
    found = _marker(vocabulary, ending) if ending else vocabulary.eos
    starts = range(0, packed.rows if found is not None else 0, _ROWS)
    return found if any((packed.labels[i : i + _ROWS] == found).any() for i in starts) else None


def _marker(vocabulary: Vocabulary, text: str) -> int | None:
    """The first added token of a text, blank ones left out."""
    tokenizer = vocabulary.tokenizer
    added = {i: t for i, t in tokenizer.get_added_tokens_decoder().items() if t.content.strip()}
    ids = tokenizer.encode(text, add_special_tokens=False).ids
    return next((token for token in ids if token in added), None)
