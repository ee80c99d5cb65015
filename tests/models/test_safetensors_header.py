"""The header check: the official package's verdict, and errors that name file and tensor."""

import json
import struct
import tracemalloc
import warnings
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors import SafetensorError, deserialize

from linnet.models.safetensors_header import DTYPE_BITS, CheckpointError, read_header

GOOD = '{"dtype":"F32","shape":[1],"data_offsets":[0,4]}'


def packed(header: str | bytes, data: bytes = b"\0" * 4, length: int | None = None) -> bytes:
    raw = header.encode("utf-8", "surrogatepass") if isinstance(header, str) else header
    return struct.pack("<Q", len(raw) if length is None else length) + raw + data


def official(content: bytes) -> dict[str, tuple[str, list[int], int]] | None:
    try:
        return {k: (v["dtype"], v["shape"], len(v["data"])) for k, v in deserialize(content)}
    except SafetensorError:
        return None


def ours(path: Path, content: bytes) -> dict[str, tuple[str, list[int], int]] | None:
    path.write_bytes(content)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            header = read_header(path)
    except CheckpointError as error:
        if str(path) not in str(error):
            raise
        return None
    return {k: (e.dtype, list(e.shape), e.stop - e.start) for k, e in header.items()}


def holding(value: str, name: str = "a") -> str:
    """A header with one tensor."""
    return f'{{"{name}":{value}}}'


def entry(text: str) -> str:
    return holding("{" + text + "}")


ACCEPTED = {
    "spaces after": holding(GOOD) + "   ",
    "spaces before": "  " + holding(GOOD),
    "metadata": f'{{"__metadata__":{{"format":"pt"}},"a":{GOOD}}}',
    "metadata null": f'{{"__metadata__":null,"a":{GOOD}}}',
    "empty name": holding(GOOD, ""),
    "escaped name": holding(GOOD, "\\u00e9"),
    "scalar": entry('"dtype":"F32","shape":[],"data_offsets":[0,4]'),
    "bf16": entry('"dtype":"BF16","shape":[2],"data_offsets":[0,4]'),
    "fp8": entry('"dtype":"F8_E4M3","shape":[4],"data_offsets":[0,4]'),
    "fp4": entry('"dtype":"F4","shape":[8],"data_offsets":[0,4]'),
    "unknown field": entry('"dtype":"F32","x":[1,{}],"shape":[1],"data_offsets":[0,4]'),
    "fields as a list": '{"a":["F32",[1],[0,4]]}',
    "any order": '{"b":{"dtype":"U8","shape":[2],"data_offsets":[2,4]},'
    '"a":{"dtype":"U8","shape":[2],"data_offsets":[0,2]}}',
    "empty tensors": f'{{"b":{{"dtype":"U8","shape":[0],"data_offsets":[4,4]}},"a":{GOOD},'
    '"c":{"dtype":"U8","shape":[2,0],"data_offsets":[0,0]}}',
}
REFUSED = {
    "too few bytes": entry('"dtype":"F32","shape":[1000,1000],"data_offsets":[0,4]'),
    "begin after end": entry('"dtype":"F32","shape":[1],"data_offsets":[4,0]'),
    "beyond the file": entry('"dtype":"F32","shape":[2],"data_offsets":[0,8]'),
    "overlap": f'{{"a":{GOOD},"b":{{"dtype":"U8","shape":[2],"data_offsets":[2,4]}}}}',
    "hole": '{"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]},'
    '"b":{"dtype":"U8","shape":[2],"data_offsets":[2,4]}}',
    "bytes left over": entry('"dtype":"U8","shape":[2],"data_offsets":[0,2]'),
    "negative offset": entry('"dtype":"F32","shape":[1],"data_offsets":[-4,0]'),
    "negative shape": entry('"dtype":"F32","shape":[-1],"data_offsets":[0,4]'),
    "minus zero": entry('"dtype":"F32","shape":[1],"data_offsets":[-0,4]'),
    "float shape": entry('"dtype":"F32","shape":[1.0],"data_offsets":[0,4]'),
    "true as a size": entry('"dtype":"F32","shape":[true],"data_offsets":[0,4]'),
    "three offsets": entry('"dtype":"F32","shape":[1],"data_offsets":[0,4,4]'),
    "unknown dtype": entry('"dtype":"F33","shape":[1],"data_offsets":[0,4]'),
    "no offsets": entry('"dtype":"F32","shape":[1]'),
    "field twice": entry('"dtype":"F32","dtype":"F32","shape":[1],"data_offsets":[0,4]'),
    "product over 2^64": entry(
        '"dtype":"U8","shape":[4294967296,4294967296,0],"data_offsets":[0,0]'
    ),
    "bits over 2^64": entry('"dtype":"F64","shape":[2305843009213693952],"data_offsets":[0,0]'),
    "size over 2^64": entry('"dtype":"U8","shape":[18446744073709551616],"data_offsets":[0,0]'),
    "metadata of numbers": f'{{"__metadata__":{{"x":1}},"a":{GOOD}}}',
    "metadata twice": f'{{"__metadata__":{{}},"__metadata__":{{}},"a":{GOOD}}}',
    "cut JSON": holding(GOOD)[:-1],
    "a list": "[]",
    "not UTF-8": holding(GOOD).encode().replace(b"a", b"\xff", 1),
    "byte order mark": "\ufeff" + holding(GOOD),
    "lone surrogate": holding(GOOD, "\\ud800"),
    "lone surrogate inside": entry('"dtype":"F32","x":"\\ud800","shape":[1],"data_offsets":[0,4]'),
    "NaN": entry('"dtype":"F32","x":NaN,"shape":[1],"data_offsets":[0,4]'),
    "infinite": entry('"dtype":"F32","x":1e999,"shape":[1],"data_offsets":[0,4]'),
    "nested too deep": entry(
        f'"dtype":"F32","x":{"[" * 126 + "]" * 126},"shape":[1],"data_offsets":[0,4]'
    ),
    "nested far too deep": entry(
        f'"dtype":"F32","x":{"[" * 90000},"shape":[1],"data_offsets":[0,4]'
    ),
}


@pytest.mark.parametrize("header", ACCEPTED.values(), ids=ACCEPTED.keys())
def test_accepts_what_the_official_package_accepts(tmp_path: Path, header: str):
    expected = official(packed(header))
    assert expected is not None
    assert ours(tmp_path / "m.safetensors", packed(header)) == expected


@pytest.mark.parametrize("header", REFUSED.values(), ids=REFUSED.keys())
def test_refuses_what_the_official_package_refuses(tmp_path: Path, header: str | bytes):
    assert official(packed(header)) is None
    assert ours(tmp_path / "m.safetensors", packed(header)) is None


@pytest.mark.parametrize("length", [0, 1, 10**6, 10**9, 2**60, 2**64 - 1])
def test_refuses_a_lying_header_length(tmp_path: Path, length: int):
    content = packed(holding(GOOD), length=length)
    assert official(content) is None
    tracemalloc.start()
    assert ours(tmp_path / "m.safetensors", content) is None
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 1 << 20


@pytest.mark.parametrize("size", range(12))
def test_refuses_a_file_of_a_few_bytes(tmp_path: Path, size: int):
    content = packed(holding(GOOD))[:size]
    assert official(content) is None
    assert ours(tmp_path / "m.safetensors", content) is None


def test_an_error_names_the_tensor(tmp_path: Path):
    path = tmp_path / "m.safetensors"
    path.write_bytes(packed(REFUSED["too few bytes"]))
    with pytest.raises(CheckpointError, match=r"m\.safetensors: tensor 'a'.*4000000.*hold 4"):
        read_header(path)


def test_a_tensor_named_twice_warns_and_the_last_counts(tmp_path: Path):
    path = tmp_path / "m.safetensors"
    first = '{"dtype":"F32","shape":[9],"data_offsets":[0,36]}'
    path.write_bytes(packed(f'{{"a":{first},"a":{GOOD}}}'))
    with pytest.warns(UserWarning, match="'a' twice"):
        assert read_header(path)["a"].shape == (1,)


SIZES = st.one_of(
    st.integers(0, 6),
    st.sampled_from(
        [8, 16, 2**31, 2**32, 2**61, 2**63, 2**64 - 1, 2**64, -1, 1.0, True, None, "4"]
    ),
)


@st.composite
def files(draw: st.DrawFn) -> bytes:
    """A well-formed file of a few tensors in which some things may then be changed."""
    header: dict[str, object] = {}
    reached = 0
    for name in draw(st.lists(st.sampled_from("abcdeé"), unique=True, max_size=4)):
        dtype = draw(st.sampled_from(sorted(DTYPE_BITS)))
        shape = draw(st.lists(st.integers(0, 3), max_size=3))
        count = DTYPE_BITS[dtype]
        for extent in shape:
            count *= extent
        size = count // 8
        fields: dict[str, object] = {
            "dtype": dtype,
            "shape": shape,
            "data_offsets": [reached, reached + size],
        }
        reached += size
        match draw(st.integers(0, 12)):
            case 0:
                fields["shape"] = draw(st.lists(SIZES, max_size=3))
            case 1:
                fields["data_offsets"] = draw(st.lists(SIZES, min_size=1, max_size=3))
            case 2:
                fields["dtype"] = draw(st.sampled_from(["F32", "f32", "I4", "", None, 3]))
            case 3:
                del fields[draw(st.sampled_from(sorted(fields)))]
            case 4:
                fields["extra"] = draw(st.recursive(SIZES, lambda s: st.lists(s, max_size=2)))
            case _:
                pass
        header[name] = fields
    if draw(st.booleans()):
        header["__metadata__"] = draw(st.dictionaries(st.text(max_size=2), st.text(max_size=2)))
    text = json.dumps(header, ensure_ascii=draw(st.booleans()))
    raw = bytearray(text.encode("utf-8", "surrogatepass"))
    if raw and draw(st.integers(0, 3)) == 0:
        raw[draw(st.integers(0, len(raw) - 1))] = draw(st.integers(0, 255))
    data = b"\0" * max(0, reached + draw(st.sampled_from([0, 0, 0, 0, -1, 1])))
    length = len(raw) + draw(st.sampled_from([0, 0, 0, 0, 0, -1, 1, 8, 2**40]))
    return packed(bytes(raw), data, max(length, 0))


def agree(path: Path, content: bytes) -> None:
    assert ours(path, content) == official(content)


@settings(
    max_examples=150, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True
)
@given(content=files())
def test_agrees_with_the_official_package_on_changed_files(
    tmp_path_factory: pytest.TempPathFactory, content: bytes
):
    agree(tmp_path_factory.getbasetemp() / "fuzz.safetensors", content)


@pytest.mark.slow
@settings(max_examples=20000, deadline=None, suppress_health_check=list(HealthCheck))
@given(content=files())
def test_agrees_with_the_official_package_on_many_changed_files(
    tmp_path_factory: pytest.TempPathFactory, content: bytes
):
    agree(tmp_path_factory.getbasetemp() / "fuzz.safetensors", content)
