import json
import sys

import datasets
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from jaxrl_llm.data.sources import read
from jaxrl_llm.types import UserError

NESTED = [
    {"prompt": [{"role": "user", "content": "1+1"}], "answer": "2", "extra_info": {"index": 0, "note": None}},
    {"prompt": [{"role": "user", "content": "2+2"}], "answer": None, "extra_info": {"index": 1, "note": "x"}},
]


def write(path, text):
    path.write_text(text, encoding="utf-8")
    return str(path)


def error_of(path) -> str:
    with pytest.raises(UserError) as caught:
        read([str(path)])
    return str(caught.value)


@pytest.mark.parametrize("name", ["rows.jsonl", "rows.json"])
def test_json_lines_keep_nesting_and_skip_blank_lines(tmp_path, name):
    path = write(tmp_path / name, "\n".join(json.dumps(row) for row in NESTED) + "\n\n")
    assert read([path]) == NESTED


def test_a_unicode_line_separator_or_byte_order_mark_does_not_break_a_row(tmp_path):
    path = write(tmp_path / "rows.jsonl", '\ufeff{"prompt": "a\u2028b\x85c"}\r\n{"prompt": "d"}')
    assert read([path]) == [{"prompt": "a\u2028b\x85c"}, {"prompt": "d"}]


def test_parquet_gives_plain_dicts_lists_and_none(tmp_path):
    pq.write_table(pa.Table.from_pylist(NESTED), tmp_path / "rows.parquet")
    assert read([str(tmp_path / "rows.parquet")]) == NESTED


def test_a_saved_dataset_folder_gives_the_same_rows(tmp_path):
    datasets.Dataset.from_list(NESTED).save_to_disk(str(tmp_path / "saved"))
    assert read([str(tmp_path / "saved")]) == NESTED


def test_several_paths_concatenate_in_order(tmp_path):
    one = write(tmp_path / "b.jsonl", '{"prompt": "first"}\n')
    pq.write_table(pa.Table.from_pylist([{"prompt": "second"}]), tmp_path / "a.parquet")
    rows = read([one, str(tmp_path / "a.parquet"), "arithmetic:count=2", one])
    assert [row["prompt"] for row in rows[:2] + rows[-1:]] == ["first", "second", "first"]
    assert [row["data_source"] for row in rows[2:4]] == ["arithmetic", "arithmetic"]
    assert len(rows) == 5


def test_no_paths_at_all_is_refused():
    with pytest.raises(UserError, match="no data files"):
        read([])


def test_a_missing_file_is_told_with_its_nearest_neighbour(tmp_path):
    write(tmp_path / "train.jsonl", "{}")
    write(tmp_path / "other.txt", "")
    assert f"did you mean {tmp_path / 'train.jsonl'}?" in error_of(tmp_path / "trian.jsonl")
    assert f"folder {tmp_path} holds other.txt, train.jsonl" in error_of(tmp_path / "zzz")
    assert f"nor does its folder {tmp_path / 'nowhere'}" in error_of(tmp_path / "nowhere" / "train.jsonl")


def test_a_broken_line_is_told_with_file_line_column_and_excerpt(tmp_path):
    path = write(tmp_path / "rows.jsonl", '{"prompt": "a"}\n\n{"prompt": "b", "answer": 1 2}\n')
    assert f"{path}, line 3, column 29" in error_of(path)
    assert '"answer": 1 2}' in error_of(path)


@pytest.mark.parametrize("line", ['[{"prompt": "a"}]', '"text"', "3", "null"])
def test_a_line_that_is_not_an_object_is_refused(tmp_path, line):
    path = write(tmp_path / "rows.json", f'{{"prompt": "a"}}\n{line}\n')
    assert f"{path}, line 2: expected a JSON object" in error_of(path)
    assert line in error_of(path)


def test_bytes_that_are_not_utf8_are_refused_with_their_place(tmp_path):
    (tmp_path / "rows.jsonl").write_bytes(b'{"a": 1}\n{"a": "\xff"}\n')
    assert "rows.jsonl, line 2: byte 8 is not UTF-8" in error_of(tmp_path / "rows.jsonl")


def test_files_without_rows_are_refused(tmp_path):
    pq.write_table(pa.table({"prompt": pa.array([], pa.string())}), tmp_path / "empty.parquet")
    datasets.Dataset.from_dict({"prompt": []}).save_to_disk(str(tmp_path / "empty_saved"))
    for path in (write(tmp_path / "empty.jsonl", "\n"), tmp_path / "empty.parquet", tmp_path / "empty_saved"):
        assert f"{path} holds no rows" in error_of(path)


def test_an_unknown_extension_lists_the_known_ones(tmp_path):
    message = error_of(write(tmp_path / "rows.csv", "prompt\n1\n"))
    assert "unknown extension '.csv'" in message
    assert ".parquet" in message


def test_a_broken_parquet_file_is_named(tmp_path):
    path = write(tmp_path / "rows.parquet", "not parquet at all")
    assert f"{path} cannot be read as Parquet" in error_of(path)


def test_a_folder_of_splits_asks_for_one_of_them(tmp_path):
    both = datasets.DatasetDict({"train": datasets.Dataset.from_list(NESTED)})
    both.save_to_disk(str(tmp_path / "saved"))
    assert f"give one of them, for example {tmp_path / 'saved' / 'train'}" in error_of(tmp_path / "saved")
    assert read([str(tmp_path / "saved" / "train")]) == NESTED


def test_a_folder_that_is_no_dataset_says_what_it_holds(tmp_path):
    write(tmp_path / "train.jsonl", "{}")
    assert "found train.jsonl" in error_of(tmp_path)


def test_without_the_datasets_package_the_error_says_how_to_install_it(tmp_path, monkeypatch):
    datasets.Dataset.from_list(NESTED).save_to_disk(str(tmp_path / "saved"))
    monkeypatch.setitem(sys.modules, "datasets", None)
    assert "pip install 'jaxrl-llm[datasets]'" in error_of(tmp_path / "saved")
