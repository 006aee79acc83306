"""Whatever a configuration file and the options over it say, the answer is a configuration, which
can be written down and read again, or one line for the user: no traceback, no hang.

    pytest tests/surogate/test_config_fuzz.py --hypothesis-profile thorough

tries 20,000 inputs a test instead of a hundred.
"""

import json
from pathlib import Path
from tempfile import TemporaryDirectory

from hypothesis import example, given
from hypothesis import strategies as st

from surogate.config import config_hash, config_to_dict, describe, ignored, load_config
from surogate.settings import FIELDS
from surogate.unsupported import GROUPS, KEYS
from tests.surogate.test_config import BASE, IMPOSSIBLE, OTHER
from tests.surogate.test_data_fuzz import DATASET, FUZZ, VALUES, answered, mostly

VERBS = st.sampled_from(["sft", "pt", "run"])
TEXTS = [
    'model = "m"\nlearning_rate = 1e-4\n\n[[datasets]]\npath = "a.jsonl"\ntype = "text"\n',
    "model: m\nmax_steps: 3 # few\nlora: {a: 1}\ndatasets:\n- &a {path: a, type: text}\n- *a\n",
    'model: \'${HOME}\'\nrope_scaling: >-\n  {"type": "linear", "factor": 2}\n<<: {gpus: 1}\n',
    '{"model": "m", "lora_target_modules": ["q"], "datasets": [{"path": "a", "type": "auto"}]}',
]
MARKS = (
    b"[ { } ] : - & *a &a !!int !!timestamp !!binary !!set !!str !!python/name:os.x <<: ? 0x 0b2 "
    b"2024-99-99 1:99:99 .inf -.nan 1e999 null ~ --- ... ${HOME} ${NO_SUCH} \x00 \xef\xbb\xbf \xff "
    b"' \" \\ud800 \\x model datasets model.x=1 [x] [[x]]"
)
PIECES = st.one_of(
    st.binary(max_size=6),
    st.text(max_size=4).map(lambda text: text.encode("utf-8", "surrogatepass")),
    st.sampled_from([mark + b" " for mark in MARKS.split(b" ")]),
    st.sampled_from([b"\t", b"\r", b"? {a: b}\n: ", b"%YAML 9.9\n---\n"]),
    st.sampled_from([b"[" * 500, b"a: {" * 900, b"9" * 5000, b"a." * 3000, b"- " * 3000]),
)
BOMB = b"a: &a [1,1,1,1,1,1,1,1,1]\n" + b"".join(
    b"%c: &%c [%s]\n" % (i + 1, i + 1, b",".join([b"*%c" % i] * 9)) for i in range(97, 108)
)
EDIT = st.tuples(st.floats(0, 1), st.integers(0, 9), PIECES)


def edited(text: str, edits: list[tuple[float, int, bytes]]) -> bytes:
    """A text in which pieces stand in the place of a few bytes."""
    raw = text.encode()
    for share, length, piece in edits:
        at = int(share * len(raw))
        raw = raw[:at] + piece + raw[at + length :]
    return raw


def read(path: Path, **options):
    """Reads a configuration as a verb does, and reads again what a run writes of it."""
    config = answered(lambda: load_config(path, **options))
    if config is None:
        return
    table = config_to_dict(config)
    assert {name.split(".")[0] for name, _, _ in describe(config)} <= FIELDS.keys()
    assert all(len(line.splitlines()) == 1 for line in ignored(config))
    again = path.with_name("again.json")
    again.write_text(json.dumps(table))
    assert config_hash(load_config(again, verb="run", need_data=False)) == config_hash(config)


@FUZZ
@given(
    content=st.one_of(
        st.builds(edited, st.sampled_from(TEXTS), st.lists(EDIT, max_size=3)),
        st.binary(max_size=40),
    ),
    suffix=st.sampled_from([".toml", ".yaml", ".yml", ".json", ".TOML"]),
    verb=VERBS,
)
@example(BOMB, ".yaml", "sft")
@example(b"model: !!timestamp 1", ".yaml", "sft")
@example(b"model: 2024-99-99", ".yaml", "sft")
@example(b"? {a: b}\n: c", ".yaml", "sft")
@example(b"model = " + b"9" * 5000, ".toml", "sft")
def test_any_bytes(content, suffix, verb):
    with TemporaryDirectory() as folder:
        path = Path(folder) / f"run{suffix}"
        path.write_bytes(content)
        read(path, verb=verb)


GOOD = [(name, value) for name, (value, _) in OTHER.items()] + [(k, v) for k, v, _ in IMPOSSIBLE]
KEYED = st.one_of(
    st.sampled_from(GOOD),
    st.sampled_from(GOOD),
    st.tuples(st.sampled_from([*FIELDS, *KEYS, *GROUPS]), VALUES),
    st.tuples(st.text(max_size=6), VALUES),
)
NEEDS = st.sampled_from([needs for _, needs in OTHER.values()])
TABLE = st.builds(
    lambda needs, pairs, datasets: BASE | needs | dict(pairs) | datasets,
    NEEDS,
    st.lists(KEYED, max_size=4),
    st.one_of(st.just({}), st.fixed_dictionaries({"datasets": mostly(st.lists(mostly(DATASET)))})),
)
OVERRIDE = st.one_of(
    st.builds(
        lambda name, value: f"{name}={value if isinstance(value, str) else json.dumps(value)}",
        st.sampled_from([*FIELDS, *KEYS, "datasets.0.path", "datasets.1", "rope_scaling.factor"]),
        st.one_of(VALUES, st.sampled_from([value for _, value in GOOD])),
    ),
    st.text(max_size=12),
    st.sampled_from(
        ["=", "a", ".=1", "datasets.99999999=x", "datasets.²=x", "model.=1", "lora=[["]
    ),
)


@FUZZ
@given(
    table=TABLE,
    overrides=st.lists(OVERRIDE, max_size=2),
    recipe=st.sampled_from([None, "bf16", "fp8_hybrid", "x", "[", ""]),
    verb=VERBS,
    need_data=st.booleans(),
)
@example(BASE, ["use_all_to_all_reduce=null"], None, "sft", True)
def test_any_table(table, overrides, recipe, verb, need_data):
    with TemporaryDirectory() as folder:
        path = Path(folder) / "run.json"
        path.write_text(json.dumps(table))
        read(path, overrides=overrides, recipe=recipe, verb=verb, need_data=need_data)
