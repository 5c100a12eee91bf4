from typing import Any
from urllib.parse import quote

import httpx
import pytest
from fake_engine import FakeEngine
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry

from app.api import ApiOptions, create_app
from app.api.languages import LanguageTable
from app.errors import QueueFull, RequestTooLarge, ShuttingDown, WorkerFailed
from app.observability import Metrics
from app.runtime.request import PairInfo

GOOD: dict[str, Any] = {"q": "good morning", "source": "en", "target": "pt"}
JSON = {"Content-Type": "application/json"}


def error_of(response: httpx.Response, status: int = 400) -> str:
    assert response.status_code == status, response.text
    assert set(response.json()) == {"error"}
    return str(response.json()["error"])


@pytest.mark.parametrize(
    ("q", "translated"),
    [
        ("good morning", "GOOD MORNING"),
        ("", ""),
        ([], []),
        (["a", "", "b"], ["A", "", "B"]),
        ("a\x00b", "A\x00B"),
        ("a\r\nb", "A\r\nB"),
    ],
)
async def test_the_answer_has_the_shape_of_q(
    client: httpx.AsyncClient, q: object, translated: object
) -> None:
    response = await client.post("/translate", json={**GOOD, "q": q})
    assert response.status_code == 200
    assert response.json() == {"translatedText": translated}


async def test_a_form_is_read_and_its_line_ends_become_lf(client: httpx.AsyncClient) -> None:
    response = await client.post(
        "/translate", data={**GOOD, "q": "olá\r\nb\rc", "api_key": "k", "format": "text"}
    )
    assert response.json() == {"translatedText": "OLÁ\nB\nC"}


async def test_the_query_string_is_read_and_the_form_goes_before_it(client: httpx.AsyncClient) -> None:
    response = await client.post("/translate", params={**GOOD, "q": "a+b & é"})
    assert response.json() == {"translatedText": "A+B & É"}
    response = await client.post("/translate?q=query&source=en&target=pt", data={"q": "form"})
    assert response.json() == {"translatedText": "FORM"}


async def test_a_json_body_is_not_mixed_with_the_query_string(client: httpx.AsyncClient) -> None:
    response = await client.post("/translate?source=en", json={"q": "a", "target": "pt"})
    assert error_of(response) == "Invalid request: missing source parameter"


@pytest.mark.parametrize("field", ["q", "source", "target"])
@pytest.mark.parametrize("form", ["json", "data", "params"])
async def test_a_missing_field_is_named(client: httpx.AsyncClient, field: str, form: str) -> None:
    fields = {name: value for name, value in GOOD.items() if name != field}
    arguments: dict[str, Any] = {form: fields}
    assert (
        error_of(await client.post("/translate", **arguments))
        == f"Invalid request: missing {field} parameter"
    )


@pytest.mark.parametrize("q", [None, 3, True, {"a": "b"}, [None], ["a", None], [["a"]], [1]])
async def test_q_of_a_wrong_type_is_refused(client: httpx.AsyncClient, engine: FakeEngine, q: object) -> None:
    error_of(await client.post("/translate", json={**GOOD, "q": q}))
    assert engine.requests == []


@pytest.mark.parametrize("field", ["source", "target", "format"])
@pytest.mark.parametrize("value", [3, True, ["en"], {"en": 1}])
async def test_other_fields_of_a_wrong_type_are_refused(
    client: httpx.AsyncClient, field: str, value: object
) -> None:
    error_of(await client.post("/translate", json={**GOOD, field: value}))


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"q=a&source=en&target=pt",
        b"[]",
        b'"text"',
        b"null",
        b'{"q": "\xff"}',
        b'{"q": "\\udc00"}',
        b'{"q": NaN, "source": "en", "target": "pt"}',
        b'{"q": ' + b"[" * 1500,
        b"[" * 4000,
    ],
)
async def test_a_body_that_is_no_json_object_is_refused(client: httpx.AsyncClient, body: bytes) -> None:
    response = await client.post("/translate", content=body, headers=JSON)
    assert error_of(response).startswith("Invalid JSON format")


@pytest.mark.parametrize("encoded", ["%ff", "%ED%A0%80", "%C3"])
async def test_fields_that_are_no_utf8_are_refused(client: httpx.AsyncClient, encoded: str) -> None:
    fields = f"q={encoded}&source=en&target=pt"
    error_of(await client.post(f"/translate?{fields}"))
    form = {"Content-Type": "application/x-www-form-urlencoded"}
    error_of(await client.post("/translate", content=fields.encode(), headers=form))


async def test_a_repeated_q_in_a_form_is_refused_rather_than_dropped(client: httpx.AsyncClient) -> None:
    assert "2 times" in error_of(await client.post("/translate", data={**GOOD, "q": ["a", "b"]}))


def parts(**fields: str | bytes) -> dict[str, tuple[None, bytes]]:
    return {
        name: (None, value if isinstance(value, bytes) else value.encode()) for name, value in fields.items()
    }


@settings(max_examples=80, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(q=st.text(max_size=30) | st.text("\r\n -:;=a", max_size=12))
async def test_a_multipart_form_is_read_whatever_its_text(
    client: httpx.AsyncClient, engine: FakeEngine, q: str
) -> None:
    response = await client.post("/translate", files=parts(q=q, source="en", target="pt"))
    assert response.status_code == 200
    assert engine.requests[-1].texts == (q.replace("\r\n", "\n").replace("\r", "\n"),)


@pytest.mark.parametrize(
    ("content_type", "body"),
    [
        ("multipart/form-data", b"--x--"),
        ("multipart/form-data; boundary=x", b""),
        ("multipart/form-data; boundary=x", b"no boundary"),
        ("multipart/form-data; boundary=x", b'--x\r\nContent-Disposition: form-data; name="q"\r\n\r\ncut o'),
        ("multipart/form-data; boundary=x", b"--x\r\n\r\nnameless\r\n--x--"),
        (
            "multipart/form-data; boundary=x",
            b"--x\r\nContent-Type: multipart/mixed; boundary=y\r\n\r\n--y\r\n\r\na\r\n--y--\r\n--x--",
        ),
        (
            "multipart/form-data; boundary=x",
            b'--x\r\nContent-Disposition: form-data; name="q"\r\n\r\n\xff\r\n--x--',
        ),
    ],
)
async def test_a_damaged_multipart_form_is_refused(
    client: httpx.AsyncClient, engine: FakeEngine, content_type: str, body: bytes
) -> None:
    url = "/translate?source=en&target=pt&q=from-the-query"
    error_of(await client.post(url, content=body, headers={"Content-Type": content_type}))
    assert engine.requests == []


async def test_an_attached_file_is_no_text(client: httpx.AsyncClient) -> None:
    response = await client.post(
        "/translate", files={"q": ("a.txt", b"a")}, params={"source": "en", "target": "pt"}
    )
    assert error_of(response) == "Invalid request: missing q parameter"


async def test_another_content_type_is_refused_by_name(client: httpx.AsyncClient) -> None:
    response = await client.post("/translate", content=b"<q/>", headers={"Content-Type": "text/xml"})
    assert "application/json" in error_of(response, 415)


@pytest.mark.parametrize("content_type", ["application/x-www-form-urlencoded", None])
@pytest.mark.parametrize(
    "body", [b'{"q":"a","source":"en","target":"pt"}', b' \n{"q":"a&q=b&source=en&target=pt"}']
)
async def test_json_sent_without_its_content_type_is_told_so(
    client: httpx.AsyncClient, engine: FakeEngine, content_type: str | None, body: bytes
) -> None:
    headers = {} if content_type is None else {"Content-Type": content_type}
    response = await client.post("/translate", content=body, headers=headers)
    assert "the header Content-Type: application/json is missing" in error_of(response)
    assert engine.requests == []


async def test_html_is_refused_until_it_is_supported(client: httpx.AsyncClient) -> None:
    assert "html format is not supported yet" in error_of(
        await client.post("/translate", json={**GOOD, "format": "html"})
    )
    assert "not supported" in error_of(await client.post("/translate", json={**GOOD, "format": "markdown"}))
    for fine in ("text", "", None):
        assert (await client.post("/translate", json={**GOOD, "format": fine})).status_code == 200


async def test_detection_is_refused_with_the_codes_to_choose_from(client: httpx.AsyncClient) -> None:
    message = error_of(await client.post("/translate", json={**GOOD, "source": "auto"}))
    assert "detection" in message
    assert "en, pt" in message


@pytest.mark.parametrize("alternatives", [0, "0", "", None, "-0", "00"])
async def test_no_alternatives_are_fine(client: httpx.AsyncClient, alternatives: object) -> None:
    response = await client.post("/translate", json={**GOOD, "alternatives": alternatives})
    assert response.json() == {"translatedText": "GOOD MORNING"}


@pytest.mark.parametrize(
    ("alternatives", "message"),
    [
        (16, "alternatives parameter must be <= 15"),
        ("016", "alternatives parameter must be <= 15"),
        (-3, "alternatives parameter must not be negative; send 0"),
        ("-3", "alternatives parameter must not be negative; send 0"),
        (10**40, "alternatives parameter must be <= 15"),
        ("many", "alternatives parameter is not a number"),
        (1.5, "alternatives parameter is not a number"),
        (True, "alternatives parameter is not a number"),
        ([], "alternatives parameter is not a number"),
    ],
)
async def test_wrong_numbers_of_alternatives_are_refused(
    client: httpx.AsyncClient, alternatives: object, message: str
) -> None:
    assert message in error_of(await client.post("/translate", json={**GOOD, "alternatives": alternatives}))


@pytest.mark.parametrize("wanted", [2, "2", "02"])
@pytest.mark.parametrize(
    ("q", "alternatives"),
    [
        ("good morning", ["good morning 1", "good morning 2"]),
        (["a", "b"], [["a 1", "a 2"], ["b 1", "b 2"]]),
        ([], []),
    ],
)
async def test_alternatives_come_in_the_shape_of_q_from_as_many_beams(
    client: httpx.AsyncClient, engine: FakeEngine, q: object, alternatives: object, wanted: object
) -> None:
    response = await client.post("/translate", json={**GOOD, "q": q, "alternatives": wanted})
    assert response.status_code == 200
    assert response.json()["alternatives"] == alternatives
    options = engine.requests[-1].options
    assert (options.beam_size, options.num_hypotheses) == (4, 3)


async def test_keys_and_unknown_fields_are_ignored(client: httpx.AsyncClient) -> None:
    response = await client.post("/translate", json={**GOOD, "api_key": "k", "secret": 1, "future": {}})
    assert response.status_code == 200


async def test_unknown_codes_and_absent_pairs_have_their_messages(client: httpx.AsyncClient) -> None:
    response = await client.post("/translate", json={**GOOD, "target": "zz"})
    assert error_of(response) == "zz is not supported; available targets from en: pt"
    response = await client.post("/translate", json={**GOOD, "source": "zz"})
    assert error_of(response) == "zz is not supported; available sources: en, pt"
    response = await client.post("/translate", json={**GOOD, "target": "en"})
    assert error_of(response) == (
        "English (en) is not available as a target language from English (en); available targets from en: pt"
    )
    response = await client.post("/translate", json={**GOOD, "source": "<script>alert(1)</script>"})
    assert "script" not in error_of(response)


async def test_limits_have_their_messages(client: httpx.AsyncClient) -> None:
    response = await client.post("/translate", json={**GOOD, "q": "a" * 1001})
    assert error_of(response) == "Invalid request: request (1001) exceeds text limit (1000)"
    response = await client.post("/translate", json={**GOOD, "q": ["a"] * 5})
    assert error_of(response) == "Invalid request: request (5) exceeds batch limit (4)"


async def test_engine_errors_have_this_dialects_statuses(
    client: httpx.AsyncClient, engine: FakeEngine
) -> None:
    engine.fault = QueueFull("9 tokens wait, the limit is 8", retry_after_s=3)
    response = await client.post("/translate", json=GOOD)
    assert error_of(response, 429) == "Slowdown: 9 tokens wait, the limit is 8"
    assert response.headers["retry-after"] == "3"
    for fault, status in ((ShuttingDown("s"), 503), (WorkerFailed("w"), 503), (RequestTooLarge("r"), 400)):
        engine.fault = fault
        error_of(await client.post("/translate", json=GOOD), status)


async def test_languages_lists_codes_names_and_targets(client: httpx.AsyncClient) -> None:
    # libretranslatepy sends a form body with this GET.
    response = await client.request("GET", "/languages", data={"api_key": "k"})
    assert response.json() == [
        {"code": "en", "name": "English", "targets": ["pt"]},
        {"code": "pt", "name": "Portuguese", "targets": ["en"]},
    ]


async def test_unknown_paths_and_methods_are_answered_in_this_shape(client: httpx.AsyncClient) -> None:
    error_of(await client.get("/nothing"), 404)
    response = await client.get(f"/translate?q={quote('secret text')}")
    assert "secret" not in error_of(response, 405)
    assert response.headers["allow"] == "POST"


_PREFLIGHT = {
    "Origin": "https://page.example",
    "Access-Control-Request-Method": "POST",
    "Access-Control-Request-Headers": "Content-Type",
}


async def test_web_pages_of_any_origin_may_ask_where_the_operator_allows_it() -> None:
    application = create_app(
        FakeEngine(), ApiOptions(cors_origins=("*",)), metrics=Metrics(CollectorRegistry())
    )
    transport = httpx.ASGITransport(application)
    async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
        preflight = await client.options("/translate", headers=_PREFLIGHT)
        assert preflight.status_code == 200
        assert preflight.headers["access-control-allow-origin"] == "*"
        assert preflight.headers["access-control-max-age"] == "1728000"
        response = await client.post("/translate", json=GOOD, headers={"Origin": "https://page.example"})
        assert response.headers["access-control-allow-origin"] == "*"


async def test_web_pages_may_not_ask_by_default(client: httpx.AsyncClient) -> None:
    error_of(await client.options("/translate", headers=_PREFLIGHT), 405)
    response = await client.post("/translate", json=GOOD, headers={"Origin": "https://page.example"})
    assert "access-control-allow-origin" not in response.headers


def table(*pairs: tuple[str, str]) -> LanguageTable:
    return LanguageTable(PairInfo(source, target, f"{source}-{target}") for source, target in pairs)


@pytest.mark.parametrize(
    ("requested", "loaded", "found"),
    [
        ("PT", "pt", "pt"),
        ("pb", "pt-BR", "pt-BR"),
        ("pt-br", "pb", "pb"),
        ("pb", "pt", "pt"),
        ("zh", "zh-Hans", "zh-Hans"),
        ("zt", "zh-Hant", "zh-Hant"),
        ("zh-TW", "zh", "zh"),
        ("pt", "pt-BR", None),
        ("zt", "zh-Hans", None),
        ("e", "en", None),
    ],
)
def test_a_code_is_found_exactly_then_by_alias_then_by_base(
    requested: str, loaded: str, found: str | None
) -> None:
    assert table(("xx", loaded)).find(requested) == found


def test_an_exact_code_goes_before_its_base() -> None:
    both = table(("en", "pt"), ("en", "pt-BR"))
    assert both.find("pt-br") == "pt-BR"
    assert both.find("pt-PT") == "pt"
    assert both.targets_of("en") == ("pt", "pt-BR")


async def test_warnings_are_counted_by_code_in_a_header_that_never_holds_text(
    client: httpx.AsyncClient,
) -> None:
    response = await client.post("/translate", json={**GOOD, "q": ["a ☃", "b", "☃"]})
    assert response.headers["x-dragoman-warnings"] == "unknown_characters;count=2"
    assert "x-dragoman-warnings" not in (await client.post("/translate", json=GOOD)).headers
    document = (await client.get("/openapi.json")).json()
    described = document["paths"]["/translate"]["post"]["responses"]["200"]
    assert "X-Dragoman-Warnings" in described["headers"]
    assert "content" in described
