"""Whatever bytes a data file has and whatever a data set's settings say, the answer is packed rows
or one line for the user: no traceback, no hang.

    pytest tests/surogate/test_data_fuzz.py --hypothesis-profile thorough

tries 20,000 inputs a test instead of a hundred.
"""

import json
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from surogate.config import DatasetConfig, load_config
from surogate.data.dataset import load_data, prepare
from surogate.data.vocabulary import load_tokenizer
from surogate.errors import UserError
from surogate.settings import DATASET_FIELDS
from tests.surogate.inputs.tiny import THINKING_CHAT, model_folder

SECONDS = 20  # an input that takes longer hangs

SCALARS = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-3, 3),
    st.floats(allow_nan=False, allow_infinity=False),
    st.text(max_size=8),
    st.sampled_from(["user", "assistant", "<think>a</think>b", "<|end|>", "\ue0f4", "{}"]),
)
VALUES = st.recursive(
    SCALARS,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3), st.dictionaries(st.text(max_size=4), inner, max_size=3)
    ),
    max_leaves=6,
)


def mostly(good, other=VALUES):
    """Good values, and now and then any."""
    return st.one_of(good, good, good, other)


CALL = st.fixed_dictionaries(
    {},
    optional={
        "type": st.just("function"),
        "function": mostly(
            st.fixed_dictionaries(
                {},
                optional={"name": mostly(st.just("f")), "arguments": mostly(st.just('{"a": 1}'))},
            )
        ),
    },
)
MESSAGE = st.fixed_dictionaries(
    {
        "role": mostly(st.sampled_from(["user", "assistant", "system", "tool", "developer"])),
        "content": mostly(st.text(max_size=12)),
    },
    optional={
        "train": mostly(st.booleans()),
        "weight": mostly(st.sampled_from([0, 1, 0.5])),
        "reasoning_content": mostly(st.text(max_size=5)),
        "tool_calls": mostly(st.lists(CALL, max_size=2)),
    },
)
ROW = st.one_of(
    st.fixed_dictionaries(
        {"messages": mostly(st.lists(mostly(MESSAGE), max_size=4))},
        optional={"tools": VALUES},
    ),
    st.fixed_dictionaries(
        {"instruction": mostly(st.text(max_size=9)), "output": mostly(st.text(max_size=9))},
        optional={"input": VALUES},
    ),
    st.fixed_dictionaries({"text": mostly(st.text(max_size=20))}),
    VALUES,
)
LINE = st.one_of(
    *[ROW.map(lambda row: json.dumps(row, ensure_ascii=False).encode("utf-8", "surrogatepass"))]
    * 5,
    ROW.map(lambda row: json.dumps(row).encode()[:-1]),
    st.binary(max_size=12),
    st.sampled_from([b"", b"\xef\xbb\xbf", b"[" * 5000, b'{"text": "\\ud800"}', b"NaN", b"\x00"]),
)
FILES = st.lists(LINE, max_size=5).map(b"\n".join)
SUFFIXES = st.sampled_from([".jsonl"] * 4 + [".json", ".csv", ".parquet", ".txt"])
FUZZ = settings(
    deadline=SECONDS * 1000,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
)


@cache
def model() -> Path:
    """A model folder that lasts as long as the process."""
    folder = TemporaryDirectory()
    _KEPT.append(folder)
    return model_folder(Path(folder.name), THINKING_CHAT)


_KEPT: list[TemporaryDirectory[str]] = []


@cache
def vocabulary():
    return load_tokenizer(model())


def answered(run):
    """What run returns; None when it raises a UserError of one line."""
    try:
        return run()
    except UserError as error:
        assert str(error) and "\n" not in str(error) and "\r" not in str(error)
        return None


@FUZZ
@given(
    content=FILES,
    suffix=SUFFIXES,
    kind=st.sampled_from(["auto", "text", "instruction", "conversation"]),
    malformed=st.sampled_from(["stop", "skip"]),
    loss_scale=st.sampled_from(["default", "last_round", "all", "thinking_only", "final_only"]),
)
@example(b"a,b\n1,2,3\n", ".csv", "text", "skip", "default")
@example(b'a\n"' + b"x" * 200_000 + b'"\n', ".csv", "auto", "stop", "default")
def test_any_bytes(content, suffix, kind, malformed, loss_scale):
    with TemporaryDirectory() as folder:
        file = Path(folder) / f"rows{suffix}"
        file.write_bytes(content)
        config = DatasetConfig(path=str(file), type=kind, malformed=malformed)
        packed = answered(
            lambda: prepare(
                [config],
                vocabulary(),
                sequence_len=24,
                vocab_size=400,
                cache_dir=Path(folder) / "cache",
                loss_scale=loss_scale,
            )
        )
        if packed is not None:
            assert packed.supervised == np.count_nonzero(packed.labels != -100) > 0
            assert packed.report.tokens <= packed.tokens.size
            assert (packed.labels < 400).all() and (packed.tokens >= 0).all()


KEYS = {
    "path": st.sampled_from(
        ["rows.jsonl", "rows.csv", "missing.jsonl", ".", "", "~", "a/b/c", "\x00"]
    ),
    "type": st.sampled_from(["auto", "text", "instruction", "conversation", "preference"]),
    "split": st.sampled_from(["train", "test", "(", "*"]),
    "malformed": st.sampled_from(["stop", "skip"]),
    "weight": st.floats(-1, 1e300),
    "samples": st.integers(-1, 10**20),
    "system_prompt_type": st.sampled_from(["field", "fixed", None]),
    "prompt_format": st.sampled_from(["{input}{instruction}", "{", "{}", "{0.__class__}"]),
    "message_property_mappings": st.dictionaries(
        st.sampled_from(["role", "content", "tool_calls", "train", "weight", "x"]),
        st.sampled_from(["role", "content", "from", "value", ""]),
    ),
}
COLUMNS = st.sampled_from(["text", "messages", "instruction", "output", "input", "x", "", None])
DATASET = st.fixed_dictionaries(
    {name: mostly(KEYS[name]) for name in ("path", "type")},
    optional={
        name: mostly(KEYS.get(name, COLUMNS))
        for name in DATASET_FIELDS
        if name not in ("path", "type")
    },
)


@FUZZ
@given(
    datasets=mostly(st.lists(mostly(DATASET), max_size=2)),
    ratio=st.sampled_from([0, 0.5, 1, -1, "x"]),
    content=FILES,
)
def test_any_data_set(monkeypatch, datasets, ratio, content):
    with TemporaryDirectory() as folder, monkeypatch.context() as patch:
        patch.chdir(folder)
        patch.setenv("HOME", folder)  # of ~, which may be large
        Path("rows.jsonl").write_bytes(content)
        Path("rows.csv").write_bytes(content)
        table = {
            "model": str(model()),
            "sequence_len": 24,
            "dataloader_num_workers": 1,
            "validation_split_ratio": ratio,
            "datasets": datasets,
        }
        Path("run.yaml").write_text(json.dumps(table))
        config = answered(lambda: load_config("run.yaml"))
        if config is not None:
            answered(lambda: load_data(config, model(), None, 400, Path(folder) / "cache"))
