"""What is told of a model before it is loaded."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from sidequest_langchain.models.glance import Glance, glance
from sidequest_langchain.models.home import model_folder


def folder_of(path, config, **files):
    path.mkdir(parents=True)
    (path / "config.json").write_text(json.dumps(config), encoding="utf-8")
    for name, text in files.items():
        (path / name.replace("__", ".")).write_text(text, encoding="utf-8")
    return path


@pytest.mark.parametrize(
    ("config", "n"),
    [
        ({"max_position_embeddings": 2048}, 2048),
        ({"text_config": {"max_position_embeddings": 77}, "max_position_embeddings": 1}, 77),
        ({"max_position_embeddings": 9, "rope_scaling": {"type": "dynamic"}}, None),
        ({"max_position_embeddings": 9, "rope_parameters": {"rope_type": "longrope"}}, None),
        ({"max_position_embeddings": 9, "rope_parameters": {"rope_type": "llama3"}}, 9),
        ({}, None),
    ],
)
def test_the_context_is_read_from_the_config(tmp_path, config, n):
    assert glance(str(folder_of(tmp_path / "m", config))).context_length == n


def test_the_template_is_found_wherever_it_lies(tmp_path):
    named = [{"name": "default", "template": "A"}]
    for i, files in enumerate(
        [
            {"chat_template__jinja": "<think>"},
            {"tokenizer_config__json": json.dumps({"chat_template": "<think>"})},
            {"tokenizer_config__json": json.dumps({"chat_template": named})},
            {"tokenizer_config__json": "{}"},
        ]
    ):
        found = glance(str(folder_of(tmp_path / str(i), {}, **files))).chat_template
        assert found == ["<think>", "<think>", json.dumps(named), None][i]


@pytest.mark.parametrize("text", ["", "[]", "{", "5"])
def test_files_that_say_nothing_are_no_error(tmp_path, text):
    path = folder_of(tmp_path / "m", {})
    (path / "config.json").write_text(text, encoding="utf-8")
    assert glance(str(path)) == Glance()


@pytest.mark.parametrize("reference", ["no-such-model", "owner/name", "smollm2-135m", "", "a\0b"])
def test_what_is_not_here_is_not_fetched(tmp_path, monkeypatch, reference):
    monkeypatch.setenv("SIDEQUEST_HOME", str(tmp_path))
    assert glance(reference) == Glance()


def test_a_catalogue_name_is_looked_up_among_the_models(tmp_path, monkeypatch):
    monkeypatch.setenv("SIDEQUEST_HOME", str(tmp_path))
    folder_of(model_folder("smollm2-135m"), {"max_position_embeddings": 8192})
    assert glance("smollm2-135m").context_length == 8192


def test_looking_loads_no_torch():
    code = (
        "import sys; from sidequest_langchain.models.glance import glance; glance('smollm2-135m');"
        "sys.exit('torch' in sys.modules or 'transformers' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
