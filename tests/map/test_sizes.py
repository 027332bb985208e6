"""Small files, long ones and wide classes: each has a reason in sizes.yaml, and no reason stands for what is gone."""

import ast

import pytest
from sizes import MANY, REASONS, ROOT, SIGNS, classes, file_importers, is_record, parts, reasons, reexports, signs

KNOWN = reasons()


def test_every_sign_has_its_list():
    assert list(KNOWN) == list(signs())


@pytest.mark.parametrize("sign", SIGNS)
def test_what_has_no_reason_fails(sign):
    new = sorted(signs()[sign] - KNOWN[sign].keys())
    assert not new, f"{sign}: {new}: join each to the file that it belongs to, or write in {REASONS.name} why not"


@pytest.mark.parametrize("sign", SIGNS)
def test_a_reason_of_what_is_no_longer_there_fails(sign):
    gone = sorted(KNOWN[sign].keys() - signs()[sign])
    assert not gone, f"{sign}: take {gone} out of {REASONS.name}"


@pytest.mark.parametrize("sign", SIGNS)
def test_reasons_are_sentences_on_one_line(sign):
    assert all(isinstance(why, str) and "\n" not in why and len(why) > 15 for why in KNOWN[sign].values())


def test_an_import_through_a_package_is_one_of_the_file_behind_it():
    assert reexports("config")["load"] == "config.read"
    assert {"tools/cli/config.py", "tools/cli/plan_explain.py"} <= file_importers()["config/read.py"]
    assert not any(file.endswith("__init__.py") for found in file_importers().values() for file in found)


def test_values_that_a_class_keeps_are_counted_and_records_are_not(tmp_path):
    many = ", ".join(f"self.a{i}" for i in range(MANY + 1))
    path = tmp_path / "wide.py"
    path.write_text(
        f"class Wide:\n    def __init__(self):\n        {many} = range({MANY + 1})\n        print(self.a0, self.read)\n"
        "@dataclass\nclass Fields:\n    a: int\n    b: int\n    def f(self):\n        self.c = 1\n"
        "@dataclass(frozen=True)\nclass Frozen:\n    a: int\nclass Row(NamedTuple):\n    a: int\n"
    )
    assert {name: len(kept) for name, kept in classes(path)} == {"Wide": MANY + 1, "Fields": 3}
    assert is_record(ast.parse("class DataError(ConfigError): pass").body[0])


def test_the_core_is_counted_with_what_it_needs_and_without_the_rest():
    files = {what: set(paths) for what, paths in parts().items()}
    assert files["`zero/`"] < files["the core: `zero/` and what it needs"] < files["`src`"]
    shown = (ROOT / "CONTRIBUTING.md").read_text().split("<!-- sizes -->")[1].split("<!-- end -->")[0]
    assert [row.split(" | ")[0] for row in shown.strip().splitlines()[2:]] == [f"| {what}" for what in files]
