"""What the server takes from a body, and the form of its answers and errors."""

from __future__ import annotations

import base64
import json
from typing import Any

import numpy as np
import pytest

from npu_embed.server import openai_api, tei_api
from npu_embed.server.refusals import Refusal
from npu_embed.server.request import Request

MODELS = ("m", "other")
DIM, MOST = 8, 3


def openai(body: object) -> tuple[Request, openai_api.Form]:
    raw = body if isinstance(body, bytes) else json.dumps(body).encode()
    return openai_api.read(raw, MODELS, DIM, MOST)


def tei(body: object, *, normalizes: bool = True) -> tuple[Request, tei_api.Form]:
    raw = body if isinstance(body, bytes) else json.dumps(body).encode()
    return tei_api.read(raw, DIM, MOST, normalizes=normalizes)


def of(value: object, **more: object) -> dict[str, object]:
    return {"model": "m", "input": value, **more}


@pytest.mark.parametrize(
    ("value", "texts", "tokens"),
    [
        ("hello", ["hello"], None),
        ("", [""], None),
        (["a", "b"], ["a", "b"], None),
        ([1, 2], None, [[1, 2]]),
        ([1, 2, 3, 4], None, [[1, 2, 3, 4]]),  # one text, whatever the limit of texts
        ([[1, 2], [3]], None, [[1, 2], [3]]),
    ],
)
def test_the_four_forms_of_input(value: object, texts: object, tokens: object) -> None:
    for request in (openai(of(value))[0], tei({"inputs": value})[0]):
        assert (request.texts, request.tokens) == (texts, tokens)


def test_options_are_read_and_null_is_as_if_not_there() -> None:
    more = {"dimensions": 8, "prompt_name": "query", "truncate": True, "user": "u"}
    request, form = openai(of("a", encoding_format="base64", **more))
    assert request == Request("input", ["a"], None, "query", True)
    assert form == openai_api.Form("m", "base64", 8)
    assert openai(of("a", **dict.fromkeys([*more, "encoding_format"])))[0] == Request(
        "input", ["a"], None
    )
    tei_request, tei_form = tei(
        {"inputs": "a", "normalize": False, "truncate": False, "truncation_direction": "right"}
    )
    assert tei_request == Request("inputs", ["a"], None, truncate=False)
    assert tei_form == tei_api.Form(normalize=False, dim=None)


@pytest.mark.parametrize(
    ("body", "status", "param", "words"),
    [
        (b"", 400, None, "not JSON"),
        (b"{", 400, None, "not JSON"),
        (b"\xff\xfe", 400, None, "not JSON"),
        (b"[" * 100_000, 400, None, "not JSON"),
        (b'{"model": "m", "input": "\\ud800"}', 400, None, "not JSON"),
        (b'{"model": "m", "input": NaN}', 400, None, "not JSON"),
        ([], 400, None, "an array, wanted a JSON object"),
        ("text", 400, None, "a string, wanted a JSON object"),
        ({"input": "a"}, 400, "model", "missing, wanted m or other"),
        ({"model": "gpt", "input": "a"}, 404, "model", "this server has m, other"),
        ({"model": 3, "input": "a"}, 400, "model", "an integer, wanted a string"),
        ({"model": "m"}, 400, "input", "missing"),
        (of(None), 400, "input", "missing"),
        (of(3), 400, "input", "an integer, wanted"),
        (of({"a": 1}), 400, "input", "an object, wanted"),
        (of([]), 400, "input", "an empty array"),
        (of(["a", None]), 400, "input", "null"),
        (of(["a", 1]), 400, "input", "an integer"),
        (of([1, "a"]), 400, "input", "a string"),
        (of([1, True]), 400, "input", "true or false"),
        (of([1.0]), 400, "input", "a number with a fraction"),
        (of([1e300]), 400, "input", "a number with a fraction"),
        (of([[]]), 400, "input", r"input\[0\]: an empty array"),
        (of([[1], ["a"]]), 400, "input", r"input\[1\]: an array of a string"),
        (of([[1], [[1]]]), 400, "input", r"input\[1\]: an array of an array"),
        (of([[True]]), 400, "input", "true or false"),
        (of(["a"] * 4), 413, "input", "4 texts, this server takes at most 3"),
        (of([[1]] * 4), 413, "input", "at most 3"),
        (of("a", encoding_format="md5"), 400, "encoding_format", "wanted float or base64"),
        (of("a", encoding_format=1), 400, "encoding_format", "wanted a string"),
        (of("a", dimensions=0), 400, "dimensions", "0, wanted 1 to 8"),
        (of("a", dimensions=-1), 400, "dimensions", "-1, wanted 1 to 8"),
        (of("a", dimensions=9), 400, "dimensions", "9, wanted 1 to 8"),
        (of("a", dimensions="8"), 400, "dimensions", "a string, wanted an integer"),
        (of("a", dimensions=True), 400, "dimensions", "true or false"),
        (of("a", user=7), 400, "user", "wanted a string"),
        (of("a", truncate="yes"), 400, "truncate", "wanted true or false"),
        (of("a", prompt_name=["q"]), 400, "prompt_name", "an array"),
        (of("a", dimension=4), 400, "dimension", "Unrecognized request argument"),
        (of("a", **{"my secret text": 4}), 400, "?", "supplied: \\?"),
    ],
)
def test_a_body_that_is_wrong_is_refused_by_name(
    body: object, status: int, param: str | None, words: str
) -> None:
    with pytest.raises(Refusal, match=words) as caught:
        openai(body)
    assert (caught.value.status, caught.value.param) == (status, param)
    found = json.loads(openai_api.error(caught.value))["error"]
    assert set(found) == {"message", "type", "param", "code"}
    assert found["type"] == "invalid_request_error"


@pytest.mark.parametrize(
    ("body", "status", "words"),
    [
        ({}, 400, "inputs: missing"),
        ({"inputs": []}, 400, "inputs: an empty array"),
        ({"inputs": "a", "truncation_direction": "Left"}, 400, "wanted Right"),
        ({"inputs": "a", "normalize": 1}, 400, "normalize: an integer"),
        ({"inputs": ["a"] * 4}, 413, "at most 3"),
        ({"input": "a"}, 400, "Unrecognized request argument supplied: input; wanted inputs"),
    ],
)
def test_a_tei_body_that_is_wrong_is_refused_in_its_form(
    body: object, status: int, words: str
) -> None:
    with pytest.raises(Refusal, match=words) as caught:
        tei(body)
    assert caught.value.status == status
    found = json.loads(tei_api.error(caught.value))
    assert found == {"error": caught.value.message, "error_type": "validation"}


def vectors() -> np.ndarray[Any, np.dtype[np.float32]]:
    return np.random.default_rng(0).standard_normal((3, 5)).astype(np.float32)[:, ::2]


def test_an_answer_of_numbers_gives_the_float32_back() -> None:
    answer = json.loads(openai_api.answer(openai_api.Form("m", "float", None), vectors(), 7))
    assert answer["object"] == "list"
    assert answer["model"] == "m"
    assert answer["usage"] == {"prompt_tokens": 7, "total_tokens": 7}
    assert [d["index"] for d in answer["data"]] == [0, 1, 2]
    assert {d["object"] for d in answer["data"]} == {"embedding"}
    found = np.array([d["embedding"] for d in answer["data"]], dtype=np.float32)
    np.testing.assert_array_equal(found, vectors())


def test_an_answer_in_base64_is_little_endian_float32() -> None:
    answer = json.loads(openai_api.answer(openai_api.Form("m", "base64", None), vectors(), 7))
    found = [np.frombuffer(base64.b64decode(d["embedding"]), "<f4") for d in answer["data"]]
    np.testing.assert_array_equal(found, vectors())


def test_a_tei_answer_is_an_array_for_each_text_and_normalized_unless_not_wanted() -> None:
    plain = json.loads(tei_api.answer(tei_api.Form(normalize=False, dim=None), vectors()))
    np.testing.assert_array_equal(np.array(plain, dtype=np.float32), vectors())
    unit = json.loads(tei_api.answer(tei_api.Form(normalize=True, dim=None), vectors()))
    np.testing.assert_allclose(np.linalg.norm(unit, axis=1), 1, atol=1e-6)


def test_a_tei_answer_that_is_not_normalized_has_the_first_numbers_as_they_are() -> None:
    body = {"inputs": "a", "normalize": False, "dimensions": 2}
    form = tei(body, normalizes=False)[1]
    cut = json.loads(tei_api.answer(form, vectors()))
    np.testing.assert_array_equal(np.array(cut, dtype=np.float32), vectors()[:, :2])
    with pytest.raises(Refusal, match="this model scales its vectors to unit length") as caught:
        tei(body, normalizes=True)
    assert (caught.value.status, caught.value.param) == (400, "normalize")
    unit = json.loads(tei_api.answer(tei({"inputs": "a", "dimensions": 2})[1], vectors()))
    np.testing.assert_allclose(np.linalg.norm(unit, axis=1), 1, atol=1e-6)


@pytest.mark.parametrize(
    ("status", "openai_type", "tei_type"),
    [
        (401, "authentication_error", "unauthorized"),
        (429, "rate_limit_error", "overloaded"),
        (500, "server_error", "backend"),
        (503, "server_error", "unhealthy"),
    ],
)
def test_the_type_of_an_error_follows_its_status(
    status: int, openai_type: str, tei_type: str
) -> None:
    refusal = Refusal(status, "cause", "words")
    assert json.loads(openai_api.error(refusal))["error"] == {
        "message": "words",
        "type": openai_type,
        "param": None,
        "code": "cause",
    }
    assert json.loads(tei_api.error(refusal))["error_type"] == tei_type
