"""A stage file becomes stages, or one error that names the line to look at."""

import textwrap
from pathlib import Path

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from vllm_omni import stage_file
from vllm_omni.config import DiTCacheConfig, DiTCacheTensor, DiTConfig, StageConfig
from vllm_omni.errors import ConfigError, ConfigFileError
from vllm_omni.stage_file import MAX_DEPTH, MAX_FILE_SIZE, MAX_NUMBER_LENGTH, read_stage_file

THREE_STAGES = """\
# Encode, draw, draw larger.
stage_configs:
  - stage_id: 0
    engine_type: ar
    model_path: models/encoder
    input_modalities: [text, image]
    output_modalities: [hidden_states]
    vllm_config:
      max_model_len: 2048
      gpu_memory_utilization: 0.5
      enforce_eager: true
      quantization: null
      revision: "2026-01-31"
      compilation_config: {level: 0, splitting_ops: [a, b]}
  - stage_id: 1
    engine_type: diffusion
    model_path: demo
    output_modalities:
      - image
    dit_config:
      device: cuda:1
      max_num_seqs: 8
      load_text_encoder: no
      cache_config:
        dit_cache_tensors: [{size: 1024}, {size: 0x10}]
        kv_cache_groups:
          - size: 2_000
        max_cache_size: 4096
        cache_cleanup_interval: 1.5
  - stage_id: 5
    engine_type: diffusion
    model_path: /models/large
    cache_config:
      max_cache_size: 1
"""

# A file that is right up to its last line, so that a mistake added to it is in line 6.
STAGE = """\
stage_configs:
  - stage_id: 1
    engine_type: diffusion

    model_path: demo
"""
AR_STAGE = STAGE.replace("diffusion", "ar")
FIELDS = [
    "stage_id",
    "engine_type",
    "model_path",
    "input_modalities",
    "output_modalities",
    "vllm_config",
    "dit_config",
    "cache_config",
]

LAUGHS = (
    "a: &a [ha, ha, ha]\n"
    "b: &b [*a, *a, *a, *a, *a, *a, *a, *a, *a]\n"
    "c: &c [*b, *b, *b, *b, *b, *b, *b, *b, *b]\n"
)

# What the mistake is -> the file, the line of the mistake, the setting, what the message says.
MISTAKES: dict[str, tuple[str, int, str, str]] = {
    # The file as a whole
    "empty": ("", 1, "stage_configs", "the file is empty"),
    "only comments": ("# nothing\n\n", 1, "stage_configs", "the file is empty"),
    "null": ("\n~\n", 2, "the top level", "the top level takes a mapping, not a single value"),
    "list": ("---\n- a\n", 2, "the top level", "the top level takes a mapping, not a list"),
    "no stages": ("{}", 1, "stage_configs", "stage_configs is missing"),
    "two documents": (STAGE + "---\na: 1\n", 6, "stage_configs", "found another document"),
    "unknown key at the top": (
        STAGE + "stage_config: 1\n",
        6,
        "stage_config",
        "unknown key 'stage_config' (did you mean 'stage_configs'?): the top level takes stage_con",
    ),
    # Not YAML
    "not closed": ("stage_configs: [\n\n", 3, "stage_configs", "expected the node content"),
    "indent": (
        STAGE + "   dit_config: 1\n",
        6,
        "stage_configs",
        "while parsing a block collection",
    ),
    "tab": (STAGE + "\tdit_config: 1\n", 6, "stage_configs", r"character '\t'"),
    "control character": (STAGE + "    a: \x07\n", 6, "stage_configs", r"('\x07')"),
    "no such character": (STAGE + '    a: "\\U00110000"\n', 6, "stage_configs", "cannot read"),
    "far from a character": (STAGE + '    a: "\\UFFFFFFFF"\n', 6, "stage_configs", "cannot read"),
    "version": (f"%YAML 1.{'1' * 5000}\n---\n{STAGE}", 1, "stage_configs", "cannot read"),
    # What YAML has and stage files have not
    "python object": (
        STAGE + "    dit_config: !!python/object/apply:os.system [echo]\n",
        6,
        "stage_configs",
        "the tag tag:yaml.org,2002:python/object/apply:os.system is not allowed",
    ),
    "tag": (STAGE + "    dit_config: !mine {}\n", 6, "stage_configs", "the tag !mine is not"),
    "tag of a scalar": (STAGE + "    a: !!int ''\n", 6, "stage_configs", ":int is not allowed"),
    "recursive": ("stage_configs: &a\n  - *a\n", 2, "stage_configs", "the alias *a is not allowed"),
    "billion laughs": (LAUGHS, 2, "stage_configs", "the alias *a is not allowed"),
    "merge": (STAGE + "    <<: {}\n", 6, "an item of stage_configs", "is not text"),
    "deep flow": ("a: " + "[" * 10_000, 1, "stage_configs", f"more than {MAX_DEPTH} mappings"),
    "deep block": (
        "\n".join(" " * depth + "a:" for depth in range(MAX_DEPTH + 3)),
        MAX_DEPTH + 1,
        "stage_configs",
        f"more than {MAX_DEPTH} mappings",
    ),
    # Stages
    "stages no list": ("\nstage_configs:\n  a: 1\n", 2, "stage_configs", "a list, not a mapping"),
    "stages null": ("stage_configs:\n", 1, "stage_configs", "takes a list, not a single value"),
    "zero stages": ("stage_configs: []\n", 1, "stage_configs", "stage_configs is empty"),
    "stage no mapping": (STAGE + "  - demo\n", 6, "an item of stage_configs", "not a single value"),
    "same stage_id": (
        STAGE + "  - engine_type: ar\n    stage_id: 1\n    model_path: m\n",
        7,
        "stage_id",
        "stage_id=1 is already that of line 2",
    ),
    **{
        f"no {name}": (STAGE + f"  - {a}: 2\n    {b}: ar\n", 6, name, f"{name} is missing in an")
        for name, a, b in [
            ("stage_id", "model_path", "engine_type"),
            ("model_path", "stage_id", "engine_type"),
            ("engine_type", "stage_id", "model_path"),
        ]
    },
    # Keys
    "unknown key": (
        STAGE + "    dit_confg: {}\n",
        6,
        "dit_confg",
        "unknown key 'dit_confg' (did you mean 'dit_config'?): an item of stage_configs takes",
    ),
    "unknown key like no other": (
        STAGE + "    colour: red\n",
        6,
        "colour",
        "unknown key 'colour': an item of stage_configs takes " + ", ".join(FIELDS),
    ),
    "unknown nested key": (
        STAGE + "    dit_config:\n      max_num_seqs: 1\n      max_num_seq: 2\n",
        8,
        "max_num_seq",
        "(did you mean 'max_num_seqs'?): dit_config takes model_type, device,",
    ),
    "unknown key of a buffer": (
        STAGE
        + "    cache_config:\n      kv_cache_groups:\n        - size: 1\n          bytes: 2\n",
        9,
        "bytes",
        "unknown key 'bytes': an item of kv_cache_groups takes size",
    ),
    "key twice": (STAGE + "    stage_id: 2\n", 6, "stage_id", "given twice, first in line 2"),
    "key twice at the top": (STAGE + STAGE, 6, "stage_configs", "given twice, first in line 1"),
    "key twice for vLLM": (
        AR_STAGE + "    vllm_config:\n      a: {b: 1,\n          b: 2}\n",
        8,
        "b",
        "'b' is given twice, first in line 7",
    ),
    "key is a number": (
        AR_STAGE + "    vllm_config:\n      1: 2\n",
        7,
        "vllm_config",
        "a key of vllm_config is not text: put it in quotes",
    ),
    "key is a list": (STAGE + "    ? [a]\n    : 1\n", 6, "an item of stage_configs", "is not text"),
    "model in dit_config": (
        STAGE + "    dit_config:\n      dtype: auto\n      model: demo\n",
        8,
        "model",
        "model of dit_config is the model_path of its stage: leave it out",
    ),
    "stage_id in dit_config": (
        STAGE + "    dit_config: {stage_id: 1}\n",
        6,
        "stage_id",
        "stage_id of dit_config is the stage_id of its stage: leave it out",
    ),
    # Values
    "stage_id is text": (
        STAGE.replace(": 1", ': "1"'),
        2,
        "stage_id",
        "stage_id='1' is not allowed: a whole number, at least 0",
    ),
    "engine_type": (
        STAGE.replace("diffusion", "text"),
        3,
        "engine_type",
        "engine_type='text' is not allowed: one of ar, diffusion",
    ),
    "model_path is null": (STAGE.replace("demo", "~"), 5, "model_path", "model_path=None is not"),
    "model_path is empty": (STAGE.replace("demo", "''"), 5, "model_path", "model_path='' is not"),
    "model_path is a number": (STAGE.replace("demo", "7"), 5, "model_path", "model_path=7 is not"),
    "a date": (
        STAGE.replace("demo", "2026-01-31"),
        5,
        "model_path",
        "model_path is a timestamp: put it in quotes if it is text",
    ),
    "no date": (STAGE.replace("demo", "2026-13-31"), 5, "model_path", "is a timestamp"),
    "no number": (STAGE.replace(": 1", ": 0x_"), 2, "stage_id", "stage_id='0x_' is not allowed"),
    "long number": (
        STAGE.replace(": 1", f": {'1' * 5000}"),
        2,
        "stage_id",
        f"111… is not allowed: a number of at most {MAX_NUMBER_LENGTH} characters",
    ),
    "modalities no list": (
        STAGE + "    input_modalities: text\n",
        6,
        "input_modalities",
        "input_modalities='text' is not allowed: a list of str",
    ),
    "modalities of numbers": (
        STAGE + "    output_modalities:\n      - 1\n",
        6,
        "output_modalities",
        "output_modalities=[1] is not allowed",
    ),
    "dit_config no mapping": (STAGE + "    dit_config: [1]\n", 6, "dit_config", "not a list"),
    "max_num_seqs": (
        STAGE + "    dit_config:\n      dtype: float32\n      max_num_seqs: many\n",
        8,
        "max_num_seqs",
        "max_num_seqs='many' is not allowed: a whole number, at least 1",
    ),
    "policy": (
        STAGE + "    dit_config:\n      policy: [fcfs]\n",
        7,
        "policy",
        "policy=['fcfs'] is not allowed: one of fcfs",
    ),
    "null for settings": (
        STAGE + "    dit_config:\n      cache_config:\n",
        7,
        "cache_config",
        "cache_config=None is not allowed",
    ),
    "buffers no list": (
        STAGE + "    cache_config:\n      kv_cache_groups:\n        size: 1\n",
        7,
        "kv_cache_groups",
        "kv_cache_groups takes a list, not a mapping",
    ),
    "buffer no mapping": (
        STAGE + "    cache_config:\n      kv_cache_groups:\n        - {size: 1}\n        - 1\n",
        9,
        "an item of kv_cache_groups",
        "an item of kv_cache_groups takes a mapping, not a single value",
    ),
    "buffer without size": (
        STAGE + "    cache_config:\n      kv_cache_groups: [{size: 1},\n        {}]\n",
        8,
        "size",
        "size is missing in an item of kv_cache_groups",
    ),
    "buffer of no bytes": (
        STAGE
        + "    cache_config:\n      dit_cache_tensors:\n        - size: 1\n        - size: 0\n",
        9,
        "DiTCacheTensor.size",
        "size=0 is not allowed: a whole number, at least 1",
    ),
    "buffers larger than the cache": (
        STAGE
        + "    cache_config:\n      dit_cache_tensors: [{size: 9}]\n      max_cache_size: 8\n",
        8,
        "max_cache_size",
        "max_cache_size=8 is not allowed: the reserved buffers alone take 9 bytes",
    ),
    "buffers larger than the default": (
        STAGE + "    cache_config:\n\n      dit_cache_tensors: [{size: 99999999999}]\n",
        8,
        "max_cache_size",
        "the reserved buffers alone take 99999999999 bytes",
    ),
    # Fields of the other kind of stage
    "vllm_config of diffusion": (
        STAGE + "    vllm_config: {}\n",
        6,
        "vllm_config",
        "a diffusion stage takes dit_config",
    ),
    "vllm_config no mapping": (
        AR_STAGE + "    vllm_config: [1]\n",
        6,
        "vllm_config",
        "vllm_config=[1] is not allowed",
    ),
    "dit_config of AR": (AR_STAGE + "    dit_config: {}\n", 6, "dit_config", "an AR stage takes"),
    "cache_config of AR": (AR_STAGE + "    cache_config: {}\n", 6, "cache_config", "an AR stage"),
}


def write(folder: Path, text: str | bytes) -> Path:
    path = folder / "stages.yaml"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return path


def test_three_stages(tmp_path: Path) -> None:
    assert read_stage_file(write(tmp_path, THREE_STAGES)) == (
        StageConfig(
            stage_id=0,
            engine_type="ar",
            model_path=str(tmp_path / "models/encoder"),
            input_modalities=("text", "image"),
            output_modalities=("hidden_states",),
            vllm_config={
                "max_model_len": 2048,
                "gpu_memory_utilization": 0.5,
                "enforce_eager": True,
                "quantization": None,
                "revision": "2026-01-31",
                "compilation_config": {"level": 0, "splitting_ops": ["a", "b"]},
            },
        ),
        StageConfig(
            stage_id=1,
            engine_type="diffusion",
            model_path="demo",
            output_modalities=("image",),
            dit_config=DiTConfig(
                model="demo",
                stage_id=1,
                device="cuda:1",
                max_num_seqs=8,
                load_text_encoder=False,
                cache_config=DiTCacheConfig(
                    dit_cache_tensors=(DiTCacheTensor(1024), DiTCacheTensor(16)),
                    kv_cache_groups=(DiTCacheTensor(2000),),
                    max_cache_size=4096,
                    cache_cleanup_interval=1.5,
                ),
            ),
        ),
        StageConfig(
            stage_id=5,
            engine_type="diffusion",
            model_path="/models/large",
            cache_config=DiTCacheConfig(max_cache_size=1),
        ),
    )


def test_example_of_the_module_is_right(tmp_path: Path) -> None:
    _, example, _ = (stage_file.__doc__ or "").split("\n\n")
    stages = read_stage_file(write(tmp_path, textwrap.dedent(example)))
    assert [stage.engine_type for stage in stages] == ["ar", "diffusion"]


def test_model_paths_are_relative_to_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("configs").mkdir()
    text = STAGE.replace("demo", "../models/m") + "    dit_config: {}\n"
    write(tmp_path / "configs", text)
    [stage] = read_stage_file("configs/stages.yaml")
    assert stage.model_path == "configs/../models/m"
    assert stage.dit_config == DiTConfig(model="configs/../models/m", stage_id=1)


@pytest.mark.parametrize("name", ["vllm_config", "dit_config", "cache_config"])
def test_null_is_as_good_as_nothing(tmp_path: Path, name: str) -> None:
    [stage] = read_stage_file(write(tmp_path, STAGE + f"    {name}:\n"))
    assert stage == StageConfig(stage_id=1, engine_type="diffusion", model_path="demo")


def test_lines_of_windows_and_byte_order_mark(tmp_path: Path) -> None:
    text = "\ufeff" + (STAGE + "    colour: red\n").replace("\n", "\r\n")
    with pytest.raises(ConfigFileError, match=r"stages\.yaml:6: unknown key 'colour'"):
        read_stage_file(write(tmp_path, text))


@pytest.mark.parametrize("mistake", MISTAKES)
def test_mistake_is_named_with_its_line(tmp_path: Path, mistake: str) -> None:
    text, line, param, words = MISTAKES[mistake]
    path = write(tmp_path, text)
    with pytest.raises(ConfigError) as caught:
        read_stage_file(path)
    message = str(caught.value)
    assert message.startswith(f"{path}:{line}: "), message
    assert words in message
    assert caught.value.param == param


def test_not_utf_8(tmp_path: Path) -> None:
    path = write(tmp_path, STAGE.encode() + b"    a: \xff\n")
    with pytest.raises(ConfigFileError) as caught:
        read_stage_file(path)
    assert str(caught.value) == f"{path}:6: not text in UTF-8"


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("stage.yaml", "No such file or directory"),
        ("", "Is a directory"),
        ("stages.yaml/more.yaml", "Not a directory"),
    ],
)
def test_file_that_cannot_be_read(tmp_path: Path, name: str, reason: str) -> None:
    write(tmp_path, STAGE)
    with pytest.raises(ConfigFileError) as caught:
        read_stage_file(str(tmp_path / name))
    assert str(caught.value) == f"{tmp_path / name}: cannot read it: {reason}"
    assert caught.value.param == "stage_configs"


def test_long_file(tmp_path: Path) -> None:
    comment = "#" * (MAX_FILE_SIZE - len(STAGE))
    assert len(read_stage_file(write(tmp_path, STAGE + comment))) == 1
    with pytest.raises(ConfigFileError, match=f"longer than {MAX_FILE_SIZE} bytes"):
        read_stage_file(write(tmp_path, STAGE + comment + "#"))


SCALARS = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.dates()
    | st.datetimes()
    | st.text()
    | st.binary(max_size=9)
)
VALUES = st.recursive(
    SCALARS,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from([*FIELDS, "size"]) | st.text(), inner, max_size=3)
    ),
    max_leaves=5,
)
# Text that YAML may take for something else than text.
PLAIN = st.text("0123456789abcdefxo_:.-+~= TZ", max_size=20) | st.from_regex(
    r"[-+]?(0x|0b|0|\.)?[0-9_]*(:[0-9_]{0,3}){0,60}(\.[0-9_]*)?(e[-+]?[0-9]*)?", fullmatch=True
)


def read_or_refuse(path: Path) -> None:
    try:
        assert len(read_stage_file(path)) >= 1
    except ConfigFileError as error:
        assert str(error).startswith(f"{path}:")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("drawn")


@given(stage=st.dictionaries(st.sampled_from(FIELDS) | st.text(max_size=5), VALUES))
def test_any_values(folder: Path, stage: dict[str, object]) -> None:
    text = yaml.safe_dump({"stage_configs": [stage]}, allow_unicode=True)
    read_or_refuse(write(folder, text))


@given(name=st.sampled_from([*FIELDS, "max_num_seqs", "device"]), value=PLAIN)
def test_any_plain_scalar(folder: Path, name: str, value: str) -> None:
    fields = {"stage_id": "0", "engine_type": "ar", "model_path": "m"} | {name: value}
    lines = [f"    {field}: {text}\n" for field, text in fields.items()]
    read_or_refuse(write(folder, "stage_configs:\n  -\n" + "".join(lines)))


@given(text=st.text() | st.text("[]{}:-,?&*!|>'\"%@`#~ \n\tab0", max_size=60))
def test_any_text(folder: Path, text: str) -> None:
    read_or_refuse(write(folder, text.encode("utf-8", "replace")))


@given(data=st.data())
def test_any_change_of_a_good_file(folder: Path, data: st.DataObject) -> None:
    start = data.draw(st.integers(0, len(THREE_STAGES)))
    end = data.draw(st.integers(start, min(start + 20, len(THREE_STAGES))))
    middle = data.draw(st.text("[]{}:-,?&*!|>'\"%@`#~ \n\tab0", max_size=5))
    read_or_refuse(write(folder, THREE_STAGES[:start] + middle + THREE_STAGES[end:]))
