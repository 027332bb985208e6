"""A user's own function and classes are looked at before a run begins: one line names the key and what is wrong."""

import pytest

from zero3d.errors import ConfigError
from zero3d.train.callbacks import Callbacks, open_callbacks
from zero3d.train.own_values import open_function


def refusal(action, *arguments):
    with pytest.raises(ConfigError) as caught:
        action(*arguments)
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize(
    ("path", "said"),
    [
        ("own_code", "names no object of a module: type module:name"),
        ("own_code:accuracy", "cannot be imported from"),
        ("no_such_module:accuracy", "No module named 'no_such_module'"),
        ("own_code:os", "is a module: it must be a function(engine, step)"),
        ("own_code:without_step", "is called as function(engine, step): too many positional arguments"),
    ],
)
def test_a_function_that_cannot_be_called_is_refused(path, said):
    found = refusal(open_function, path)
    assert found.startswith(f"evaluate.function '{path}'")
    assert said in found


@pytest.mark.parametrize(
    ("path", "said"),
    [
        ("own_code:Misspelled", "on_evaluat is not an event. Did you mean on_evaluate?"),
        ("own_code:OfAnotherTrainer", "on_train_begin is not an event. Did you mean on_start?"),
        ("own_code:CamelCase", "onStep is not an event. Did you mean on_step?"),
        ("own_code:Silent", "has none of the events: give it on_start or on_step or"),
        ("own_code:TakesTooFew", "on_save is called with (engine, folder): too many positional arguments"),
        ("own_code:raises", "is not a class, but a function"),
    ],
)
def test_a_class_that_would_never_be_called_or_wrongly_is_refused(path, said):
    found = refusal(open_callbacks, [path])
    assert found.startswith("callbacks ")
    assert path in found
    assert said in found


def test_a_class_that_needs_arguments_is_named():
    assert "callbacks own_code:NeedsArguments cannot be made without arguments: TypeError" in refusal(
        Callbacks, ["own_code:NeedsArguments"], None
    )


def test_a_module_that_fails_on_import_is_told_with_the_place(tmp_path, monkeypatch):
    (tmp_path / "broken_module.py").write_text("x = 1\n1 / 0\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.path", [str(tmp_path)])
    found = refusal(open_function, "broken_module:f")
    assert found.endswith("broken_module.py:2)")
    assert "ZeroDivisionError: division by zero" in found
