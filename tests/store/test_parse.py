"""Documents of strangers: read as json and yaml read them, or refused before they cost memory."""

import json
import resource

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from kvbench.store import parse
from kvbench.store.parse import measure_depth, parse_json, parse_yaml

PLAIN = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda own: st.lists(own, max_size=3) | st.dictionaries(st.text(), own, max_size=3),
    max_leaves=8,
)


@given(PLAIN)
def test_what_json_writes_is_read_again(value):
    assert parse_json(json.dumps(value).encode()) == value


@given(PLAIN)
def test_what_yaml_writes_is_read_again(value):
    text = yaml.safe_dump(value).encode(errors="surrogatepass")
    assert parse_yaml(text) == value or b"&" in text


@given(st.text(st.sampled_from('[]{}"\\a,'), max_size=30))
def test_brackets_within_texts_do_not_count(text):
    assert measure_depth(json.dumps([{text: [text]}]).encode()) == 3


@pytest.mark.parametrize(
    ("content", "line"),
    [
        (b"[" * 200_000, "is nested deeper than 50"),
        (b"[" * 51 + b"]" * 51, "is nested deeper than 50"),
        (b'["\\' + b'\\"' * 1_000_000, "is no JSON"),
        (b"[" + b"[]," * 200_000 + b"1]", "has more than 200000 values"),
        (b'{"a": 1, "a": 2}', "has the key 'a' twice"),
        (b"[NaN]", "contains NaN"),
        (b"[-Infinity]", "contains -Infinity"),
        (b'["\xff"]', "is not in UTF-8"),
        (b"", "is no JSON (Expecting value, line 1 column 1)"),
        (b"9" * 5000, "Exceeds the limit"),
        (b" " * 4_000_001, "has 4000001 bytes, more than 4000000"),
    ],
)
def test_json_beyond_the_limits_is_refused(content, line):
    with pytest.raises(ValueError) as error:
        parse_json(content)
    assert line in str(error.value) and "\n" not in str(error.value)


LAUGHS = "a0: &a0 [x]\n" + "".join(f"a{i + 1}: &a{i + 1} [{','.join([f'*a{i}'] * 9)}]\n" for i in range(30))


@pytest.mark.parametrize(
    ("content", "line"),
    [
        (LAUGHS.encode(), "has an anchor, an alias or a tag"),
        (b"a: !!binary aGk=", "has an anchor, an alias or a tag"),
        (b"a: !!python/object/apply:os.system [ls]", "has an anchor, an alias or a tag"),
        (b"[" * 200_000, "is nested deeper than 50"),
        (b"- " * 200_000, "is nested deeper than 50"),
        (b"? " * 200_000, "is nested deeper than 50"),
        ("".join(f"{' ' * i}a:\n" for i in range(200)).encode(), "is nested deeper than 50"),
        (b"[1,]\n" + b"- 1\n", "is no YAML"),
        (b"a: \x00", "is no YAML"),
        (b"a: \xff", "is no YAML"),
        (b"[" + b"1," * 200_001, "has more than 200000 values"),
    ],
)
def test_yaml_beyond_the_limits_is_refused(content, line):
    with pytest.raises(ValueError) as error:
        parse_yaml(content)
    assert line in str(error.value) and "\n" not in str(error.value)


def test_a_date_is_a_text():
    assert parse_yaml(b"a: 2026-01-01\nb: 12:30:00\n<<: {c: 1}") == {"a": "2026-01-01", "b": 45000, "<<": {"c": 1}}


def test_the_limits_hold_before_memory_is_taken():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for content in (LAUGHS.encode(), b"[" + b"[]," * 1_000_000 + b"1]"):
        for read in (parse_json, parse_yaml):
            with pytest.raises(ValueError):
                read(content)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 50_000  # kilobytes
    assert parse.MOST_BYTES == 4_000_000
